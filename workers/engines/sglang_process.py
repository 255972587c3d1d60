"""Supervision: SGLang's engine is started in a thread of its own, and watched from the thread that waits for it.

SGLang waits without an end, and takes over the signals of the main thread. So every wait for it is bounded here, and a
failure is an EngineFailure with the engine's last words.
"""

import asyncio
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from workers.engines.config import RolloutConfig
from workers.engines.protocol import EngineFailure, T
from workers.engines.sglang_hooks import run_scheduler
from workers.parallel.mesh import InferenceLayout

START_SECONDS = 600
"""A first start compiles kernels and captures graphs."""

REPORT_TOKENS = 256
"""After how many tokens SGLang tells of a sample that has not ended."""


class SGLangError(Exception):
    """Raised inside a coroutine of `EngineProcess.run` by what SGLang raised there."""


class EngineProcess:
    """`engine`, a `sglang.Engine`. stall_seconds: the longest silence; log: what its processes print."""

    def __init__(self, stall_seconds: float, log: Path) -> None:
        self.stall_seconds, self.log = stall_seconds, log
        self.engine: Any = None
        self.processes: list[Any] = []
        self.others: set[Any] | None = None  # the children beside a start that is not over
        self.dead = False
        self._work: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="sglang", daemon=True).start()
        # One of SGLang's processes that fails sends this, whose default would end the trainer without a word.
        signal.signal(signal.SIGQUIT, lambda *_: None)

    def start(self, arguments: Mapping[str, Any]) -> None:
        """Start the engine; raises EngineFailure where that fails or takes longer than START_SECONDS."""
        self.ask("start", lambda: self._start(arguments), START_SECONDS)

    def _start(self, arguments: Mapping[str, Any]) -> None:
        from sglang.srt.entrypoints.engine import Engine

        class QuietEngine(Engine):
            run_scheduler_process_func = staticmethod(run_scheduler)

            @classmethod
            def _launch_detokenizer_subprocesses(cls, *_: Any, **__: Any) -> tuple[list, list]:
                return [], []  # token ids come out: a detokenizer would only take memory

            # What SGLang does when the trainer's process ends: its own would kill all children, whoever started them.
            shutdown = staticmethod(self.kill)

        self.others = set(multiprocessing.active_children())
        try:
            self.engine = QuietEngine(**arguments)
        finally:
            self._find_processes()
            self.others = None

    def _find_processes(self) -> None:
        """Keep hold of the processes that the start made so far; when it is over, of what it made."""
        if self.others is not None:
            self.processes = [child for child in multiprocessing.active_children() if child not in self.others]

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            future, function = work
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                future.set_exception(error)

    def ask(self, what: str, function: Callable[[], Any], seconds: float | None = None) -> Any:
        """What `function` returns in the engine's thread within `seconds`; an EngineFailure naming `what` where not."""
        begun, limit = time.monotonic(), seconds or self.stall_seconds

        def watch() -> None:
            if time.monotonic() - begun > limit:
                raise self.failure(what, f"did not answer within {limit:g} s")

        try:
            answer = self._wait(what, function, watch)
        except EngineFailure:
            raise
        except Exception as error:
            raise self.failure(what, f"failed: {error}") from error
        if isinstance(answer, tuple) and answer and answer[0] is False:
            raise self.failure(what, f"was refused: {answer[1]}", alive=True)
        return answer

    def run(self, work: Coroutine[Any, Any, T], asked: Callable[[], float | None]) -> T:
        """What `work` returns on SGLang's event loop.

        asked: when SGLang was last asked for something, on time.time's clock, None while it owes nothing. Raises
        EngineFailure for an engine that dies, falls silent or raises; what else `work` raises passes through.
        """

        def watch() -> None:
            last = self.engine.tokenizer_manager.last_receive_tstamp
            if (since := asked()) is not None and time.time() - max(since, last) > self.stall_seconds:
                raise self.failure("generation", f"has been silent for {self.stall_seconds:g} s")

        try:
            return self._wait("generation", lambda: self.engine.loop.run_until_complete(work), watch)
        except SGLangError as error:
            raise self.failure("generation", f"failed: {error}") from error

    def _wait(self, what: str, function: Callable[[], Any], watch: Callable[[], None]) -> Any:
        if self.dead:
            raise EngineFailure(f"SGLang's {what} is not possible: the engine was given up before.")
        future: Future = Future()
        self._work.put((future, function))
        while not future.done():
            try:
                future.exception(timeout=0.5)
            except TimeoutError:
                dead = [process for process in self.processes if not process.is_alive()]
                if dead:
                    raise self.failure(what, f"failed: its process ended with exit code {dead[0].exitcode}") from None
                watch()
        return future.result()

    def failure(self, what: str, how: str, alive: bool = False) -> EngineFailure:
        """The error to raise, after giving up the engine unless it is `alive`."""
        words = self.log.read_text(errors="replace").strip().splitlines()[-30:] if self.log.exists() else []
        if not alive:
            self.dead = True
            self.kill()
        last = "\n".join(f"  | {line}" for line in words) or "  | (none)"
        if any(sign in f"{how}\n{last}".lower() for sign in ("out of memory", "not enough memory", "mem-fraction")):
            last += "\nrollout.memory_fraction is its share of a GPU: lower it where the GPU is out of memory, "
            last += "raise it where SGLang says that this share is not enough."
        return EngineFailure(f"SGLang's {what} {how}. Its last words ({self.log}):\n{last}")

    def kill(self) -> None:
        """End SGLang's processes at once."""
        watchdog = getattr(getattr(self.engine, "tokenizer_manager", None), "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()  # it would cry wolf
        self._find_processes()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self.processes = []

    def shutdown(self) -> None:
        """End the engine and its thread."""
        if self.processes:
            self._work.put((Future(), self._end_loop))
            self._work.put(None)
            self.kill()

    def _end_loop(self) -> None:
        loop = self.engine.loop
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


PREFILL_TOKENS = [64, 128, 256, 512, 1024, 2048, 4096]
"""Sizes with a CUDA graph for prefilling, which SGLang fills up to twice: it takes them 6 s at the start."""


def make_arguments(
    config: RolloutConfig, layout: InferenceLayout, folder: str, dtype: torch.dtype, turns: bool = False
) -> dict[str, Any]:
    """SGLang's options for a model in `folder` whose weights are to come, the user's own of `config` among them.

    turns: samples are to go on after what others say, each time by a short prefill.
    """
    cuda = layout.device.type == "cuda"
    if cuda:
        arguments: dict[str, Any] = {
            # Decoding graphs up to what runs at once, and few or none for prefilling, which cost more at the start than
            # they save: the samples of one prompt share its prefix.
            "cuda_graph_bs_decode": graph_sizes(config.concurrent_samples),
            "disable_prefill_cuda_graph": not turns,
            "cuda_graph_bs_prefill": PREFILL_TOKENS,
        }
    else:
        arguments = {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "max_total_tokens": 2**16,
        }
    arguments |= {"log_level": "error"} | dict(config.sglang)
    arguments |= {
        "model_path": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": layout.device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "tp_size": layout.tp_size,
        "mem_fraction_static": config.memory_fraction,
        "max_running_requests": config.concurrent_samples,
    }
    if cuda:
        arguments |= {"enable_memory_saver": True, "base_gpu_id": layout.device.index or 0}
    return arguments


def graph_sizes(most: int) -> list[int]:
    """Batch sizes with a CUDA graph, up to `most`: each takes a third of a second, so a third of SGLang's own."""
    sizes, size = [1, 2, 4], 8
    while size < most:
        sizes += [size, size * 5 // 4, size * 3 // 2, size * 7 // 4] if size >= 64 else [size, size * 3 // 2]
        size *= 2
    return [*(size for size in sizes if size < most), most]


@contextmanager
def start_environment(config: RolloutConfig, layout: InferenceLayout, more: Mapping[str, str]) -> Iterator[None]:
    """The environment that SGLang's processes are started in; none of the changes stays, nor any of SGLang's own."""
    before = dict(os.environ)
    os.environ.update(more)
    os.environ["SGLANG_FORCE_STREAM_INTERVAL"] = str(REPORT_TOKENS)
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = str(int(config.release == "all"))
    # SGLang's processes would take torchrun's store for their own.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    if layout.device.type == "cpu":
        # Compiling a kernel on the first request would take longer than all requests of a tiny model.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        if layout.tp_size > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
            cores = sorted(os.sched_getaffinity(0))
            binding = "|".join(str(cores[rank % len(cores)]) for rank in range(layout.tp_size))
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = binding
    # Spawned processes would import the whole program again, which they do not need.
    main = sys.modules["__main__"]
    spec, file = main.__spec__, getattr(main, "__file__", None)
    main.__spec__ = None
    if file is not None:
        del main.__file__
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file
        os.environ.clear()
        os.environ.update(before)
