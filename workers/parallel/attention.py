"""Attention over packed sequences: T tokens of many sequences side by side, none of which sees another.

`packed_class` gives Hugging Face's self-attention another forward method, so that its models run unpadded. On CUDA in
half precision that is torch's varlen flash attention, or FlashAttention 4, which on Hopper takes about half the time
(attention_backend.py chooses). Elsewhere (on a CPU, or in float32) the heads are padded to rectangles inside the
attention call alone, for torch's SDPA: right-padded causal rows need no mask.
"""

import functools
import importlib
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from workers.parallel.mesh import to_device

# Torch 2.11 accepts fewer KV heads than query heads; later versions accept them with this argument.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class PackedSequences:
    """Where the sequences among T packed tokens begin and end, on the device of the tokens."""

    lengths: list[int]
    cu_seqlens: Tensor  # [sequences + 1] int32, cumulated lengths
    positions: Tensor  # [T] int64, from 0 in each sequence
    span: Tensor  # [max_seqlen], never read: a layer is compiled once for tensors of any size, but for each int

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest sequence."""
        return self.span.shape[0]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "PackedSequences":
        borders = to_device(torch.tensor(list(itertools.accumulate(lengths, initial=0))), device)
        total = sum(lengths)  # repeat_interleave is given it: otherwise the host would wait for the device to count
        begins = borders[:-1].repeat_interleave(borders.diff(), output_size=total)
        positions = torch.arange(total, device=device) - begins
        return cls(lengths, borders.int(), positions, borders.new_empty(max(lengths)))

    @functools.cached_property
    def rectangles(self) -> list[tuple[Tensor, Tensor]]:
        """The sequences in groups of similar length (from 60 % of the longest on), padded to rectangles.

        Of each rectangle the tokens [rows, columns] int64, padded with a row's last token, and which of its cells,
        counted through, are not padding [n] int64.
        """
        borders, device = self.cu_seqlens.tolist(), self.cu_seqlens.device
        left, rectangles = sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row]), []
        while left:
            columns = torch.arange(self.lengths[left[0]])
            group = [row for row in left if self.lengths[row] >= 0.6 * len(columns)]
            left = left[len(group) :]
            tokens = torch.stack([(columns + borders[row]).clamp(max=borders[row + 1] - 1) for row in group])
            cells = torch.stack([columns < self.lengths[row] for row in group]).flatten().nonzero()[:, 0]
            rectangles.append((tokens.to(device), cells.to(device)))
        return rectangles


class PackedSelfAttention:
    """What a class of Hugging Face's self-attention is mixed with to take packed hidden states.

    Heads stay behind the tokens throughout, [1, T, heads, d]: with tokens behind the heads, index arithmetic for any T
    would cost a compiled kernel ten times the time of the data it moves.
    """

    flash4: bool  # whether CUDA runs FlashAttention 4

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [1, T, heads, d] before rotation, from [1, T, H]."""
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        return tuple(project(hidden_states).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], sequences: PackedSequences, **_
    ) -> tuple[Tensor, None]:
        """Hidden states [1, T, H], from such and the angles of rotary_angles."""
        query, key, value = self.project(hidden_states)
        cos, sin = position_embeddings
        # The second factor is a head with its halves swapped.
        query, key = (x * cos + x.unflatten(-1, (2, -1)).flip(-2).flatten(-2) * sin for x in (query, key))
        out_TND = packed_attention(query[0], key[0], value[0], self.scaling, sequences, self.flash4)
        return self.o_proj(out_TND.reshape(*hidden_states.shape[:-1], -1)), None


@functools.cache
def packed_class(attention: type[torch.nn.Module], packed: type[PackedSelfAttention], flash4: bool) -> type:
    """The class `attention` of Hugging Face mixed with `packed`. Cached, since torch.compile guards on classes."""
    return type(f"Packed{attention.__name__}", (packed, attention), {"flash4": flash4})


def rotary_angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [1, T, d] as [1, T, 1, d], the rotation's minus in sin: negating heads in each layer costs more."""
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(2), torch.cat((-first, second), dim=-1).unsqueeze(2)


