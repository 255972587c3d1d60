"""The memory plan as the user sees it: what workers/plan.py predicts for a config, and what was measured."""

from collections.abc import Mapping

import torch
from rich.table import Table

from trainer.config import TrainConfig
from workers.models.hub import compute_dtype, read_config
from workers.parallel.mesh import count_shards
from workers.plan import OUTSIDE, Breakdown, Job


def job_of(config: TrainConfig, world: int, device: torch.device, total: int) -> Job:
    """What decides the memory of one of `world` ranks, on devices like `device` with `total` bytes."""
    batch, tensor = config.batch, config.actor.tensor_parallel
    engines = world // config.rollout.tensor_parallel
    return Job(
        read_config(config.model),
        compute_dtype(config.model, device),
        config.actor,
        config.rollout,
        compiled=config.actor.compiles(device),
        dp_shard=count_shards(world, config.actor.replicate, tensor),
        total=total,
        samples=-(-batch.samples_per_update // (world // tensor)),
        longest=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        rows=-(-batch.prompts_per_step // engines) * batch.samples_per_prompt,
        reference=bool(config.algorithm.kl_coefficient),
        off_policy=config.needs_old_logprobs,
    )


def plan_table(phases: Mapping[str, Breakdown], total: int) -> Table:
    """What takes how much at the fullest moment of each phase, as predicted for a device of `total` bytes."""
    title = f"Memory predicted, GiB of {total / 2**30:.1f}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in phases:
        table.add_column(name, justify="right")
    for what in dict.fromkeys(what for breakdown in phases.values() for what in breakdown):
        sizes = [breakdown.get(what, 0) for breakdown in phases.values()]
        if any(sizes):
            table.add_row(what, *(_gib(size) if size else "" for size in sizes))
    table.add_row("in all", *(_gib(sum(breakdown.values())) for breakdown in phases.values()), style="bold")
    return table


def measured_table(phases: Mapping[str, Breakdown], metrics: Mapping[str, float]) -> Table:
    """What the trainer takes in each phase, without the engine: as predicted, and as torch's peaks in `metrics` say."""
    table = Table(title="Memory of the trainer, GiB", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "predicted", "measured"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, breakdown in phases.items():
        if (measured := metrics.get(f"memory/{name}_peak_gib")) is not None:
            own = sum(size for what, size in breakdown.items() if what != OUTSIDE)
            table.add_row(name, _gib(own), f"{measured:.1f}")
    return table


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
