"""How a run ends before its last step: a signal ends it after the step that is under way, with a checkpoint."""

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

STOPPED = 3
"""Exit code of a run that a signal ended after a step; of one that it ended at once: 128 + the signal's number."""

PR_SET_PDEATHSIG = 1


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
    as a collective. `say`: how rank 0 tells its user.
    """

    def __init__(self, grace: float = 0.0) -> None:
        self.grace, self.asked, self.stepping = grace, False, False
        self.say: Callable[[str], None] = say_once

    def __enter__(self) -> "Notice":
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        self._descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        if "TORCHELASTIC_RUN_ID" in os.environ:  # as if by Ctrl-C, where torchrun dies without having ended its ranks
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _listen(self) -> None:
        number, interrupted, deadline = signal.SIGTERM, False, None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._reader], [], [], left)[0]:
                self._end(number, f"The step and its checkpoint took longer than {self.grace:g} s")
            received = os.read(self._reader, 1)
            if not received:
                return
            if received[0] not in self._before:
                continue
            number = signal.Signals(received[0])
            if not self.stepping:
                self._end(number, f"{number.name} before the first step")
            if interrupted:  # torchrun makes SIGTERM of a second Ctrl-C
                self._end(signal.SIGINT, "A second Ctrl-C")
            interrupted = number == signal.SIGINT
            if not self.asked:
                self.asked, deadline = True, time.monotonic() + self.grace
                within = f"within checkpoint.grace_seconds={self.grace:g}"
                at_once = "; a second Ctrl-C ends it at once" if interrupted else ""
                self.say(f"{number.name}: the run ends after this step, with a checkpoint, {within}{at_once}.")

    def _end(self, number: signal.Signals, why: str) -> None:
        """End this process and what it started; rewards end with it by themselves."""
        if os.environ.get("RANK", "0") == "0":
            cursor = "\n\x1b[?25h" if sys.stdout.isatty() else ""  # which the live display hides
            print(f"{cursor}{why}: the run ends at once, and nothing more is saved.", file=sys.stderr, flush=True)
        for child in multiprocessing.active_children():
            with contextlib.suppress(OSError):
                child.kill()
        os._exit(128 + number)
