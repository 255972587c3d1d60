"""The embedded engine: transformers' model in a continuous batch, for CPUs, small models and tests."""

import asyncio
import os
from collections.abc import Collection, Coroutine, Iterable, Sequence
from typing import Any

import torch
import transformers

from workers.engines.protocol import Bucket, Response, Sampling, T, checked
from workers.engines.torch_batch import ContinuousBatch, Request
from workers.models.hub import ModelConfig, compute_dtype, read_config


def share_of_memory(device: torch.device, fraction: float) -> int:
    """Bytes of the device's memory, or of the host's, that one process's engine may fill."""
    if device.type == "cuda":
        return int(fraction * torch.cuda.get_device_properties(device).total_memory)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(fraction * total / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


class TorchEngine:
    """A whole copy of the model in every process. Asleep it keeps its weights: they are small beside the actor's.

    `Sampling.seed` decides a response, but for rounding: which requests share a batch decides how products round, and
    that is the same in each run with the same requests. most_rows: requests at once. memory: bytes for weights,
    KV cache and logits.
    """

    concurrent_samples = None

    def __init__(self, model: ModelConfig, device: torch.device, most_rows: int = 512, memory: int = 2**32) -> None:
        causal_lm = transformers.AutoModelForCausalLM.from_config(
            read_config(model), dtype=compute_dtype(model, device), attn_implementation="cached"
        )
        self.model = causal_lm.to(device).eval().requires_grad_(False)
        self.weights = dict(self.model.named_parameters())
        self.shapes = {name: weight.shape for name, weight in self.weights.items()}
        self.dtype = self.model.dtype
        weights = sum(weight.nbytes for weight in self.weights.values())
        self.batch = ContinuousBatch(self.model, most_rows, memory - weights)
        self.asleep, self.freed = (), 0
        self.serving = self.holds_weights = False

    def sleep(self, release: Collection[str]) -> None:
        self.serving = False

    def wake_weights(self) -> None:
        pass

    def update_weights(self, buckets: Iterable[Bucket]) -> None:
        self.holds_weights = False
        for bucket in checked(buckets, self.shapes):
            for name, tensor in bucket.items():
                self.weights[name].data.copy_(tensor)
        self.holds_weights = True

    def verify(self, buckets: Iterable[Bucket]) -> None:
        for bucket in checked(buckets, self.shapes):
            for name, tensor in bucket.items():
                if not torch.equal(self.weights[name], tensor):
                    raise RuntimeError(f"The engine's weights are not the actor's: {name!r} differs.")

    def wake(self) -> None:
        self.serving = True

    def shutdown(self) -> None:
        self.serving = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self.serving:
            work.close()
            raise RuntimeError("The engine is asleep: it serves inside `with sharding.serving()` alone.")
        return asyncio.run(self._serve(work))

    async def _serve(self, work: Coroutine[Any, Any, T]) -> T:
        self.news = asyncio.Event()
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self.news.set())
        try:
            while not task.done():
                # Those who were answered go on, and may ask for more, before the next step.
                await asyncio.sleep(0)
                if self.batch:
                    self.batch.step()
                elif not task.done():
                    self.news.clear()
                    await self.news.wait()
            return task.result()
        finally:
            self.batch.abort()

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Response:
        request = Request(list(tokens), sampling, asyncio.get_running_loop().create_future())
        self.batch.waiting.append(request)
        self.news.set()
        return await request.answer

    def abort(self) -> None:
        self.batch.abort()
