"""FlashAttention 4 as an operator for packed sequences: on Hopper it takes about half the time of torch's own kernels.

SGLang's CUDA packages bring it (flash_attn/cute of https://github.com/Dao-AILab/flash-attention, which on Hopper does
what FlashAttention-3 does, arXiv:2407.08608). Torch 2.11 to 2.13 can use it instead of their own kernels, but then
everywhere in the process, and they expect fewer results than it returns. So it is an operator of its own here.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
def kernels() -> tuple[Callable, Callable]:
    """FlashAttention's forward and backward pass, imported at the first use, since that imports a compiler."""
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
    q_TND, k_TMD, v_TMD = q_TND.contiguous(), k_TMD.contiguous(), v_TMD.contiguous()
    forward, _ = kernels()
    out_TND, lse_NT = forward(q_TND, k_TMD, v_TMD, **_arguments(cu_seqlens, max_seqlen, scaling), return_lse=True)[:2]
    return out_TND, lse_NT


@flash4.register_fake
def _(q_TND, k_TMD, v_TMD, cu_seqlens, max_seqlen, scaling):
    return q_TND.new_empty(q_TND.shape), q_TND.new_empty(q_TND.shape[1], q_TND.shape[0], dtype=torch.float32)


@torch.library.custom_op("grpo::flash4_backward", mutates_args=())
def flash4_backward(grad_TND: Tensor, saved: list[Tensor], max_seqlen: int, scaling: float) -> list[Tensor]:
    """Gradients to queries, keys and values, from what _save kept."""
    *heads, cu_seqlens, out_TND, lse_NT = saved
    heads = (x.contiguous() for x in heads)
    _, backward = kernels()
    arguments = _arguments(cu_seqlens, max_seqlen, scaling)
    return list(backward(*heads, out_TND, grad_TND.contiguous(), lse_NT, **arguments)[:3])


@flash4_backward.register_fake
def _(grad_TND, saved, max_seqlen, scaling):
    return [x.new_empty(x.shape) for x in saved[:3]]


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.max_seqlen, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad_TND: Tensor, _):
    return *flash4_backward(grad_TND, list(ctx.saved_tensors), ctx.max_seqlen, ctx.scaling), None, None, None


flash4.register_autograd(_backward, setup_context=_save)
