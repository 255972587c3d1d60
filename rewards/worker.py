"""A worker process of the reward pool, seen from both ends: the pool uses Worker, the process runs `serve`.

The pool sends pickles over the process's stdin, first the setup and then lists of calls; the setup and each call are
answered with one line of JSON over stdout. A reward that prints writes to stderr, which the pool passes on.

A call is (reward name, options, units of pickled samples). A unit is a sample, or a group where the reward sees groups;
there is one unless the reward is batched or async. The units of an async one are graded side by side, each under its
own limit, in one event loop that lives as long as the worker, so that what a reward opens there stays open.

The process is a fresh Python that imports `rewards` and nothing of the trainer (multiprocessing would import the main
script again). It never outlives the trainer: when its stdin closes, a thread kills it and all that its rewards
started. A reward in C code can keep that thread from running, and is ended by an alarm that the kernel delivers.
"""

import asyncio
import contextlib
import dataclasses
import faulthandler
import importlib
import json
import math
import numbers
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any, BinaryIO, TextIO

from rewards import registry

MAX_MESSAGE = 1000  # characters of what a reward raised or returned
GRACE = 1.0  # seconds that an async call has to end by itself after its limit
MAX_STDERR = 4000  # characters of stderr that are kept; a crash lists every extension module below its stack
START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from rewards.worker import serve; serve()"


