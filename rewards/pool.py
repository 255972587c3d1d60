"""The process pool that grades. A worker grades one completion after another and can be killed at any of them.

A worker is a fresh Python that imports `rewards` and nothing of the trainer (multiprocessing would import the
main script again). It is sent pickles over its stdin and answers each task with a line of JSON over its stdout;
a reward that prints writes to stderr instead. A worker that exceeds the time limit, or dies, costs exactly the
grade it was busy with: the rest of its tasks go back to the queue and a new worker takes its place.

Nothing outlives the trainer: a worker kills its process group when its stdin closes, and an alarm of the kernel
ends a grade that would not even let the thread run that watches for this.
"""

import contextlib
import dataclasses
import faulthandler
import importlib
import json
import math
import numbers
import os
import pickle
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any, Literal

from rewards import registry
from rewards.config import RewardsConfig

MAX_CHUNK = 16
MAX_MESSAGE = 1000  # characters of what a reward raised or returned
MAX_STDERR = 4000  # bytes of a worker's stderr that are kept; a crash lists every extension module below its stack
START_WORKER = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rewards.pool import serve
serve()
"""


@dataclasses.dataclass(frozen=True)
class Failure:
    """One grade that could not be had: completion `index`, the reward, and why. It counted as 0.0."""

    index: int
    reward: str
    kind: Literal["timeout", "exception", "crash", "not a number"]
    message: str
    completion: str


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a batch of N completions earned: `total` [N] and `parts` (reward name -> [N], before weights)."""

    total: list[float]
    parts: dict[str, list[float]]
    failures: list[Failure]
    seconds: float


