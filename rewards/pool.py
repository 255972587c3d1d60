"""The pool that grades completions in worker processes, each of which can be killed at any time.

`submit` takes one completion, at any time and from any thread, and puts it into the queue of each reward; those that
see groups get its group once that is whole. Every worker process has a thread in the pool that takes from the queue
that has waited longest, sends its worker calls of that reward and waits for the answers: a call has one completion of a
plain reward, or one group, and of a batched or async reward all that wait, up to MAX_CHUNK. A worker that exceeds the
time limit, or dies, costs exactly the call it was busy with: its other calls go back to the queue, and a new process
takes its place.
"""

import contextlib
import math
import os
import pickle
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, Literal

from rewards.registry import Example, RewardsConfig
from rewards.worker import Worker, among

MAX_CHUNK = 64  # completions, or groups, that a worker is sent at once
QUICK_SECONDS = 0.05  # what a chunk may take for the next one to be twice as large


@dataclass(frozen=True)
class Failure:
    """One reward that could not be computed and counts as 0.0; or that none applies, which makes a total of 0.0."""

    reward: str
    kind: Literal["timeout", "memory", "exception", "crash", "not a number", "not a list", "none applies"]
    message: str
    completion: str


@dataclass(frozen=True)
class Grade:
    """What one completion earned: `components` by reward name, and `total`, the weighted sum of those that apply."""

    total: float
    components: dict[str, float | None]  # None where the reward does not apply
    failures: list[Failure]


@dataclass(eq=False)
class _Request:
    """A completion that is being graded, and what its rewards have come to."""

    number: int  # of those submitted before it
    completion: str
    payload: bytes  # pickled (completion, row, prompt), so that each reward gets a row of its own, which it may change
    weights: Mapping[str, float]  # of the rewards that grade it
    options: Mapping[str, Any] | None = None  # None: those of the config
    future: Future[Grade] = field(default_factory=Future)
    answers: dict[str, tuple[str, Any]] = field(default_factory=dict)  # reward name -> (kind, value or message)


@dataclass
class Group:
    """The `size` completions to one prompt, for the rewards that see them together."""

    size: int = 1
    requests: list[_Request] = field(default_factory=list)


_Unit = list[_Request]  # a completion, or the group that a reward sees
_Call = list[_Unit]  # what the worker is to give to one reward together


