"""Attention over packed sequences: T tokens of many sequences side by side, none of which sees another.

`packed_class` gives Hugging Face's self-attention another forward method, so that its models run unpadded. On CUDA in
half precision that is torch's varlen flash attention, or FlashAttention 4 (flash4.py). Elsewhere (on a CPU, or in
float32) the heads are padded to rectangles inside the attention call alone, for torch's SDPA: right-padded causal rows
need no mask.
"""

import functools
import inspect
import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from workers.parallel.flash4 import flash4
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
        groups: list[list[int]] = []
        for row in sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row]):
            if not groups or self.lengths[row] < 0.6 * self.lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(row)
        rectangles = []
        for group in groups:
            columns = torch.arange(self.lengths[group[0]])
            tokens = torch.stack([(columns + borders[row]).clamp(max=borders[row + 1] - 1) for row in group])
            cells = torch.stack([columns < self.lengths[row] for row in group]).flatten().nonzero()[:, 0]
            rectangles.append((tokens.to(device), cells.to(device)))
        return rectangles


class PackedSelfAttention:
    """What a class of Hugging Face's self-attention is mixed with to take packed hidden states.

    Heads stay behind the tokens throughout, [1, T, heads, d]: with tokens behind the heads, index arithmetic for any T
    would cost a compiled kernel ten times the time of the data it moves.
    """

    flash4: bool
    """Whether CUDA runs FlashAttention 4."""

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
        query, key = (x * cos + _swap_halves(x) * sin for x in (query, key))
        out_TND = packed_attention(query[0], key[0], value[0], self.scaling, sequences, self.flash4)
        return self.o_proj(out_TND.reshape(*hidden_states.shape[:-1], -1)), None


@functools.cache
def packed_class(attention: type[torch.nn.Module], packed: type[PackedSelfAttention], flash4: bool) -> type:
    """The class `attention` of Hugging Face mixed with `packed`. Cached, since torch.compile guards on classes."""
    return type(f"Packed{attention.__name__}", (packed, attention), {"flash4": flash4})


def rotary_angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Hugging Face's cos and sin [1, T, d] as PackedSelfAttention takes them, [1, T, 1, d].

    The minus of the rotation's first half is put into sin: negating the heads, layer by layer, costs more.
    """
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(2), torch.cat((-first, second), dim=-1).unsqueeze(2)


def _swap_halves(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)


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
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        out_nND = out.transpose(1, 2).flatten(0, 1).index_select(0, cells)
        out_TND = out_TND.index_copy(0, tokens.flatten()[cells], out_nND)
    return out_TND