def packed_attention(
    q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor, scaling: float, sequences: PackedSequences, by_flash4: bool = False
) -> Tensor:
    """Causal attention within each sequence, [T, heads, d]; keys and values may have fewer heads."""
    if not q_TND.is_cuda or q_TND.dtype not in (torch.bfloat16, torch.float16):
        return _attention_in_rectangles(q_TND, k_TMD, v_TMD, scaling, sequences)
    cu_seqlens, max_seqlen = sequences.cu_seqlens, sequences.max_seqlen
    if by_flash4:
        return flash4(q_TND, k_TMD, v_TMD, cu_seqlens, max_seqlen, scaling)[0]
    borders = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)  # of queries and keys
    return varlen_attn(q_TND, k_TMD, v_TMD, *borders, scale=scaling, window_size=(-1, 0), **_GROUPED)


@torch.compiler.disable
def _attention_in_rectangles(
    q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor, scaling: float, sequences: PackedSequences
) -> Tensor:
    out_TND = torch.zeros_like(q_TND)
    for tokens, cells in sequences.rectangles:
        padded = (x.index_select(0, tokens.flatten()).unflatten(0, tokens.shape) for x in (q_TND, k_TMD, v_TMD))
        q, k, v = (x.transpose(1, 2) for x in padded)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        out_nND = out.transpose(1, 2).flatten(0, 1).index_select(0, cells)
        out_TND = out_TND.index_copy(0, tokens.flatten()[cells], out_nND)
    return out_TND


@functools.cache
def kernels() -> tuple[Callable, Callable]:
    """FlashAttention 4's forward and backward pass, imported at the first use, since that imports a compiler.

    SGLang's CUDA packages bring it (flash_attn/cute of https://github.com/Dao-AILab/flash-attention, which on Hopper
    does what FlashAttention-3 does, arXiv:2407.08608). Torch 2.11 to 2.13 can use it instead of their own kernels, but
    then everywhere in the process, and they expect fewer results than it returns. So it is an operator of its own here.
    """
    module = importlib.import_module("flash_attn.cute.interface")
    return module._flash_attn_fwd, module._flash_attn_bwd


def _arguments(cu_seqlens: Tensor, max_seqlen: int, scaling: float) -> dict[str, Any]:
    """What both passes are told beside tensors [T, heads, D]."""
    borders = {f"cu_seqlens_{x}": cu_seqlens for x in "qk"} | {f"max_seqlen_{x}": max_seqlen for x in "qk"}
    return {**borders, "softmax_scale": scaling, "causal": True}


@torch.library.custom_op("grpo::flash4", mutates_args=())
def flash4(
    q_TND: Tensor, k_TMD: Tensor, v_TMD: Tensor, cu_seqlens: Tensor, max_seqlen: int, scaling: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within each sequence: its output [T, N, D] and the log-sum-exp of its scores [N, T]."""
    forward, _ = kernels()
    heads = (x.contiguous() for x in (q_TND, k_TMD, v_TMD))
    out_TND, lse_NT, *_ = forward(*heads, **_arguments(cu_seqlens, max_seqlen, scaling), return_lse=True)
    return out_TND, lse_NT


@flash4.register_fake
def _(q_TND, k_TMD, v_TMD, cu_seqlens, max_seqlen, scaling):
    return q_TND.new_empty(q_TND.shape), q_TND.new_empty(q_TND.shape[1], q_TND.shape[0], dtype=torch.float32)


@torch.library.custom_op("grpo::flash4_backward", mutates_args=())
def flash4_backward(grad_TND: Tensor, saved: list[Tensor], max_seqlen: int, scaling: float) -> list[Tensor]:
    """Gradients to queries, keys and values, from what _save kept."""
    _, backward = kernels()
    *heads, cu_seqlens, out_TND, lse_NT = saved
    tensors = *(x.contiguous() for x in heads), out_TND, grad_TND.contiguous(), lse_NT
    return list(backward(*tensors, **_arguments(cu_seqlens, max_seqlen, scaling))[:3])


@flash4_backward.register_fake
def _(grad_TND, saved, max_seqlen, scaling):
    return [x.new_empty(x.shape) for x in saved[:3]]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.max_seqlen, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad_TND: Tensor, _):
    return *flash4_backward(grad_TND, list(ctx.saved_tensors), ctx.max_seqlen, ctx.scaling), None, None, None


flash4.register_autograd(_backward, setup_context=_save)
