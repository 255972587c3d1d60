"""The two passes over a chunk's logits on CUDA, in Triton; `_summarize` and `_to_slope` in logprobs.py are the same.

Each reads the logits once. What torch.compile makes of those functions takes half as long again, and twice as long: it
reads the logits twice for the highest and the sums below it, and loads what belongs to a token for each of its logits.
"""

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Logits of one token that a program works on at a time."""


def summarize(logits_NV: torch.Tensor, local_N: torch.Tensor, scale: float, entropy: bool) -> torch.Tensor:
    """[4, N] float32: the highest logit, sum of exps below it, that weighted by logits, the target."""
    sums_4N = torch.empty(4, len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    rows, columns = logits_NV.shape
    if rows:
        _summarize[(rows,)](logits_NV, local_N, sums_4N, rows, columns, scale, entropy, BLOCK, num_warps=4)
    return sums_4N


def to_slope(
    logits_NV: torch.Tensor, local_N: torch.Tensor, per_token_4N: torch.Tensor, scale: float, entropy: bool
) -> None:
    """Put the gradient to the logits before temperature in their place, given [4, N] of lse, entropy, gradients."""
    rows, columns = logits_NV.shape
    if rows:
        grid = rows, triton.cdiv(columns, BLOCK)
        _to_slope[grid](logits_NV, local_N, per_token_4N, rows, columns, scale, entropy, BLOCK, num_warps=4)


@triton.jit
def _summarize(logits, local, sums, rows, columns, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * columns
    highest = tl.full([], -float("inf"), tl.float32)
    exps = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        there = column < columns
        x = tl.load(logits + column, mask=there, other=-float("inf")).to(tl.float32) * scale
        top = tl.maximum(highest, tl.max(x))
        shrink = tl.exp(highest - top)
        exp = tl.exp(x - top)
        exps = exps * shrink + exp
        if ENTROPY:
            weighted = weighted * shrink + exp * tl.where(there, x, 0.0)
        highest = top
    target = tl.load(local + row)
    value = tl.load(logits + tl.maximum(target, 0)).to(tl.float32) * scale
    tl.store(sums + row, highest)
    tl.store(sums + rows + row, tl.sum(exps))
    tl.store(sums + 2 * rows + row, tl.sum(weighted))
    tl.store(sums + 3 * rows + row, tl.where(target >= 0, value, 0.0))


@triton.jit
def _to_slope(logits, local, per_token, rows, columns, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * columns
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    lse = tl.load(per_token + row)
    entropy = tl.load(per_token + rows + row)
    grad_logprob = tl.load(per_token + 2 * rows + row)
    grad_entropy = tl.load(per_token + 3 * rows + row)
    target = tl.load(local + row)
    logp = tl.load(logits + column, mask=there, other=0.0).to(tl.float32) * scale - lse
    # d logprob = onehot - p;  d entropy = -p (log p + entropy)
    pull = grad_logprob
    if ENTROPY:
        pull = grad_logprob + grad_entropy * (logp + entropy)
    slope = tl.where(column == target, grad_logprob, 0.0) - tl.exp(logp) * pull
    tl.store(logits + column, slope * scale, mask=there)
