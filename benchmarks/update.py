"""How fast the actor learns: forward, backward and optimizer step over packed sequences, in tokens a second and MFU.

    python -m benchmarks.update                                             # 1.5B shape, 16k tokens of length 1024
    python -m benchmarks.update tokens=32768 length=4096 actor.recompute=full
    torchrun --nproc-per-node 4 -m benchmarks.update shape=qwen2.5-7b length=2048 actor.tensor_parallel=2
    torchrun --nproc-per-node 4 -m benchmarks.update samples=512 length=600 spread=0.8

Settings, as key=value: shape, tokens (for each data-parallel part), length of each sequence, samples (in all, instead
of tokens), spread (sigma of log-normal lengths with that mean, cut at 4096; 0 for equal ones), prompt (tokens of each
that are not learned from), rounds, trace (a file for torch's profile of one update), folder, and the actor's own as
actor.*.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import shapes
from benchmarks.shapes import SHAPES, make
from grpo.advantages import weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import jagged, make_batch
from grpo.config import load, option
from workers.actor import ActorConfig, ActorWorker
from workers.parallel.flops import Flops, peak_of
from workers.parallel.mesh import join, make_layout, pick_device
from workers.parallel.policy import ModelConfig, compute_dtype, read_config
from workers.plan import Job, gib, predict
from workers.rollout import RolloutConfig


@dataclass
class Settings(shapes.Settings):
    tokens: int = option(16384, "")
    length: int = option(1024, "")
    samples: int = option(0, "")
    spread: float = option(0.0, "")
    prompt: int = option(1, "")
    rounds: int = option(5, "")
    trace: str = option("", "")
    actor: ActorConfig = option(ActorConfig, "")


def main() -> None:
    settings = load(Settings, None, sys.argv[1:])
    device = pick_device(settings.device)
    join(device, 300.0)
    model = ModelConfig(path=make(settings.shape, Path(settings.folder), device))
    layout = make_layout(device, settings.actor.replicate, settings.actor.tensor_parallel)
    actor = ActorWorker(model, settings.actor, AlgorithmConfig(), layout, 1.0, 10)
    random = torch.Generator().manual_seed(0)
    count = settings.samples or settings.tokens // settings.length * layout.parts
    # The mean of a log-normal lies above its median.
    normal = torch.randn(count, generator=random) * settings.spread - settings.spread**2 / 2
    lengths = (
        (settings.length * normal.exp()).clamp(settings.prompt + 1, 4096 if settings.spread else None).int().tolist()
    )
    batch = None
    if dist.get_rank() == 0:
        tokens = [torch.randint(2, SHAPES[settings.shape][5], (n,), generator=random) for n in lengths]
        fields = {
            "tokens": jagged(tokens),
            "response_mask": jagged([torch.arange(n) >= settings.prompt for n in lengths]),
        }
        for name in ("advantages", "rollout_logprobs"):
            fields[name] = jagged([torch.randn(n, generator=random) for n in lengths])
        batch = weigh_tokens(make_batch(fields), AlgorithmConfig())
    seconds = []
    for round_ in range(settings.rounds + 2):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        begun = time.perf_counter()
        if settings.trace and round_ == settings.rounds + 1 and dist.get_rank() == 0:
            with torch.profiler.profile() as profile:
                actor.update_minibatch(batch)
            profile.export_chrome_trace(settings.trace)
            print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90))
        else:
            metrics = actor.update_minibatch(batch)
            seconds.append(time.perf_counter() - begun)
    if dist.get_rank() == 0:
        median = statistics.median(seconds[2:])
        predicted = sum(lengths) - settings.prompt * count
        flops = 3 * Flops.of(read_config(model)).forward(lengths, predicted) / dist.get_world_size()
        rate = sum(lengths) / dist.get_world_size() / median
        line = f"update: {median:.4f} s ({min(seconds[2:]):.4f} to {max(seconds[2:]):.4f}), first {seconds[0]:.1f} s; "
        line += f"{rate:,.0f} tokens/s a device, {flops / median / 1e12:.0f} TFLOP/s a device"
        if device.type == "cuda":
            peak = peak_of(torch.cuda.get_device_name())
            line += f", MFU {flops / median / peak:.1%}" if peak else ""
            line += f"; peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        print(line)
        print(
            ", ".join(
                f"{name} {metrics[name]:.3f}"
                for name in ("perf/update_balance", "perf/update_bubble", "perf/packing")
                if name in metrics
            )
        )
        job = Job(
            read_config(model),
            compute_dtype(model, device),
            settings.actor,
            RolloutConfig(engine="sglang"),
            fuse=settings.actor.fuses(device),
            shards=layout.shards,
            total=0,
            samples=count // layout.parts,
            longest=max(lengths),
            rows=0,
        )
        print(f"predicted peak memory: {gib(sum(predict(job)['update'].values()))}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
