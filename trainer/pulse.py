"""What a start says: each thing that it does, with the seconds since the command began, and that it still does it."""

import functools
import os
import threading
import time
from collections.abc import Callable

SILENCE = 8.0  # seconds
BEGAN = time.monotonic()


class Pulse:
    """Says through `say` what is being done, at once and again whenever nothing was said for SILENCE seconds.

    Only rank 0 says anything.
    """

    def __init__(self, what: str, say: Callable[[str], None] | None = None) -> None:
        self._say, self._what, self._lock = say or functools.partial(print, flush=True), "", threading.Lock()
        self._ended = threading.Event()
        self._said_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        if os.environ.get("RANK", "0") == "0":
            self._thread.start()
            self(what)

    def __enter__(self) -> "Pulse":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self, what: str) -> None:
        """From now on `what` is being done; the same as before is not said again at once."""
        with self._lock:
            if what != self._what and self._thread.is_alive():
                self._what = what
                self._tell(what)

    def end(self) -> None:
        """Nothing more is said. A second call does nothing."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(max(0.05, self._said_at + SILENCE - time.monotonic())):
            with self._lock:
                if self._what and time.monotonic() >= self._said_at + SILENCE:
                    self._tell(f"still {self._what}")

    def _tell(self, what: str) -> None:
        self._said_at = time.monotonic()
        self._say(f"{self._said_at - BEGAN:4.0f} s  {what}")
