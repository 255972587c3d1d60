"""Advantages, loss weights and the overlong penalty by hand, and what a batch may look like."""

import pytest
import reference
import torch

from grpo.advantages import (
    compute_advantages,
    groups_with_signal,
    overlong_penalty,
    prompts_missing,
    signal_of,
    weigh_tokens,
)
from grpo.algorithm import AlgorithmConfig
from grpo.batch import jagged, make_batch

SCALES = ["group_std", "none"]


def batch_of(rewards, groups, masks=None, **fields):
    masks = [[True]] * len(rewards) if masks is None else masks
    return make_batch(
        {
            "tokens": jagged([torch.arange(len(mask)) for mask in masks]),
            "response_mask": jagged([torch.tensor(mask) for mask in masks]),
            "group": torch.as_tensor(groups),
            "rewards": torch.as_tensor(rewards),
            **fields,
        }
    )


def of_samples(rewards, groups, **settings):
    """[B]: the advantages of responses of one token each."""
    return compute_advantages(batch_of(rewards, groups), AlgorithmConfig(**settings))["advantages"].values()


def by_hand(rewards, groups, scale):
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        differ = max(mine) > min(mine)
        divisor = reference.deviation(mine) + 1e-6 if differ and scale == "group_std" else 1.0
        result.append((reward - reference.mean(mine)) / divisor if differ else 0.0)
    return torch.tensor(result, dtype=torch.float64)


def ragged(seed):
    """Rewards of 29 samples in 6 interleaved groups of unequal sizes whose ids are neither sorted nor dense."""
    random = torch.Generator().manual_seed(seed)
    groups = torch.tensor([40, 3, 17, 3000, 0, 8]).repeat_interleave(torch.tensor([2, 9, 5, 1, 8, 4]))
    groups = groups[torch.randperm(29, generator=random)]
    return 3 * torch.randn(29, generator=random) + 5, groups


