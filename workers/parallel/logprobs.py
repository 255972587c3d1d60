"""Log-probabilities and entropy from hidden states, without ever holding [N, vocabulary] logits.

Chunked over tokens, and over the vocabulary where a tensor-parallel group shards the head: each rank computes some of
the logits, and only sums for each token cross the group. This is Megatron-LM's vocabulary-parallel cross entropy
(arXiv:1909.08053, section 3) with the entropy and its gradient beside it.

`head_logprobs` computes the logits again in its backward pass. `head_loss` is given the loss: as that is a sum over
tokens, a chunk's gradient is known as soon as its log-probabilities are, so its logits serve both passes, with three
matrix products instead of four.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Loss = Callable[[Tensor, Tensor, slice], Tensor]
"""The sum over a chunk's tokens, from their log-probabilities and entropies and the chunk's place among all N."""


@dataclass(frozen=True)
class Head:
    """softmax(hidden @ weight.T / temperature), asked for the probabilities of targets."""

    weight: Tensor  # [V_local, H], the rows of the vocabulary from vocab_start on
    targets: Tensor  # [N] int64 ids of the whole vocabulary
    temperature: float
    vocab_start: int = 0
    group: dist.ProcessGroup | None = None  # whose ranks hold the other rows, and the same hidden states
    chunk_size: int = 2048  # tokens whose logits exist at a time
    compiled: bool = False  # on CUDA: one Triton kernel each way reads a chunk's logits


def head_logprobs(hidden_NH: Tensor, head: Head, entropy: bool = True) -> tuple[Tensor, Tensor | None]:
    """log p(targets) and the entropy under `head`, for hidden_NH [N, H] in the type of its weight.

    Returns two [N] float32 tensors, the same on every rank of the group, the second None without `entropy`. Their
    gradient to hidden is summed over the group already. Beyond inputs and gradients it holds [chunk_size, V_local] in
    the type of weight, and in the backward pass [V_local, H] in float32.
    """
    logprobs, entropies = _HeadLogprobs.apply(hidden_NH, head.weight, head, entropy)
    return logprobs, entropies if entropy else None


def head_loss(hidden_NH: Tensor, head: Head, loss: Loss) -> Tensor:
    """The sum of `loss`, called once for each chunk, which it must not look beyond; gradients as of head_logprobs."""
    return _HeadLoss.apply(hidden_NH, head.weight, head, loss)


BLOCK = 2**19
"""Logits that eager arithmetic works on at a time on a CPU."""


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, head, with_entropy):
        chunks = _Chunks(hidden_NH, weight_VH, head, with_entropy)
        logprobs, entropy, lse = torch.cat([chunks.forward_chunk(chunk)[1] for chunk in chunks], dim=1)
        ctx.save_for_backward(hidden_NH, weight_VH, lse, entropy)
        ctx.head, ctx.with_entropy = head, with_entropy
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_NH, weight_VH, lse, entropy = ctx.saved_tensors
        chunks = _Chunks(hidden_NH, weight_VH, ctx.head, ctx.with_entropy)
        for chunk in chunks:
            per_token = torch.stack([lse[chunk], entropy[chunk], grad_logprobs[chunk], grad_entropy[chunk]])
            chunks.backward_chunk(chunk, hidden_NH[chunk] @ weight_VH.T, per_token)
        return *chunks.gradients(), None, None


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, head, loss):
        chunks = _Chunks(hidden_NH, weight_VH, head, True)
        total = hidden_NH.new_zeros((), dtype=torch.float32)
        for chunk in chunks:
            logits, (logprobs, entropy, lse) = chunks.forward_chunk(chunk)
            with torch.enable_grad():
                leaves = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
                chunk_loss = loss(*leaves, chunk)
            grads = torch.autograd.grad(chunk_loss, leaves, materialize_grads=True)
            chunks.backward_chunk(chunk, logits, torch.stack([lse, entropy, *grads]))
            total += chunk_loss.detach()
        ctx.save_for_backward(*chunks.gradients())
        return total

    @staticmethod
    def backward(ctx, upstream):
        # In place: a second tensor of the weight's size costs more than its arithmetic.
        return *(None if grad is None else grad.mul_(upstream) for grad in ctx.saved_tensors), None, None


class _Chunks:
    """Forward and backward pass of each chunk of tokens, and the gradients that the chunks add up to."""

    def __init__(self, hidden_NH: Tensor, weight_VH: Tensor, head: Head, entropy: bool) -> None:
        self.hidden, self.weight, self.head, self.entropy = hidden_NH, weight_VH, head, entropy
        self.group = head.group if head.group is not None and dist.get_world_size(head.group) > 1 else None
        self.softmax_sums, self.logits_to_grads = _softmax_sums, _logits_to_grads
        if head.compiled and hidden_NH.is_cuda:
            from workers.parallel import head_kernels  # Triton comes with torch for CUDA alone

            self.softmax_sums, self.logits_to_grads = head_kernels.softmax_sums, head_kernels.logits_to_grads
        local = head.targets - head.vocab_start
        # The row of each target in this rank's weight; -1 where another rank has it.
        self.local_targets = local.where((local >= 0) & (local < len(weight_VH)), -1)
        self.grad_hidden = self.grad_weight = None  # made by the first backward_chunk

    def __iter__(self) -> Iterator[slice]:
        # One at least, though it may be empty: a loss counts what it sees, on every rank alike.
        starts = range(0, max(len(self.hidden), 1), self.head.chunk_size)
        return (slice(start, start + self.head.chunk_size) for start in starts)

    def forward_chunk(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Logits [n, V_local] before temperature; log-probabilities, entropies, log-sum-exps (lse), [3, n] float32."""
        logits = self.hidden[chunk] @ self.weight.T
        sums = self.softmax_sums(logits, self.local_targets[chunk], 1 / self.head.temperature, self.entropy)
        highest, exps, weighted, target = sums
        if self.group is not None:
            top = highest.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.group)
            shrink = (highest - top).exp()
            sums = torch.stack([exps * shrink, weighted * shrink, target])
            dist.all_reduce(sums, group=self.group)
            highest, (exps, weighted, target) = top, sums
        lse = exps.log() + highest
        return logits, torch.stack([target - lse, lse - weighted / exps, lse])

    def backward_chunk(self, chunk: slice, logits: Tensor, per_token_4n: Tensor) -> None:
        """Add the chunk's gradients, from its lse, entropies and the gradients to both results; overwrites `logits`."""
        if self.grad_hidden is None:
            self.grad_hidden = torch.empty_like(self.hidden)
            if self.weight.requires_grad:
                wide = torch.promote_types(self.weight.dtype, torch.float32)
                self.grad_weight = torch.zeros_like(self.weight, dtype=wide)
        self.logits_to_grads(logits, self.local_targets[chunk], per_token_4n, 1 / self.head.temperature, self.entropy)
        torch.mm(logits, self.weight, out=self.grad_hidden[chunk])
        if self.grad_weight is None:
            return  # frozen
        if logits.dtype == self.grad_weight.dtype:
            self.grad_weight.addmm_(logits.T, self.hidden[chunk])
        elif logits.is_cuda:
            torch.addmm(self.grad_weight, logits.T, self.hidden[chunk], out_dtype=torch.float32, out=self.grad_weight)
        else:
            self.grad_weight += logits.T @ self.hidden[chunk]

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """To hidden (summed over the group) and weight, in the types of the two; None where the weight is frozen."""
        if self.group is not None:
            dist.all_reduce(self.grad_hidden, group=self.group)
        return self.grad_hidden, self.grad_weight.to(self.weight.dtype) if self.weight.requires_grad else None


