"""How much GPU memory each phase of a step took on this process, as torch's allocator counts it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MARGIN = 0.05
"""The share of a GPU's memory that is left unused, for what no prediction counts and for steps that need more."""

PHASES = ("sync", "rollout", "ref", "old_logprobs", "update")
"""The phases of a step that are predicted (workers/plan.py) and measured, by the names of their times."""


class Peaks:
    """The fullest moment of each phase on this process's CUDA device; nothing where `cuda` is False.

    Torch counts one peak, which is reset here at each border of a phase: nobody else may reset it.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._open: list[str] = []
        self._peaks: dict[str, int] = {}
        self._reserved = 0

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
