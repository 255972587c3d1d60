"""Transport: weights from the ranks of an engine to SGLang's processes on the same devices, and questions to its model.

SGLang takes an unknown weight for a success and ends its owner's process when a shape is wrong: names and shapes are
checked before anything is sent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from workers.engines.protocol import Bucket, EngineFailure, checked
from workers.engines.sglang_hooks import ANSWER_BYTES, compare, read_answer, tell_names
from workers.engines.sglang_process import EngineProcess
from workers.models.llama import Llama
from workers.parallel.mesh import InferenceLayout

QUESTIONS = {question: f"{question.__module__}.{question.__name__}" for question in (tell_names, compare)}


class WeightTransport:
    """The way to SGLang's model; every rank of the engine must take part, and the one that leads has its `process`."""

    def __init__(
        self, layout: InferenceLayout, process: EngineProcess | None, shapes: Mapping[str, torch.Size], family: Llama
    ) -> None:
        self.layout, self.process, self.shapes, self.family = layout, process, shapes, family
        self.names_agree = False

    def update(self, buckets: Iterable[Bucket]) -> None:
        """Put the weights of `buckets` into SGLang's model; raises as Engine.update_weights."""
        if not self.names_agree:
            self._check_names()
        with self._session():
            for bucket in checked(buckets, self.shapes):
                self._send({"flattened_tensor": bucket.flat.view(torch.uint8), "metadata": _metadata(bucket)})

    def verify(self, buckets: Iterable[Bucket]) -> None:
        """As Engine.verify."""
        totals: dict[str, list[int]] = {}
        with self._session():
            for bucket in checked(buckets, self.shapes):
                for name, (elements, sent, different) in self._ask(compare, list(bucket.items())).items():
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
            held = set(self._ask(tell_names, []))
        known = {self.family.engine_name(name) for name in self.shapes}
        if held != known:
            both = "SGLang's model and the trainer's do not have the same weights"
            raise EngineFailure(f"{both}: they differ in {min(held ^ known)!r}.")
        self.names_agree = True

    @contextmanager
    def _session(self) -> Iterator[None]:
        """Where SGLang takes weights, and nothing else: from 0.5.21 on inside an update session alone."""
        if self.process is None or not hasattr(self.process.engine, "begin_weight_update"):
            yield
            return
        self.process.ask("opening of a weight update", self.process.engine.begin_weight_update)
        try:
            yield
        finally:
            if self.process.processes:
                self.process.ask("end of a weight update", self.process.engine.end_weight_update)

    def _ask(self, question: Callable, weights: list[tuple[str, torch.Tensor]]) -> Any:
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
        if self.layout.tp_group is not None:
            payloads = [b""] * self.layout.tp_size if self.process else None
            dist.gather_object(payload, payloads, group=self.layout.tp_group, group_dst=0)
        if self.process is not None:
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=payloads, load_format=load_format, flush_cache=False
            )
            engine = self.process.engine
            update = engine.tokenizer_manager.update_weights_from_tensor
            self.process.ask("weight update", lambda: engine.loop.run_until_complete(update(request, None)))
        wait_for_peers(self.layout)  # nobody overwrites what is being read


def wait_for_peers(layout: InferenceLayout) -> None:
    """Wait for the other ranks of the engine."""
    if layout.tp_group is not None:
        dist.all_reduce(torch.zeros(1), group=layout.tp_group)  # on the CPU


def _metadata(bucket: Bucket) -> list[Any]:
    """Where each weight lies in the bytes of `bucket.flat`, in SGLang's words."""
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

    metadata, end = [], 0
    for name, shape in bucket.shapes.items():
        begin, size = end, shape.numel() * bucket.flat.element_size()
        end = begin + size
        metadata.append(FlattenedTensorMetadata(name, shape, bucket.flat.dtype, begin, end, size))
    return metadata