@dataclasses.dataclass
class Worker:
    """The pool's end of a worker, used by one thread; `start` gives it a new process each time."""

    setup: dict[str, Any]
    start_timeout: float  # seconds
    stop: socket.socket  # ends every wait with a RuntimeError once it can be read
    process: Popen | None = None
    folder: str = ""  # where its temporary files are, which end with it

    def start(self) -> dict[str, tuple[bool, float, bool]]:
        """Start a process and wait until it has imported the rewards. Raises RuntimeError if it does not.

        Returns of each reward whether one call takes all units that wait, after how many seconds a call is late, and
        whether a unit is a group.
        """
        self.kill()
        path = [str(entry) for entry in sys.path] + [str(Path(__file__).resolve().parent.parent)]
        # -P keeps the directory it is started in (it could be rewards/, with a math.py) from shadowing the stdlib.
        command = [sys.executable, "-P", "-c", START, json.dumps(path)]
        self.folder = tempfile.mkdtemp(prefix="reward-")
        environment = os.environ | {"TMPDIR": self.folder}
        # A session of its own makes a group that can be killed together with what a reward starts.
        streams = {"stdin": PIPE, "stdout": PIPE, "stderr": PIPE, "bufsize": 0}
        self.process = Popen(command, env=environment, start_new_session=True, **streams)
        self._inbox, self._stderr = b"", ""
        self._poll = select.poll()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            os.set_blocking(stream.fileno(), False)
        for readable in (self.stop, self.process.stdout, self.process.stderr):
            self._poll.register(readable, select.POLLIN)
        self.send(pickle.dumps(self.setup))
        kind, message = self.receive(self.start_timeout)
        if kind == "ready":
            return message
        if kind == "timeout":
            message = f"not ready after {self.start_timeout:g} seconds; stderr: {self._stderr.strip() or 'empty'}"
        raise RuntimeError(f"A reward worker could not be started: {message}")

    def is_dead(self) -> bool:
        # While it has nothing to do, the end of its stdout is all that can be read there.
        return any(descriptor == self.process.stdout.fileno() for descriptor, _ in self._poll.poll(0))

    def send(self, message: bytes) -> None:
        """Send it as soon as the pipe takes it, which is while `receive` waits."""
        self._outbox = memoryview(message)
        self._poll.register(self.process.stdin, select.POLLOUT)

    def receive(self, seconds: float) -> tuple[str, Any]:
        """The next answer of the worker: (kind, result); ("timeout", message) or ("crash", message) without one."""
        deadline, remaining = time.monotonic() + seconds, seconds
        while b"\n" not in self._inbox:
            if remaining < 0:
                return "timeout", f"took longer than {seconds:g} seconds"
            # When it is late, what came while this thread was kept from running is still read.
            remaining = deadline - time.monotonic()
            for descriptor, _ in self._poll.poll(max(0.0, 1000 * remaining)):
                if descriptor == self.stop.fileno():
                    raise RuntimeError("The reward pool stopped its workers.")
                if descriptor == self.process.stdin.fileno():
                    self._write()
                elif descriptor == self.process.stderr.fileno():
                    self._read_stderr()
                elif data := os.read(descriptor, 1 << 16):
                    self._inbox += data
                else:
                    # Its stdout closes a moment before it has exited: wait for its own exit code.
                    return "crash", f"its worker {self.kill(patience=1.0)}; stderr: {self._stderr.strip() or 'empty'}"
        line, _, self._inbox = self._inbox.partition(b"\n")
        try:
            return tuple(json.loads(line))
        except ValueError:
            return "crash", "wrote where its worker answers"

    def kill(self, patience: float = 0.0) -> str:
        """End the process, after up to `patience` seconds, and all it started; returns how it ended."""
        if self.process is None:
            return "was not started"
        with contextlib.suppress(TimeoutExpired):
            self.process.wait(timeout=patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait(timeout=10.0)
        with self.process:  # closes its pipes
            self._read_stderr()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.process = None
        return f"exited with code {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"

    def _write(self) -> None:
        try:
            self._outbox = self._outbox[os.write(self.process.stdin.fileno(), self._outbox) :]
        except BrokenPipeError:
            self._outbox = memoryview(b"")  # Nobody reads any more, and the end of its stdout will say so.
        if not self._outbox:
            self._poll.unregister(self.process.stdin)

    def _read_stderr(self) -> None:
        # There may be nothing to read now, or its end may have been seen before.
        with contextlib.suppress(BlockingIOError, KeyError):
            data = os.read(self.process.stderr.fileno(), 1 << 16)
            text = data.decode(errors="replace")
            self._stderr = (self._stderr + text)[-MAX_STDERR:]
            sys.stderr.write(text)
            if not data:
                self._poll.unregister(self.process.stderr)


def enter(patience: float = 0.0) -> tuple[BinaryIO, TextIO, dict[str, Any]]:
    """What a process of a pool begins with; returns where tasks come from and answers go to, and the setup.

    From then on it may take memory_megabytes of the setup, and is killed with all that it started `patience` seconds
    after the trainer has gone.
    """
    tasks_from, answers_to = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    # From here on the numbers 0 and 1 belong to the rewards: what they print or read is not the protocol.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    signal.signal(signal.SIGTERM, lambda *_: None)  # a scheduler's notice, after which the trainer ends its step
    watched = tasks_from.fileno(), os.environ["TMPDIR"], patience
    threading.Thread(target=_end_with_parent, args=watched, daemon=True).start()
    setup = pickle.load(tasks_from)
    _, highest = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = setup["memory_megabytes"] << 20
    allowed = allowed if highest == resource.RLIM_INFINITY else min(allowed, highest)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    return tasks_from, answers_to, setup


def serve() -> None:
    """Read the setup, import the rewards and answer ["ready", ...]; then answer calls until stdin closes."""
    tasks_from, answers_to, setup = enter()
    for file in setup["files"]:
        registry.load_file(file)
    rewards = {name: registry.find(name) for name in setup["rewards"]}
    for reward in rewards.values():
        for module in reward.imports:
            importlib.import_module(module)
    limits = {name: setup["timeouts"].get(name, r.seconds or setup["timeout_seconds"]) for name, r in rewards.items()}
    together = {n: r.is_async or (r.form != "plain" and r.sees != "group") for n, r in rewards.items()}
    about = {n: (together[n], limits[n] + GRACE * r.is_async, r.sees == "group") for n, r in rewards.items()}
    loop = asyncio.new_event_loop()
    print(json.dumps(["ready", about]), file=answers_to, flush=True)

    with contextlib.suppress(EOFError):
        while True:
            for name, options, units in pickle.load(tasks_from):
                reward, limit = rewards[name], limits[name]
                options = setup["rewards"][name] if options is None else options
                # Twice the limit, so that the pool, which knows which call it kills a worker for, always comes first.
                signal.setitimer(signal.ITIMER_REAL, 2 * limit + GRACE)
                if reward.is_async:
                    answers = loop.run_until_complete(_side_by_side(reward, options, units, limit))
                else:
                    answers = _answer(reward, options, list(chain(*units)))
                signal.setitimer(signal.ITIMER_REAL, 0)
                print(json.dumps(["graded", answers]), file=answers_to, flush=True)


_Answer = tuple[str, float | str | None]  # ("ok", what it is worth), or (kind of failure, message)


def _answer(reward: registry.Reward, options: Mapping[str, Any], payloads: Sequence[bytes]) -> list[_Answer]:
    """What one call of a reward gives to pickled (completion, row, prompt)s."""
    try:
        return _read(reward, reward.call([pickle.loads(payload) for payload in payloads], options), len(payloads))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a reward is anybody's code, and this is its report
        return _raised(error, len(payloads))


async def _side_by_side(
    reward: registry.Reward, options: Mapping[str, Any], units: Sequence[Sequence[bytes]], limit: float
) -> list[_Answer]:
    """What an async reward gives: one call for all `units` where it is batched, else one for each."""

    async def answer(payloads: Sequence[bytes]) -> list[_Answer]:
        try:
            async with asyncio.timeout(limit) as clock:
                result = await reward.call([pickle.loads(payload) for payload in payloads], options)
            return _read(reward, result, len(payloads))
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - as above
            if isinstance(error, TimeoutError) and clock.expired():
                return [("timeout", f"took longer than {limit:g} seconds{among(len(payloads))}")] * len(payloads)
            return _raised(error, len(payloads))

    calls = units if reward.form == "plain" or reward.sees == "group" else [list(chain(*units))]
    return list(chain(*await asyncio.gather(*map(answer, calls))))


def _read(reward: registry.Reward, result: Any, count: int) -> list[_Answer]:
    """The answers that a call for `count` samples returned."""
    if reward.form == "plain":
        return [_number(reward, result)]
    if not isinstance(result, list | tuple) or len(result) != count:
        given = f"a list of {len(result)}" if isinstance(result, list | tuple) else f"{result!r:.{MAX_MESSAGE // 2}}"
        wanted = f"a list of {count}, a number or None for each of its completions"
        return [("not a list", f"returned {given}: reward {reward.name!r} must return {wanted}")] * count
    return [_number(reward, value) for value in result]


def _number(reward: registry.Reward, value: Any) -> _Answer:
    # bool, int and numpy's numbers are fine; a tensor or a string is a mistake in the reward.
    if value is None or (isinstance(value, numbers.Real) and math.isfinite(value)):
        return "ok", None if value is None else float(value)
    wanted = "a finite number, or None where it does not apply"
    return "not a number", f"returned {value!r:.{MAX_MESSAGE // 2}}: reward {reward.name!r} must return {wanted}"


def _raised(error: BaseException, count: int) -> list[_Answer]:
    where = traceback.extract_tb(error.__traceback__)[-1]
    kind, said = "exception", str(error)
    if isinstance(error, MemoryError):
        kind, said = "memory", f"needs more than rewards.memory_megabytes allow {said}".strip()
    text = f"{type(error).__name__} at {where.filename}:{where.lineno}: {said}"
    return [(kind, text[:MAX_MESSAGE] + among(count))] * count


def among(count: int) -> str:
    """What to add to the reason why a call for `count` samples failed."""
    return f", in one call with {count - 1} other completion(s)" if count > 1 else ""


def _end_with_parent(descriptor: int, folder: str, patience: float) -> None:
    # Asked for no event, poll returns only when every writer has closed the pipe, whatever is queued in it.
    watch = select.poll()
    watch.register(descriptor, 0)
    watch.poll()
    time.sleep(patience)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
