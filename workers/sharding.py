"""The ShardingManager: the one owner of the way from training weights to serving weights, and of the memory.

The actor's parameters are cut over (replicate, shard, tensor); an engine wants them whole, under their Hugging Face
names, in its own type. `serving()` brings the engine to exactly the actor's weights, opens it for rollouts, and puts
it to sleep again. Each side carries a policy version: what was sampled says from which weights.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.tensor import DTensor

from workers.actor import ActorWorker
from workers.engines.protocol import CUDA_GRAPH, KV_CACHE, WEIGHTS, Bucket, EngineFailure
from workers.parallel.gather import Gatherer
from workers.parallel.lora import adapters_of
from workers.plan import MARGIN, Peaks
from workers.ref import RefWorker
from workers.rollout import RolloutWorker

RELEASES = {"none": (), "kv": (KV_CACHE,), "kv+weights": (KV_CACHE, WEIGHTS), "all": (KV_CACHE, WEIGHTS, CUDA_GRAPH)}
"""What the engine lets go of while the trainer works, by the names of rollout.release, from least to most."""

ROUNDING = 0.15
"""A larger mean difference of log-probabilities is more than two ways to compute in bfloat16 explain."""


class State(Enum):
    """Who owns the memory."""

    TRAINING = "the trainer owns the memory"
    WEIGHTS_AWAKE = "the engine's weights can be written"
    SERVING = "the engine serves"


class ShardingManager:
    """Moves the actor's weights into the rollout engine and guards that nothing samples from stale ones.

    `metrics` tells of the last time that the engine served: seconds of each phase (time/sync/NAME) and of all
    (time/sync), and bytes sent (sync/bytes). `peaks`: what the memory is watched by, where others watch it too.
    """

    def __init__(
        self, actor: ActorWorker, rollout: RolloutWorker, ref: RefWorker | None = None, peaks: Peaks | None = None
    ) -> None:
        self.actor, self.rollout, self.ref = actor, rollout, ref
        self.peaks = peaks or Peaks(actor.layout.device.type == "cuda")
        self.engine, config = rollout.engine, rollout.config
        weights, adapters = actor.policy.weights(), adapters_of(actor.policy.causal_lm)
        bucket_bytes = config.bucket_megabytes * 2**20
        self.gatherer = Gatherer(weights, actor.layout, self.engine.dtype, bucket_bytes, adapters)
        self.state = State.TRAINING
        self.release = "kv+weights" if config.release == "auto" else config.release
        # The engine begins asleep, with nothing kept: what that gave back is what it wants again.
        self.weight_bytes = self.gatherer.bytes // rollout.layout.tp_size
        self.kv_bytes = max(0, self.engine.freed - self.weight_bytes)
        self.first_version: int | None = None  # of the actor, when the engine first served
        self.updates = 0
        self.verified: int | None = None  # the last version at which the engine's weights were compared
        self.metrics: dict[str, float] = {}

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The engine is awake inside this block and holds exactly the actor's weights."""
        if self.state is not State.TRAINING:
            raise RuntimeError(f"serving() was entered twice: {self.state.value}.")
        self.metrics = defaultdict(float, {"sync/bytes": 0})
        try:
            self._enter_serving()
            yield
        except EngineFailure as failure:
            failure.add_note(self.memory_table())
            raise
        finally:
            with self._phase("release"):
                self.engine.sleep(RELEASES[self.release])
            self.state = State.TRAINING
            with self._phase("reload"):
                self.actor.reload()
                if self.ref is not None:
                    self.ref.reload()
            self.metrics["time/sync"] = sum(v for name, v in self.metrics.items() if name.startswith("time/sync/"))

    def _enter_serving(self) -> None:
        with self._phase("offload"):
            self._choose_release()
            self.actor.offload_optimizer()
            if self.ref is not None:
                self.ref.offload()
        with self._phase("wake_weights"):
            self._make_room(WEIGHTS)
            self.engine.wake_weights()
        self.state = State.WEIGHTS_AWAKE
        if self.rollout.version != self.actor.version or not self.engine.holds_weights:
            self._update()
        with self._phase("offload"):
            self.actor.offload_parameters()
        with self._phase("wake_kv"):
            self._make_room(KV_CACHE)
            self.engine.wake()
        self.state = State.SERVING

    def _update(self) -> None:
        # Half-updated weights have no version: whatever is sampled after a failure here is refused.
        self.rollout.version = -1
        with self._phase("update"):
            self.engine.update_weights(self.weights())
        self.metrics["sync/bytes"] = self.gatherer.bytes
        every = self.rollout.config.verify_every
        if every and self.updates % every == 0:
            with self._phase("verify"):
                self.engine.verify(self.weights())
            self.verified = self.actor.version
        self.updates += 1
        self.rollout.version = self.actor.version

    def weights(self) -> Iterator[Bucket]:
        """The actor's weights whole, each once, in buckets of the engine's type; every rank must take part."""
        return self.gatherer.buckets()

    # --- memory ----------------------------------------------------------------------------------------------------

    def _choose_release(self) -> None:
        """With rollout.release=auto: once a step was trained, keep what fits beside the fullest moment so far."""
        device = self.actor.layout.device
        if self.first_version is None:
            self.first_version = self.actor.version
        if self.rollout.config.release != "auto" or device.type != "cuda" or self.first_version == self.actor.version:
            return
        free, total = torch.cuda.mem_get_info()
        gives = {"none": 0, "kv": self.kv_bytes, "kv+weights": self.kv_bytes + self.weight_bytes}
        awake = total - free - torch.cuda.memory_reserved() + gives[self.release]
        room = total * (1 - MARGIN) - awake - self.peaks.most_reserved()
        names = list(gives)
        fits = [i for i, name in enumerate(names) if room + gives[name] >= 0]
        # One choice for all: they take part in one another's updates.
        choice = torch.tensor(fits[0] if fits else len(names) - 1)
        dist.all_reduce(choice, op=dist.ReduceOp.MAX)
        self.release = names[int(choice)]

    def _make_room(self, tag: str) -> None:
        """Raise MemoryError with the memory table where the engine could not take back its memory of kind `tag`."""
        if tag not in self.engine.asleep or self.actor.layout.device.type != "cuda":
            return
        needed = self.weight_bytes if tag == WEIGHTS else self.kv_bytes
        if torch.cuda.mem_get_info()[0] >= needed:
            return
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        if free < needed:
            raise MemoryError(
                f"The engine needs {_gib(needed)} for its {tag} and {_gib(free)} are free: lower "
                "rollout.memory_fraction, or set actor.offload=[optimizer] or actor.offload=[optimizer,parameters]."
                f"\n{self.memory_table()}"
            )

    def memory_table(self) -> str:
        """What holds how much of this process's device, one line each."""
        device = self.actor.layout.device
        states = [state for held in self.actor.optimizer.state.values() for state in held.values()]
        frozen = self.ref.policy.parameters() if self.ref and self.ref.policy is not self.actor.policy else ()
        rows = {
            "actor: parameters (this rank's shards)": _bytes(self.actor.parameters),
            "actor: gradients": _bytes(p.grad for p in self.actor.parameters if p.grad is not None),
            "actor: optimizer": _bytes(state for state in states if state.ndim),
            "reference": _bytes(frozen),
        }
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            rows["other tensors of the trainer"] = torch.cuda.memory_allocated() - sum(rows.values())
            rows["torch's cache"] = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            rows["the engine, contexts and other processes"] = total - free - torch.cuda.memory_reserved()
        else:
            page = os.sysconf("SC_PAGE_SIZE")
            free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
        rows |= {"free": free, "in total": total}
        asleep = ", ".join(sorted(self.engine.asleep)) or "nothing"
        lines = [f"  {name:<42} {_gib(size):>12}" for name, size in rows.items()]
        return "\n".join([f"Memory of {device} (rank {dist.get_rank()}); the engine has let go of {asleep}:", *lines])

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            with self.peaks("sync"):
                yield
        finally:
            self.metrics[f"time/sync/{name}"] += time.perf_counter() - begun

    # --- guards ----------------------------------------------------------------------------------------------------

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

    def judge_gap(self, metrics: Mapping[str, float]) -> str | None:
        """A warning where rollout and trainer log-probabilities differ more than rollout.gap_warning, None otherwise.

        metrics: those of an update. Raises RuntimeError past rollout.gap_error. Both name the likely cause.
        """
        config, gap = self.rollout.config, metrics["rollout/logprob_gap"]
        if gap <= config.gap_warning:
            return None
        dtype = str(self.engine.dtype).removeprefix("torch.")
        if abs(metrics["rollout/gap_correlation"]) > 0.7:
            stretch = max(1 + metrics["rollout/gap_slope"], 1e-3)
            cause = (
                f"the temperature: the engine seems to sample at {config.temperature / stretch:.2g}, and the trainer "
                f"computes at {config.temperature:g}"
            )
        elif self.engine.dtype != torch.float32 and gap < ROUNDING:
            cause = (
                f"rounding: both sides compute in {dtype}, with other kernels each. Try another attention_backend in "
                "rollout.sglang; with model.dtype=float32 the gap must vanish"
            )
        elif self.verified == self.rollout.version:
            cause = (
                "the engine's numbers: its weights were compared and are the actor's, so it computes otherwise from "
                "them. Look at attention_backend, quantization and kv_cache_dtype in rollout.sglang"
            )
        else:
            cause = (
                "stale weights: the engine seems to hold others than the actor's. They were last compared at version "
                f"{self.verified}; rollout.verify_every=1 compares them each time"
            )
        limit, name = (config.gap_error, "gap_error") if gap > config.gap_error else (config.gap_warning, "gap_warning")
        message = (
            f"Rollout and trainer log-probabilities differ by {gap:.3g} on average (KL "
            f"{metrics['rollout/kl']:.3g}), more than rollout.{name}={limit:g}. The likely cause is {cause}."
        )
        if gap > config.gap_error:
            raise RuntimeError(message)
        return message


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """What this process holds of them."""
    return sum(t.untyped_storage().nbytes() for t in (t.to_local() if isinstance(t, DTensor) else t for t in tensors))


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
