"""Group advantages against plain loops over the formula, in float64."""

import math

import pytest
import torch

from grpo.advantages import compute_advantages, group_advantages
from grpo.batch import jagged, make_batch


def by_hand(rewards, groups, scale):
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(mine) / len(mine)
        if max(mine) == min(mine):
            result.append(0.0)
            continue
        variance = math.fsum((r - mean) ** 2 for r in mine) / (len(mine) - 1)
        result.append((reward - mean) / (math.sqrt(variance) + 1e-6) if scale else reward - mean)
    return torch.tensor(result, dtype=torch.float64)


def ragged(seed):
    """Rewards of 29 samples in 6 interleaved groups of unequal sizes whose ids are neither sorted nor dense."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.tensor([40, 3, 17, 3000, 0, 8])
    groups = torch.cat([ids.repeat_interleave(torch.tensor([2, 9, 5, 1, 8, 4]))])
    groups = groups[torch.randperm(29, generator=random)]
    return 3 * torch.randn(29, generator=random) + 5, groups


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_advantages_follow_the_formula_in_interleaved_unequal_groups(seed, scale):
    rewards, groups = ragged(seed)
    result = group_advantages(rewards, groups, scale)
    assert result.dtype == torch.float32
    expected = by_hand(rewards.double().tolist(), groups.tolist(), scale)
    torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-7)


def test_binary_rewards_have_the_known_advantages():
    result = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    torch.testing.assert_close(result, torch.tensor([1.5, -0.5, -0.5, -0.5]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e8, -0.7])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(reward, size, scale, dtype):
    rewards = torch.tensor([reward] * size + [0.0, 1.0], dtype=dtype)
    groups = torch.tensor([1] * size + [0, 0])
    result = group_advantages(rewards, groups, scale)
    assert result[:size].tolist() == [0.0] * size
    assert result[size] == -result[size + 1] != 0


@pytest.mark.parametrize("scale", [True, False])
def test_the_advantages_of_a_group_sum_to_zero(scale):
    rewards, groups = ragged(9)
    result = group_advantages(rewards, groups, scale)
    for group in groups.unique():
        assert abs(float(result[groups == group].double().sum())) < 1e-5


def test_scaling_makes_the_size_of_rewards_irrelevant():
    rewards, groups = ragged(2)
    torch.testing.assert_close(
        group_advantages(1000 * rewards - 7, groups), group_advantages(rewards, groups), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("scale", [True, False])
def test_every_sampled_token_gets_the_advantage_of_its_sample_and_no_other_token_any(scale):
    masks = [[False, True, True], [False, False], [True], [False, True, False, True]]
    batch = make_batch(
        {
            "tokens": jagged([torch.arange(len(mask)) for mask in masks]),
            "response_mask": jagged([torch.tensor(mask) for mask in masks]),
            "group": torch.tensor([7, 2, 7, 2]),
            "rewards": torch.tensor([1.0, 0.5, 4.0, -1.0]),
        }
    )
    expected = by_hand([1.0, 0.5, 4.0, -1.0], [7, 2, 7, 2], scale).tolist()
    rows = compute_advantages(batch, scale)["advantages"].unbind()
    assert len(rows) == 4
    for row, mask, advantage in zip(rows, masks, expected, strict=True):
        assert row.dtype == torch.float32
        assert row.tolist() == pytest.approx([advantage if sampled else 0.0 for sampled in mask])


def test_away_from_the_controller_there_is_nothing_to_compute():
    assert compute_advantages(None) is None
