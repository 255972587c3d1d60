"""What runs in a process of the pool: the environments of many conversations, each in a thread of its own.

The pool sends pickles over stdin, first the setup and then (number, conversation, name, what, *arguments); each is
answered with one line of JSON over stdout, [number, kind, result]: kind "ok", or that of a failure and a message. Calls
of one conversation are answered in the order they came, those of several side by side.
"""

import asyncio
import contextlib
import inspect
import json
import math
import numbers
import os
import pickle
import queue
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from environments import registry
from rewards.worker import MAX_MESSAGE, enter

GRACE = 5.0
"""Seconds that environments have for their close() when the pool ends, or the trainer is gone."""

MAX_MESSAGES = 64  # of what an environment says at once

STACK = 2**21  # bytes a thread: the system's 8 MiB would count as memory of a thousand conversations


class Refused(Exception):
    """An environment did what it must not; args: kind and message."""


class Server:
    """Takes calls and has them answered."""

    def __init__(self, setup: Mapping[str, Any], answer: Callable[[int, str, Any], None]) -> None:
        self.options, self.most_text, self.answer = setup["options"], setup["most_text"], answer
        self.loop = asyncio.new_event_loop()  # of all async methods, so that what they open stays open
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.conversations: dict[int, Conversation] = {}
        self.unclosed: set[Conversation] = set()

    def take(self, number: int, conversation: int, name: str, what: str, *arguments: Any) -> None:
        """Begin to answer one call, the first of a conversation with an environment of its own."""
        if conversation not in self.conversations:
            self.conversations[conversation] = Conversation(self, name)
        if what == "close":
            self.conversations.pop(conversation).end(number)
        else:
            self.conversations[conversation].take(number, what, arguments)

    def wait_for(self, result: Any) -> Any:
        """What a method returned, once awaited if it is async."""
        if inspect.isawaitable(result):

            async def awaited() -> Any:
                try:
                    return await result
                except (SystemExit, KeyboardInterrupt) as error:  # which would end the loop, that all share
                    raise RuntimeError(repr(error)) from error

            return asyncio.run_coroutine_threadsafe(awaited(), self.loop).result()
        return result

    def end(self) -> None:
        """Close all environments, and wait for that at most GRACE."""
        for conversation in self.conversations.values():
            conversation.end(0)
        deadline = time.monotonic() + GRACE
        while self.unclosed and time.monotonic() < deadline:
            time.sleep(0.01)