def assert_on_responses(field, masks, of_rows):
    """Every response token has the value of its row, in float32, and every other token 0."""
    for row, mask, value in zip(field.unbind(), masks, of_rows, strict=True):
        assert row.dtype == torch.float32
        assert row.tolist() == pytest.approx([value if sampled else 0.0 for sampled in mask])


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("seed", range(4))
def test_advantages_follow_the_formula_in_interleaved_unequal_groups(seed, scale):
    rewards, groups = ragged(seed)
    result = of_samples(rewards, groups, scale=scale)
    assert result.dtype == torch.float32
    expected = by_hand(rewards.double().tolist(), groups.tolist(), scale)
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({}, [1.5, -0.5, -0.5, -0.5]),
        ({"scale": "none"}, [0.75, -0.25, -0.25, -0.25]),
        ({"baseline": "leave_one_out", "scale": "none"}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ({"baseline": "none", "scale": "none"}, [1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_binary_rewards_have_the_known_advantages(choices, expected):
    result = of_samples([1.0, 0.0, 0.0, 0.0], [0, 0, 0, 0], **choices)
    torch.testing.assert_close(result, torch.tensor(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e8, -0.7])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # in float64 the mean of 0.1s is not 0.1
def test_equal_rewards_give_exactly_zero(reward, size, baseline, scale, dtype):
    rewards = torch.tensor([reward] * size + [0.0, 1.0], dtype=dtype)
    result = of_samples(rewards, [1] * size + [0, 0], baseline=baseline, scale=scale)
    assert result[:size].tolist() == [0.0] * size
    assert result[size] == -result[size + 1] != 0


def test_scaling_makes_the_size_of_rewards_irrelevant():
    rewards, groups = ragged(2)
    larger, usual = of_samples(1000 * rewards - 7, groups), of_samples(rewards, groups)
    torch.testing.assert_close(larger, usual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scale", SCALES)
def test_every_sampled_token_gets_the_advantage_of_its_sample_and_no_other_token_any(scale):
    masks = [[False, True, True], [False, False], [True], [False, True, False, True]]
    rewards, groups = [1.0, 0.5, 4.0, -1.0], [7, 2, 7, 2]
    batch = compute_advantages(batch_of(rewards, groups, masks), AlgorithmConfig(scale=scale))
    assert_on_responses(batch["advantages"], masks, by_hand(rewards, groups, scale).tolist())


def test_a_kl_term_in_the_reward_counts_from_a_token_on_and_never_a_token_outside_the_mask():
    masks = [[False, True, False, True], [True, True]]
    old = {"old_logprobs": jagged([torch.tensor([9.0, -1.0, 9.0, -2.0]), torch.tensor([-3.0, -1.0])])}
    ref = {"ref_logprobs": jagged([torch.tensor([0.0, -1.5, 0.0, -2.25]), torch.tensor([-3.0, -2.0])])}
    batch = batch_of([1.0, 2.0], [0, 0], masks, **old, **ref)
    kl = {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1", "scale": "none"}
    to_go = compute_advantages(batch, AlgorithmConfig(baseline="none", **kl))["advantages"]
    assert to_go.values().tolist() == pytest.approx([0, 1 - 0.075, 0, 1 - 0.025, 2 - 0.1, 2 - 0.1])
    whole = compute_advantages(batch, AlgorithmConfig(baseline="leave_one_out", **kl))["advantages"]
    assert whole.values().tolist() == pytest.approx([0, -0.975, 0, -0.975, 0.975, 0.975])


def test_away_from_the_controller_there_is_nothing_to_compute():
    assert compute_advantages(None, AlgorithmConfig()) is None
    assert weigh_tokens(None, AlgorithmConfig()) is None


def test_a_group_has_signal_where_its_rewards_differ():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.1, 0.1, 0.1, -2.0])
    groups = torch.tensor([9, 9, 4, 4, 70, 70, 3])
    assert groups_with_signal(rewards, groups).tolist() == [False, True, True, False]
    rewards[[0, 5, 6]] = torch.nan  # which could not be graded
    assert groups_with_signal(rewards, groups).tolist() == [False, True, False, False]


def test_what_a_group_is_judged_by():
    parts = {"rewards/right": torch.tensor([1.0, 1.0, torch.nan]), "penalties": torch.tensor([0.0, -1.0, 0.0])}
    batch = batch_of([0.5, 2.0, 3.0], [0, 0, 0], failures=torch.tensor([0, 0, 2]), **parts)

    def judged(**settings):
        return signal_of(batch, AlgorithmConfig(**settings)).tolist()

    assert judged() == pytest.approx([0.5, 2.0, torch.nan], nan_ok=True)
    assert judged(ungraded="zero") == [0.5, 2.0, 3.0]
    assert judged(signal_reward="right") == pytest.approx([1.0, 1.0, torch.nan], nan_ok=True)
    assert judged(signal_reward="right", ungraded="zero") == [1.0, 1.0, 3.0]


def test_a_penalty_counts_in_the_advantage_and_not_as_a_signal():
    batch = batch_of([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], penalties=torch.tensor([0.0, -0.5, 0.0, 0.0]))
    assert compute_advantages(batch, AlgorithmConfig(scale="none"))["advantages"].values().tolist() == [
        0.25,
        -0.25,
        0,
        0,
    ]
    assert prompts_missing([batch], 2, AlgorithmConfig(resample_rounds=1)) == 2
    assert batch["rewards"].tolist() == [1.0, 1.0, 0.0, 0.0]


MASKS = [[False, True, True], [False, False], [True], [False, True, False, True, True]]


@pytest.mark.parametrize(
    ("choices", "of_rows"),
    [
        ({"aggregate": "token_mean"}, [1 / 6, 0, 1 / 6, 1 / 6]),
        ({"aggregate": "sequence_mean"}, [1 / 6, 0, 1 / 3, 1 / 9]),
        ({"aggregate": "sequence_sum"}, [1 / 3, 0, 1 / 3, 1 / 3]),
        ({"aggregate": "constant", "constant_length": 5}, [1 / 15, 0, 1 / 15, 1 / 15]),
        ({"aggregate": "token_mean", "mask_truncated": True}, [1 / 3, 0, 1 / 3, 0]),
        ({"aggregate": "sequence_mean", "mask_no_signal": True}, [0, 0, 1 / 2, 1 / 6]),
        ({"aggregate": "sequence_sum", "mask_no_signal": True, "mask_truncated": True}, [0, 0, 1, 0]),
        ({"aggregate": "prompt_mean"}, [1 / 4, 0, 1 / 8, 1 / 8]),
        ({"aggregate": "prompt_mean", "mask_truncated": True}, [1 / 4, 0, 1 / 2, 0]),
        ({"aggregate": "prompt_mean", "mask_no_signal": True}, [0, 0, 1 / 4, 1 / 4]),
        ({"aggregate": "sequence_mean", "resample_rounds": 2}, [0, 0, 1 / 2, 1 / 6]),
    ],
)
def test_what_a_token_weighs(choices, of_rows):
    truncated = torch.tensor([False, False, False, True])
    batch = batch_of([1.0, 1.0, 4.0, -1.0], [7, 7, 2, 2], MASKS, truncated=truncated)
    assert_on_responses(weigh_tokens(batch, AlgorithmConfig(**choices))["loss_weights"], MASKS, of_rows)


@pytest.mark.parametrize("aggregate", ["token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant"])
@pytest.mark.parametrize("name", ["mask_truncated", "mask_no_signal"])
def test_where_all_is_masked_nothing_weighs_and_nothing_is_nan(name, aggregate):
    batch = batch_of([1.0] * 4, [7, 7, 2, 2], MASKS, truncated=torch.ones(4, dtype=torch.bool))
    config = AlgorithmConfig(aggregate=aggregate, constant_length=5, **{name: True})
    assert weigh_tokens(batch, config)["loss_weights"].values().tolist() == [0.0] * 11


def test_the_overlong_penalty_falls_over_the_last_share():
    lengths = torch.tensor([1, 16384, 16385, 18432, 20479, 20480, 20481])
    penalty = overlong_penalty(lengths, 20480, 0.2)  # the lengths of arXiv:2503.14476
    assert penalty.dtype == torch.float32
    assert penalty.tolist() == pytest.approx([0, 0, -1 / 4096, -0.5, -4095 / 4096, -1, -1], abs=1e-6)
    assert overlong_penalty(torch.tensor([0, 5, 10]), 10, 1.0).tolist() == [0, -0.5, -1]
