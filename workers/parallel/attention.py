"""Attention over packed sequences: T tokens of many sequences side by side, none seeing another.

`packed_class` gives Hugging Face's self-attention another forward method, so that its models run unpadded. On CUDA in
half precision it is torch's own varlen flash attention, or FlashAttention 4 (flash4.py); elsewhere (CPU, or float32)
the heads are padded to rectangles for torch's SDPA inside the attention call alone, where right-padded causal rows need
no mask.
"""

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

from workers.parallel.flash4 import flash4
from workers.parallel.mesh import to_device

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
    span: torch.Tensor  # [longest], never read: a layer is compiled for tensors of any size, but anew for each number

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.span.shape[0]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> "Packing":
        ends = torch.tensor(list(itertools.accumulate(lengths, initial=0)))
        starts = to_device(ends, device)
        total = sum(lengths)  # told to repeat_interleave, which would make the host wait for the device to count
        before = starts[:-1].repeat_interleave(starts.diff(), output_size=total)
        positions = torch.arange(total, device=device) - before
        return cls(lengths, starts.int(), positions, starts.new_empty(max(lengths)))

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


@functools.cache
def packed_class(attention: type[torch.nn.Module], flash4: bool) -> type[torch.nn.Module]:
    """A class of Hugging Face's self-attention of Qwen2, Qwen3 or Llama that takes packed hidden states."""
    return type(f"Packed{attention.__name__}", (attention,), {"forward": _packed_self_attention, "flash4": flash4})


def _packed_self_attention(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    packing: Packing,
    **_,
) -> tuple[torch.Tensor, None]:
    """The forward method, for hidden states [1, T, H] and the angles of rotary_angles.

    Heads stay behind the tokens throughout, [1, T, heads, d]: with tokens inside, index arithmetic for any T would
    cost a compiled kernel ten times what it moves.
    """
    heads = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, key, value = (
        project(hidden_states).view(heads) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    cos, sin = position_embeddings
    query, key = (x * cos + _swap_halves(x) * sin for x in (query, key))
    out_TND = packed_attention(query[0], key[0], value[0], module.scaling, packing, module.flash4)
    return module.o_proj(out_TND.reshape(*hidden_states.shape[:-1], -1)), None


def rotary_angles(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hugging Face's cos and sin [1, T, d] as packed self-attention wants them, [1, T, 1, d].

    The minus of the rotation's first half stands in sin: negating the heads themselves, layer by layer, costs more.
    """
    first, second = sin.chunk(2, dim=-1)
    return cos.unsqueeze(2), torch.cat((-first, second), dim=-1).unsqueeze(2)


def _swap_halves(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)


def packed_attention(
    q_TND: torch.Tensor,
    k_TMD: torch.Tensor,
    v_TMD: torch.Tensor,
    scaling: float,
    packing: Packing,
    by_flash4: bool = False,
) -> torch.Tensor:
    """Causal attention within each sequence, [T, heads, d]; keys and values may have fewer heads."""
    if q_TND.is_cuda and q_TND.dtype in (torch.bfloat16, torch.float16):
        if by_flash4:
            return flash4(q_TND, k_TMD, v_TMD, packing.starts, packing.longest, scaling)[0]
        return varlen_attn(
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
    return _attention_in_rectangles(q_TND, k_TMD, v_TMD, scaling, packing)


@functools.cache
def flash4_failure(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> str:
    """What is wrong with FlashAttention 4 for such heads, as the end of a sentence; empty where nothing is.

    Its kernels are compiled where they first run, by packages of many versions. A small run of them, forward and
    backward beside torch in float32, says before a model is loaded what would end the first update or spoil all.
    """
    random = torch.Generator().manual_seed(0)
    packing = Packing.of([300, 1, 77, 130], device)
    shapes = [(sum(packing.lengths), count, width) for count in (heads, kv_heads, kv_heads, heads)]
    *inputs, slope = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)

    def run(kind: torch.dtype, attend: Callable) -> list[torch.Tensor]:
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        out = attend(*leaves)
        return [x.detach().float() for x in (out, *torch.autograd.grad(out, leaves, slope.to(kind)))]

    with torch.accelerator.device_index(device.index):
        try:
            found = run(dtype, lambda *qkv: flash4(*qkv, packing.starts, packing.longest, width**-0.5)[0])
        except Exception as error:  # noqa: BLE001 - of any of the packages that take part
            first = (str(error).strip() or "without words").splitlines()[0]
            return f"FlashAttention 4's kernels fail here ({type(error).__name__}: {first[:200]})"
        expected = run(torch.float32, lambda *qkv: packed_attention(*qkv, width**-0.5, packing))
        # Rounding to bfloat16 alone makes about half a percent. Not max(): it may pass over a NaN.
        distance = torch.stack([(x - y).norm() / y.norm() for x, y in zip(found, expected, strict=True)]).max().item()
    return "" if distance < 0.02 else f"FlashAttention 4's results here are {distance:.1%} away from torch's"


@torch.compiler.disable
def _attention_in_rectangles(
    q_TND: torch.Tensor, k_TMD: torch.Tensor, v_TMD: torch.Tensor, scaling: float, packing: Packing
) -> torch.Tensor:
    out_TND = torch.zeros_like(q_TND)
    for rectangle in packing.rectangles:

        def pad(heads_TND: torch.Tensor, to: Rectangle = rectangle) -> torch.Tensor:
            heads_nND = heads_TND.index_select(0, to.tokens)
            cells = heads_nND.new_zeros(to.rows * to.longest, *heads_nND.shape[1:]).index_copy(0, to.cells, heads_nND)
            return cells.view(to.rows, to.longest, *heads_nND.shape[1:]).transpose(1, 2)

        q, k, v = pad(q_TND), pad(k_TMD), pad(v_TMD)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        cells_nND = out.transpose(1, 2).flatten(0, 1).index_select(0, rectangle.cells)
        out_TND = out_TND.index_copy(0, rectangle.tokens, cells_nND)
    return out_TND
