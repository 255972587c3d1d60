"""Log-probabilities and entropy from hidden states, without ever holding [N, vocabulary] logits.

Chunked over tokens, and over the vocabulary where the head is sharded on a tensor-parallel group: each rank
computes its slice of the logits, and only per-token sums cross the group. The same idea as vocabulary-parallel cross
entropy in Megatron-LM (arXiv:1909.08053, section 3), with the entropy and its gradient beside it.

`head_logprobs` is a function like any other, whose backward pass computes the logits again. `head_loss` takes the loss
inside: where it is a sum over tokens, a chunk's gradient is known as soon as its log-probabilities are, so that its
logits serve both passes: three matrix products instead of four.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

Loss = Callable[[torch.Tensor, torch.Tensor, slice], torch.Tensor]
"""The sum over a chunk's tokens, from their log-probabilities and entropies and where the chunk stands in all N."""


@dataclass(frozen=True)
class Head:
    """softmax(hidden @ weight.T / temperature), asked for the probabilities of targets."""

    weight: torch.Tensor  # [V_local, H], the rows of the vocabulary that begin at `first`
    targets: torch.Tensor  # [N] int64 ids of the whole vocabulary
    temperature: float
    first: int = 0
    group: dist.ProcessGroup | None = None  # whose ranks hold the other rows, and the same hidden states
    chunk: int = 2048  # tokens whose logits exist at a time
    fuse: bool = False  # on CUDA: what is done with a chunk's logits is one pass each way, in Triton


