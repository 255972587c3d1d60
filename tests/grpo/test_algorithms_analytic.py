"""What is known of the algorithms without a batch to compare with: sums, limits, and expectations by enumeration."""

from dataclasses import replace

import pytest
import torch

from grpo.advantages import compute_advantages, weigh_tokens
from grpo.algorithm import PRESETS, AlgorithmConfig
from grpo.batch import jagged, make_batch
from grpo.choices import CHOICES
from grpo.losses import policy_loss

K1, K2, K3 = (CHOICES["kl_estimator"][name].function for name in ("k1", "k2", "k3"))
GROUPED = [name for name in PRESETS if AlgorithmConfig.of(name).grouped or name == "gdpo"]


def batch_of(rewards, groups, lengths, **fields):
    mask = jagged([torch.tensor([False] + [True] * length) for length in lengths])
    fields = {name: torch.as_tensor(field) for name, field in {"rewards": rewards, "group": groups, **fields}.items()}
    return make_batch({"response_mask": mask, **fields})


def advantages_of(batch, **settings):
    return compute_advantages(batch, AlgorithmConfig(**settings))["advantages"]


def worths_of(batch, config, weights=None):
    """The advantage of each sample's last token, which is that of all."""
    return [float(row[-1]) for row in compute_advantages(batch.copy(), config, weights)["advantages"].unbind()]


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -0.7, 1e8])
@pytest.mark.parametrize("preset", GROUPED)
def test_equal_rewards_teach_exactly_nothing(preset, reward, off_policy):
    lengths, own = [1, 2, 3, 4, 1, 2, 3], {"rewards/a": [reward] * 7}
    config = AlgorithmConfig.of(preset, constant_length=4)
    config.drift_coefficient = 0.0  # which holds the policy where it was, whatever is rewarded
    batch = batch_of([reward] * 7, [3, 1, 3, 1, 1, 3, 1], lengths, **own)
    batch = weigh_tokens(compute_advantages(batch, config, {"a": 2.0}), config)
    picked = batch["response_mask"].values()
    fields = {name: batch[name].values()[picked] for name in ("advantages", "loss_weights")}
    fields["seq_id"] = torch.arange(7).repeat_interleave(torch.tensor(lengths))
    logprobs = torch.linspace(-2, -0.1, 16).requires_grad_()
    if off_policy:
        fields["old_logprobs"] = fields["rollout_logprobs"] = logprobs.detach().flip(0)
    loss, _ = policy_loss(logprobs, torch.zeros(16), fields, config)
    loss.backward()
    assert loss == 0
    assert logprobs.grad.tolist() == [0.0] * 16


def test_all_presets_with_a_group_baseline_are_among_those():
    names = ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sapo", "dppo", "maxrl", "gdpo", "rloo"]
    assert [*names, "reinforce++-baseline"] == GROUPED


def test_a_group_of_equal_rewards_is_worth_what_the_batch_takes_off_where_its_tokens_are_centred():
    batch = batch_of([1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1], [3, 3, 4, 1])
    first, second, right, wrong = worths_of(batch, AlgorithmConfig.of("reinforce++-baseline"))
    assert first == second < 0 < right
    assert 6 * first + 4 * right + wrong == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("penalty", [False, True])
def test_groups_that_fill_a_batch_learn_nothing_of_length_either(penalty):
    """Four wrong answers of different length: what is left after the last round of dapo's further prompts."""
    rewards, groups, lengths = [0.0] * 4 + [1.0, 0.0], [5, 5, 5, 5, 2, 2], [1, 1, 9, 10, 4, 4]
    batch = batch_of(rewards, groups, lengths, **({"penalties": [0.0, 0.0, -0.5, -1.0, 0.0, 0.0]} if penalty else {}))
    for config in (AlgorithmConfig.of("dapo"), AlgorithmConfig(mask_no_signal=True, aggregate="token_mean")):
        weights = weigh_tokens(compute_advantages(batch.copy(), config), config)["loss_weights"].unbind()
        assert [float(row[-1]) for row in weights] == pytest.approx([0.0] * 4 + [1 / 8] * 2)
    kept = weigh_tokens(compute_advantages(batch, AlgorithmConfig()), AlgorithmConfig())["loss_weights"]
    assert kept.values().count_nonzero() == sum(lengths)


