"""Low-rank adapters (LoRA, arXiv:2106.09685): W + scale B A in place of a frozen W, of which A and B are trained.

peft puts them into the model. Here is what is ours: their first values, the same on every layout, and whole weights
from the shards of W, A and B.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from workers.config import LoraConfig


@dataclass(frozen=True)
class Adapter:
    """What is added to a weight [rows, columns]: scale * B @ A, DTensors in float32 whose rows FSDP shards."""

    A: nn.Parameter  # [rank, columns]
    B: nn.Parameter  # [rows, rank]
    scale: float

    def merged(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """This rank's rows `local` with what is added, rounded once to `dtype`; every rank must take part."""
        A = self.A.detach().full_tensor()
        return torch.addmm(local.float(), self.B.detach().to_local(), A, alpha=self.scale).to(dtype)


def add_adapters(model: nn.Module, config: LoraConfig) -> None:
    """Put adapters, in float32 and without values, into a `model` on the meta device, and freeze all else."""
    import peft

    settings = peft.LoraConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets))
    peft.inject_adapter_in_model(settings, model)


def adapters_of(model: nn.Module) -> dict[str, Adapter]:
    """The adapters in `model` by the names of the weights that they change, as they were without adapters."""
    return {
        f"{name}.weight": Adapter(module.lora_A.default.weight, module.lora_B.default.weight, module.scaling["default"])
        for name, module in _layers(model)
    }


def original_name(name: str) -> str | None:
    """What a parameter was called before adapters came into its model; None for a parameter of an adapter."""
    return None if ".lora_" in name else name.replace(".base_layer.", ".")


def adapter_name(weight: str, which: str) -> str:
    """What the A or B of the weight that was called `weight` is called."""
    return f"{weight.removesuffix('weight')}lora_{which}.default.weight"


@torch.no_grad()
def reset_adapters(model: nn.Module) -> None:
    """Set A as peft does and B to 0, so that nothing is added yet; the same on every layout and in every run."""
    generator = torch.Generator().manual_seed(0)
    for adapter in adapters_of(model).values():
        # Drawn whole on the CPU and then cut: what a rank drew for itself would depend on the layout.
        A = nn.init.kaiming_uniform_(torch.empty(adapter.A.shape), a=math.sqrt(5), generator=generator)
        mesh, placements = adapter.A.device_mesh, adapter.A.placements
        adapter.A.copy_(distribute_tensor(A.to(adapter.A.device), mesh, placements, src_data_rank=None))
        adapter.B.zero_()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, `model` computes as if it had no adapters. It must not be trained there."""
    layers = [module for _, module in _layers(model)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
            # peft freezes them, and FSDP would keep to that if it met them so at its first forward pass.
            for adapter in (layer.lora_A, layer.lora_B):
                adapter.requires_grad_(True)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))
