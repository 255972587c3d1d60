"""What the RolloutWorker asks of an inference engine, and the words they share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `seed` makes a rollout repeatable: the same prompts and weights give the same samples."""

    temperature: float
    top_p: float
    top_k: int  # 0: all tokens
    max_new_tokens: int
    stop: tuple[int, ...]  # ids that end a response; the response includes the one it ended with
    seed: int


@dataclass
class Response:
    """One sampled response. A logprob is after temperature, over the whole vocabulary (before top-p and top-k)."""

    tokens: list[int]
    logprobs: list[float]
    truncated: bool  # it reached max_new_tokens without a stop token


class Engine(Protocol):
    """An inference engine that lives in this process.

    Its states are asleep, weights awake, serving; `wake_weights`, `update_weights` and `wake` lead from one to the
    next, `sleep` leads back.
    """

    def sleep(self) -> None:
        """Let go of the memory that serving needs."""

    def wake_weights(self) -> None:
        """Make the weights writable."""

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take over whole tensors under their Hugging Face names; raises ValueError where names or shapes differ."""

    def wake(self) -> None:
        """Be ready to generate."""

    def generate(self, prompts: list[list[int]], samples: int, sampling: Sampling) -> list[list[Response]]:
        """`samples` responses to each prompt, in the order of the prompts."""

    def shutdown(self) -> None:
        """End everything the engine started."""
