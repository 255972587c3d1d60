"""How a run ends before its last step: a signal ends it after the step that is under way, with a checkpoint."""

import contextlib
import ctypes
import faulthandler
import math
import multiprocessing
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

STOPPED = 3
"""Exit code of a run that a signal ended after a step; of one that it ended at once: 128 + the signal's number."""

PR_SET_PDEATHSIG = 1

PROJECT = f"{Path(__file__).resolve().parents[1]}/"

TICK = 0.5
"""Seconds from one look at this process to the next."""

PATIENCE = 5.0
"""Seconds that a rank has to end by itself after another one failed."""


class Stopped(Exception):
    """A signal ended the run after a step; the message is one sentence on what was saved and how to go on."""


def say_once(what: object) -> None:
    """Print it on rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print(what, flush=True)


class Notice:
    """Takes SIGTERM and Ctrl-C while it is entered; `asked`: whether one came, since when the step is the last one.

    A second Ctrl-C, `grace` seconds that were not enough, and any signal while nothing is `stepping` end the process
    at once. A thread sees to that, as Python's own handlers would wait for the C code that the main thread is in, such
    as a collective. `say`: how rank 0 tells its user. `folder`: the run's, where a rank that fails leaves its stacks as
    stacks-RANK.txt, and then each that does not end by itself. So does a rank that hangs: others time out waiting for
    it, and torchrun sends it SIGTERM. A process alone hangs where it is at the same lines of ours for `timeout` seconds
    of its steps without a `beat`.
    """

    def __init__(self, grace: float = 0.0, timeout: float = math.inf) -> None:
        self.grace, self.asked, self.stepping = grace, False, False
        self.timeout = timeout if os.environ.get("WORLD_SIZE", "1") == "1" else math.inf
        self.beats = 0
        self.say: Callable[[str], None] = say_once
        self.folder: Path | None = None

    def __enter__(self) -> "Notice":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        self._descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        if "TORCHELASTIC_RUN_ID" in os.environ:  # where torchrun dies without having ended its ranks
            # SIGTERM, as it comes once for each thread that torchrun had, and a second SIGINT would end them at once.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if isinstance(error, RuntimeError):
            self._leave_stacks("".join(traceback.format_exception(error)))
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def beat(self) -> None:
        """Something went on, where lines do not tell: an engine in processes of its own samples."""
        self.beats += 1

    def _listen(self) -> None:
        number, interrupted, since, began = signal.SIGTERM, False, 0.0, time.time()
        still, seen = 0, None
        while True:
            looking = self.asked or self.timeout < math.inf
            if not select.select([self._reader], [], [], TICK if looking else None)[0]:
                before, seen = seen, (self.beats, self._lines())
                # Counted, as a process that was stopped for hours did not hang.
                still = still + 1 if self.stepping and seen == before else 0
                if still * TICK > self.timeout:
                    self._hang(f"timeout_seconds={self.timeout:g} went by")
                if not self.asked:
                    continue
                if time.monotonic() > since + self.grace:
                    self._end(number, f"The step and its checkpoint took longer than {self.grace:g} s")
                if time.monotonic() > since + PATIENCE and self._failed(began):
                    self._hang("others waited for it")
                continue
            received = os.read(self._reader, 1)
            if not received:
                return
            if received[0] not in self._before:
                continue
            number = signal.Signals(received[0])
            if not self.stepping:
                self._end(number, f"{number.name} before the first step")
            # torchrun makes SIGTERM of a second Ctrl-C, and of two signals at once either may come first.
            if self.asked and (interrupted or number == signal.SIGINT):
                self._end(signal.SIGINT, "A second Ctrl-C")
            interrupted = number == signal.SIGINT
            if not self.asked:
                self.asked, since = True, time.monotonic()
                within = f"within checkpoint.grace_seconds={self.grace:g}"
                at_once = "; a second Ctrl-C ends it at once" if interrupted else ""
                self.say(f"{number.name}: the run ends after this step, with a checkpoint, {within}{at_once}.")

    def _failed(self, began: float) -> bool:
        """Whether another rank has left its stacks since `began`."""
        return self.folder is not None and any(f.stat().st_mtime > began for f in self.folder.glob("stacks-*.txt"))

    def _lines(self) -> list[str]:
        """Where the main thread is in this project, the innermost first."""
        walked = traceback.walk_stack(sys._current_frames()[threading.main_thread().ident])
        ours = re.compile(f"{re.escape(PROJECT)}(?!.*site-packages)(.*)")
        found = ((ours.match(frame.f_code.co_filename), line, frame.f_code.co_name) for frame, line in walked)
        return [f"{match[1]}:{line} ({name})" for match, line, name in found if match]

    def _hang(self, why: str) -> None:
        """End this process, which does not end by itself, and say where it is."""
        where, path = (self._lines() or ["an unknown place"])[0], self._leave_stacks("")
        rank = os.environ.get("RANK", "0")
        print(f"Rank {rank} hangs at {where}, where {why}: {path}.", file=sys.stderr, flush=True)
        self._exit(1)

    def _leave_stacks(self, text: str) -> Path | None:
        """Write `text` and where all threads are."""
        if self.folder is None or not self.folder.is_dir():
            return None
        path = self.folder / f"stacks-{os.environ.get('RANK', '0')}.txt"
        with path.open("w") as file:
            print(text, file=file, flush=True)
            faulthandler.dump_traceback(file)
        return path

    def _end(self, number: signal.Signals, why: str) -> None:
        """End at once, and say why."""
        if os.environ.get("RANK", "0") == "0":
            cursor = "\n\x1b[?25h" if sys.stdout.isatty() else ""  # which the live display hides
            print(f"{cursor}{why}: the run ends at once, and nothing more is saved.", file=sys.stderr, flush=True)
        self._exit(128 + number)

    def _exit(self, code: int) -> None:
        """End this process and what it started; rewards end with it by themselves."""
        for child in multiprocessing.active_children():
            with contextlib.suppress(OSError):
                child.kill()
        os._exit(code)