class RewardPool(contextlib.AbstractContextManager):
    """Worker processes that grade completions with the rewards of `config`. Any thread may use it."""

    def __init__(self, config: RewardsConfig, start_timeout_seconds: float = 120.0) -> None:
        """Start the workers and wait until each has imported the rewards.

        Raises RuntimeError, with the last lines of a worker's stderr, if one cannot start in time. Call
        `rewards.validate(config)` before, for messages about the settings themselves.
        """
        self._weights = dict(config.weights)
        setup = {
            "files": [os.path.abspath(os.path.expanduser(file)) for file in config.files],
            "rewards": {name: dict(config.options.get(name, {})) for name in config.weights},
            "timeout_seconds": config.timeout_seconds,
            "timeouts": dict(config.timeouts),
            "memory_megabytes": config.memory_megabytes,
        }
        # What is sent here is never read: it ends every wait for a worker from then on.
        self._stop, self._stop_sender = socket.socketpair()
        self._workers = [Worker(setup, start_timeout_seconds, self._stop) for _ in range(config.processes)]
        self._threads = [threading.Thread(target=self._run, args=[worker], daemon=True) for worker in self._workers]
        self._changed = threading.Condition()  # guards all below, and what a _Request gathers
        self._queues: dict[str, deque[_Unit]] = {name: deque() for name in config.weights}
        self._submitted = 0
        self._pending: set[_Request] = set()
        self._about: dict[str, tuple[bool, float, bool]] = {}  # what Worker.start returned
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

    def submit(self, completion: str, row: dict, prompt: str = "", group: Group | None = None) -> Future[Grade]:
        """Grade one completion with every reward; returns at once. The future cannot be cancelled.

        prompt: its text, for rewards in TRL's form that ask for it. group: what all completions to its prompt have in
        common, for whose last one the rewards that see groups wait, and they alone; None where it is the only one. A
        reward that fails counts 0.0 and is listed in the grade's failures; so is that no reward with a weight applies.
        Raises RuntimeError if the pool is closed or a worker could not be started (the future does so if that happens
        later), and what pickle raises for a row that cannot be sent.
        """
        return self._submit((completion, row, prompt), group or Group(), self._weights)

    def submit_example(self, name: str, example: Example) -> list[Future[Grade]]:
        """Grade the completions of an example with the reward `name` alone; prompts are the rows' column `prompt`."""
        samples, weights = example.samples(), {name: 1.0}
        given, group = [(text, row, row.get("prompt", "")) for text, row, _ in samples], Group(len(samples))
        return [self._submit(sample, group, weights, example.options) for sample in given]

    def _submit(
        self, sample: tuple[str, dict, str], group: Group, weights: Mapping[str, float], options: Mapping | None = None
    ) -> Future[Grade]:
        payload = pickle.dumps(sample)
        with self._changed:
            if self._end:
                raise RuntimeError(str(self._end))
            self._submitted += 1
            request = _Request(self._submitted, sample[0], payload, weights, options)
            request.future.set_running_or_notify_cancel()
            self._pending.add(request)
            group.requests.append(request)
            for name in request.weights:
                _, _, sees_group = self._about[name]
                if not sees_group or len(group.requests) == group.size:
                    self._queues[name].append(group.requests if sees_group else [request])
            self._changed.notify(len(request.weights))
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
            about = worker.start()
            with self._changed:
                self._about = about
                self._ready += 1
                self._changed.notify_all()
            chunks = dict.fromkeys(about, 1)
            while taken := self._take(chunks):
                name, calls = taken
                started = time.monotonic()
                self._grade(worker, name, calls, patience=about[name][1])
                # To wake up for every task costs more than a quick reward itself. Slow ones are taken one at a time,
                # so that no worker sits on tasks that others could take.
                quick = time.monotonic() - started < QUICK_SECONDS
                chunks[name] = min(2 * chunks[name], MAX_CHUNK) if quick else 1
        except Exception as error:  # noqa: BLE001 - whatever ends this thread must end the waiting for its answers
            self._finish(error)
        finally:
            worker.kill()

    def _take(self, chunks: Mapping[str, int]) -> tuple[str, deque[_Call]] | None:
        """Wait for completions and take the calls of the reward that waits longest; None once the pool has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._end or any(self._queues.values()))
            if self._end:
                return None
            name = min(filter(self._queues.get, self._queues), key=lambda name: self._queues[name][0][-1].number)
            queue, together = self._queues[name], self._about[name][0]
            share = math.ceil(len(queue) / (2 * len(self._workers)))
            size = min(MAX_CHUNK, len(queue)) if together else min(chunks[name], share)
            units = [queue.popleft() for _ in range(size)]
        if not together:
            return name, deque([unit] for unit in units)
        return name, deque(list(alike) for _, alike in groupby(units, key=lambda unit: unit[0].options))

    def _grade(self, worker: Worker, name: str, calls: deque[_Call], patience: float) -> None:
        """Have the worker make `calls`. If one ends it, or all its memory is taken, the rest goes back to the queue."""
        # One that died while it had nothing to do is replaced before a call could be blamed for it.
        if worker.is_dead():
            worker.start()
        sent = [(name, call[0][0].options, [[each.payload for each in unit] for unit in call]) for call in calls]
        worker.send(pickle.dumps(sent))
        while calls:
            kind, answers = worker.receive(patience)
            requests = list(chain(*calls.popleft()))
            if kind != "graded":
                answers = [(kind, answers + among(len(requests)))] * len(requests)
            for request, answer in zip(requests, answers, strict=True):
                self._answer(request, name, answer)
            if kind != "graded" or any(answer[0] == "memory" for answer in answers):
                with self._changed:
                    self._queues[name].extendleft(unit for call in reversed(calls) for unit in reversed(call))
                    self._changed.notify(len(calls))
                worker.start()
                return

    def _answer(self, request: _Request, name: str, answer: tuple[str, Any]) -> None:
        """Note what one reward gave; the last one of a completion completes its grade."""
        with self._changed:
            request.answers[name] = answer
            if len(request.answers) < len(request.weights) or self._end:
                return
            self._pending.remove(request)
        answers = [(name, *request.answers[name]) for name in request.weights]
        components = {name: result if kind == "ok" else 0.0 for name, kind, result in answers}
        total = sum(weight * (components[name] or 0.0) for name, weight in request.weights.items())
        failed = sorted(answer for answer in answers if answer[1] != "ok")
        weighed = [name for name, weight in request.weights.items() if weight] or list(components)
        if all(components[name] is None for name in weighed):
            failed.append((", ".join(weighed), "none applies", "returned None, and no other reward applies"))
        request.future.set_result(Grade(total, components, [Failure(*answer, request.completion) for answer in failed]))
