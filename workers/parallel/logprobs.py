"""Log-probabilities and entropy from hidden states, without ever holding [N, vocabulary] logits.

Chunked over tokens, and over the vocabulary where the head is sharded on a tensor-parallel group: each rank
computes its slice of the logits, and only per-token sums cross the group. The backward pass computes the
chunk's logits again. The same idea as vocabulary-parallel cross entropy in Megatron-LM (arXiv:1909.08053,
section 3), with the entropy and its gradient beside it.
"""

import torch
import torch.distributed as dist


def head_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    temperature: float,
    first: int = 0,
    group: dist.ProcessGroup | None = None,
    chunk: int = 2048,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(targets) and the entropy under softmax(hidden @ weight.T / temperature).

    hidden_NH: [N, H] float, the same on every rank of `group`. weight_VH: [V_local, H], the rows of the
    vocabulary that begin at `first`. targets_N: [N] int64 ids of the whole vocabulary. Returns two [N] float32
    tensors, the same on every rank of `group`; both carry gradients to hidden and weight, and the gradient of
    hidden is already summed over `group`.
    """
    return _HeadLogprobs.apply(hidden_NH, weight_VH, targets_N, temperature, first, group, chunk)


class _HeadLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, targets_N, temperature, first, group, chunk):
        logprobs, lses, entropies = [], [], []
        for hidden, targets in zip(hidden_NH.split(chunk), targets_N.split(chunk), strict=True):
            logits = _logits(hidden, weight_VH, temperature)
            highest = logits.amax(-1)
            _reduce(highest, dist.ReduceOp.MAX, group)
            exps = (logits - highest[:, None]).exp_()
            local, inside = _local_targets(targets, first, weight_VH.shape[0])
            target_logits = logits.gather(1, local[:, None])[:, 0].where(inside, 0.0)
            sums = torch.stack([exps.sum(-1), exps.mul_(logits).sum(-1), target_logits])
            _reduce(sums, dist.ReduceOp.SUM, group)
            lse = sums[0].log() + highest
            logprobs.append(sums[2] - lse)
            entropies.append(lse - sums[1] / sums[0])
            lses.append(lse)
        logprobs, entropy, lse = (
            torch.cat(x) if x else hidden_NH.new_zeros(0, dtype=torch.float32) for x in (logprobs, entropies, lses)
        )
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, lse, entropy)
        ctx.settings = temperature, first, group, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden_NH, weight_VH, targets_N, lse_N, entropy_N = ctx.saved_tensors
        temperature, first, group, chunk = ctx.settings
        grad_hidden = torch.zeros_like(hidden_NH)
        grad_weight = torch.zeros_like(weight_VH, dtype=torch.float32)
        for start in range(0, len(targets_N), chunk):
            here = slice(start, start + chunk)
            logp = _logits(hidden_NH[here], weight_VH, temperature).sub_(lse_N[here, None])
            # d logprob = onehot - p;  d entropy = -p (log p + entropy)
            slope = logp.add(entropy_N[here, None]).mul_(-grad_entropy[here, None])
            slope = slope.sub_(grad_logprobs[here, None]).mul_(logp.exp_())
            local, inside = _local_targets(targets_N[here], first, weight_VH.shape[0])
            slope.scatter_add_(1, local[:, None], grad_logprobs[here].where(inside, 0.0)[:, None])
            slope = slope.div_(temperature).to(weight_VH.dtype)
            grad_hidden[here] = slope @ weight_VH
            grad_weight += slope.T @ hidden_NH[here]
        _reduce(grad_hidden, dist.ReduceOp.SUM, group)
        return grad_hidden, grad_weight.to(weight_VH.dtype), None, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float) -> torch.Tensor:
    return (hidden @ weight.T).float().div_(temperature)


def _local_targets(targets: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    local = targets - first
    return local.clamp(0, count - 1), (local >= 0) & (local < count)


def _reduce(x: torch.Tensor, op: dist.ReduceOp, group: dist.ProcessGroup | None) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(x, op=op, group=group)
