"""The pool: processes that environments run in, each of which can be killed at any time, and conversations with them.

A conversation stays in its process. One that is late costs its own conversation: its thread cannot be ended, so its
process takes no more of them, another takes its place, and it is killed when the others in it are done.
"""

import asyncio
import contextlib
import itertools
import json
import os
import pickle
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from environments.registry import EnvironmentsConfig, find
from environments.worker import GRACE
from rewards.worker import MAX_STDERR

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from environments.worker import serve; serve()"
START_SECONDS = 120


class Failed(Exception):
    """A call of an environment failed; kind: timeout, crash, memory, exception... gone: nothing more can be asked."""

    def __init__(self, kind: str, message: str, gone: bool = False) -> None:
        super().__init__(message)
        self.kind, self.gone = kind, gone


Answer = Future | asyncio.Future
"""(kind, result) to come; of a loop's future, the loop is woken."""


def _give(answers: list[tuple[Answer | None, tuple[str, Any]]]) -> None:
    """Set the results of all that still want one; those that a loop waits for in one turn of it."""
    waiting: dict[asyncio.AbstractEventLoop, list] = {}
    for answer, result in answers:
        if isinstance(answer, Future):
            answer.set_result(result)
        elif answer is not None:
            waiting.setdefault(answer.get_loop(), []).append((answer, result))

    def give(answers: list) -> None:
        for answer, result in answers:
            if not answer.done():
                answer.set_result(result)

    for loop, some in waiting.items():
        with contextlib.suppress(RuntimeError):  # it is closed: nobody waits
            loop.call_soon_threadsafe(give, some)


class Process:
    """One process, with a thread for each of its pipes, so that nobody waits for it who does not want to."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.folder = tempfile.mkdtemp(prefix="environment-")  # where its temporary files are, which end with it
        path = [*map(str, sys.path), str(Path(__file__).resolve().parent.parent)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", START, json.dumps(path)],
            env=os.environ | {"TMPDIR": self.folder},
            start_new_session=True,  # a group that can be killed with all that environments start
            **pipes,
        )
        self.conversations = 0
        self.retired = self.ending = False
        self.begun: set[str] = set()  # environments that have been reset here, and so have imported what they need
        self.closing: list[tuple[float, Future]] = []  # when each close() is late, and its answer
        self.ended = ""  # how, once it has
        self._said = ""
        self._lock = threading.Lock()
        self._numbers, self._answers = itertools.count(1), {0: Future()}
        self.ready: Future = self._answers[0]
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outbox.put(pickle.dumps(setup))
        self._threads = [threading.Thread(target=w, daemon=True) for w in (self._write, self._read, self._listen)]
        for thread in self._threads:
            thread.start()

    def ask(self, answer: Answer, conversation: int, name: str, what: str, *arguments: Any) -> None:
        """Have (kind, result) in `answer` when it comes; name: of the environment that the conversation is with."""
        with self._lock:
            ended, number = self.ended, next(self._numbers)
            if not ended:
                self._answers[number] = answer
        if ended:
            _give([(answer, ("crash", ended))])
        else:
            self._outbox.put(pickle.dumps((number, conversation, name, what, *arguments)))

    def end(self, patience: float) -> None:
        """Let it close its environments for up to `patience` seconds, and kill it with all that it started."""
        self._outbox.put(None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(patience)
        self.kill()
        for thread in self._threads:
            thread.join(1.0)

    def rest(self) -> None:
        """End it if it takes no more conversations and has none left."""
        if self.retired and not self.conversations and not self.ending:
            self.ending = True
            threading.Thread(target=self.end, args=[GRACE + 1], daemon=True).start()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def _write(self) -> None:
        with contextlib.suppress(OSError), self.popen.stdin:  # one that has ended reads no more
            while (message := self._outbox.get()) is not None:
                self.popen.stdin.write(message)
                if self._outbox.empty():  # many conversations often end their turns at once
                    self.popen.stdin.flush()

    def _read(self) -> None:
        begun = b""
        while data := self.popen.stdout.read1(1 << 16):
            *lines, begun = (begun + data).split(b"\n")
            try:
                said = {number: (kind, result) for number, kind, result in map(json.loads, lines)}
            except (ValueError, TypeError):  # an environment wrote where its process answers
                break
            with self._lock:
                given = [(self._answers.pop(number, None), result) for number, result in said.items()]
            # All at once: a loop that is woken for each would send each one's next turn to the engine alone.
            _give(given)
        with contextlib.suppress(subprocess.TimeoutExpired):  # its stdout closes a moment before it has exited
            self.popen.wait(1.0)
        self.kill()
        code = self.popen.wait()
        self._threads[2].join(1.0)  # longer only where what an environment started has left the group
        how = f"exited with code {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"
        with self._lock:
            self.ended = f"its process {how}; stderr: {self._said.strip() or 'empty'}"
            lost, self._answers = self._answers, {}
        _give([(answer, ("crash", self.ended)) for answer in lost.values()])
        self._outbox.put(None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _listen(self) -> None:
        while data := self.popen.stderr.read1(1 << 16):
            text = data.decode(errors="replace")
            self._said = (self._said + text)[-MAX_STDERR:]
            sys.stderr.write(text)


def rehearse(config: EnvironmentsConfig, rows: Mapping[str, dict[str, Any]]) -> None:
    """Begin a conversation with each environment, name -> row, and end it; ValueError for one that cannot begin."""

    async def begin(pool: EnvironmentPool) -> None:
        for name, row in rows.items():
            session = pool.open(name)
            try:
                await session.reset(row)
            except Failed as failure:
                said = (
                    f"Environment {name!r} cannot begin with the first row that is for it ({failure.kind}: {failure})"
                )
                raise ValueError(f"{said}: mend the environment, environments.options or the data.") from failure
            finally:
                session.close()

    with EnvironmentPool(replace(config, processes=1)) as pool:
        asyncio.run(begin(pool))


class EnvironmentPool(contextlib.AbstractContextManager):
    """Processes that run the environments of `config`, which must be valid."""

    def __init__(self, config: EnvironmentsConfig) -> None:
        """Start the processes and wait until each has imported the environments; RuntimeError if one cannot."""
        self.config = config
        self._setup = {
            "files": [os.path.abspath(os.path.expanduser(file)) for file in config.files],
            "options": {name: dict(options) for name, options in config.options.items()},
            "memory_megabytes": config.memory_megabytes,
            "seconds": config.timeout_seconds,
            "most_text": 32 * config.max_observation_tokens,  # characters: no tokenizer makes so few tokens of more
        }
        self._numbers = itertools.count(1)
        self._processes = [Process(self._setup) for _ in range(config.processes)]
        for process in self._processes:
            try:
                kind, why = process.ready.result(START_SECONDS)
            except TimeoutError:
                kind, why = "timeout", f"not ready after {START_SECONDS} seconds"
            if kind != "ok":
                self.close()
                raise RuntimeError(f"A process for environments could not be started: {why}")

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all conversations and their processes. A second time does nothing."""
        processes, self._processes = self._processes, []
        ends = [threading.Thread(target=process.end, args=[GRACE + 1]) for process in processes]
        for thread in ends:
            thread.start()
        for thread in ends:
            thread.join()

    def open(self, name: str) -> "Session":
        """A new conversation with the environment `name`; call its `close` whatever happens."""
        for process in self._processes:
            process.closing = [(late, answer) for late, answer in process.closing if not answer.done()]
            process.retired |= any(late < time.monotonic() for late, _ in process.closing)
            process.rest()
        taking = [process for process in self._processes if not process.retired and not process.ended]
        while len(taking) < self.config.processes:
            taking.append(Process(self._setup))
            self._processes.append(taking[-1])
        self._processes = [process for process in self._processes if not process.ended]
        process = min(taking, key=lambda process: process.conversations)
        process.conversations += 1
        return Session(process, next(self._numbers), name, find(name).seconds or self.config.timeout_seconds)


