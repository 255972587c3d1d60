"""Owns the processes: their devices, joining them, and how they are laid out for training and for inference."""

import contextlib
import fcntl
import os
import queue
import socket
import struct
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from grpo.config import ConfigError

SIOCGIFADDR = 0x8915  # asks for the address of an interface

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12}
"""Dense bfloat16 operations a second from NVIDIA's data sheets, by a piece of the device's name."""


def peak_of(name: str) -> float | None:
    """The operations a second of a device called `name`, where they are known."""
    return next((peak for piece, peak in PEAK_FLOPS.items() if piece in name), None)


def pick_device(device: str) -> torch.device:
    """The device of this process for `device` in auto, cpu, cuda; raises ConfigError where it does not exist."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise ConfigError(f"device={device!r} is not a choice: use auto, cpu or cuda.")
    if not torch.cuda.is_available():
        way_out = "use device=cpu, or install a CUDA build of torch"
        if hidden := os.environ.get("CUDA_VISIBLE_DEVICES"):
            way_out = f"use device=cpu, or correct CUDA_VISIBLE_DEVICES={hidden}, which may hide them"
        raise ConfigError(f"device=cuda was asked for, but torch sees no CUDA device: {way_out}.")
    count, local_world = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if local_world > count:
        fault = f"{local_world} processes were started on this machine, which has {count} CUDA device(s)"
        raise ConfigError(f"{fault}: start at most {count} with --nproc-per-node, or use device=cpu.")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def is_controller() -> bool:
    """Whether this process is rank 0, which holds the data and the record of the run; good before `join` too."""
    return int(os.environ.get("RANK", 0)) == 0


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, in its turn: copied from memory that is not pinned, the host waits for that turn."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


MANY = 2_000_000
"""Operations of a token's forward pass from which on more threads than one gain on a CPU (docs/performance.md)."""


def take_threads(operations: int) -> str:
    """Let torch use this process's share of the cores for a model of so many `operations` a token, or one thread.

    OMP_NUM_THREADS decides instead where it is set, as torchrun does for several processes; returns what to say then,
    where that leaves cores idle.
    """
    each = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    wanted = max(1, each) if operations >= MANY else 1
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(wanted)
    if "TORCHELASTIC_RUN_ID" not in os.environ or torch.get_num_threads() >= wanted:
        return ""
    return f"Each process has {torch.get_num_threads()} thread(s): OMP_NUM_THREADS={wanted} would use all cores."


def memory_for_each() -> int:
    """Bytes for each process of this machine: of the host's memory what nothing uses yet, and no control group forbids.

    Of control groups version 2 counts.
    """
    kib = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())["MemAvailable"]
    free, group = int(kib.split()[0]) * 1024, Path("/sys/fs/cgroup")
    if (group / "memory.max").is_file() and (limit := (group / "memory.max").read_text().strip()) != "max":
        # Pages of files count as used, but are given up where memory is wanted.
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        free = min(free, int(limit) - int((group / "memory.current").read_text()) + int(kept))
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def read_world() -> int:
    """How many processes there are; raises ConfigError, on each of them, where torchrun's variables do not fit."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    there = {name: os.environ[name] for name in (*needed, "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in os.environ}
    numbers = {name: int(text) for name, text in there.items() if text.isdecimal()}
    fits = all(name in numbers or name == "MASTER_ADDR" for name in there)
    if fits and there.keys() & {"RANK", "WORLD_SIZE"}:
        fits = there.keys() >= set(needed) and numbers["RANK"] < numbers["WORLD_SIZE"]
        fits = fits and 0 < numbers["MASTER_PORT"] < 65536
    if not fits:
        refuse_place(f"The environment has {', '.join(f'{name}={text}' for name, text in there.items())}")
    return numbers.get("WORLD_SIZE", 1)


def refuse_place(fault: str) -> None:
    """Raise ConfigError, which this process says itself whichever rank it is: there may be no rank 0 to say it."""
    os.environ.pop("RANK", None)
    way_out = "start with torchrun, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or unset them"
    raise ConfigError(f"{fault}, with which no processes can join: {way_out}.")


def join(device: torch.device, timeout_seconds: float) -> None:
    """Join the process group: that of torchrun where its variables are set, else one of this process alone.

    CPU tensors travel over gloo and CUDA tensors over NCCL. Every collective ends with an error after
    `timeout_seconds`, so that a dead peer is never waited for without an end.
    """
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    timeout, place = timedelta(seconds=timeout_seconds), {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if on_one_machine():
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
    elif interface := interface_to(os.environ["MASTER_ADDR"]):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # NCCL finds its own
    if "RANK" in os.environ:
        try:
            store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
        except dist.DistError as error:
            place = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={os.environ['MASTER_PORT']}"
            refuse_place(f"Rank {os.environ['RANK']} waited at {place} ({str(error).splitlines()[0].rstrip('.')})")
        place = {"store": own_part(store, rank, world, timeout_seconds), "rank": rank, "world_size": world}
    dist.init_process_group(backend, timeout=timeout, **place)


def on_one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")  # without torchrun there is neither


def interface_to(host: str) -> str | None:
    """The network interface by which this machine reaches `host`, where that is by IPv4.

    Gloo would listen where the machine's own name leads, which is often the loopback address.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # which sends nothing
        address = socket.inet_aton(probe.getsockname()[0])
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                if fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))[20:24] == address:
                    return name
    return None