def test_maxrl_weighs_answers_of_0_and_1_by_what_they_are_over_the_share_of_right_ones():
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0] * 4 + [1] * 4 + [2] * 2
    found = worths_of(batch_of(rewards, groups, [1, 2, 3] * 3 + [1]), AlgorithmConfig.of("maxrl"))
    shares = [0.25] * 4 + [0.75] * 4 + [1.0] * 2  # of no right answer there is nothing to learn
    assert found == pytest.approx([(r - p) / p if r or p < 1 else 0.0 for r, p in zip(rewards, shares, strict=True)])


def test_a_mean_that_cannot_divide_is_refused_where_it_would():
    config = AlgorithmConfig.of("maxrl")
    assert worths_of(batch_of([-1.0, -1.0, 0.0, 0.0], [0, 0, 1, 1], [1] * 4), config) == [0.0] * 4
    for rewards in ([-1.0, 1.0], [-3.0, 1.0]):
        with pytest.raises(ValueError, match=r"algorithm\.scale=group_mean.*not above 0"):
            worths_of(batch_of(rewards, [0, 0], [1, 1]), config)


REWARDS = [1.5, -0.25, 7.0, 0.1, 0.2, 0.4, 0.8, -3.0, 0.0]
GROUPS = [5, 5, 0, 9, 9, 9, 9, 0, 9]
LENGTHS = [3, 1, 2, 5, 1, 1, 4, 2, 3]


@pytest.mark.parametrize("weight", [1.0, 0.25, 40.0])
def test_gdpo_of_one_reward_is_the_groups_deviation_and_then_the_batchs(weight):
    batch = batch_of([0.0] * 9, GROUPS, LENGTHS, **{"rewards/a": REWARDS})
    found = worths_of(batch, AlgorithmConfig.of("gdpo"), {"a": weight})
    once = worths_of(batch_of(REWARDS, GROUPS, LENGTHS), AlgorithmConfig())
    twice = worths_of(batch_of(once, GROUPS, LENGTHS), AlgorithmConfig.of("gdpo", combine="sum"))
    assert found == pytest.approx(twice, rel=1e-5)
    assert torch.tensor(found).std() == pytest.approx(1, rel=1e-5)


def test_gdpo_keeps_apart_what_a_sum_would_make_equal():
    parts = {"rewards/a": [1.0, 1.0, 0.0, 0.0], "rewards/b": [0.0, 100.0, 0.0, 100.0]}
    found = worths_of(batch_of([0.0] * 4, [0] * 4, [1] * 4, **parts), AlgorithmConfig.of("gdpo"), {"a": 1.0, "b": 1.0})
    assert found == pytest.approx([0.0, 1.5**0.5, -(1.5**0.5), 0.0], abs=1e-5)  # not as b alone would have it


@pytest.mark.parametrize("preset", PRESETS)
def test_a_sample_that_could_not_be_graded_changes_nothing_for_the_others(preset):
    config = AlgorithmConfig.of(preset, constant_length=4)
    rewards = [abs(reward) for reward in REWARDS]
    graded = batch_of(rewards, GROUPS, LENGTHS, **{"rewards/a": rewards})
    # One of each group, and a group of its own.
    own = {"rewards/a": [float("nan"), 0.0, 0.0, 7.0, *rewards], "failures": [1, 2, 1, 1] + [0] * 9}
    more = batch_of([0.0] * 4 + rewards, [5, 0, 9, 77, *GROUPS], [2, 3, 4, 5, *LENGTHS], **own)
    alone, found = worths_of(graded, config, {"a": 1.0}), worths_of(more, config, {"a": 1.0})
    assert found == pytest.approx([0.0] * 4 + alone)
    weights = [float(row[-1]) for row in weigh_tokens(more.copy(), config)["loss_weights"].unbind()]
    expected = [float(row[-1]) for row in weigh_tokens(graded, config)["loss_weights"].unbind()]
    assert weights == pytest.approx([0.0] * 4 + expected)
    if preset not in ("gdpo", "reinforce"):  # the one has rewards of their own, the other compares with nothing
        assert worths_of(more, replace(config, ungraded="zero"), {"a": 1.0})[4:] != pytest.approx(alone)


