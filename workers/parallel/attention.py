"""Attention over packed sequences: [1, T] tokens of many sequences side by side, none seeing another.

Registered with transformers under the name "packed", so that its models run unpadded. On CUDA in half precision
it is torch's own varlen flash attention; elsewhere (CPU, or float32) the heads are padded to a rectangle for
torch's SDPA inside the attention call alone, where right-padded causal rows need no mask.
"""

import inspect
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

# torch 2.11 takes fewer KV heads than query heads as they are; later versions want to be told.
_GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Packing:
    """Where the sequences of one packed row [T] begin and end, on the device of the tokens."""

    lengths: list[int]
    starts: torch.Tensor  # [sequences + 1] int32, cumulated lengths
    positions: torch.Tensor  # [T] int64, counted anew in each sequence
    cells: torch.Tensor  # [T] int64, where each token stands in the padded [sequences x longest] rectangle

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Packing":
        lengths_N = torch.tensor(lengths)
        starts = F.pad(lengths_N.cumsum(0), (1, 0))
        row_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_N)
        positions = torch.arange(int(starts[-1])) - starts[row_T]
        cells = row_T * max(lengths) + positions
        return cls(lengths, starts.to(device, torch.int32), positions.to(device), cells.to(device))


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
    rows, longest = len(packing.lengths), packing.longest

    def pad(x: torch.Tensor) -> torch.Tensor:
        heads_TND = x[0].transpose(0, 1)
        padded = heads_TND.new_zeros(rows * longest, *heads_TND.shape[1:])
        padded = padded.index_copy(0, packing.cells, heads_TND)
        return padded.view(rows, longest, *heads_TND.shape[1:]).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        pad(query),
        pad(key),
        pad(value),
        is_causal=True,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    out_TND = out.transpose(1, 2).flatten(0, 1).index_select(0, packing.cells)
    return out_TND[None], None


AttentionInterface.register("packed", packed_attention)