def head_logprobs(
    hidden_NH: torch.Tensor, head: Head, entropy: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log p(targets) and the entropy under `head`, for hidden_NH [N, H] in the type of its weight.

    Returns two [N] float32 tensors, the same on every rank of the group; both carry gradients to hidden and weight,
    and the gradient of hidden is already summed over the group. Without `entropy` the second is None.

    Beyond inputs and gradients it holds [chunk, V_local] in the type of weight, and [V_local, H] in float32 on the
    way back.
    """
    logprobs, entropies = _HeadLogprobs.apply(hidden_NH, head.weight, head, entropy)
    return logprobs, entropies if entropy else None


def head_loss(hidden_NH: torch.Tensor, head: Head, loss: Loss) -> torch.Tensor:
    """The sum of `loss` over all chunks, a float32 scalar with gradients to hidden and weight as of head_logprobs.

    `loss` is called once for each chunk and must not look beyond it.
    """
    return _HeadLoss.apply(hidden_NH, head.weight, head, loss)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, head, with_entropy):
        chunks = _Chunks(hidden_NH, weight_VH, head, with_entropy)
        parts = [chunks.measure(here)[1] for here in chunks]
        logprobs, entropy, lse = torch.cat(parts, dim=1)
        ctx.save_for_backward(hidden_NH, weight_VH, lse, entropy)
        ctx.head, ctx.with_entropy = head, with_entropy
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_NH, weight_VH, lse, entropy = ctx.saved_tensors
        chunks = _Chunks(hidden_NH, weight_VH, ctx.head, ctx.with_entropy)
        for here in chunks:
            per_token = torch.stack([lse[here], entropy[here], grad_logprobs[here], grad_entropy[here]])
            chunks.go_back(here, chunks.logits(here), per_token)
        return *chunks.gradients(), None, None


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, head, loss):
        chunks = _Chunks(hidden_NH, weight_VH, head, True)
        total = hidden_NH.new_zeros((), dtype=torch.float32)
        for here in chunks:
            logits, (logprobs, entropy, lse) = chunks.measure(here)
            with torch.enable_grad():
                leaves = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
                part = loss(*leaves, here)
            grads = torch.autograd.grad(part, leaves, materialize_grads=True)
            chunks.go_back(here, logits, torch.stack([lse, entropy, *grads]))
            total += part.detach()
        ctx.save_for_backward(*chunks.gradients())
        return total

    @staticmethod
    def backward(ctx, upstream):
        return *(None if grad is None else grad * upstream.to(grad.dtype) for grad in ctx.saved_tensors), None, None


class _Chunks:
    """The passes over one chunk of tokens, and the gradients that they add up to."""

    def __init__(self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, head: Head, entropy: bool) -> None:
        self.hidden, self.weight, self.head, self.entropy = hidden_NH, weight_VH, head, entropy
        self.group = head.group if head.group is not None and dist.get_world_size(head.group) > 1 else None
        self.summarize, self.to_slope = _summarize, _to_slope
        if head.fuse and hidden_NH.is_cuda:
            from workers.parallel import head_kernels  # Triton comes with torch for CUDA alone

            self.summarize, self.to_slope = head_kernels.summarize, head_kernels.to_slope
        local = head.targets - head.first
        # The row of each target in this slice; -1 where it lies in another.
        self.local = local.where((local >= 0) & (local < len(weight_VH)), -1)
        self.grad_hidden = self.grad_weight = None  # on the way back alone

    def __iter__(self) -> Iterator[slice]:
        count = len(self.hidden)
        # One at least, though it may be empty: a loss counts what it sees, on every rank alike.
        starts = range(0, max(count, 1), self.head.chunk)
        return (slice(start, min(start + self.head.chunk, count)) for start in starts)

    def logits(self, here: slice) -> torch.Tensor:
        """[n, V_local], before temperature."""
        return self.hidden[here] @ self.weight.T

    def measure(self, here: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunk's logits; and its log-probabilities, entropies and logarithms of sums of exps, [3, n] float32."""
        logits = self.logits(here)
        sums = self.summarize(logits, self.local[here], 1 / self.head.temperature, self.entropy)
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

    def go_back(self, here: slice, logits: torch.Tensor, per_token_4n: torch.Tensor) -> None:
        """Add the chunk's gradients, given its lse, entropies and the gradients to log-probabilities and entropies."""
        if self.grad_hidden is None:
            self.grad_hidden = torch.empty_like(self.hidden)
            if self.weight.requires_grad:
                self.grad_weight = torch.zeros_like(self.weight, dtype=torch.float32)
        self.to_slope(logits, self.local[here], per_token_4n, 1 / self.head.temperature, self.entropy)
        torch.mm(logits, self.weight, out=self.grad_hidden[here])
        if self.grad_weight is None:
            return  # frozen
        if logits.is_cuda and logits.dtype != torch.float32:
            torch.addmm(self.grad_weight, logits.T, self.hidden[here], out_dtype=torch.float32, out=self.grad_weight)
        else:
            self.grad_weight += logits.T @ self.hidden[here]

    def gradients(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """To hidden (summed over the group) and weight, in the types of the two; None where the weight is frozen."""
        if self.group is not None:
            dist.all_reduce(self.grad_hidden, group=self.group)
        return self.grad_hidden, self.grad_weight.to(self.weight.dtype) if self.weight.requires_grad else None


def _summarize(logits_NV: torch.Tensor, local_N: torch.Tensor, scale: float, entropy: bool) -> torch.Tensor:
    """[4, N] float32 over this slice: the highest logit, sum of exps below it, that weighted by logits, the target."""
    logits = logits_NV.float() * scale
    highest = logits.amax(-1)
    exps = (logits - highest[:, None]).exp()
    weighted = (exps * logits).sum(-1) if entropy else torch.zeros_like(highest)
    target = logits_NV.gather(1, local_N.clamp(min=0)[:, None])[:, 0].float() * scale
    return torch.stack([highest, exps.sum(-1), weighted, target.where(local_N >= 0, 0.0)])


def _to_slope(
    logits_NV: torch.Tensor, local_N: torch.Tensor, per_token_4N: torch.Tensor, scale: float, entropy: bool
) -> None:
    """Put the gradient to the logits before temperature in their place."""
    lse, entropies, grad_logprobs, grad_entropy = per_token_4N[:, :, None]
    logp = logits_NV.float() * scale - lse
    # d logprob = onehot - p;  d entropy = -p (log p + entropy)
    pull = grad_logprobs + grad_entropy * (logp + entropies) if entropy else grad_logprobs
    columns = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    onehot = (columns == local_N[:, None]) * grad_logprobs
    logits_NV.copy_((onehot - logp.exp() * pull) * scale)