def own_part(store: dist.Store, rank: int, world: int, timeout_seconds: float) -> dist.Store:
    """A part of `store` that these `world` processes alone know.

    torchrun keeps one store for all its attempts, with the addresses of ranks that died, and the nodes do not count
    attempts alike. So each process asks under a name that nobody had before, and rank 0 answers whoever asks.
    """
    mine, deadline = uuid.uuid4().hex, time.monotonic() + timeout_seconds
    if rank:
        store.set(f"asks/{rank}", mine)
        try:
            part = store.get(f"part/{mine}").decode()
        except dist.DistStoreError as error:
            raise RuntimeError(f"Rank {rank} waited for rank 0 to join: {error}") from error
        store.add(part, 1)
        return dist.PrefixStore(part, store)
    while store.add(mine, 0) < world - 1:
        for other in range(1, world):
            if store.check([f"asks/{other}"]):
                store.set(f"part/{store.get(f'asks/{other}').decode()}", mine)
        if time.monotonic() > deadline:
            raise RuntimeError(f"Rank 0 waited for {world} ranks to join, and {store.add(mine, 0) + 1} did.")
        time.sleep(0.02)
    return dist.PrefixStore(mine, store)


def leave() -> None:
    """Leave the process group, before the process ends."""
    dist.destroy_process_group()
    # A gloo thread needs Python's lock to drop its last tensor. Where it still waits for it when the interpreter
    # ends, it aborts the process instead: https://github.com/pytorch/pytorch/issues/190489
    time.sleep(0.1)


def host_store() -> dist.Store:
    """A store that the controller hosts, which lives on where torchrun, with its own, is killed; every rank takes part.

    On one machine it listens at the loopback address alone.
    """
    if dist.get_world_size() == 1:
        return dist.HashStore()
    here, timeout, hosted = on_one_machine(), _get_default_store().timeout, None
    host = "127.0.0.1" if here else os.environ["MASTER_ADDR"]
    if is_controller():
        hosting = {"timeout": timeout, "wait_for_workers": False}
        hosted = store_at(host, 0, **hosting) if here else dist.TCPStore(host, 0, is_master=True, **hosting)
    port = [hosted and hosted.port]
    dist.broadcast_object_list(port)
    return hosted or dist.TCPStore(host, port[0], timeout=timeout)


def store_at(host: str, port: int, **options: Any) -> dist.TCPStore:
    """A store that listens at the address `host` alone, where torch's own would at all of the machine; port 0: any."""
    door = socket.create_server((host, port))
    return dist.TCPStore(host, door.getsockname()[1], is_master=True, master_listen_fd=door.detach(), **options)