@dataclass
class Session:
    """A conversation with an environment. Its methods raise Failed, and belong to one thread."""

    process: Process
    number: int
    name: str
    seconds: float  # limit of each call
    waited: float = 0.0  # seconds
    gone: bool = False

    async def reset(self, row: dict[str, Any]) -> str | list[dict] | None:
        said = await self._ask("reset", row)
        self.process.begun.add(self.name)
        return said

    async def step(self, text: str) -> tuple[str | list[dict], float, bool]:
        """(observation, reward, done)."""
        return await self._ask("step", text)

    async def tools(self, calls: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
        """("ok", what came back) of each call (name, arguments), or (kind of failure, message), in their order."""
        answers = await self._ask("tools", calls)
        if any(kind == "memory" for kind, _ in answers):
            self.process.retired = self.gone = True
        return answers

    async def reward(self) -> float | None:
        return await self._ask("reward")

    def close(self) -> None:
        """Have the environment closed, and do not wait for it. A second time does nothing."""
        if self.number:
            answer: Future = Future()
            self.process.ask(answer, self.number, self.name, "close")
            self.process.closing.append((time.monotonic() + self.seconds, answer))
            self.process.conversations -= 1
            self.number, self.gone = 0, True
            self.process.rest()

    async def _ask(self, what: str, *arguments: Any) -> Any:
        if self.gone:
            raise Failed("gone", "the environment has ended", gone=True)
        loop = asyncio.get_running_loop()
        begun, answer = loop.time(), loop.create_future()
        self.process.ask(answer, self.number, self.name, what, *arguments)
        # The first conversations of a process begin before it has imported what they need.
        limit = self.seconds if self.name in self.process.begun else START_SECONDS
        late = loop.call_later(limit, _give, [(answer, ("timeout", f"{what} took longer than {limit:g} seconds"))])
        try:
            kind, result = await answer
        finally:
            late.cancel()
            self.waited += loop.time() - begun
        if kind == "ok":
            return result
        # What is left after it ran out of memory is not to be trusted.
        self.process.retired |= kind in ("memory", "timeout")
        self.gone = kind in ("crash", "memory", "timeout")
        raise Failed(kind, result, self.gone)
