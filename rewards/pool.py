"""The pool that grades completions in worker processes, each of which can be killed at any time.

`submit` takes one completion, at any time and from any thread, and makes one task for each reward. Tasks wait in one
queue. Every worker process has a thread in the pool that takes tasks, sends them to its worker and waits for the
answers. A worker that exceeds the time limit, or dies, costs exactly the task it was busy with: its other tasks go
back to the queue, and a new process takes its place.
"""

import contextlib
import math
import os
import pickle
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from rewards.registry import RewardsConfig
from rewards.worker import Worker

MAX_CHUNK = 64  # tasks that a worker is sent at once
QUICK_SECONDS = 0.05  # what a chunk may take for the next one to be twice as large


@dataclass(frozen=True)
class Failure:
    """One reward that could not be computed and counts as 0.0."""

    reward: str
    kind: Literal["timeout", "exception", "crash", "not a number"]
    message: str
    completion: str


@dataclass(frozen=True)
class Grade:
    """What one completion earned: `components` (reward name -> value) and `total`, their weighted sum."""

    total: float
    components: dict[str, float]
    failures: list[Failure]


@dataclass(eq=False)
class _Request:
    """A completion that is being graded, and what its tasks have come to."""

    completion: str
    payload: bytes  # pickled (completion, row), so that each reward gets a row of its own, which it may change
    future: Future[Grade] = field(default_factory=Future)
    answers: dict[str, tuple[str, Any]] = field(default_factory=dict)  # reward name -> what Worker.receive returned


_Task = tuple[_Request, str]  # compute the reward of this name


class RewardPool(contextlib.AbstractContextManager):
    """Worker processes that grade completions with the rewards of `config`. Any thread may use it."""

    def __init__(self, config: RewardsConfig, start_timeout_seconds: float = 120.0) -> None:
        """Start the workers and wait until each has imported the rewards.

        Raises RuntimeError, with the last lines of a worker's stderr, if one cannot start in time. Call
        `rewards.validate(config)` before, for messages about the settings themselves.
        """
        self._weights = dict(config.weights)
        self._timeout = config.timeout_seconds
        setup = {
            "files": [os.path.abspath(os.path.expanduser(file)) for file in config.files],
            "rewards": {name: dict(config.options.get(name, {})) for name in config.weights},
            # Twice the limit, so that the pool, which knows which task it kills a worker for, always comes first.
            "alarm_seconds": 2 * config.timeout_seconds + 1,
        }
        # What is sent here is never read: it ends every wait for a worker from then on.
        self._stop, self._stop_sender = socket.socketpair()
        self._workers = [Worker(setup, start_timeout_seconds, self._stop) for _ in range(config.processes)]
        self._threads = [threading.Thread(target=self._run, args=[worker], daemon=True) for worker in self._workers]
        self._changed = threading.Condition()  # guards all below, and what a _Request gathers
        self._queue: deque[_Task] = deque()
        self._pending: set[_Request] = set()
        self._ready = 0
        self._end: Exception | None = None  # why the pool takes no more completions
        try:
            for thread in self._threads:
                thread.start()
            with self._changed:
                self._changed.wait_for(lambda: self._end or self._ready == len(self._workers))
            if self._end:
                raise self._end
        except BaseException:
            self.close()
            raise

    def submit(self, completion: str, row: dict) -> Future[Grade]:
        """Grade one completion with every reward; returns at once. The future cannot be cancelled.

        A reward that fails counts 0.0 and is listed in the grade's failures. Raises RuntimeError if the pool is
        closed or a worker could not be started (the future does so if that happens later), and what pickle raises
        for a row that cannot be sent.
        """
        request = _Request(completion, pickle.dumps((completion, row)))
        request.future.set_running_or_notify_cancel()
        with self._changed:
            if self._end:
                raise RuntimeError(str(self._end))
            self._pending.add(request)
            self._queue.extend((request, name) for name in self._weights)
            self._changed.notify(len(self._weights))
        return request.future

    def close(self) -> None:
        """Kill the workers; futures that are not done get a RuntimeError. A second time does nothing."""
        self._finish(RuntimeError("This reward pool is closed: make a new one."))
        for thread in self._threads:
            thread.join()
        self._stop.close()
        self._stop_sender.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _finish(self, reason: Exception) -> None:
        """Stop the workers and give `reason` to the futures that are not done. Only the first call does anything."""
        with self._changed:
            if self._end:
                return
            self._end = reason
            self._stop_sender.send(b"stop")
            self._changed.notify_all()
        for request in self._pending:
            request.future.set_exception(reason)

    def _run(self, worker: Worker) -> None:
        """The life of a worker's thread."""
        try:
            worker.start()
            with self._changed:
                self._ready += 1
                self._changed.notify_all()
            chunk = 1
            while tasks := self._take(chunk):
                started = time.monotonic()
                self._grade(worker, tasks)
                # To wake up for every task costs more than a quick reward itself. Slow ones are taken one at a time,
                # so that no worker sits on tasks that others could take.
                chunk = min(2 * chunk, MAX_CHUNK) if time.monotonic() - started < QUICK_SECONDS else 1
        except Exception as error:  # noqa: BLE001 - whatever ends this thread must end the waiting for its answers
            self._finish(error)
        finally:
            worker.kill()

    def _take(self, chunk: int) -> deque[_Task]:
        """Wait for tasks and take up to `chunk`, fewer where the queue is short; none once the pool has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._end)
            size = min(chunk, math.ceil(len(self._queue) / (2 * len(self._workers))))
            return deque() if self._end else deque(self._queue.popleft() for _ in range(size))

    def _grade(self, worker: Worker, tasks: deque[_Task]) -> None:
        """Have the worker do `tasks`. If it dies or is late, the rest goes back to the queue and it starts anew."""
        # One that died while it had nothing to do is replaced before a task could be blamed for it.
        if worker.is_dead():
            worker.start()
        worker.send(pickle.dumps([(name, request.payload) for request, name in tasks]))
        while tasks:
            kind, result = worker.receive(self._timeout)
            self._answer(*tasks.popleft(), (kind, result))
            if kind in ("timeout", "crash"):
                with self._changed:
                    self._queue.extendleft(reversed(tasks))
                    self._changed.notify(len(tasks))
                return worker.start()

    def _answer(self, request: _Request, name: str, answer: tuple[str, Any]) -> None:
        """Note the answer to one task; the last one of a completion completes its grade."""
        with self._changed:
            request.answers[name] = answer
            if len(request.answers) < len(self._weights) or self._end:
                return
            self._pending.remove(request)
        answers = [(name, *request.answers[name]) for name in self._weights]
        components = {name: result if kind == "ok" else 0.0 for name, kind, result in answers}
        total = sum(weight * components[name] for name, weight in self._weights.items())
        failed = sorted(answer for answer in answers if answer[1] != "ok")
        request.future.set_result(Grade(total, components, [Failure(*answer, request.completion) for answer in failed]))
