"""FlashAttention 4 for packed sequences, where it is installed: on Hopper it takes about half of what torch's own does.

SGLang's CUDA packages bring it. Torch 2.11 to 2.13 can put it in the place of their own kernels, but for everything in
the process, and they expect fewer results than it returns; so it is an operator of its own here.

Source: https://github.com/Dao-AILab/flash-attention (flash_attn/cute), whose way on Hopper is that of FlashAttention-3,
arXiv:2407.08608.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def why_not(device: torch.device) -> str:
    """What keeps attention on `device` from FlashAttention 4, as the end of a sentence; empty where nothing does."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "the device is not a Hopper GPU"
    try:
        kernels()
    # Beside a package that is not there, one that was made for other versions of what it builds on.
    except (ImportError, OSError, AttributeError, TypeError, RuntimeError) as error:
        return f"flash_attn.cute cannot be imported ({error!r})"
    return ""


@functools.cache
def kernels() -> tuple[Callable, Callable]:
    """FlashAttention's forward and backward pass, imported at the first use, since that imports a compiler."""
    module = importlib.import_module("flash_attn.cute.interface")
    return module._flash_attn_fwd, module._flash_attn_bwd


def _packed(starts: torch.Tensor, longest: int, scaling: float) -> dict[str, Any]:
    """What both passes are told of the sequences, under their names."""
    borders = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return {**borders, "softmax_scale": scaling, "causal": True}


@torch.library.custom_op("grpo::flash4", mutates_args=())
def flash4(
    q_TND: torch.Tensor, k_TMD: torch.Tensor, v_TMD: torch.Tensor, starts: torch.Tensor, longest: int, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention within each sequence: its output [T, N, D] and the logarithms of its denominators [N, T]."""
    q_TND, k_TMD, v_TMD = q_TND.contiguous(), k_TMD.contiguous(), v_TMD.contiguous()
    forward, _ = kernels()
    out_TND, lse_NT = forward(q_TND, k_TMD, v_TMD, **_packed(starts, longest, scaling), return_lse=True)[:2]
    return out_TND, lse_NT


@flash4.register_fake
def _(q_TND, k_TMD, v_TMD, starts, longest, scaling):
    return q_TND.new_empty(q_TND.shape), q_TND.new_empty(q_TND.shape[1], q_TND.shape[0], dtype=torch.float32)


@torch.library.custom_op("grpo::flash4_backward", mutates_args=())
def flash4_backward(
    grad_TND: torch.Tensor,
    q_TND: torch.Tensor,
    k_TMD: torch.Tensor,
    v_TMD: torch.Tensor,
    out_TND: torch.Tensor,
    lse_NT: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients to queries, keys and values."""
    q_TND, k_TMD, v_TMD, grad_TND = q_TND.contiguous(), k_TMD.contiguous(), v_TMD.contiguous(), grad_TND.contiguous()
    _, backward = kernels()
    packed = _packed(starts, longest, scaling)
    grad_q, grad_k, grad_v = backward(q_TND, k_TMD, v_TMD, out_TND, grad_TND, lse_NT, **packed)[:3]
    return grad_q, grad_k, grad_v


@flash4_backward.register_fake
def _(grad_TND, q_TND, k_TMD, v_TMD, out_TND, lse_NT, starts, longest, scaling):
    return tuple(x.new_empty(x.shape) for x in (q_TND, k_TMD, v_TMD))


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.longest, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad_TND: torch.Tensor, _):
    q_TND, k_TMD, v_TMD, starts, out_TND, lse_NT = ctx.saved_tensors
    grads = flash4_backward(grad_TND, q_TND, k_TMD, v_TMD, out_TND, lse_NT, starts, ctx.longest, ctx.scaling)
    return *grads, None, None, None


flash4.register_autograd(_backward, setup_context=_save)
