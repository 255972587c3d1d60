"""SGLang on the devices that also train: `sglang.Engine` behind the engine protocol, its states and its memory.

The first rank of each inference tensor-parallel group leads it: it owns the engine, which runs in processes of its
own on the GPUs of the whole group. Weights reach it in buckets, from every rank of the group on its own device; token
ids go in, token ids and log-probabilities come out.
"""

import gc
import multiprocessing
import tempfile
import time
from collections.abc import Collection, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from workers.config import ModelConfig
from workers.engines.config import RolloutConfig
from workers.engines.protocol import CUDA_GRAPH, KV_CACHE, WEIGHTS, Bucket, Response, Sampling, T
from workers.engines.sglang_hooks import LOG, TOKENIZER
from workers.engines.sglang_process import EngineProcess, make_arguments, start_environment
from workers.engines.sglang_requests import Requests
from workers.engines.sglang_weights import QUESTIONS, WeightTransport, wait_for_peers
from workers.engines.stop import StopStrings
from workers.models import family_of
from workers.models.hub import compute_dtype, local_folder, read_config
from workers.parallel.mesh import InferenceLayout


class SGLangEngine:
    """`sglang.Engine` on the ranks of one tensor-parallel group of `layout`; its weights are garbage until an update.

    SGLang draws its samples in whatever order requests meet in its batches, so `Sampling.seed` decides nothing by
    itself; with `sglang={"enable_deterministic_inference": True}` it decides each sample alone. SGLang also stops at
    the end-of-sequence ids of the model's configuration, unless there is no stop id at all.

    log: receives what SGLang's processes print. turns: a sample goes on after what others say, again and again.
    """

    tokens_at_work = 0

    def __init__(
        self,
        model: ModelConfig,
        config: RolloutConfig,
        layout: InferenceLayout,
        seed: int,
        log: Path | None = None,
        turns: bool = False,
    ) -> None:
        self.stops, self.layout, self.concurrent_samples = StopStrings(model), layout, config.concurrent_samples
        self.dtype = compute_dtype(model, layout.device)
        hf_config = read_config(model)
        with torch.device("meta"):
            wanted = transformers.AutoModelForCausalLM.from_config(hf_config)
        self.shapes = {name: parameter.shape for name, parameter in wanted.named_parameters()}
        self.holds_weights = self.awake = False
        self.asleep: set[str] = set()
        self.freed = 0
        if layout.device.type == "cpu":
            # An engine's processes take tensors of the host from ranks that have the key they were started with, and
            # a rank keeps the one it first shared a tensor with.
            key = [bytes(multiprocessing.current_process().authkey)]
            dist.broadcast_object_list(key)
            multiprocessing.current_process().authkey = key[0]
        self.process: EngineProcess | None = None  # on the rank that leads
        if layout.tp_rank == 0:
            log = log or Path(tempfile.mkstemp(prefix="sglang-", suffix=".log")[1])
            self.process = EngineProcess(config.stall_seconds, log)
            arguments = make_arguments(config, layout, local_folder(model.path), self.dtype, turns)
            stops = {TOKENIZER: model.path} if config.stop else {}
            with start_environment(config, layout, {LOG: str(log)} | stops):
                self.process.start(arguments | {"random_seed": seed, "custom_weight_loader": list(QUESTIONS.values())})
            deterministic = bool(config.sglang.get("enable_deterministic_inference"))
            self.requests = Requests(self.process.engine, deterministic)
            # What was imported stays, here and in SGLang's processes: a collection that looks through it holds up all
            # requests for 0.1 s and more.
            gc.collect()
            self.process.ask("freeze of what it imported", self.process.engine.freeze_gc)
        else:
            import sglang.srt.managers.io_struct  # takes seconds, in which the others start the engine
            import sglang.srt.utils  # noqa: F401
        self.transport = WeightTransport(layout, self.process, self.shapes, family_of(hf_config))
        self.sleep((KV_CACHE, WEIGHTS))

    def shutdown(self) -> None:
        if self.process is not None:
            self.process.shutdown()

    # --- memory ----------------------------------------------------------------------------------------------------

    def sleep(self, release: Collection[str]) -> None:
        self.awake = False
        if self.process is not None and self.process.dead:
            self.holds_weights = False
            return  # the other ranks of the group, which wait for an answer, would not take part
        tags = [tag for tag in (KV_CACHE, WEIGHTS, CUDA_GRAPH) if tag in release and tag not in self.asleep]
        self.asleep.update(tags)
        if WEIGHTS in tags:
            self.holds_weights = False
        free = self._free()
        if self.process is not None and self.process.processes:
            engine = self.process.engine
            self.process.ask("flush of its cache", lambda: _flush(engine, self.process.stall_seconds))
            if tags:
                self.process.ask("release of its memory", lambda: engine.release_memory_occupation(tags=tags))
        wait_for_peers(self.layout)
        self.freed = self._free() - free

    def _free(self) -> int:
        return torch.cuda.mem_get_info(self.layout.device)[0] if self.layout.device.type == "cuda" else 0

    def wake_weights(self) -> None:
        self._resume(WEIGHTS)

    def wake(self) -> None:
        self._resume(CUDA_GRAPH)
        self._resume(KV_CACHE)
        self.awake = True

    def _resume(self, tag: str) -> None:
        if tag in self.asleep:
            self.asleep.remove(tag)
            if self.process is not None:
                engine = self.process.engine
                self.process.ask(f"wake-up of its {tag}", lambda: engine.resume_memory_occupation(tags=[tag]))
            wait_for_peers(self.layout)

    # --- weights ---------------------------------------------------------------------------------------------------

    def update_weights(self, buckets: Iterable[Bucket]) -> None:
        self.holds_weights = False
        self.transport.update(buckets)
        self.holds_weights = True

    def verify(self, buckets: Iterable[Bucket]) -> None:
        self.transport.verify(buckets)

    # --- sampling --------------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self.awake or not self.holds_weights:
            work.close()
            if not self.awake:
                raise RuntimeError("The engine is asleep: it serves inside `with sharding.serving()` alone.")
            raise RuntimeError("The engine has no weights: they arrive with `with sharding.serving()`.")
        return self.process.run(work, self.requests.asked)

    async def sample(self, tokens: Sequence[int] | np.ndarray, sampling: Sampling) -> Response:
        response = await self.requests.sample(tokens, sampling)
        # Whatever SGLang did, it ends where the embedded engine's does.
        return self.stops.cut(response, sampling.stop_strings) if sampling.stop_strings else response

    def abort(self) -> None:
        self.requests.abort()


def _flush(engine: Any, seconds: float) -> None:
    # What it still does just after the last answer counts as work, and a working engine neither flushes nor sleeps.
    for _ in range(int(seconds * 100)):
        if engine.flush_cache().success:
            return
        time.sleep(0.01)
    raise TimeoutError("it is never idle")
