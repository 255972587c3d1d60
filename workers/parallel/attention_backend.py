"""Which kernels compute attention on CUDA: torch's own, or FlashAttention 4 where a trial shows that it works."""

import functools
from collections.abc import Callable

import torch
import transformers
from torch import Tensor

from grpo.config import ConfigError, choose
from workers.config import ModelConfig
from workers.models import family_of
from workers.models.hub import compute_dtype
from workers.parallel.attention import PackedSequences, flash4, kernels, packed_attention

ATTENTIONS = ("auto", "torch", "flash4")


def why_not_flash4(config: ModelConfig, hf_config: transformers.PretrainedConfig, device: torch.device) -> str:
    """Why attention does not use FlashAttention 4, empty where it does; ConfigError where it must and cannot."""
    choose(config.attention, ATTENTIONS, "model.attention")
    if config.attention == "torch":
        return "model.attention=torch"
    dtype, family = compute_dtype(config, device), family_of(hf_config)
    reason = (
        why_not(device)
        or ("the compute type is float32" if dtype == torch.float32 else "")
        or ("" if family.head_dim in (64, 128) else f"the model's heads are {family.head_dim} wide, not 64 or 128")
        or flash4_failure(device, dtype, family.heads, family.kv_heads, family.head_dim)
    )
    if reason and config.attention == "flash4":
        raise ConfigError(f"model.attention=flash4 cannot be: {reason}. Use auto or torch.")
    return reason


@functools.cache
def why_not(device: torch.device) -> str:
    """Why FlashAttention 4 cannot run on `device`, as the end of a sentence; empty where it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "the device is not a Hopper GPU"
    try:
        kernels()
    # A package that is missing, or that was made for other versions of what it builds on.
    except (ImportError, OSError, AttributeError, TypeError, RuntimeError) as error:
        return f"flash_attn.cute cannot be imported ({error!r})"
    return ""


@functools.cache
def flash4_failure(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> str:
    """What is wrong with FlashAttention 4 for such heads, as the end of a sentence; empty where nothing is.

    Its kernels are compiled when they first run, by packages of many versions. A short run of them, forward and
    backward beside torch in float32, finds before a model is loaded what would end the first update or spoil all.
    """
    random = torch.Generator().manual_seed(0)
    sequences = PackedSequences.of([300, 1, 77, 130], device)
    shapes = [(sum(sequences.lengths), count, head_dim) for count in (heads, kv_heads, kv_heads, heads)]
    *inputs, grad = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)

    def run(dtype: torch.dtype, attend: Callable) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = attend(*leaves)
        return [x.detach().float() for x in (out, *torch.autograd.grad(out, leaves, grad.to(dtype)))]

    borders, scaling = (sequences.cu_seqlens, sequences.max_seqlen), head_dim**-0.5
    with torch.accelerator.device_index(device.index):
        try:
            found = run(dtype, lambda *qkv: flash4(*qkv, *borders, scaling)[0])
        except Exception as error:  # noqa: BLE001 - of any of the packages that take part
            first = (str(error).strip() or "without words").splitlines()[0]
            return f"FlashAttention 4's kernels fail here ({type(error).__name__}: {first[:200]})"
        expected = run(torch.float32, lambda *qkv: packed_attention(*qkv, scaling, sequences))
        # Rounding to bfloat16 alone makes about half a percent. Not max(): it may pass over a NaN.
        distance = torch.stack([(x - y).norm() / y.norm() for x, y in zip(found, expected, strict=True)]).max().item()
    return "" if distance < 0.02 else f"FlashAttention 4's results here are {distance:.1%} away from torch's"
