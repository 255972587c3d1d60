"""The ShardingManager: the one owner of the way from training weights to serving weights.

The actor's parameters are cut over (replicate, shard, tensor); an engine wants them whole, under their Hugging
Face names, in its own type. `serving()` brings the engine to exactly the actor's weights, opens it for rollouts,
and puts it to sleep again. Each side carries a policy version: what was sampled says from which weights.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from workers.actor import ActorWorker
from workers.parallel.policy import PREFIX
from workers.rollout import RolloutWorker


class State(Enum):
    """Who owns the memory."""

    TRAINING = "the trainer owns the memory"
    WEIGHTS_AWAKE = "the engine's weights can be written"
    SERVING = "the engine serves"


class ShardingManager:
    """Moves the actor's weights into the rollout engine and guards that nothing samples from stale ones."""

    def __init__(self, actor: ActorWorker, rollout: RolloutWorker) -> None:
        self.actor, self.rollout = actor, rollout
        self.state = State.TRAINING
        self.seconds = 0.0  # spent in the last transition
        self.bytes = 0  # sent in the last update

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The engine is awake inside this block and holds exactly the actor's weights."""
        if self.state is not State.TRAINING:
            raise RuntimeError(f"serving() was entered twice: {self.state.value}.")
        begun = time.perf_counter()
        try:
            self._enter_serving()
            self.seconds = time.perf_counter() - begun
            yield
        finally:
            begun = time.perf_counter()
            self.rollout.engine.sleep()
            self.state = State.TRAINING
            self.seconds += time.perf_counter() - begun

    def _enter_serving(self) -> None:
        engine = self.rollout.engine
        engine.wake_weights()
        self.state = State.WEIGHTS_AWAKE
        self.bytes = 0
        if self.rollout.version != self.actor.version:
            # Half-updated weights have no version: whatever is sampled after a failure here is refused.
            self.rollout.version = -1
            engine.update_weights(self.weights())
            self.rollout.version = self.actor.version
        engine.wake()
        self.state = State.SERVING

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The actor's parameters whole, each once, under their Hugging Face names; every rank must take part."""
        for name, parameter in self.actor.policy.named_parameters():
            # A plain tensor here would be FSDP's gathered copy in the compute type, not the master weight.
            assert isinstance(parameter, DTensor), f"{name} is not sharded"
            tensor = parameter.detach().full_tensor()
            self.bytes += tensor.numel() * tensor.element_size()
            yield name.removeprefix(PREFIX), tensor

    def expect_current(self, batch: TensorDict | None) -> None:
        """Raise RuntimeError where a batch was not sampled from the actor's present weights."""
        if batch is None:
            return
        versions = batch["version"].unique().tolist()
        if versions != [self.actor.version]:
            raise RuntimeError(
                f"The batch was sampled from weights of version {versions}, and the actor is at "
                f"{self.actor.version}: the engine's weights are stale."
            )
