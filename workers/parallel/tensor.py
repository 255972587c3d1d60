"""Tensor parallelism in Megatron's words (arXiv:1909.08053): layers that compute with this rank's piece of a weight.

Weights are DTensors, as FSDP, checkpoints and the weight sync want them, but plain tensors pass between modules:
DTensors of unknown sizes cannot be compiled (torch 2.13), and dispatch slowly. Between attention and MLP all ranks hold
the same hidden states. A norm copies them to the tensor-parallel region, column-parallel layers take them from there,
and a row-parallel layer reduces its outputs back: one all-reduce each way for each attention and each MLP.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F


def parallelize(causal_lm: transformers.PreTrainedModel, mesh: DeviceMesh, kinds: Mapping[str, type]) -> None:
    """Turn the modules whose last name is in `kinds` into these kinds, with parameters cut over `mesh`."""
    for name, module in causal_lm.named_modules():
        kind, parameters = kinds.get(name.rpartition(".")[2]), dict(module.named_parameters(recurse=False))
        if kind is None or not parameters:  # none: a head that reads the weight of the embeddings
            continue
        for which, parameter in parameters.items():
            setattr(module, which, nn.Parameter(distribute_tensor(parameter, mesh, [kind.placements[which]])))
        module.__class__ = kind
        module.tp_group, module.tp_rank = mesh.get_group(), mesh.get_local_rank()


class ColumnParallelLinear(nn.Linear):
    """A linear layer cut along its outputs: from whole inputs [*, in] this rank's outputs [*, out / tp_size]."""

    placements = {"weight": Shard(0), "bias": Shard(0)}

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight.to_local(), None if self.bias is None else self.bias.to_local())


class RowParallelLinear(nn.Linear):
    """A linear layer cut along its inputs: from this rank's inputs [*, in / tp_size] whole outputs [*, out]."""

    placements = {"weight": Shard(1), "bias": Replicate()}

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = _ReduceFromRegion.apply(F.linear(inputs, self.weight.to_local()), self.tp_group)
        return outputs if self.bias is None else outputs + self.bias.to_local()


class VocabParallelEmbedding(nn.Embedding):
    """An embedding cut along the vocabulary: from ids [*] whole embeddings [*, H]."""

    placements = {"weight": Shard(0)}

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.weight.to_local()
        vocab_start = self.tp_rank * len(weight)
        rows = tokens - vocab_start
        elsewhere = (rows < 0) | (rows >= len(weight))
        # The padding id gets no gradient, on the rank that holds its row.
        padding = None if self.padding_idx is None else self.padding_idx - vocab_start
        padding = padding if padding is not None and 0 <= padding < len(weight) else None
        embedded = F.embedding(rows.masked_fill(elsewhere, 0), weight, padding)
        return _ReduceFromRegion.apply(embedded.masked_fill(elsewhere[..., None], 0.0), self.tp_group)


class ReplicatedNorm(nn.Module):
    """RMSNorm as the model families have it, with its weight on every rank: [*, n] to [*, n]."""

    placements = {"weight": Replicate()}
    gradient: Placement = Replicate()  # of the weight's gradient a rank computes all (Replicate) or an addend (Partial)

    def forward(self, inputs: Tensor) -> Tensor:
        wide = inputs.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight.to_local(grad_placements=[self.gradient]) * normed.to(inputs.dtype)


class HeadNorm(ReplicatedNorm):
    """A norm of queries or keys, which sees other heads on each rank."""

    gradient = Partial()


class InputNorm(ReplicatedNorm):
    """The norm before an attention or MLP: copying once to the region serves all column-parallel layers behind it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return _CopyToRegion.apply(super().forward(inputs), self.tp_group)


class _CopyToRegion(torch.autograd.Function):
    """Forward the identity. Backward an all-reduce, as each rank uses the copy in its own way."""

    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return _all_reduce(gradient, ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    """Forward an all-reduce. Backward the identity, as all ranks use the sum alike."""

    @staticmethod
    def forward(ctx, addend, group):
        return _all_reduce(addend, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _all_reduce(addend: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `addend` over the group, as a new tensor."""
    total = addend.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
