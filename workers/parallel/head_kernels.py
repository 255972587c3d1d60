"""`_softmax_sums` and `_logits_to_grads` of logprobs.py as Triton kernels, for CUDA.

Each reads the logits once. torch.compile's kernels of these functions take 1.5 and 2 times as long: the first reads the
logits twice, for the highest and for the sums, and the second loads the values of a token for each of its logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # logits of one token that a program works on at a time


def softmax_sums(logits_NV: Tensor, local_N: Tensor, scale: float, entropy: bool) -> Tensor:
    """As _softmax_sums of logprobs.py."""
    sums_4N = torch.empty(4, len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    rows, columns = logits_NV.shape
    if rows:
        _softmax_sums[(rows,)](logits_NV, local_N, sums_4N, rows, columns, scale, entropy, BLOCK, num_warps=4)
    return sums_4N


def logits_to_grads(logits_NV: Tensor, local_N: Tensor, per_token_4N: Tensor, scale: float, entropy: bool) -> None:
    """As _logits_to_grads of logprobs.py."""
    rows, columns = logits_NV.shape
    if rows:
        grid = rows, triton.cdiv(columns, BLOCK)
        _logits_to_grads[grid](logits_NV, local_N, per_token_4N, rows, columns, scale, entropy, BLOCK, num_warps=4)


@triton.jit
def _softmax_sums(logits, local, sums, rows, columns, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * columns
    highest = tl.full([], -float("inf"), tl.float32)
    exps = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(logits + column, mask=inside, other=-float("inf")).to(tl.float32) * scale
        top = tl.maximum(highest, tl.max(x))
        shrink = tl.exp(highest - top)
        exp = tl.exp(x - top)
        exps = exps * shrink + exp
        if ENTROPY:
            weighted = weighted * shrink + exp * tl.where(inside, x, 0.0)
        highest = top
    target = tl.load(local + row)
    value = tl.load(logits + tl.maximum(target, 0)).to(tl.float32) * scale
    tl.store(sums + row, highest)
    tl.store(sums + rows + row, tl.sum(exps))
    tl.store(sums + 2 * rows + row, tl.sum(weighted))
    tl.store(sums + 3 * rows + row, tl.where(target >= 0, value, 0.0))


@triton.jit
def _logits_to_grads(logits, local, per_token, rows, columns, scale, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * columns
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    lse = tl.load(per_token + row)
    entropy = tl.load(per_token + rows + row)
    grad_logprob = tl.load(per_token + 2 * rows + row)
    grad_entropy = tl.load(per_token + 3 * rows + row)
    target = tl.load(local + row)
    logp = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32) * scale - lse
    # d logprob = onehot - p;  d entropy = -p (log p + entropy)
    pull = grad_logprob
    if ENTROPY:
        pull = grad_logprob + grad_entropy * (logp + entropy)
    grad = tl.where(column == target, grad_logprob, 0.0) - tl.exp(logp) * pull
    tl.store(logits + column, grad * scale, mask=inside)
