"""What the RolloutWorker and the ShardingManager ask of an inference engine, and the words they share."""

from collections.abc import Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

T = TypeVar("T")

KV_CACHE, WEIGHTS, CUDA_GRAPH = "kv_cache", "weights", "cuda_graph"
"""What an engine can let go of while it sleeps."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one response are drawn. `seed` decides them where the engine can: see its class."""

    temperature: float
    top_p: float
    top_k: int  # 0: all tokens
    max_new_tokens: int
    stop: tuple[int, ...]  # ids that end a response; the response includes the one it ended with
    seed: int
    stop_strings: tuple[str, ...] = ()  # a response also ends with the token that completes one in its text


@dataclass(frozen=True)
class Response:
    """What was sampled. A logprob is after temperature, over the whole vocabulary (before top-p and top-k)."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop": by a stop token or string; "length": max_new_tokens without; "abort": ended before


@dataclass
class Bucket:
    """Whole weights end to end in one tensor `flat` [n], in the engine's type, under their Hugging Face names."""

    flat: torch.Tensor
    shapes: dict[str, torch.Size]

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight as a view of `flat`."""
        pieces = self.flat.split([shape.numel() for shape in self.shapes.values()])
        for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True):
            yield name, piece.view(shape)


def checked(buckets: Iterable[Bucket], shapes: Mapping[str, torch.Size]) -> Iterator[Bucket]:
    """`buckets`; ValueError for a weight that is not one of `shapes`, comes twice, or at the end did not come."""
    missing = set(shapes)
    for bucket in buckets:
        for name, shape in bucket.shapes.items():
            if name not in shapes:
                raise ValueError(f"The engine's model has no weight {name!r}.")
            if shapes[name] != shape:
                has = tuple(shapes[name])
                raise ValueError(f"The engine's weight {name!r} has the shape {has}, not {tuple(shape)}.")
            if name not in missing:
                raise ValueError(f"The weight {name!r} was sent twice.")
            missing.discard(name)
        yield bucket
    if missing:
        raise ValueError(f"The weight {min(missing)!r} was not sent ({len(missing)} in all).")


class EngineFailure(RuntimeError):
    """The engine died, hung or refused; the message ends with its last words."""


class Engine(Protocol):
    """An inference engine that lives in this process, or is led by it.

    Its states are asleep (as it begins), weights awake, serving; `wake_weights`, `update_weights` and `wake` lead
    from one to the next, `sleep` leads back. Every rank of an inference tensor-parallel group calls all of these;
    the rank that leads the group alone runs requests.
    """

    dtype: torch.dtype  # of its weights
    shapes: Mapping[str, torch.Size]  # the weights it needs, under their Hugging Face names
    holds_weights: bool  # False before the first update, after a failed one, and once they were released
    concurrent_samples: int | None  # how many requests it wants at once; None: all there are, which it queues itself
    tokens_at_work: int  # sampled so far for requests that are not answered yet; 0 where the engine does not tell
    asleep: Collection[str]  # the kinds of memory that it let go of
    freed: int  # bytes of this rank's device that its last sleep gave back

    def sleep(self, release: Collection[str]) -> None:
        """Let go of the kinds of memory named in `release`."""

    def wake_weights(self) -> None:
        """Make the weights writable."""

    def update_weights(self, buckets: Iterable[Bucket]) -> None:
        """Take over all weights; raises ValueError as `checked` does."""

    def verify(self, buckets: Iterable[Bucket]) -> None:
        """Raise RuntimeError where the weights that it holds are not, bit for bit, those in `buckets`."""

    def wake(self) -> None:
        """Be ready to sample."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; RuntimeError where the engine does not serve, EngineFailure where it dies or hangs."""

    async def sample(self, tokens: Sequence[int] | np.ndarray, sampling: Sampling) -> Response:
        """The response to `tokens`, inside `run` alone. Any number may be awaited at once; each ends by itself."""

    def abort(self) -> None:
        """End all requests in flight, inside `run` alone: each is answered with what it has so far."""

    def shutdown(self) -> None:
        """End everything the engine started."""
