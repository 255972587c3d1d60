"""The memory of a device that engine and trainer share: its peaks, what the engine lets go of, who holds what."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from workers.actor import ActorWorker
from workers.engines.protocol import WEIGHTS
from workers.ref import RefWorker
from workers.rollout import RolloutWorker

MARGIN = 0.05
"""The share of a GPU's memory that is left unused, for what no prediction counts and for steps that need more."""

PHASES = ("sync", "rollout", "ref", "teacher", "old_logprobs", "update")
"""The phases of a step that are predicted (workers/plan.py) and measured, by the names of their times."""


class Peaks:
    """Nothing where `cuda` is False. Torch counts one peak, reset here at each border of a phase and nowhere else."""

    def __init__(self, cuda: bool) -> None:
        self._cuda, self._reserved = cuda, 0
        self._open: list[str] = []
        self._peaks: dict[str, int] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Watch the block as the phase `name`; phases may nest, and the same name keeps its largest."""
        self._read()
        self._open.append(name)
        try:
            yield
        finally:
            self._read()
            self._open.remove(name)

    def _read(self) -> None:
        if not self._cuda:
            return
        self._reserved = self.most_reserved()
        allocated = torch.cuda.max_memory_allocated()
        for name in self._open:
            self._peaks[name] = max(self._peaks.get(name, 0), allocated)
        torch.cuda.reset_peak_memory_stats()

    def most_reserved(self) -> int:
        """The most bytes that torch's allocator has held since the process began."""
        return max(self._reserved, torch.cuda.max_memory_reserved())

    def metrics(self) -> dict[str, float]:
        """Allocated GiB as "memory/NAME_peak_gib", of the PHASES that ended since the last call."""
        peaks, self._peaks = self._peaks, {}
        return {f"memory/{name}_peak_gib": size / 2**30 for name, size in peaks.items() if name in PHASES}


class SharedMemory:
    """Decides `release`, what the engine lets go of while the trainer works. weight_bytes: of the whole model."""

    def __init__(
        self, actor: ActorWorker, refs: Sequence[RefWorker], rollout: RolloutWorker, weight_bytes: int, peaks: Peaks
    ) -> None:
        self.actor, self.refs, self.engine, self.peaks = actor, refs, rollout.engine, peaks
        self.device, self.chosen = actor.layout.device, rollout.config.release
        self.release = "kv+weights" if self.chosen == "auto" else self.chosen
        # The engine begins asleep, with nothing kept: what that gave back is what it wants again.
        self.weight_bytes = weight_bytes // rollout.layout.tp_size
        self.kv_bytes = max(0, self.engine.freed - self.weight_bytes)
        self.first_version: int | None = None  # of the actor, when the engine first served

    def choose_release(self) -> None:
        """With rollout.release=auto: once a step was trained, keep what fits beside the fullest moment so far."""
        if self.first_version is None:
            self.first_version = self.actor.version
        if self.chosen != "auto" or self.device.type != "cuda" or self.first_version == self.actor.version:
            return
        free, total = torch.cuda.mem_get_info()
        gives = {"none": 0, "kv": self.kv_bytes, "kv+weights": self.kv_bytes + self.weight_bytes}
        awake = total - free - torch.cuda.memory_reserved() + gives[self.release]
        room = total * (1 - MARGIN) - awake - self.peaks.most_reserved()
        names = list(gives)
        fits = [i for i, name in enumerate(names) if room + gives[name] >= 0]
        # One choice for all: they take part in one another's updates.
        choice = torch.tensor(fits[0] if fits else len(names) - 1)
        dist.all_reduce(choice, op=dist.ReduceOp.MAX)
        self.release = names[int(choice)]

    def make_room(self, tag: str) -> None:
        """Raise MemoryError with the memory table where the engine could not take back its memory of kind `tag`."""
        if tag not in self.engine.asleep or self.device.type != "cuda":
            return
        needed = self.weight_bytes if tag == WEIGHTS else self.kv_bytes
        if torch.cuda.mem_get_info()[0] >= needed:
            return
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if free < needed:
            raise MemoryError(
                f"The engine needs {_gib(needed)} for its {tag} and {_gib(free)} are free: lower "
                "rollout.memory_fraction, or set actor.offload=[optimizer] or actor.offload=[optimizer,parameters]."
                f"\n{self.table()}"
            )

    def table(self) -> str:
        """What holds how much of this process's device, one line each."""
        states = [state for held in self.actor.optimizer.state.values() for state in held.values()]
        frozen = {ref.name: ref.policy.parameters() for ref in self.refs if ref.policy is not self.actor.policy}
        rows = {
            "actor: parameters (this rank's shards)": bytes_of(self.actor.parameters),
            "actor: gradients": bytes_of(p.grad for p in self.actor.parameters if p.grad is not None),
            "actor: optimizer": bytes_of(state for state in states if state.ndim),
        } | {f"{name}: parameters": bytes_of(parameters) for name, parameters in frozen.items()}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            rows["other tensors of the trainer"] = torch.cuda.memory_allocated() - sum(rows.values())
            rows["torch's cache"] = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            rows["the engine, contexts and other processes"] = total - free - torch.cuda.memory_reserved()
        else:
            page = os.sysconf("SC_PAGE_SIZE")
            free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
        rows |= {"free": free, "in total": total}
        asleep = ", ".join(sorted(self.engine.asleep)) or "nothing"
        lines = [f"  {name:<42} {_gib(size):>12}" for name, size in rows.items()]
        title = f"Memory of {self.device} (rank {dist.get_rank()}); the engine has let go of {asleep}:"
        return "\n".join([title, *lines])


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """What this process holds of them."""
    return sum(t.untyped_storage().nbytes() for t in (t.to_local() if isinstance(t, DTensor) else t for t in tensors))


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
