"""Plans of who computes what: samples over parts, and samples into micro-batches under a token budget."""

from collections.abc import Sequence


def balance(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Split the indices of `costs` into `parts` non-empty lists of nearly equal summed cost.

    The most costly sample goes first, each to the part that has least so far (Graham's longest processing
    time rule, at most 4/3 of the best split). Every list is in ascending order. Raises ValueError where there
    are fewer samples than parts.
    """
    if len(costs) < parts:
        raise ValueError(f"{len(costs)} samples cannot be split into {parts} parts.")
    bins: list[list[int]] = [[] for _ in range(parts)]
    sums = [0.0] * parts
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for place, i in enumerate(order):
        # The last samples go to the parts that would stay empty otherwise.
        empty = [b for b in range(parts) if not bins[b]]
        open_bins = empty if len(order) - place <= len(empty) else range(parts)
        best = min(open_bins, key=lambda b: (sums[b], b))
        bins[best].append(i)
        sums[best] += costs[i]
    return [sorted(b) for b in bins]


def pack(lengths: Sequence[int], max_tokens: int, at_least: int = 1) -> list[list[int]]:
    """Cut samples into the fewest balanced micro-batches of at most `max_tokens` tokens, but `at_least` so many.

    Returns lists of indices. A sample longer than `max_tokens` raises ValueError. More micro-batches than
    samples are asked for where other ranks have more work: the surplus ones are empty.
    """
    if max(lengths) > max_tokens:
        raise ValueError(f"A sample of {max(lengths)} tokens does not fit max_tokens_per_microbatch={max_tokens}.")
    count = max(at_least, -(-sum(lengths) // max_tokens))
    while count < len(lengths):
        bins = balance(lengths, count)
        if all(sum(lengths[i] for i in b) <= max_tokens for b in bins):
            return bins
        count += 1
    return [[i] for i in range(len(lengths))] + [[] for _ in range(count - len(lengths))]
