"""Plans: nothing lost, nothing twice, no budget broken, and loads that are nearly even."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.packing import balance, pack

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=40)


def heaviest(costs, plan):
    return max(sum(costs[i] for i in part) for part in plan)


def best_split(costs, parts):
    """The smallest heaviest load of any assignment of costs to parts, by trying all."""
    return min(
        max(sum(cost for cost, part in zip(costs, choice, strict=True) if part == p) for p in range(parts))
        for choice in itertools.product(range(parts), repeat=len(costs))
    )


def cost_of(length):
    """About that of a model of 1.5 B parameters."""
    return length * (3e9 + length * 2e5)


def assert_each_index_once(plan, count):
    assert sorted(i for part in plan for i in part) == list(range(count))
    assert all(part == sorted(part) for part in plan)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0, 0, 1, 7, 100]), min_size=1, max_size=12), st.data())
def test_balance_deals_every_index_once_and_leaves_no_part_empty(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    plan = balance(costs, parts)
    assert len(plan) == parts
    assert all(plan)
    assert_each_index_once(plan, len(costs))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
def test_balance_keeps_grahams_bound_against_the_best_split(costs, parts):
    parts = min(parts, len(costs))
    assert heaviest(costs, balance(costs, parts)) <= (4 / 3 - 1 / (3 * parts)) * best_split(costs, parts) + 1e-9


@pytest.mark.parametrize(
    ("costs", "parts", "load"),
    [([1] * 8, 4, 2), ([8, 1, 1, 1, 1, 1, 1, 1, 1], 2, 8), ([7, 6, 5, 4, 3, 2, 1], 2, 14), ([0, 0, 0], 3, 0)],
)
def test_balance_finds_the_even_split_of_simple_loads(costs, parts, load):
    assert heaviest(costs, balance(costs, parts)) == load


def test_balance_deals_many_samples_as_evenly():
    costs = torch.empty(3000).log_normal_(6, 0.8, generator=torch.Generator().manual_seed(0)).tolist()
    plan = balance(costs, 7)
    assert_each_index_once(plan, 3000)
    assert all(part == sorted(part) for part in plan)
    assert heaviest(costs, plan) < 1.0005 * sum(costs) / 7


@pytest.mark.parametrize(("count", "parts"), [(0, 1), (2, 3)])
def test_balance_refuses_fewer_samples_than_parts(count, parts):
    with pytest.raises(ValueError, match=f"{count} samples cannot be split over {parts} ranks"):
        balance([1] * count, parts)


def many_lengths(seed):
    """512 lengths, log-normal with a mean of 600 and a sigma of 0.8, cut at 4096."""
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(512, generator=random) * 0.8 + math.log(600) - 0.32).exp().clamp(1, 4096).int().tolist()


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 200), st.integers(1, 50))
def test_pack_holds_every_index_once_within_the_budget(lengths, spare, at_least):
    budget = max(lengths) + spare
    plan = pack(lengths, budget, at_least)
    assert_each_index_once(plan, len(lengths))
    assert all(sum(lengths[i] for i in part) <= budget for part in plan)
    # Other ranks count on the number, and only a surplus over the samples may be empty.
    assert len(plan) >= at_least
    assert sum(not part for part in plan) == max(0, at_least - len(lengths))
    own = len(pack(lengths, budget))
    for more in (own, own + 1, own + 17):
        assert len(pack(lengths, budget, more)) == more


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 200))
def test_pack_opens_a_micro_batch_only_where_no_other_has_room(lengths, spare):
    budget = max(lengths) + spare
    fill = [sum(lengths[i] for i in rows) for rows in pack(lengths, budget)]
    assert fill == sorted(fill, reverse=True)
    # So that no two of them would fit into one.
    assert all(one + other > budget for one, other in itertools.combinations(fill, 2))


@pytest.mark.parametrize("seed", range(5))
def test_of_many_samples_all_micro_batches_but_the_last_are_full_to_97_percent(seed):
    lengths = many_lengths(seed)
    costs = [cost_of(length) for length in lengths]
    parts = balance(costs, 4)
    loads = [sum(costs[i] for i in part) for part in parts]
    assert max(loads) <= 1.03 * min(loads)
    for part in parts:
        plan = pack([lengths[i] for i in part], 16384)
        fill = [sum(lengths[part[i]] for i in rows) / 16384 for rows in plan]
        assert min(fill[:-1]) >= 0.97


@pytest.mark.parametrize("seed", range(5))
def test_ranks_side_by_side_do_equal_work_in_each_micro_batch(seed):
    lengths = many_lengths(seed)
    shards = [[lengths[i] for i in part] for part in balance([cost_of(length) for length in lengths], 4)]
    for budget in (8192, 16384):
        passes = max(len(pack(shard, budget)) for shard in shards)
        work = [
            [sum(cost_of(shard[i]) for i in rows) for rows in pack(shard, budget, passes, cost_of)] for shard in shards
        ]
        longest = sum(max(side_by_side) for side_by_side in zip(*work, strict=True))
        # Ordered by their tokens they would wait for 1 to 3 %.
        assert 1 - sum(map(sum, work)) / 4 / longest <= 0.0075


def test_pack_makes_one_micro_batch_of_what_fits_exactly():
    assert pack([3, 4, 5], 12) == [[0, 1, 2]]
    assert len(pack([3, 4, 5], 11)) == 2


def test_pack_refuses_a_sample_longer_than_the_budget_and_names_both():
    assert pack([8], 8) == [[0]]
    with pytest.raises(ValueError, match="sample of 9 tokens does not fit max_tokens_per_microbatch=8"):
        pack([3, 9, 2], 8)