class Counters(dist.Store):
    """Numbers that all processes share and add to, in a store that the controller hosts; every rank must make them.

    Torch waits for the store's answer without an end where a cable is cut; here a thread waits, for which nobody waits
    longer than the store's timeout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store, self.asked = host_store(), queue.SimpleQueue()
        threading.Thread(target=self._answer, name="counters", daemon=True).start()

    def add(self, key: str, amount: int) -> int:
        """The sum at `key` after `amount` was added."""
        self.asked.put((answer := Future(), key, amount))
        try:
            return answer.result(self.store.timeout.total_seconds())
        except TimeoutError:
            raise RuntimeError(f"Timed out waiting {self.store.timeout} for the counters of all ranks.") from None

    def _answer(self) -> None:
        while True:
            answer, *what = self.asked.get()
            try:
                answer.set_result(self.store.add(*what))
            except RuntimeError as error:
                answer.set_exception(error)


@dataclass(frozen=True)
class TrainingLayout:
    """How the processes hold the trained model: a mesh of dp_replicate x dp_shard x tp ranks.

    Whose rows: a batch is split into dp_size shares, and this process works on that of dp_rank, as its tensor-parallel
    peers do. Over whom sums go: what is summed over tokens, losses and gradients among it, is summed over `sum_group`,
    whose sum_size ranks see other tokens but hold the same part of each weight.
    """

    device: torch.device
    dp_replicate: int  # copies of the sharded model
    dp_shard: int
    dp_rank: int
    dp_size: int
    fsdp_mesh: DeviceMesh  # what FSDP shards, and where there are copies replicates, over
    tp_rank: int
    tp_size: int
    tp_mesh: DeviceMesh
    sum_group: dist.ProcessGroup
    sum_size: int
    replica_group: dist.ProcessGroup  # the dp_shard x tp ranks that hold one copy of the model together


@dataclass(frozen=True)
class InferenceLayout:
    """How dp_size engines share the processes: tp_size ranks of one machine each, led by tp_rank 0; ours is dp_rank."""

    device: torch.device
    dp_rank: int
    dp_size: int
    tp_rank: int
    tp_size: int
    tp_group: dist.ProcessGroup | None  # the ranks of this engine, where it has several


def count_shards(world: int, replicate: int, tensor: int) -> int:
    """How many shards `world` processes make; raises ConfigError where replicate x tensor does not divide them."""
    if world % (replicate * tensor):
        cut = f"{world} process(es) cannot be cut into actor.replicate={replicate} x actor.tensor_parallel={tensor}"
        raise ConfigError(f"{cut}: start a multiple of {replicate * tensor} processes.")
    return world // (replicate * tensor)


def make_training_layout(device: torch.device, replicate: int = 1, tensor: int = 1) -> TrainingLayout:
    """Lay all processes out for training, tensor-parallel peers side by side; raises ConfigError as count_shards."""
    world = dist.get_world_size()
    shards = count_shards(world, replicate, tensor)
    names = ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh(device.type, (replicate, shards, tensor), mesh_dim_names=names)
    dp_rank, tp_rank = divmod(dist.get_rank(), tensor)
    fsdp_mesh = mesh["dp_replicate", "dp_shard"] if replicate > 1 else mesh["dp_shard"]
    sum_group, _ = dist.new_subgroups_by_enumeration([list(range(first, world, tensor)) for first in range(tensor)])
    replica_group, _ = dist.new_subgroups(shards * tensor)
    dp, tp = (replicate, shards, dp_rank, replicate * shards, fsdp_mesh), (tp_rank, tensor, mesh["tp"])
    return TrainingLayout(device, *dp, *tp, sum_group, sum_group.size(), replica_group)


def make_inference_layout(device: torch.device, tensor: int = 1) -> InferenceLayout:
    """Lay all processes out for engines of `tensor` ranks each, which must divide their number."""
    dp_rank, tp_rank = divmod(dist.get_rank(), tensor)
    group = dist.new_subgroups(tensor)[0] if tensor > 1 else None
    return InferenceLayout(device, dp_rank, dist.get_world_size() // tensor, tp_rank, tensor, group)
