"""The ShardingManager: the one way from training weights to serving weights.

The actor's parameters are cut over (dp_replicate, dp_shard, tp); an engine wants them whole, under their Hugging Face
names, in its own type. `serving()` brings the engine to exactly the actor's weights, opens it for rollouts, and puts
it to sleep again. Each side carries a policy version: what was sampled says from which weights, and two guards at the
end hold it against the actor's.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from tensordict import TensorDict

from grpo.config import ConfigError
from workers.actor import ActorWorker
from workers.engines.protocol import CUDA_GRAPH, KV_CACHE, WEIGHTS, Bucket, EngineFailure
from workers.memory import Peaks, SharedMemory
from workers.parallel.gather import Gatherer
from workers.parallel.lora import adapters_of
from workers.ref import RefWorker
from workers.rollout import RolloutWorker

RELEASES = {"none": (), "kv": (KV_CACHE,), "kv+weights": (KV_CACHE, WEIGHTS), "all": (KV_CACHE, WEIGHTS, CUDA_GRAPH)}
"""What the engine lets go of while the trainer works, by the names of rollout.release, from least to most."""

BUCKET_BYTES = 512 * 2**20
"""Weights that travel to the engine at once; up to two such buckets are held."""


class ShardingManager:
    """Moves the actor's weights into the rollout engine, once for each version of them.

    `metrics` tells of the last time that the engine served: seconds of each phase (time/sync/NAME) and of all
    (time/sync), and bytes sent (sync/bytes). `verified`: the last version at which the engine's weights were compared
    with the actor's. `refs`: the frozen policies beside the actor. `peaks`: what the memory is watched by, where others
    watch it too.
    """

    def __init__(
        self, actor: ActorWorker, rollout: RolloutWorker, refs: Sequence[RefWorker] = (), peaks: Peaks | None = None
    ) -> None:
        self.actor, self.rollout, self.refs, self.engine = actor, rollout, refs, rollout.engine
        self.peaks = peaks or Peaks(actor.layout.device.type == "cuda")
        weights, adapters = actor.policy.weights(), adapters_of(actor.policy.causal_lm)
        self.gatherer = Gatherer(weights, actor.layout, self.engine.dtype, BUCKET_BYTES, adapters)
        self.memory = SharedMemory(actor, refs, rollout, self.gatherer.bytes, self.peaks)
        self.is_serving = False
        self.updates = 0
        self.verified: int | None = None
        self.metrics: dict[str, float] = {}
        self.gaps_told: set[str] = set()  # the causes that judge_gap has named

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The engine is awake inside this block and holds exactly the actor's weights."""
        if self.is_serving:
            raise RuntimeError("serving() was entered twice.")
        self.is_serving = True
        self.metrics = defaultdict(float, {"sync/bytes": 0})
        try:
            self._enter_serving()
            yield
        except EngineFailure as failure:
            failure.add_note(self.memory.table())
            raise
        finally:
            with self._phase("release"):
                self.engine.sleep(RELEASES[self.memory.release])
            self.is_serving = False
            with self._phase("reload"):
                self.actor.reload()
                for ref in self.refs:
                    ref.reload()
            self.metrics["time/sync"] = sum(v for name, v in self.metrics.items() if name.startswith("time/sync/"))

    def _enter_serving(self) -> None:
        with self._phase("offload"):
            self.memory.choose_release()
            self.actor.offload_optimizer()
            for ref in self.refs:
                ref.offload()
        with self._phase("wake_weights"):
            self.memory.make_room(WEIGHTS)
            self.engine.wake_weights()
        if self.rollout.version != self.actor.version or not self.engine.holds_weights:
            self._update()
        with self._phase("offload"):
            self.actor.offload_parameters()
        with self._phase("wake_kv"):
            self.memory.make_room(KV_CACHE)
            self.engine.wake()

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

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            with self.peaks("sync"):
                yield
        finally:
            self.metrics[f"time/sync/{name}"] += time.perf_counter() - begun


def expect_current(batch: TensorDict | None, version: int) -> None:
    """Raise RuntimeError where a row of the batch was not sampled from the actor's present weights, of `version`."""
    if batch is None:
        return
    sampled = batch["response_length"] > 0
    versions = torch.cat([batch[f"{which}_version"][sampled] for which in ("oldest", "newest")]).unique().tolist()
    if versions != [version]:
        sampled = f"The batch was sampled from weights of version {versions}, and the actor is at {version}"
        raise RuntimeError(f"{sampled}: the engine's weights are stale.")


def judge_gap(metrics: Mapping[str, float], sharding: ShardingManager) -> str | None:
    """A warning past rollout.gap_warning, once a likely cause; ConfigError past gap_error; metrics: of an update.

    The warning's bound, which is left in the metrics of `sharding`, is larger as far as rounding explains it.
    """
    rollout, dtype = sharding.rollout, sharding.engine.dtype
    config, gap = rollout.config, metrics["rollout/logprob_gap"]
    bound = config.gap_warning
    if dtype != torch.float32:
        # Rounding moves the logits, and the log-probability of a token of probability p by about 1 - p of that, whose
        # mean is at most 1 - exp(-entropy): the more open the policy, the more of it is seen. With a pretrained model
        # of 30 layers it is 0.016 at 0.3 nats and 0.040 at 2.2; with random weights of 7B it was 0.058.
        bound = min(bound * max(1.0, 2 * (1 - math.exp(-metrics["entropy"]))), config.gap_error)
    sharding.metrics["rollout/gap_bound"] = bound
    if not gap > bound:  # nor where it is NaN: such an update was skipped, which is told elsewhere
        return None
    if abs(metrics["rollout/gap_correlation"]) > 0.7:
        stretch = max(1 + metrics["rollout/gap_slope"], 1e-3)
        seems = f"the engine seems to sample at {config.temperature / stretch:.2g}"
        cause = f"the temperature: {seems}, and the trainer computes at {config.temperature:g}"
    elif dtype != torch.float32 and gap < 2 * bound:
        cause = (
            f"rounding: both sides compute in {str(dtype).removeprefix('torch.')}, with other kernels each. Try "
            "another attention_backend in rollout.sglang; with model.dtype=float32 the gap must vanish"
        )
    elif sharding.verified == rollout.version:
        cause = (
            "the engine's numbers: its weights were compared and are the actor's, so it computes otherwise from "
            "them. Look at attention_backend, quantization and kv_cache_dtype in rollout.sglang"
        )
    else:
        cause = (
            "stale weights: the engine seems to hold others than the actor's. They were last compared at version "
            f"{sharding.verified}; rollout.verify_every=1 compares them each time"
        )
    name, limit = ("gap_error", config.gap_error) if gap > config.gap_error else ("gap_warning", config.gap_warning)
    apart = f"differ by {gap:.3g} on average (KL {metrics['rollout/kl']:.3g}), more than rollout.{name}={limit:g}"
    message = f"Rollout and trainer log-probabilities {apart}. The likely cause is {cause}."
    if name == "gap_error":
        raise ConfigError(message)
    kind = cause.split(":")[0]
    if kind in sharding.gaps_told:
        return None
    sharding.gaps_told.add(kind)
    return f"warning: {message}"