class RewardPool:
    """Worker processes that grade completions with the rewards of `config`. A context manager; not thread-safe."""

    def __init__(self, config: RewardsConfig, start_timeout_seconds: float = 120.0) -> None:
        """Start the workers and wait until each has imported the rewards.

        Raises RuntimeError, with the last lines of a worker's stderr, if one cannot start in time. Call
        `rewards.validate(config)` before, for messages about the settings themselves.
        """
        self._config = config
        self._start_timeout = start_timeout_seconds
        self._setup = pickle.dumps(
            {
                "files": [os.path.abspath(os.path.expanduser(file)) for file in config.files],
                "rewards": {name: dict(config.options.get(name, {})) for name in config.weights},
                # Twice the limit, so that the pool, which knows which grade it kills, always comes first.
                "alarm_seconds": 2 * config.timeout_seconds + 1,
            }
        )
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._queue: deque[_Task] = deque()
        self._closed = False
        try:
            for _ in range(config.processes):
                self._start_worker()
            while not all(worker.ready for worker in self._workers):
                self._wait()
        except BaseException:
            self.close()
            raise

    def score(self, completions: list[str], rows: list[dict]) -> Scores:
        """Grade every completion with every reward; a grade that fails counts 0.0 and is listed in `failures`.

        Takes at most about timeout_seconds for each grade over the workers, plus the time to replace a worker
        after each one killed. Raises ValueError for lists of different lengths, RuntimeError if the pool is closed
        or a worker cannot be replaced, and what pickle raises for a row that cannot be sent.
        """
        if self._closed:
            raise RuntimeError("This reward pool is closed: make a new one.")
        if len(completions) != len(rows):
            raise ValueError(f"There are {len(completions)} completions but {len(rows)} rows: give one for each.")
        started = time.monotonic()
        parts = {name: [0.0] * len(completions) for name in self._config.weights}
        failures = []
        try:
            # A worker that died while it had nothing to do is replaced before a task could be blamed for it.
            self._wait(seconds=0.0)
            self._queue.extend(
                _Task(index, name, pickle.dumps((completion, row)))
                for index, (completion, row) in enumerate(zip(completions, rows, strict=True))
                for name in parts
            )
            while self._queue or any(worker.tasks for worker in self._workers):
                self._hand_out()
                for task, kind, result in self._wait():
                    if kind == "ok":
                        parts[task.reward][task.index] = result
                    else:
                        failures.append(Failure(task.index, task.reward, kind, result, completions[task.index]))
        except BaseException:
            # Answers to this batch may still be under way and must never be taken for those of a next one.
            self.close()
            raise
        total = [
            sum(weight * parts[name][i] for name, weight in self._config.weights.items())
            for i in range(len(completions))
        ]
        failures.sort(key=lambda failure: (failure.index, failure.reward))
        return Scores(total, parts, failures, time.monotonic() - started)

    def close(self) -> None:
        """Kill the workers. A second time does nothing."""
        while self._workers:
            self._workers.pop().kill(self._selector)
        if not self._closed:
            self._selector.close()
        self._closed = True

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start_worker(self) -> None:
        self._workers.append(_Worker(self._selector, self._setup, time.monotonic() + self._start_timeout))

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.ready and not worker.tasks and self._queue:
                # Small chunks at the end of the queue, so that no worker sits on tasks others could take.
                size = min(MAX_CHUNK, math.ceil(len(self._queue) / (2 * len(self._workers))))
                worker.tasks.extend(self._queue.popleft() for _ in range(size))
                worker.deadline = time.monotonic() + self._config.timeout_seconds
                worker.send(pickle.dumps([(task.reward, task.payload) for task in worker.tasks]))

    def _wait(self, seconds: float | None = None) -> list[tuple["_Task", str, Any]]:
        """Exchange bytes with the workers until one has something to say or is late (or for `seconds`).

        Returns (task, "ok", its value) and (task, kind of failure, message) for the tasks that are done with.
        """
        if seconds is None:
            seconds = max(0.0, min(worker.deadline for worker in self._workers) - time.monotonic())
        for key, _ in self._selector.select(None if math.isinf(seconds) else seconds):
            worker, receive = key.data
            receive(worker)
        done = []
        now = time.monotonic()
        for worker in list(self._workers):
            for kind, result in worker.take_answers():
                if not worker.ready:
                    worker.ready = True
                else:
                    done.append((worker.tasks.popleft(), kind, result))
                worker.deadline = now + self._config.timeout_seconds if worker.tasks else math.inf
            if worker.dead or now >= worker.deadline:
                done.extend(self._replace(worker))
        return done

    def _replace(self, worker: "_Worker") -> list[tuple["_Task", str, Any]]:
        kind = "crash" if worker.dead else "timeout"
        status = worker.kill(self._selector)
        self._workers.remove(worker)
        stderr = worker.stderr.decode(errors="replace").strip()
        if not worker.ready:
            why = f"it {status}" if kind == "crash" else f"it was not ready after {self._start_timeout:g} seconds"
            raise RuntimeError(f"A reward worker could not be started, {why}; its last words: {stderr or 'none'}")
        self._start_worker()
        if not worker.tasks:
            return []
        late, *others = worker.tasks
        self._queue.extendleft(reversed(others))
        if kind == "timeout":
            return [(late, kind, f"took longer than {self._config.timeout_seconds:g} seconds")]
        return [(late, kind, f"its worker {status}; stderr: {stderr or 'empty'}")]


@dataclasses.dataclass(frozen=True)
class _Task:
    index: int
    reward: str
    payload: bytes  # pickled (completion, row): each grade gets a row of its own, which it may change


