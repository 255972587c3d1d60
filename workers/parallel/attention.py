"""Attention over packed sequences: [1, T] tokens of many sequences side by side, none seeing another.

Registered with transformers under the name "packed", so that its models run unpadded. On CUDA in half precision
it is torch's own varlen flash attention; elsewhere (CPU, or float32) the heads are padded to rectangles for torch's
SDPA inside the attention call alone, where right-padded causal rows need no mask.
"""

import functools
import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

# torch 2.11 takes fewer KV heads than query heads as they are; later versions want to be told.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Rectangle:
    """Sequences of similar length, padded to the longest of them."""

    rows: int
    longest: int
    tokens: torch.Tensor  # [n] int64, where their tokens stand in the packed row
    cells: torch.Tensor  # [n] int64, where each of them goes in the [rows x longest] cells


@dataclass(frozen=True)
class Packing:
    """Where the sequences of one packed row [T] begin and end, on the device of the tokens."""

    lengths: list[int]
    starts: torch.Tensor  # [sequences + 1] int32, cumulated lengths
    positions: torch.Tensor  # [T] int64, counted anew in each sequence

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Packing":
        lengths_N = torch.tensor(lengths)
        starts = F.pad(lengths_N.cumsum(0), (1, 0))
        positions = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(lengths_N)
        return cls(lengths, starts.to(device, torch.int32), positions.to(device))

    @functools.cached_property
    def rectangles(self) -> list[Rectangle]:
        """The sequences from long to short, a new rectangle where one has less than 60 % of the longest's length."""
        starts = self.starts.tolist()
        groups: list[list[int]] = []
        for row in sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row]):
            if not groups or self.lengths[row] < 0.6 * self.lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(row)
        rectangles = []
        for group in groups:
            longest = self.lengths[group[0]]
            tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in group])
            cells = torch.cat([torch.arange(self.lengths[row]) + i * longest for i, row in enumerate(group)])
            device = self.starts.device
            rectangles.append(Rectangle(len(group), longest, tokens.to(device), cells.to(device)))
        return rectangles


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    packing: Packing,
    **_,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence: [1, heads, T, d] in, ([1, T, heads, d], None) out."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        q_TND, k_TMD, v_TMD = (x[0].transpose(0, 1) for x in (query, key, value))
        out_TND = varlen_attn(
            q_TND,
            k_TMD,
            v_TMD,
            packing.starts,
            packing.starts,
            packing.longest,
            packing.longest,
            scale=scaling,
            window_size=(-1, 0),
            **_GROUPED,
        )
        return out_TND[None], None
    out_TND = torch.zeros_like(query[0].transpose(0, 1))
    for rectangle in packing.rectangles:

        def pad(x: torch.Tensor, to: Rectangle = rectangle) -> torch.Tensor:
            heads_nHD = x[0].transpose(0, 1).index_select(0, to.tokens)
            cells = heads_nHD.new_zeros(to.rows * to.longest, *heads_nHD.shape[1:]).index_copy(0, to.cells, heads_nHD)
            return cells.view(to.rows, to.longest, *heads_nHD.shape[1:]).transpose(1, 2)

        q, k, v = pad(query), pad(key), pad(value)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        cells_nND = out.transpose(1, 2).flatten(0, 1).index_select(0, rectangle.cells)
        out_TND = out_TND.index_copy(0, rectangle.tokens, cells_nND)
    return out_TND[None], None


AttentionInterface.register("packed", packed_attention)