def test_where_nothing_could_be_graded_nothing_is_worth_anything():
    for preset in PRESETS:
        config = AlgorithmConfig.of(preset, constant_length=4)
        batch = batch_of([0.0] * 2, [3, 3], [1, 2], failures=[1, 1], **{"rewards/a": [0.0, 1.0]})
        batch = weigh_tokens(compute_advantages(batch, config, {"a": 1.0}), config)
        assert batch["advantages"].values().tolist() == batch["loss_weights"].values().tolist() == [0.0] * 5


@pytest.mark.parametrize("scale", ["group_std", "sample_std", "none"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_the_advantages_of_a_groups_samples_sum_to_zero(baseline, scale):
    rows = advantages_of(batch_of(REWARDS, GROUPS, LENGTHS), baseline=baseline, scale=scale).unbind()
    for group in set(GROUPS):
        values = [float(row[-1]) for row, of in zip(rows, GROUPS, strict=True) if of == group]
        assert max(map(abs, values)) > 0.1
        assert abs(sum(values)) < 1e-6 * max(map(abs, values))


@pytest.mark.parametrize("scale", ["group_std", "none"])
def test_leaving_oneself_out_is_the_group_mean_times_n_over_n_less_one(scale):
    batch = batch_of(REWARDS, GROUPS, LENGTHS)
    mean = advantages_of(batch, baseline="group_mean", scale=scale).unbind()
    others = advantages_of(batch, baseline="leave_one_out", scale=scale).unbind()
    for group, a, b in zip(GROUPS, mean, others, strict=True):
        count = GROUPS.count(group)
        torch.testing.assert_close(b, a * count / (count - 1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("baseline", ["batch_mean", "group_mean", "leave_one_out", "none"])
def test_statistics_of_tokens_are_of_tokens_and_those_of_samples_of_the_rewards(baseline):
    batch = batch_of(REWARDS, GROUPS, LENGTHS)
    rows = advantages_of(batch, baseline=baseline, scale="token_std").unbind()
    tokens = torch.cat([row[1:] for row in rows]).double()
    assert abs(float(tokens.mean())) < 1e-6
    assert float(tokens.std()) == pytest.approx(1, abs=1e-5)
    by_samples = advantages_of(batch, baseline=baseline, scale="sample_std").values()
    unscaled = advantages_of(batch, baseline=baseline, scale="none").values()
    torch.testing.assert_close(by_samples, unscaled / (batch["rewards"].std() + 1e-6))


@pytest.mark.parametrize("scale", ["sample_std", "token_std", "none"])
def test_one_response_of_one_token_is_worth_nothing_against_its_own_mean(scale):
    rows = advantages_of(batch_of([3.0], [0], [1]), baseline="batch_mean", scale=scale)
    assert rows.values().tolist() == [0.0, 0.0]


# estimators of KL(policy, reference), summed over all tokens a policy could sample

SIZE = 5


def policies(distance=1.0):
    """Logits, with gradient, and the log-probabilities of another policy at `distance` in logits; float64."""
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(SIZE, generator=random, dtype=torch.float64)
    other = logits + distance * torch.randn(SIZE, generator=random, dtype=torch.float64)
    return logits.requires_grad_(), other.log_softmax(0)


def divergence(first, second):
    return (first.exp() * (first - second)).sum()


def gradient(loss, logits):
    [found] = torch.autograd.grad(loss, logits, retain_graph=True)
    return found


def expected_gradient(estimator, kl_ratio, old=None):
    """Of the loss's KL term over samples of `old`, or of the policy itself: (gradient, logits, log policy, log ref)."""
    logits, ref = policies()
    logprobs = logits.log_softmax(0)
    sampled = logprobs.detach() if old is None else old
    fields = {
        "advantages": torch.zeros(SIZE, dtype=torch.float64),
        "loss_weights": sampled.exp(),
        "seq_id": torch.arange(SIZE),
        "ref_logprobs": ref,
    } | ({} if old is None else {"old_logprobs": old})
    config = AlgorithmConfig(kl_coefficient=1.0, kl_estimator=estimator, kl_ratio=kl_ratio)
    loss, _ = policy_loss(logprobs, torch.zeros(SIZE), fields, config)
    return gradient(loss, logits), logits, logits.log_softmax(0), ref


def expectation(estimator, distance):
    """What an estimator is on average, and the divergence."""
    logits, ref = policies(distance)
    logprobs = logits.detach().log_softmax(0)
    return float((logprobs.exp() * estimator(logprobs - ref)).sum()), float(divergence(logprobs, ref))


@pytest.mark.parametrize("estimator", [K1, K3])
@pytest.mark.parametrize("distance", [0.01, 1.0, 3.0])
def test_k1_and_k3_are_unbiased(estimator, distance):
    estimate, exact = expectation(estimator, distance)
    assert estimate == pytest.approx(exact, rel=1e-9)


def test_k2_is_near_for_near_policies():
    for distance, relative in ((0.01, 0.02), (0.1, 0.2)):
        estimate, exact = expectation(K2, distance)
        assert estimate == pytest.approx(exact, rel=relative)
        assert estimate != pytest.approx(exact, rel=relative / 1000)


def test_k2_and_k3_are_never_negative_and_k1_is():
    gaps = torch.linspace(-3, 3, 61, dtype=torch.float64)
    assert min(K2(gaps).min(), K3(gaps).min()) >= 0 > K1(gaps).min()


def test_k1s_own_gradient_is_zero_k2s_that_of_the_divergence_and_k3s_that_of_the_other_way_round():
    assert expected_gradient("k1", kl_ratio=False)[0].abs().max() < 1e-12
    found, logits, logprobs, ref = expected_gradient("k2", kl_ratio=False)
    exact = gradient(divergence(logprobs, ref), logits)
    assert exact.abs().max() > 0.1
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)
    found, logits, logprobs, ref = expected_gradient("k3", kl_ratio=False)
    torch.testing.assert_close(found, gradient(divergence(ref, logprobs), logits), rtol=1e-10, atol=1e-12)
    assert (found - gradient(divergence(logprobs, ref), logits)).abs().max() > 0.03


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("name", ["k1", "k3"])
def test_with_the_ratio_the_gradient_of_k1_and_k3_is_that_of_the_divergence(name, off_policy):
    old = torch.tensor([0.3, -1.0, 0.2, 0.0, 1.0], dtype=torch.float64).log_softmax(0) if off_policy else None
    found, logits, logprobs, ref = expected_gradient(name, kl_ratio=True, old=old)
    torch.testing.assert_close(found, gradient(divergence(logprobs, ref), logits), rtol=1e-10, atol=1e-12)


def test_with_the_ratio_the_gradient_of_k2_is_that_of_its_own_expectation():
    found, logits, logprobs, ref = expected_gradient("k2", kl_ratio=True)
    own = (logprobs.exp() * (logprobs - ref).square() / 2).sum()
    torch.testing.assert_close(found, gradient(own, logits), rtol=1e-10, atol=1e-12)
    assert (found - gradient(divergence(logprobs, ref), logits)).abs().max() > 0.03
