"""The memory plan as the user sees it: what workers/plan.py predicts for a config, and what was measured beside it."""

from collections.abc import Mapping

import torch
from rich.table import Table

from trainer.config import TrainConfig
from workers.parallel.mesh import count_shards
from workers.parallel.policy import compute_dtype, read_config
from workers.plan import OUTSIDE, Job, Parts


def job_of(config: TrainConfig, world: int, device: torch.device, total: int) -> Job:
    """What decides the memory of one of `world` ranks, on devices like `device` with `total` bytes."""
    algorithm, tensor = config.algorithm, config.actor.tensor_parallel
    engines = world // config.rollout.tensor_parallel
    return Job(
        read_config(config.model),
        compute_dtype(config.model, device),
        config.actor,
        config.rollout,
        fuse=config.actor.fuses(device),
        shards=count_shards(world, config.actor.replicate, tensor),
        total=total,
        samples=-(-algorithm.samples_per_update // (world // tensor)),
        longest=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        rows=-(-algorithm.prompts_per_step // engines) * algorithm.samples_per_prompt,
        reference=bool(algorithm.kl_coefficient),
        off_policy=algorithm.needs_old_logprobs,
    )


def plan_table(phases: Mapping[str, Parts], total: int) -> Table:
    """The parts of the fullest moment of each phase, as `predict` gives them for a device of `total` bytes."""
    title = f"Memory predicted, GiB of {total / 2**30:.1f}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in phases:
        table.add_column(name, justify="right")
    for what in dict.fromkeys(what for parts in phases.values() for what in parts):
        sizes = [parts.get(what, 0) for parts in phases.values()]
        if any(sizes):
            table.add_row(what, *(_gib(size) if size else "" for size in sizes))
    table.add_row("in all", *(_gib(sum(parts.values())) for parts in phases.values()), style="bold")
    return table


def measured_table(phases: Mapping[str, Parts], metrics: Mapping[str, float]) -> Table:
    """The trainer's own part of each phase as predicted, beside what a step's `metrics` say that torch allocated."""
    table = Table(title="Memory of the trainer, GiB", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "predicted", "measured"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, parts in phases.items():
        if (measured := metrics.get(f"memory/{name}_peak_gib")) is not None:
            own = sum(size for what, size in parts.items() if what != OUTSIDE)
            table.add_row(name, _gib(own), f"{measured:.1f}")
    return table


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
