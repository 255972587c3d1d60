"""SGLang on the devices that also train: `sglang.Engine` behind the engine protocol.

The first rank of each inference tensor-parallel group leads it: it owns the engine, which runs in processes of its
own on the GPUs of the whole group. Weights reach it in buckets, from every rank of the group on its own device; token
ids go in, token ids and log-probabilities come out. SGLang takes an unknown weight for a success, ends its owner's
process when a shape is wrong, and waits without an end: names, shapes and answers are checked here, every wait is
watched, and a failure is an EngineFailure with the engine's last words.
"""

import asyncio
import inspect
import json
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from grpo.config import ConfigError, nearest
from workers.engines.protocol import (
    CUDA_GRAPH,
    KV_CACHE,
    WEIGHTS,
    Bucket,
    EngineFailure,
    Response,
    Sampling,
    checked,
)
from workers.engines.sglang_hooks import (
    ANSWER_BYTES,
    LOG,
    BarStops,
    compare,
    engine_name,
    read_answer,
    run_scheduler,
    tell_names,
)
from workers.parallel.mesh import InferenceLayout
from workers.parallel.policy import ModelConfig, compute_dtype, local_folder, read_config
from workers.rollout import RolloutConfig

FIRST, BEYOND = (0, 5, 17), (0, 5, 22)
INSTALL = "pip install -e '.[sglang]'"
START_SECONDS = 600
"""A first start compiles kernels and captures graphs."""
REPORT_TOKENS = 256
QUESTIONS = {question: f"{question.__module__}.{question.__name__}" for question in (tell_names, compare)}

OWNED = ("model_path", "tokenizer_path", "device", "dtype", "base_gpu_id", "tp_size", "random_seed", "load_format")
OWNED += ("custom_weight_loader", "skip_tokenizer_init", "enable_memory_saver", "mem_fraction_static")
OWNED += ("max_running_requests", "enable_custom_logit_processor")
"""SGLang's options that the trainer decides, from the settings of its own that they belong to."""


def check_sglang(options: Mapping[str, Any]) -> None:
    """Raise ConfigError where SGLang is missing, of a version that was not tried, or does not know one of `options`."""
    try:
        installed = version("sglang")
    except PackageNotFoundError as error:
        raise ConfigError(f"rollout.engine=sglang needs SGLang, which is not installed: use {INSTALL}.") from error
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:3] if part.isdigit())
    if not FIRST <= numbers < BEYOND:
        first, beyond = (".".join(map(str, edge)) for edge in (FIRST, BEYOND))
        raise ConfigError(
            f"SGLang {installed} is installed, and {first} up to, but not, {beyond} are supported: use {INSTALL}."
        )
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise ConfigError(
            "PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, with which memory cannot be shared with SGLang: "
            "leave it out."
        )
    if not options:
        return
    from sglang.srt.server_args import ServerArgs

    known = [name for name in inspect.signature(ServerArgs).parameters if name not in OWNED]
    for name in options:
        if name in OWNED:
            raise ConfigError(f"rollout.sglang.{name} is decided by the trainer: leave it out.")
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else "see python -m sglang.launch_server --help."
            raise ConfigError(f"rollout.sglang.{name} is not an option of SGLang {installed}: {hint}")


