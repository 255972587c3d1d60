"""How fast a whole GRPO step is: rollout, update and weight sync on the same devices, with a trivial reward.

    python -m benchmarks.step                                       # 1.5B shape, 64 x 8 samples, 128 + 512 tokens
    python -m benchmarks.step lengths=lognormal response=4096       # responses of a mean of 600 tokens, sigma 0.8
    torchrun --nproc-per-node 4 -m benchmarks.step prompts=256

Settings of the actor's own are there too: actor.recompute=full.
"""

import dataclasses
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import read, shapes
from benchmarks.shapes import make, random_prompts
from grpo.advantages import compute_advantages
from grpo.algorithm import AlgorithmConfig
from grpo.batch import Trajectory
from grpo.config import option
from rewards import Group
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.engines.config import RolloutConfig
from workers.engines.sglang_engine import SGLangEngine
from workers.parallel.mesh import join, leave, make_inference_layout, make_training_layout, pick_device
from workers.rollout import RolloutWorker
from workers.sharding import ShardingManager


@dataclass
class Settings(shapes.EngineSettings):
    prompts: int = option(64, "in a step")
    samples: int = option(8, "for each prompt")
    prompt: int = option(128, "tokens of each prompt")
    response: int = option(512, "tokens of each response, or the most of them")
    lengths: str = option("forced", "of responses: forced, or lognormal with a mean of 600 tokens")
    rounds: int = option(3, "measured steps")
    engine_tp: int = option(1, "processes that share an engine")
    actor: ActorConfig = option(ActorConfig, "the actor's own settings (docs/config.md)")


class UnevenEngine(SGLangEngine):
    """An engine that ends every response at a length of its own, drawn from a log-normal with a mean of 600 tokens."""

    async def sample(self, tokens, sampling):
        length = int(random.Random(sampling.seed).lognormvariate(math.log(600) - 0.32, 0.8))
        most = min(max(length, 1), sampling.max_new_tokens)
        return await super().sample(tokens, dataclasses.replace(sampling, max_new_tokens=most))


def main() -> None:
    settings = read(Settings, sys.argv[1:])
    device = pick_device(settings.device)
    join(device, 300.0)
    world, controls = dist.get_world_size(), dist.get_rank() == 0
    model = ModelConfig(path=make(settings.shape, Path(settings.folder), device))
    engines_count = world // settings.engine_tp
    config = RolloutConfig(
        engine="sglang",
        tensor_parallel=settings.engine_tp,
        max_response_tokens=settings.response,
        concurrent_samples=settings.prompts * settings.samples // engines_count,
        memory_fraction=settings.memory_fraction,
        sglang=settings.options,
    )
    config.check(world, world)
    engines = make_inference_layout(device, settings.engine_tp)
    kind = {"forced": SGLangEngine, "lognormal": UnevenEngine}[settings.lengths]
    engine = kind(model, config, engines, engines.dp_rank)
    layout = make_training_layout(device, settings.actor.replicate, settings.actor.tensor_parallel)
    algorithm = AlgorithmConfig()
    actor = ActorWorker(model, settings.actor, algorithm, layout, 1.0, 100)
    worker = RolloutWorker(config, engine, engines, (), seed=0, grade=grade)
    sharding = ShardingManager(actor, worker)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for round_ in range(settings.rounds + 2):
        prompts = None
        if controls:
            prompts = random_prompts(settings.shape, settings.prompts, settings.prompt, generator)
        dist.barrier()
        begun = time.perf_counter()
        with sharding.serving():
            entered = time.perf_counter()
            batch = worker.generate(prompts, settings.samples)
            rolled = time.perf_counter()
        batch = compute_advantages(batch, algorithm)
        ready = time.perf_counter()
        metrics = actor.update(batch)
        ended = time.perf_counter()
        if controls:
            tokens = int(batch["length"].sum())
            row = {"step": ended - begun, "rollout": rolled - entered, "sync": sharding.metrics["time/sync"]}
            row |= {"update": ended - ready, "rest": ended - begun - (rolled - entered) - (ended - ready)}
            row["rest"] -= row["sync"]
            row |= {"tokens/s a device": tokens / row["step"] / world}
            row |= {name: value for name, value in (metrics | worker.metrics).items() if name.startswith("perf/")}
            rows.append(row)
            print(f"round {round_}: {tokens} tokens, released {sharding.memory.release}, " + describe(row), flush=True)
    if controls:
        kept = rows[2:]
        print("median: " + describe({name: statistics.median(row[name] for row in kept) for name in kept[0]}))
    engine.shutdown()
    leave()


async def grade(trajectory: Trajectory, group: Group) -> None:
    """Something that differs within a group."""
    trajectory.reward = float(trajectory.tokens[-1] % 2)


def describe(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.0f}" if value > 100 else f"{name} {value:.3f}" for name, value in row.items())


if __name__ == "__main__":
    main()