class _Worker:
    """The pool's end of one process: its pipes, and the tasks it has in hand, the first being graded now."""

    def __init__(self, selector: selectors.BaseSelector, setup: bytes, deadline: float) -> None:
        path = [str(entry) for entry in sys.path] + [str(Path(__file__).resolve().parent.parent)]
        # -P keeps the directory it is started in (it could be rewards/, with a math.py) from shadowing the stdlib.
        # A session of its own makes a group that can be killed together with what a reward starts.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", START_WORKER, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self.tasks: deque[_Task] = deque()
        self.deadline = deadline
        self.ready = False
        self.dead = False
        self.stderr = b""
        self._inbox = b""
        self._outbox = b""
        self._selector = selector
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            os.set_blocking(stream.fileno(), False)
        selector.register(self.process.stdout, selectors.EVENT_READ, (self, _Worker.read_answers))
        selector.register(self.process.stderr, selectors.EVENT_READ, (self, _Worker.read_stderr))
        self.send(setup)

    def send(self, message: bytes) -> None:
        self._outbox += message
        self._selector.register(self.process.stdin, selectors.EVENT_WRITE, (self, _Worker.write))
        self.write()

    def write(self) -> None:
        try:
            written = os.write(self.process.stdin.fileno(), self._outbox)
        except BlockingIOError:
            return
        except BrokenPipeError:
            # Nobody reads any more; the end of its stdout says so as well, after any answers it gave.
            written = len(self._outbox)
        self._outbox = self._outbox[written:]
        if not self._outbox:
            self._selector.unregister(self.process.stdin)

    def read_answers(self) -> None:
        data = _read(self.process.stdout.fileno())
        if data == b"":
            self._selector.unregister(self.process.stdout)
            self.dead = True
        self._inbox += data or b""

    def read_stderr(self) -> None:
        data = _read(self.process.stderr.fileno())
        if data == b"":
            self._selector.unregister(self.process.stderr)
        if data:
            self.stderr = (self.stderr + data)[-MAX_STDERR:]
            sys.stderr.write(data.decode(errors="replace"))

    def take_answers(self) -> list[tuple[str, Any]]:
        *lines, self._inbox = self._inbox.split(b"\n")
        return [tuple(json.loads(line)) for line in lines]

    def kill(self, selector: selectors.BaseSelector) -> str:
        """End the process group; returns how the process ended, such as 'exited with code 3'."""
        if self.dead:
            # Its stdout closes a moment before it has exited: let it, for its own exit code.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        if self.process.stderr in selector.get_map():
            self.read_stderr()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream in selector.get_map():
                selector.unregister(stream)
            stream.close()
        if code < 0:
            return f"was ended by signal {-code} ({signal.strsignal(-code)})"
        return f"exited with code {code}"


def _read(descriptor: int) -> bytes | None:
    """What there is to read: b"" at the end of the stream, None when there is nothing now."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def serve() -> None:
    """A worker's life: take the setup from stdin, then chunks of tasks, and answer each task with one line."""
    tasks_from, answers_to = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w")
    # From here on the numbers 0 and 1 belong to the rewards: what they print or read is not the protocol.
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    threading.Thread(target=_end_with_parent, args=(tasks_from.fileno(),), daemon=True).start()

    setup = pickle.load(tasks_from)
    for file in setup["files"]:
        registry.load_file(file)
    graders = {name: registry.get(name, **options) for name, options in setup["rewards"].items()}
    for name in graders:
        for module in registry.find(name).imports:
            importlib.import_module(module)
    print(json.dumps(["ready", None]), file=answers_to, flush=True)

    with contextlib.suppress(EOFError):
        while True:
            for name, payload in pickle.load(tasks_from):
                signal.setitimer(signal.ITIMER_REAL, setup["alarm_seconds"])
                answer = _grade(graders[name], payload)
                signal.setitimer(signal.ITIMER_REAL, 0)
                print(json.dumps(answer), file=answers_to, flush=True)


def _grade(grader: registry.RewardFunction, payload: bytes) -> tuple[str, float | str]:
    try:
        value = grader(*pickle.loads(payload))
        # bool, int and numpy's numbers are fine; a tensor, a string or None is a mistake in the reward.
        number = float(value) if isinstance(value, numbers.Real) else math.nan
        if not math.isfinite(number):
            return "not a number", f"returned {value!r}"[:MAX_MESSAGE]
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a reward is anybody's code, and this is its report
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__} at {where.filename}:{where.lineno}: {error}"
        return "exception", text[:MAX_MESSAGE]
    return "ok", number


def _end_with_parent(descriptor: int) -> None:
    # No event asked for: poll then returns only when every writer has closed the pipe, whatever is queued in it.
    watch = select.poll()
    watch.register(descriptor, 0)
    watch.poll()
    os.killpg(0, signal.SIGKILL)
