"""Owns the processes: joining them, and the (replicate, shard, tensor) mesh that every layout is cut from."""

import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo.config import ConfigError


def pick_device(device: str) -> torch.device:
    """The device of this process for `device` in auto, cpu, cuda; raises ConfigError where it does not exist."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise ConfigError(f"device={device!r} is not a choice: use auto, cpu or cuda.")
    if not torch.cuda.is_available():
        raise ConfigError(
            "device=cuda was asked for, but torch sees no CUDA device: use device=cpu, or install a "
            "CUDA build of torch."
        )
    count, local_world = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if local_world > count:
        raise ConfigError(
            f"{local_world} processes were started on this machine, which has {count} CUDA device(s): "
            f"start at most {count} with --nproc-per-node, or use device=cpu."
        )
    return torch.device("cuda", local_rank)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, in its turn: copied from memory that is not pinned, the host waits for that turn."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def join(device: torch.device, timeout_seconds: float) -> None:
    """Join the process group: that of torchrun where its variables are set, else one of this process alone.

    CPU tensors travel over gloo and CUDA tensors over NCCL. Every collective ends with an error after
    `timeout_seconds`, so that a dead peer is never waited for without an end.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def leave() -> None:
    """Leave the process group, before the process ends."""
    dist.destroy_process_group()
    # A gloo thread needs Python's lock to drop its last tensor. Where it still waits for it when the interpreter
    # ends, it aborts the process instead: https://github.com/pytorch/pytorch/issues/190489
    time.sleep(0.1)


@dataclass(frozen=True)
class Layout:
    """How the processes are cut: `replicas` copies of `shards` shards of `slices` tensor-parallel slices of a model.

    A batch is split into `parts` = replicas x shards; this process works on `part`, and of the peers that work
    on the same one it is the one that `leads` where it answers for them.
    """

    device: torch.device
    mesh: DeviceMesh  # (replicate, shard, tensor)
    replicas: int
    shards: int
    slices: int
    part: int
    leads: bool
    tensor: DeviceMesh
    data: DeviceMesh  # what FSDP shards, and where there are replicas replicates, over
    data_group: dist.ProcessGroup  # one process of each part: they see other rows, but the same slice of weights
    plane: dist.ProcessGroup  # the shards x slices processes that hold one replica of the model together

    @property
    def parts(self) -> int:
        return self.replicas * self.shards


def count_shards(world: int, replicate: int, tensor: int) -> int:
    """How many shards `world` processes make; raises ConfigError where replicate x tensor does not divide them."""
    if world % (replicate * tensor):
        raise ConfigError(
            f"{world} process(es) cannot be cut into actor.replicate={replicate} x "
            f"actor.tensor_parallel={tensor}: start a multiple of {replicate * tensor} processes."
        )
    return world // (replicate * tensor)


def make_layout(device: torch.device, replicate: int, tensor: int) -> Layout:
    """Lay all processes out as (replicate, shard, tensor), tensor-parallel peers side by side.

    Raises ConfigError where replicate x tensor does not divide their number.
    """
    world = dist.get_world_size()
    shards = count_shards(world, replicate, tensor)
    mesh = init_device_mesh(device.type, (replicate, shards, tensor), mesh_dim_names=("replicate", "shard", "tensor"))
    part, peer = divmod(dist.get_rank(), tensor)
    groups = [dist.new_group(list(range(first, world, tensor))) for first in range(tensor)]
    size = shards * tensor
    planes = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    data = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
    return Layout(
        device,
        mesh,
        replicate,
        shards,
        tensor,
        part,
        leads=peer == 0,
        tensor=mesh["tensor"],
        data=data,
        data_group=groups[peer],
        plane=planes[dist.get_rank() // size],
    )
