"""Tensor parallelism: weights cut over a mesh, and modules that compute with this rank's pieces (arXiv:1909.08053).

Weights are DTensors, as FSDP, checkpoints and the weight sync want them, but what passes between modules is plain
tensors: DTensors of unknown sizes cannot be compiled (torch 2.13), and dispatch slowly. Hidden states are equal on all
ranks between the cut modules: `_Enter` stands before matrices cut by rows, `_Leave` after one cut by columns, which
makes one collective each way for each attention and MLP.
"""

import torch
import transformers
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F


def split_over_tensor_mesh(causal_lm: transformers.PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cut a Qwen2, Qwen3 or Llama over `mesh`: heads, the MLP and the vocabulary; norms are on every rank.

    Its sizes must be such as `check_layout` lets pass. A head is cut where the model has one, and computes nothing
    itself.
    """
    rows, columns, whole = Shard(0), Shard(1), Replicate()
    for layer in causal_lm.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            _split(linear, mesh, rows, _Sliced)
        for linear in (attention.o_proj, mlp.down_proj):
            _split(linear, mesh, columns, _Summed)
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            _split(norm, mesh, whole, _EnteringNorm)
        if hasattr(attention, "q_norm"):
            for norm in (attention.q_norm, attention.k_norm):
                _split(norm, mesh, whole, _HeadNorm)
    _split(causal_lm.model.norm, mesh, whole, _Norm)
    _split(causal_lm.model.embed_tokens, mesh, rows, _Vocabulary)
    if isinstance(causal_lm.lm_head, nn.Linear):
        _split(causal_lm.lm_head, mesh, rows, nn.Linear)


def _split(module: nn.Module, mesh: DeviceMesh, placement: Placement, kind: type[nn.Module]) -> None:
    """Lay the parameters of `module` out as `placement` and make it a `kind`."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        # A bias has no columns to cut.
        here = Replicate() if placement.is_shard(1) and parameter.ndim == 1 else placement
        module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [here])))
    module.__class__ = kind
    module.group, module.place = mesh.get_group().group_name, mesh.get_local_rank()


class _Sliced(nn.Linear):
    """A linear layer cut by rows: from whole inputs [*, in] this rank's outputs [*, out / ranks]."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return F.linear(inputs, self.weight.to_local(), None if self.bias is None else self.bias.to_local())


class _Summed(nn.Linear):
    """A linear layer cut by columns: from this rank's inputs [*, in / ranks] whole outputs [*, out]."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = _Leave.apply(F.linear(inputs, self.weight.to_local()), self.group)
        return outputs if self.bias is None else outputs + self.bias.to_local()


class _Vocabulary(nn.Embedding):
    """An embedding cut by rows: from ids [*] their embeddings [*, H], each from the rank that has it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local()
        first = self.place * len(weight)
        rows = tokens - first
        absent = (rows < 0) | (rows >= len(weight))
        # The row that gets no gradient, where it is one of these.
        padding = self.padding_idx
        padding = padding - first if padding is not None and 0 <= padding - first < len(weight) else None
        embedded = F.embedding(rows.masked_fill(absent, 0), weight, padding)
        return _Leave.apply(embedded.masked_fill(absent[..., None], 0.0), self.group)


class _Norm(nn.Module):
    """The RMSNorm of the three models, whose weight is on every rank: [*, n] to [*, n]."""

    gradient: Placement = Replicate()
    """What a rank's gradient to the weight is: as all others have it, or a part of the sum."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        wide = inputs.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight.to_local(grad_placements=[self.gradient]) * normed.to(inputs.dtype)


class _HeadNorm(_Norm):
    """The q and k norms of Qwen3, which see other heads on each rank."""

    gradient = Partial()


class _EnteringNorm(_Norm):
    """A norm before matrices cut by rows: one all-reduce of the gradient serves them all."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _Enter.apply(super().forward(inputs), self.group)


class _Enter(torch.autograd.Function):
    """What is whole on all ranks, which go on with it each in its own way: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, whole, group):
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient):
        return _sum(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    """The sum over all ranks, which go on with it alike: its gradient, equal on all, is that of each addend."""

    @staticmethod
    def forward(ctx, part, group):
        return _sum(part, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _sum(part: torch.Tensor, group: str) -> torch.Tensor:
    """As functional collectives, which can be compiled."""
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(part, "sum", group))
