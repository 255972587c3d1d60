"""Guards: that a batch was sampled from the actor's weights, and that engine and trainer agree on what they compute."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict

from workers.sharding import ShardingManager

ROUNDING = 0.15
"""A larger mean difference of log-probabilities is more than two ways to compute in bfloat16 explain."""


def expect_current(batch: TensorDict | None, version: int) -> None:
    """Raise RuntimeError where a token of the batch was not sampled from the actor's present weights, of `version`."""
    if batch is None:
        return
    versions = batch["versions"].values()[batch["response_mask"].values()].unique().tolist()
    if versions != [version]:
        raise RuntimeError(
            f"The batch was sampled from weights of version {versions}, and the actor is at {version}: the engine's "
            "weights are stale."
        )


def judge_gap(metrics: Mapping[str, float], sharding: ShardingManager) -> str | None:
    """A warning where rollout and trainer log-probabilities differ more than rollout.gap_warning, None otherwise.

    metrics: those of an update. Raises RuntimeError past rollout.gap_error. Both name the likely cause.
    """
    rollout, dtype = sharding.rollout, sharding.engine.dtype
    config, gap = rollout.config, metrics["rollout/logprob_gap"]
    if gap <= config.gap_warning:
        return None
    if abs(metrics["rollout/gap_correlation"]) > 0.7:
        stretch = max(1 + metrics["rollout/gap_slope"], 1e-3)
        cause = (
            f"the temperature: the engine seems to sample at {config.temperature / stretch:.2g}, and the trainer "
            f"computes at {config.temperature:g}"
        )
    elif dtype != torch.float32 and gap < ROUNDING:
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
    name = "gap_error" if gap > config.gap_error else "gap_warning"
    message = (
        f"Rollout and trainer log-probabilities differ by {gap:.3g} on average (KL {metrics['rollout/kl']:.3g}), more "
        f"than rollout.{name}={getattr(config, name):g}. The likely cause is {cause}."
    )
    if name == "gap_error":
        raise RuntimeError(message)
    return message