def _blocks(logits_NV: Tensor) -> Iterator[slice]:
    """All rows at once, but on a CPU a few at a time: what is made of them then stays in its caches.

    Larger tensors cost it more than their arithmetic, as the system hands out and clears their memory anew each time.
    """
    rows, columns = logits_NV.shape
    each = max(rows if logits_NV.is_cuda else BLOCK // columns, 1)
    return (slice(start, start + each) for start in range(0, max(rows, 1), each))


def _softmax_sums(logits_NV: Tensor, local_N: Tensor, scale: float, entropy: bool) -> Tensor:
    """[4, N] float32 over this rank's logits times `scale`, given the row of each target or -1 (another rank's).

    The highest, max; sum of exp(logit - max); that weighted by logits (0 without `entropy`); the target's (or 0).
    """
    blocks = _blocks(logits_NV)
    return torch.cat([_block_sums(logits_NV[rows], local_N[rows], scale, entropy) for rows in blocks], dim=1)


def _block_sums(logits_NV: Tensor, local_N: Tensor, scale: float, entropy: bool) -> Tensor:
    logits = logits_NV.float() * scale
    highest = logits.amax(-1)
    exps = (logits - highest[:, None]).exp_()
    weighted = (exps * logits).sum(-1) if entropy else torch.zeros_like(highest)
    target = logits_NV.gather(1, local_N.clamp(min=0)[:, None])[:, 0].float() * scale
    return torch.stack([highest, exps.sum(-1), weighted, target.where(local_N >= 0, 0.0)])


def _logits_to_grads(logits_NV: Tensor, local_N: Tensor, per_token_4N: Tensor, scale: float, entropy: bool) -> None:
    """Overwrite the logits with their gradients, from lse, entropy and the gradients to log-probability and entropy."""
    for rows in _blocks(logits_NV):
        _block_to_grads(logits_NV[rows], local_N[rows], per_token_4N[:, rows], scale, entropy)


def _block_to_grads(logits_NV: Tensor, local_N: Tensor, per_token_4N: Tensor, scale: float, entropy: bool) -> None:
    lse, entropies, grad_logprobs, grad_entropy = per_token_4N[:, :, None]
    logp = logits_NV.float() * scale - lse
    # d logprob = onehot - p;  d entropy = -p (log p + entropy)
    pull = torch.addcmul(grad_logprobs + grad_entropy * entropies, grad_entropy, logp) if entropy else grad_logprobs
    grads = logp.exp_().mul_(pull).mul_(-scale)
    grads.scatter_add_(1, local_N.clamp(min=0)[:, None], scale * grad_logprobs.where(local_N[:, None] >= 0, 0.0))
    logits_NV.copy_(grads)