class Conversation:
    """One environment. Its thread makes it and asks it all, as libraries that belong to a thread want."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name, self.calls = server, name, queue.SimpleQueue()
        self.environment: Any = None
        self.taken = self.answered = 0
        server.unclosed.add(self)
        threading.Thread(target=self.run, daemon=True).start()

    def take(self, *call: Any) -> None:
        self.taken += 1
        self.calls.put(call)

    def run(self) -> None:
        while len(call := self.calls.get()) > 1:
            number, what, arguments = call
            try:
                kind, result = "ok", getattr(self, what)(*arguments)
            except BaseException as error:  # noqa: BLE001 - an environment is anybody's code, and this is its report
                kind, result = describe(error)
            self.answered += 1
            self.server.answer(number, kind, result)
        self.close(*call)

    def end(self, number: int) -> None:
        """Close the environment, in its thread unless that is in a call, from which it may never come back."""
        if self.answered < self.taken and self.environment is not None:
            threading.Thread(target=self.close, args=[number], daemon=True).start()
        self.calls.put((number,))

    def close(self, number: int) -> None:
        environment, self.environment = self.environment, None  # once
        if (close := getattr(environment, "close", None)) is not None:
            try:
                self.server.wait_for(close())
            except BaseException:  # noqa: BLE001 - as above; nobody is told
                traceback.print_exc()
        self.server.unclosed.discard(self)
        self.server.answer(number, "ok", None)

    def reset(self, row: dict) -> Any:
        """What it says first: None, text or messages."""
        known = registry.find(self.name)
        self.environment = known.make(**self.server.options.get(self.name, {}))
        if (reset := getattr(self.environment, "reset", None)) is None:
            return None
        said = self.server.wait_for(reset(row) if known.form == "text" else reset(**row))
        return None if said is None else self.text("reset", said)

    def step(self, text: str) -> tuple[Any, float, bool]:
        result = self.server.wait_for(self.environment.step(text))
        if not isinstance(result, tuple | list) or len(result) != 3:
            raise Refused("not a step", f"step returned {result!r:.200}, not (observation, reward, done)")
        observation, reward, done = result
        return self.text("step", observation or ""), number("step", reward), bool(done)

    def tools(self, calls: Sequence[tuple[str, dict]]) -> list[tuple[str, Any]]:
        """(kind, text) of each call, made side by side."""
        answers: list[tuple[str, Any]] = [("", "")] * len(calls)

        def make(place: int) -> None:
            name, arguments = calls[place]
            try:
                function = getattr(self.environment, name)
                try:
                    inspect.signature(function).bind(**arguments)
                except TypeError as error:
                    raise Refused("wrong arguments", f"{name}: {error}") from None
                result = self.server.wait_for(function(**arguments))
                answers[place] = "ok", self.text(name, result if isinstance(result, str) else json.dumps(result))
            except BaseException as error:  # noqa: BLE001 - as above
                answers[place] = describe(error)

        others = [threading.Thread(target=make, args=[place], daemon=True) for place in range(1, len(calls))]
        for thread in others:
            thread.start()
        make(0)
        for thread in others:
            thread.join()
        return answers

    def reward(self) -> float | None:
        if (get_reward := getattr(self.environment, "get_reward", None)) is None:
            return None
        return number("get_reward", self.server.wait_for(get_reward()))

    def text(self, what: str, said: Any) -> Any:
        """`said`, cut where it is longer than could be used."""
        if isinstance(said, str):
            return said[: self.server.most_text]
        if (
            isinstance(said, list)
            and said
            and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in said)
        ):
            said, most = said[:MAX_MESSAGES], self.server.most_text
            return [{"role": str(m["role"])[:MAX_MESSAGE], "content": str(m["content"])[:most]} for m in said]
        raise Refused("not text", f"{what} returned {said!r:.200}, neither text nor messages with role and content")


def number(what: str, value: Any) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise Refused("not a number", f"{what} gave the reward {value!r:.200}, which is not a finite number")
    return float(value)


def describe(error: BaseException) -> tuple[str, str]:
    """The kind of a failure, and what to say of it."""
    if isinstance(error, Refused):
        return error.args
    kind = "memory" if isinstance(error, MemoryError) else "exception"
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return kind, text[:MAX_MESSAGE]


def serve() -> None:
    """Read the setup, import the environments and answer; then answer calls until stdin closes."""
    tasks_from, answers_to, setup = enter(GRACE)
    lock = threading.Lock()

    def answer(number: int, kind: str, result: Any) -> None:
        line = json.dumps([number, kind, result])
        with lock:
            print(line, file=answers_to, flush=True)

    for file in setup["files"]:
        registry.load_file(file)
    limits = [registry.find(name).seconds or 0.0 for name in registry.names()]
    threading.Thread(target=_beat, args=[2 * max(setup["seconds"], *limits) + GRACE], daemon=True).start()
    threading.stack_size(STACK)
    server = Server(setup, answer)
    answer(0, "ok", None)
    with contextlib.suppress(EOFError):
        while True:
            server.take(*pickle.load(tasks_from))
    server.end()
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # whatever thread still hangs, and what environments started


def _beat(seconds: float) -> None:
    """Have the kernel end this process once no Python has run in it for `seconds`.

    C code that keeps the interpreter to itself stops all threads, also the one that ends this process with the trainer.
    """
    while True:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        time.sleep(1.0)
