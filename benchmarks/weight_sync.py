"""How long the engine takes from asleep to holding the actor's new weights, and how far that is from the hardware.

    python -m benchmarks.weight_sync                                              # 1.5B shape on one GPU
    torchrun --nproc-per-node 4 -m benchmarks.weight_sync shape=qwen2.5-7b actor_tp=1 engine_tp=4

Prints the median of each phase, the slowest rank's, beside a naive sync in the same engine: one collective a parameter.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import workers.sharding
from benchmarks import read, shapes
from benchmarks.shapes import make, random_prompts
from grpo.algorithm import AlgorithmConfig
from grpo.config import option
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.engines.config import RolloutConfig
from workers.engines.protocol import Bucket
from workers.engines.sglang_engine import SGLangEngine
from workers.parallel.mesh import join, leave, make_inference_layout, make_training_layout, pick_device
from workers.rollout import RolloutWorker, make_engine
from workers.sharding import ShardingManager


@dataclass
class Settings(shapes.EngineSettings):
    actor_tp: int = option(1, "processes that share an actor's layers")
    engine_tp: int = option(1, "processes that share an engine")
    cycles: int = option(10, "for each kind of release")
    soak: int = option(0, "cycles after which memory is compared with that after the fifth; 0: none")
    bucket_megabytes: int = option(512, "weights sent at once")


def slowest(value: float) -> float:
    """The largest of all ranks'."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def cycle(sharding: ShardingManager) -> dict[str, float]:
    """Seconds of each phase of one cycle with new weights, the slowest rank's."""
    sharding.actor.version += 1
    dist.barrier()
    begun = time.perf_counter()
    with sharding.serving():
        pass
    whole = time.perf_counter() - begun
    phases = {name.removeprefix("time/sync/"): v for name, v in sharding.metrics.items() if "time/sync/" in name}
    return {name: slowest(value) for name, value in {**phases, "whole": whole}.items()}


def naive_buckets(sharding: ShardingManager):
    """The same weights gathered one parameter at a time, and then laid end to end."""
    gatherer, pieces, shapes, size = sharding.gatherer, [], {}, 0
    limit = workers.sharding.BUCKET_BYTES
    for name, parameter in gatherer.parameters.items():
        if pieces and size + parameter.numel() * gatherer.dtype.itemsize > limit:
            yield Bucket(torch.cat(pieces), shapes)
            pieces, shapes, size = [], {}, 0
        pieces.append(parameter.detach().full_tensor().to(gatherer.dtype).reshape(-1))
        shapes[name] = parameter.shape
        size += parameter.numel() * gatherer.dtype.itemsize
    yield Bucket(torch.cat(pieces), shapes)


def gather_bandwidth(device: torch.device, size: int = 2**29) -> float:
    """Bytes a second that each rank receives from others in an all-gather of `size` bytes."""
    world = dist.get_world_size()
    out = torch.empty(size // world * world, dtype=torch.uint8, device=device)
    mine = out[: size // world].clone()
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        dist.all_gather_into_tensor(out, mine)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return size * (world - 1) / world / min(seconds)


def held(engine: SGLangEngine) -> tuple[int, int]:
    """Bytes in use on this rank's GPU by everyone, and of the host by this process and its engine's."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    resident = 0
    for pid in ["self", *(process.pid for process in engine.process.processes)]:
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        resident += int(lines["RssAnon"].split()[0]) * 1024
    return total - free, resident


def main() -> None:
    settings = read(Settings, sys.argv[1:])
    device = pick_device(settings.device)
    join(device, 300.0)
    console = Console(width=120, quiet=dist.get_rank() != 0)
    model = ModelConfig(path=make(settings.shape, Path(settings.folder), device))
    config = RolloutConfig(
        engine="sglang",
        tensor_parallel=settings.engine_tp,
        memory_fraction=settings.memory_fraction,
        concurrent_samples=512,
        release="kv+weights",
        max_response_tokens=64,
        verify_every=0,
        sglang=settings.options,
    )
    config.check(dist.get_world_size(), dist.get_world_size())
    engines = make_inference_layout(device, settings.engine_tp)
    begun = time.perf_counter()
    engine = make_engine(model, config, engines, seed=0)
    started = slowest(time.perf_counter() - begun)
    layout = make_training_layout(device, 1, settings.actor_tp)
    actor = ActorWorker(model, ActorConfig(), AlgorithmConfig(), layout, 1.0, 10)
    workers.sharding.BUCKET_BYTES = settings.bucket_megabytes * 2**20
    sharding = ShardingManager(actor, RolloutWorker(config, engine, engines, (), seed=0))
    prompts = None
    if dist.get_rank() == 0:
        prompts = random_prompts(settings.shape, 16, 32, torch.Generator().manual_seed(0))
    with sharding.serving():
        engine.verify(sharding.weights())
        samples = sharding.rollout.generate(prompts, 4)
    ours = actor.compute_logprobs(samples)
    if samples is not None:
        gaps = ours["old_logprobs"].values() - samples["rollout_logprobs"].values()
        gap = float(gaps[samples["response_mask"].values()].abs().mean())
        console.print(f"mean difference of log-probabilities over {len(samples)} samples of 64 tokens: {gap:.5f}")
    console.print(
        f"{settings.shape}: {dist.get_world_size()} rank(s), actor tp {settings.actor_tp}, engine tp "
        f"{settings.engine_tp}; engine started in {started:.1f} s; its weights are the actor's"
    )
    whole = sharding.gatherer.bytes
    if device.type == "cuda" and dist.get_world_size() > 1:
        rate = gather_bandwidth(device)
        ranks = layout.dp_shard * layout.tp_size
        floor = whole * (ranks - 1) / ranks / rate
        console.print(
            f"all-gather {rate / 1e9:.0f} GB/s received a rank: {whole / 1e9:.2f} GB take {floor:.4f} s at best"
        )
    elif device.type == "cuda":
        console.print(f"{whole / 1e9:.2f} GB in {len(sharding.gatherer.plan)} bucket(s)")
    names = ("offload", "wake_weights", "update", "wake_kv", "release", "reload", "whole")
    table = Table("median of s", *names)

    def measure(label: str) -> None:
        cycle(sharding)
        runs = [cycle(sharding) for _ in range(settings.cycles)]
        table.add_row(label, *(f"{statistics.median(run.get(name, 0.0) for run in runs):.4f}" for name in names))

    for release in ("none", "kv", "kv+weights", "all"):
        sharding.memory.release = release
        measure(release)
    sharding.weights = lambda: naive_buckets(sharding)
    measure("all, naive")
    del sharding.weights
    console.print(table)
    if settings.soak:
        sharding.memory.release = "kv+weights"
        marks = {}
        for count in range(1, settings.soak + 1):
            cycle(sharding)
            if count in (5, settings.soak):
                marks[count] = held(engine)
        (gpu, host), (gpu_end, host_end) = marks[5], marks[settings.soak]
        console.print(
            f"after 5 and {settings.soak} cycles: GPU {gpu / 2**30:.3f} and {gpu_end / 2**30:.3f} GiB, "
            f"host {host / 2**30:.2f} and {host_end / 2**30:.2f} GiB"
        )
    engine.shutdown()
    leave()


if __name__ == "__main__":
    main()