class SGLangEngine:
    """`sglang.Engine` on the ranks of one tensor-parallel group of `layout`; its weights are garbage until an update.

    SGLang draws its samples in whatever order requests meet in its batches, so `Sampling.seed` decides nothing by
    itself; with `sglang={"enable_deterministic_inference": True}` it decides each sample alone. SGLang also stops at
    the end-of-sequence ids of the model's configuration, unless there is no stop id at all.

    config: its options, how many samples it works on at once, its share of the memory, and the longest silence after
    which a working engine is given up. log: receives what SGLang's processes print.
    """

    def __init__(
        self, model: ModelConfig, config: RolloutConfig, layout: InferenceLayout, seed: int, log: Path | None = None
    ) -> None:
        self.layout, self.stall_seconds = layout, config.stall_seconds
        self.concurrent_samples = config.concurrent_samples
        self.dtype = compute_dtype(model, layout.device)
        with torch.device("meta"):
            wanted = transformers.AutoModelForCausalLM.from_config(read_config(model))
        self.shapes = {name: parameter.shape for name, parameter in wanted.named_parameters()}
        self.holds_weights = False
        self.asleep: set[str] = set()
        self.awake = False
        self.freed = 0
        self.deterministic = bool(config.sglang.get("enable_deterministic_inference"))
        self.group = layout.tp_group
        if layout.device.type == "cpu":
            # An engine's processes take tensors of the host from ranks that have the key they were started with, and
            # a rank keeps the one it first shared a tensor with.
            key = [bytes(multiprocessing.current_process().authkey)]
            dist.broadcast_object_list(key)
            multiprocessing.current_process().authkey = key[0]
        self.names_agree = self.dead = False
        self.engine = None
        self.processes: list[Any] = []
        self.others: set[Any] | None = None  # the children beside a start that is not over
        if layout.tp_rank == 0:
            self.log = log or Path(tempfile.mkstemp(prefix="sglang-", suffix=".log")[1])
            self._lead(model, config, seed)
        else:
            import sglang.srt.managers.io_struct  # takes seconds, in which the others start the engine
            import sglang.srt.utils  # noqa: F401
        self.sleep((KV_CACHE, WEIGHTS))

    def _lead(self, model: ModelConfig, config: RolloutConfig, seed: int) -> None:
        """Start the engine, and the thread that talks to it."""
        layout = self.layout
        cuda = layout.device.type == "cuda"
        arguments: dict[str, Any] = {
            "log_level": "error",
            # Samples of one prompt share its prefix; decoding graphs up to what runs at once, and none for prefilling,
            # which cost more at the start than they save.
            "cuda_graph_bs_decode": _graph_sizes(self.concurrent_samples),
            "disable_prefill_cuda_graph": True,
        }
        if not cuda:
            arguments = {
                "log_level": "error",
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "grammar_backend": "none",
                "disable_cuda_graph": True,
                "max_total_tokens": 2**16,
            }
        arguments |= dict(config.sglang) | {
            "model_path": local_folder(model.path),
            "load_format": "dummy",
            "custom_weight_loader": list(QUESTIONS.values()),
            "skip_tokenizer_init": True,
            "device": layout.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "tp_size": layout.tp_size,
            "random_seed": seed,
            "mem_fraction_static": config.memory_fraction,
            "enable_custom_logit_processor": config.min_response_tokens > 0,
            "max_running_requests": self.concurrent_samples,
        }
        if cuda:
            arguments |= {"enable_memory_saver": True, "base_gpu_id": layout.device.index or 0}
        # A thread of its own, since SGLang waits in its own event loop without an end, and takes over the signals of
        # the main thread: what happens there can be watched from here.
        self.requests: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._work, name="sglang", daemon=True).start()
        # One of SGLang's processes that fails sends this, whose default would end the trainer without a word.
        signal.signal(signal.SIGQUIT, lambda *_: None)
        environment = {LOG: str(self.log), "SGLANG_MEMORY_SAVER_CUDA_GRAPH": str(int(config.release == "all"))}
        if not cuda:
            # Compiling a kernel on the first request would take longer than all requests of a tiny model.
            environment["TORCHDYNAMO_DISABLE"] = "1"
        if not cuda and layout.tp_size > 1 and "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ:
            cores = sorted(os.sched_getaffinity(0))
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
                str(cores[slice_ % len(cores)]) for slice_ in range(layout.tp_size)
            )
        with _environment(environment), _no_main_module():
            self._ask("start", lambda: self._start(arguments), START_SECONDS)
        if config.min_response_tokens:
            import dill

            self.bar_stops = json.dumps({"callable": dill.dumps(BarStops).hex()})
        # From 0.5.21 on, SGLang takes weights inside an update session alone; before, it has none.
        self.has_sessions = hasattr(self.engine, "begin_weight_update")

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

    # --- the engine's thread, and waiting for it -------------------------------------------------------------------

    def _work(self) -> None:
        while (request := self.requests.get()) is not None:
            future, function = request
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                future.set_exception(error)

    def _ask(self, what: str, function: Callable[[], Any], seconds: float | None = None) -> Any:
        """What `function` returns in the engine's thread; an EngineFailure naming `what` where the engine cannot.

        `seconds`: the longest wait, stall_seconds where it is None.
        """
        if self.dead:
            raise EngineFailure(f"SGLang's {what} is not possible: the engine was given up before.")
        future: Future = Future()
        self.requests.put((future, function))
        begun, limit = time.monotonic(), seconds or self.stall_seconds
        while not future.done():
            try:
                future.exception(timeout=0.5)
            except TimeoutError:
                self._expect_alive(what)
                if time.monotonic() - begun > limit:
                    raise self._failure(what, f"did not answer within {limit:g} s") from None
        try:
            answer = future.result()
        except Exception as error:
            raise self._failure(what, f"failed: {error}") from error
        if isinstance(answer, tuple) and answer and answer[0] is False:
            raise self._failure(what, f"was refused: {answer[1]}", alive=True)
        return answer

    def _expect_alive(self, what: str) -> None:
        dead = [process for process in self.processes if not process.is_alive()]
        if dead:
            raise self._failure(what, f"failed: its process ended with exit code {dead[0].exitcode}")

    def _failure(self, what: str, how: str, alive: bool = False) -> EngineFailure:
        words = self.log.read_text(errors="replace").strip().splitlines()[-30:] if self.log.exists() else []
        if not alive:
            self.holds_weights, self.awake, self.dead = False, False, True
            self.kill()
        last = "\n".join(f"  | {line}" for line in words) or "  | (none)"
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
        if self.processes:
            self.requests.put((Future(), self._end_loop))
            self.requests.put(None)
            self.kill()

    def _end_loop(self) -> None:
        loop = self.engine.loop
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    # --- memory ----------------------------------------------------------------------------------------------------

    def sleep(self, release: Collection[str]) -> None:
        if self.dead:
            return  # the other ranks of the group, which wait for an answer, would not take part
        self.awake = False
        tags = [tag for tag in (KV_CACHE, WEIGHTS, CUDA_GRAPH) if tag in release and tag not in self.asleep]
        self.asleep.update(tags)
        if WEIGHTS in tags:
            self.holds_weights = False
        free = self._free()
        if self.processes:
            self._ask("flush of its cache", self._flush)
            if tags:
                self._ask("release of its memory", lambda: self.engine.release_memory_occupation(tags=tags))
        self._together()
        self.freed = self._free() - free

    def _flush(self) -> None:
        # What it still does just after the last answer counts as work, and a working engine neither flushes nor sleeps.
        for _ in range(int(self.stall_seconds * 100)):
            if self.engine.flush_cache().success:
                return
            time.sleep(0.01)
        raise TimeoutError("it is never idle")

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self.layout.device)[0] if self.layout.device.type == "cuda" else 0

    def _together(self) -> None:
        """Wait for the other ranks of the group."""
        if self.group is not None:
            dist.all_reduce(torch.zeros(1), group=self.group)  # on the CPU

    def wake_weights(self) -> None:
        self._resume(WEIGHTS)

    def wake(self) -> None:
        self._resume(CUDA_GRAPH)
        self._resume(KV_CACHE)
        self.awake = True

    def _resume(self, tag: str) -> None:
        if tag in self.asleep:
            self.asleep.remove(tag)
            if self.engine is not None:
                self._ask(f"wake-up of its {tag}", lambda: self.engine.resume_memory_occupation(tags=[tag]))
            self._together()

    # --- weights ---------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Bucket]) -> None:
        self.holds_weights = False
        if not self.names_agree:
            self._check_names()
        with self._session():
            for bucket in checked(buckets, self.shapes):
                self._send({"flattened_tensor": bucket.flat.view(torch.uint8), "metadata": _metadata(bucket)})
        self.holds_weights = True

    def verify(self, buckets: Iterable[Bucket]) -> None:
        totals: dict[str, list[int]] = {}
        with self._session():
            for bucket in checked(buckets, self.shapes):
                for name, (elements, sent, different) in self._question(compare, list(bucket.items())).items():
                    total = totals.setdefault(name, [elements, 0, 0])
                    total[1] += sent
                    total[2] += different
        wrong = {name: total for name, total in totals.items() if total[1] != total[0] or total[2]}
        if wrong:
            name, (elements, sent, different) = min(wrong.items())
            raise RuntimeError(
                f"The engine's weights are not the actor's: {len(wrong)} of its {len(totals)} parameters differ, "
                f"{name!r} in {different} of {elements} elements ({elements - sent} were not sent to it)."
            )

    def _check_names(self) -> None:
        """Raise EngineFailure where the engine's model has other weights than its configuration says."""
        with self._session():
            held = set(self._question(tell_names, []))
        known = {engine_name(name) for name in self.shapes}
        if held != known:
            raise EngineFailure(
                f"SGLang's model and the trainer's do not have the same weights: they differ in {min(held ^ known)!r}."
            )
        self.names_agree = True

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Where SGLang takes weights, and nothing else."""
        if self.engine is None or not self.has_sessions:
            yield
            return
        self._ask("opening of a weight update", self.engine.begin_weight_update)
        try:
            yield
        finally:
            if self.processes:
                self._ask("end of a weight update", self.engine.end_weight_update)

    def _question(self, question: Callable, weights: list[tuple[str, torch.Tensor]]) -> Any:
        """What the function `question` of sglang_hooks answers about the model of this rank's engine process."""
        answer = torch.zeros(ANSWER_BYTES, dtype=torch.uint8, device=self.layout.device)
        self._send([*weights, ("answer", answer)], QUESTIONS[question])
        return read_answer(answer)

    def _send(self, content: Any, load_format: str = "flattened_bucket") -> None:
        """Hand tensors that lie on this rank's device to the engine's process there; back when they are read."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        if self.layout.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the other process reads on a stream of its own
        payload = MultiprocessingSerializer.serialize(content)
        payloads = [payload]
        if self.group is not None:
            payloads = [b""] * self.layout.tp_size if self.layout.tp_rank == 0 else None
            dist.gather_object(payload, payloads, group=self.group, group_dst=0)
        if self.engine is not None:
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payloads, load_format=load_format, flush_cache=False
            )
            manager, loop = self.engine.tokenizer_manager, self.engine.loop
            self._ask(
                "weight update", lambda: loop.run_until_complete(manager.update_weights_from_tensor(request, None))
            )
        self._together()  # nobody overwrites what is being read

    # --- sampling --------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Iterable[tuple[int, list[int]]], samples: int, sampling: Sampling
    ) -> Iterator[tuple[int, list[Response]]]:
        if not self.awake:
            raise RuntimeError("The engine is asleep: it serves inside `with sharding.serving()` alone.")
        if not self.holds_weights:
            raise RuntimeError("The engine has no weights: they arrive with `with sharding.serving()`.")
        finished: queue.SimpleQueue = queue.SimpleQueue()
        coroutine = self._serve(iter(prompts), samples, sampling, finished.put)
        future: Future = Future()
        self.requests.put((future, lambda: self.engine.loop.run_until_complete(coroutine)))
        future.add_done_callback(lambda _: finished.put(None))
        begun = time.time()
        while True:
            try:
                item = finished.get(timeout=0.5)
            except queue.Empty:
                self._expect_alive("generation")
                # SGLang reports every REPORT_TOKENS tokens of every sample.
                if time.time() - max(begun, self.engine.tokenizer_manager.last_receive_tstamp) > self.stall_seconds:
                    raise self._failure("generation", f"has been silent for {self.stall_seconds:g} s") from None
                continue
            if item is None:
                break
            yield item
        if error := future.exception():
            raise self._failure("generation", f"failed: {error}") from error

    async def _serve(
        self,
        prompts: Iterator[tuple[int, list[int]]],
        samples: int,
        sampling: Sampling,
        hand_over: Callable[[tuple[int, list[Response]]], None],
    ) -> None:
        """Keep as many prompts at work as there is room for, until there are none left."""
        room = free = max(1, self.concurrent_samples // samples)
        answers: asyncio.Queue = asyncio.Queue()
        waves: set[asyncio.Task] = set()
        while True:
            if wave := list(islice(prompts, free)):
                free -= len(wave)
                waves.add(asyncio.create_task(self._wave(wave, samples, sampling, answers)))
            if free == room:
                return
            done = [await answers.get()]
            while not answers.empty():
                done.append(answers.get_nowait())
            for answer in done:
                if isinstance(answer, Exception):
                    raise answer
                hand_over(answer)
            free += len(done)

    async def _wave(
        self, wave: list[tuple[int, list[int]]], samples: int, sampling: Sampling, answers: asyncio.Queue
    ) -> None:
        """Put the responses to each (index, prompt) into `answers` when it has all, or the exception that ended it.

        All samples go to SGLang in one message: what comes one by one makes it begin anew each time, while those that
        run wait.
        """
        try:
            if samples > 1:  # the samples find their prompt in the prefix cache
                prompts = [prompt for _, prompt in wave]
                await self.engine.async_generate(input_ids=prompts, sampling_params={"max_new_tokens": 0})
            outputs = await self.engine.async_generate(
                input_ids=[prompt for _, prompt in wave for _ in range(samples)],
                sampling_params=[self._parameters(index, i, sampling) for index, _ in wave for i in range(samples)],
                return_logprob=True,
                stream=True,
                custom_logit_processor=self.bar_stops if sampling.stop and sampling.min_new_tokens else None,
            )
            responses: list[list[Response | None]] = [[None] * samples for _ in wave]
            async for output in outputs:
                if output["meta_info"]["finish_reason"] is None:
                    continue
                place, sample = divmod(output["index"], samples)
                responses[place][sample] = _response(output, sampling.stop)
                if None not in responses[place]:
                    answers.put_nowait((wave[place][0], responses[place]))
        except Exception as error:  # noqa: BLE001 - raised where the answers are taken
            answers.put_nowait(error)

    def _parameters(self, index: int, sample: int, sampling: Sampling) -> dict[str, Any]:
        """What SGLang is told of one sample of prompt `index`."""
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": not sampling.stop,
            "stream_interval": REPORT_TOKENS,
        }
        if sampling.stop and sampling.min_new_tokens:
            parameters["custom_params"] = {"minimum": sampling.min_new_tokens, "stop": list(sampling.stop)}
        if self.deterministic:
            parameters["sampling_seed"] = hash((sampling.seed, index, sample)) % 2**31
        return parameters


def _graph_sizes(most: int) -> list[int]:
    """Numbers of samples that decoding has a CUDA graph for: about four from one doubling to the next, up to `most`.

    SGLang's own list has three times as many, and each of them takes a third of a second or more at the start.
    """
    sizes, size = [1, 2, 4], 8
    while size < most:
        sizes += [size, size * 5 // 4, size * 3 // 2, size * 7 // 4] if size >= 64 else [size, size * 3 // 2]
        size *= 2
    return [*(size for size in sizes if size < most), most]


def _response(output: Mapping[str, Any], stop: Collection[int]) -> Response:
    meta = output["meta_info"]
    reason = meta["finish_reason"]
    if reason["type"] not in ("stop", "length"):
        raise RuntimeError(f"a response ended with {reason}")
    logprobs, tokens, *_ = zip(*meta["output_token_logprobs"], strict=True)
    # A stop token at the last place counts as reached length in some versions.
    return Response(list(tokens), list(logprobs), reason["type"] == "length" and tokens[-1] not in stop)


def _metadata(bucket: Bucket) -> list[Any]:
    """Where each weight lies in the bytes of `bucket.flat`, in SGLang's words."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata, end = [], 0
    for name, shape in bucket.shapes.items():
        begin, size = end, shape.numel() * bucket.flat.element_size()
        end = begin + size
        metadata.append(FlattenedTensorMetadata(name, shape, bucket.flat.dtype, begin, end, size))
    return metadata


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """`more` environment variables for what is started inside, none of whose own changes stay."""
    before = dict(os.environ)
    os.environ.update(more)
    # SGLang's processes would take torchrun's store for their own.
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Spawned processes would import the whole program again, which they do not need."""
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
