"""Plans of who computes what: samples over ranks, and samples into micro-batches under a token budget."""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

ONE_BY_ONE = 64
"""So many samples a list are placed one by one; more are dealt in rounds, as half a million take seconds one by one."""


def balance(costs: Sequence[float], count: int) -> list[list[int]]:
    """Split the indices of `costs` into `count` non-empty lists, in ascending order each, of nearly equal cost.

    The most costly sample goes first, each to the list that costs least so far (Graham's longest processing time rule,
    at most 4/3 of the best split). Of many samples the cheaper ones go in rounds, one to each list, the most costly of
    a round to the list that costs least: lists never part by more than a round's samples do. Raises ValueError where
    there are fewer samples than lists.
    """
    if len(costs) < count:
        raise ValueError(f"{len(costs)} samples cannot be split over {count} ranks.")
    each = np.asarray(costs, np.float64)
    order = np.argsort(-each, kind="stable")
    owner, totals = np.empty(len(each), np.int64), np.zeros(count)
    heap = [(0.0, False, b) for b in range(count)]  # what each costs so far; those of equal cost that are empty first
    for i in order[: ONE_BY_ONE * count].tolist():
        total, _, b = heap[0]
        owner[i], totals[b] = b, total + costs[i]
        heapq.heapreplace(heap, (totals[b], True, b))
    for first in range(ONE_BY_ONE * count, len(order), count):
        dealt = order[first : first + count]
        cheapest = np.argsort(totals, kind="stable")[: len(dealt)]
        owner[dealt] = cheapest
        totals[cheapest] += each[dealt]
    ends = np.bincount(owner, minlength=count).cumsum()[:-1]
    return [part.tolist() for part in np.split(np.argsort(owner, kind="stable"), ends)]


def pack(
    lengths: Sequence[int], max_tokens: int, at_least: int = 1, cost: Callable[[int], float] = float
) -> list[list[int]]:
    """Pack samples of `lengths` tokens into micro-batches of at most `max_tokens`; returns their lists of indices.

    The longest sample goes first, each into the fullest micro-batch that has room for it (best fit decreasing, at most
    11/9 of the fewest + 1), so that all but the last are nearly full. There are `at_least` so many, for ranks that keep
    step with others: beyond those needed, of one sample each, and empty when the samples run out. The most costly by
    `cost`, of a sample's length, come first, so that ranks do equal work side by side. Raises ValueError for a sample
    longer than `max_tokens`.
    """
    if max(lengths) > max_tokens:
        raise ValueError(f"A sample of {max(lengths)} tokens does not fit max_tokens_per_microbatch={max_tokens}.")
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b in range(len(bins)) if room[b] >= lengths[i]]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            room.append(max_tokens)
        best = min(fitting, key=lambda b: room[b])
        bins[best].append(i)
        room[best] -= lengths[i]
    while len(bins) < at_least:
        most = max(bins, key=len)
        bins.append([most.pop()] if len(most) > 1 else [])
    bins.sort(key=lambda rows: -sum(cost(lengths[i]) for i in rows))
    return [sorted(rows) for rows in bins]
