"""What these tests share: the command line as processes of their own, which can be harmed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.trainer.conftest import countdown, rows_of, run_main, settings, start  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
}


class Process:
    """A command in a session of its own, as a terminal would start it; `said` is all that it printed."""

    def __init__(self, arguments: list[object], log: Path) -> None:
        self.log, self.file = log, log.open("w")
        streams = {"stdout": self.file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        self.popen = subprocess.Popen(
            list(map(str, arguments)), **streams, env=ENVIRONMENT, cwd=ROOT, start_new_session=True
        )

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = 60.0) -> int:
        """Its exit code, within so many seconds."""
        try:
            return self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {seconds} s:\n{self.said}") from None

    def until(self, what: Callable[[], object], seconds: float = 300.0) -> None:
        """Wait until `what` holds; fails where the process ends before."""
        deadline = time.monotonic() + seconds
        while not what():
            assert self.popen.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def interrupt(self) -> None:
        """Ctrl-C: the whole foreground group gets the signal."""
        os.killpg(self.popen.pid, signal.SIGINT)

    def family(self) -> list[int]:
        """Its descendants and all that is in their sessions, by what /proc says."""
        stats = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if fields[0] != "Z":
                stats[int(stat.parent.name)] = int(fields[1]), int(fields[3])  # parent, session
        found, sessions = {self.popen.pid}, {self.popen.pid}
        while (
            more := {pid for pid, (parent, session) in stats.items() if parent in found or session in sessions} - found
        ):
            found |= more
            sessions |= {stats[pid][1] for pid in more if stats[pid][1] in found}
        return sorted(found & stats.keys())


@pytest.fixture
def begin(settings, tmp_path) -> Iterator[Callable[..., Process]]:  # noqa: F811
    """begin("train" or "sft", name, *overrides, ranks=0) starts the command, under torchrun where there are ranks.

    options: torchrun's; within: a command that runs it.
    """
    begun: list[Process] = []

    def run(
        command: str,
        name: str,
        *overrides: str,
        ranks: int = 0,
        options: tuple[str, ...] = (),
        module: str = "trainer",
        within: tuple[str, ...] = (),
    ) -> Process:
        python = [*within, sys.executable, "-m"]
        if ranks:
            alone = ["--standalone"] * ("--nnodes=2" not in options)
            python += ["torch.distributed.run", *alone, f"--nproc-per-node={ranks}", *options, "-m"]
        place = [f"tracking.folder={tmp_path}", f"tracking.name={name}"]
        log = tmp_path / f"{name}-{len(begun)}.log"
        begun.append(Process([*python, module, command, *settings[command], *place, *overrides], log))
        return begun[-1]

    yield run
    for process in begun:
        for pid in process.family():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.popen.wait()
        process.file.close()


def steps_of(run: Path) -> int:
    """How many rows the record has."""
    path = run / "metrics.jsonl"
    return path.read_text().count("\n") if path.is_file() else 0
