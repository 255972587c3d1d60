"""How fast the actor learns: forward, backward and optimizer step over packed sequences, in tokens a second and MFU.

    python -m benchmarks.update                                             # 1.5B shape, 16k tokens of length 1024
    python -m benchmarks.update tokens=32768 length=4096 actor.recompute=full
    torchrun --nproc-per-node 4 -m benchmarks.update shape=qwen2.5-7b length=2048 actor.tensor_parallel=2
    torchrun --nproc-per-node 4 -m benchmarks.update samples=512 length=600 spread=0.8

Settings of the actor's own are there too.
"""

import resource
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict

from benchmarks import read, shapes
from benchmarks.shapes import SHAPES, make
from grpo.advantages import weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import jagged, make_batch
from grpo.config import option
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.models.hub import compute_dtype, read_config
from workers.parallel.mesh import join, leave, make_training_layout, pick_device
from workers.plan import Job, gib, predict
from workers.rollout import RolloutConfig


@dataclass
class Settings(shapes.Settings):
    tokens: int = option(16384, "for each data-parallel part")
    length: int = option(1024, "of each sequence")
    samples: int = option(0, "in all, instead of tokens")
    spread: float = option(0.0, "sigma of log-normal lengths of that mean, cut at 4096, in turns with equal ones")
    prompt: int = option(1, "tokens of each that are not learned from")
    attention: str = option("auto", "auto, torch or flash4")
    rounds: int = option(5, "measured ones, after two that are not")
    trace: str = option("", "a file for torch's profile of one update")
    actor: ActorConfig = option(ActorConfig, "the actor's own settings (docs/config.md)")


def main() -> None:
    settings = read(Settings, sys.argv[1:])
    device = pick_device(settings.device)
    join(device, 300.0)
    model = ModelConfig(path=make(settings.shape, Path(settings.folder), device), attention=settings.attention)
    layout = make_training_layout(device, settings.actor.replicate, settings.actor.tensor_parallel)
    at_start = 0 if device.type == "cuda" else most_resident()
    actor = ActorWorker(model, settings.actor, AlgorithmConfig(), layout, 1.0, 10)
    count = settings.samples or settings.tokens // settings.length * layout.dp_size
    works = [Work.of(settings, count, spread) for spread in dict.fromkeys((0.0, settings.spread))]
    for round_ in range(settings.rounds + 2):
        for work in works:
            work.run(actor, settings.trace if work is works[-1] and round_ == settings.rounds + 1 else "")
            work.peak -= at_start
    if dist.get_rank() == 0:
        rates = [work.report(actor, settings.prompt) for work in works]
        if len(works) > 1:
            print(f"{rates[1] / rates[0]:.1%} of the tokens a second of equal lengths")
        job = Job(
            read_config(model),
            compute_dtype(model, device),
            settings.actor,
            RolloutConfig(engine="sglang"),
            compiled=settings.actor.compiles(device),
            dp_shard=layout.dp_shard,
            total=0,
            samples=count // layout.dp_size,
            longest=max(max(work.lengths) for work in works),
            rows=0,
            on_cpu=device.type == "cpu",
        )
        print(f"predicted peak memory: {gib(sum(predict(job)['update'].values()))}")
    leave()


def most_resident() -> int:
    """Bytes of the host's memory that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass
class Work:
    """The samples of an update, and what was measured of it."""

    name: str
    lengths: list[int]
    batch: TensorDict | None  # on the controller
    seconds: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    peak: int = 0  # bytes

    @classmethod
    def of(cls, settings: Settings, count: int, spread: float) -> "Work":
        random = torch.Generator().manual_seed(0)
        # The mean of a log-normal lies above its median.
        normal = torch.randn(count, generator=random) * spread - spread**2 / 2
        most = 4096 if spread else None
        lengths = (settings.length * normal.exp()).clamp(settings.prompt + 1, most).int().tolist()
        batch = None
        if dist.get_rank() == 0:
            tokens = [torch.randint(2, SHAPES[settings.shape][5], (n,), generator=random) for n in lengths]
            mask = [torch.arange(n) >= settings.prompt for n in lengths]
            fields = {"tokens": jagged(tokens), "response_mask": jagged(mask)}
            for name in ("advantages", "rollout_logprobs"):
                fields[name] = jagged([torch.randn(n, generator=random) for n in lengths])
            batch = weigh_tokens(make_batch(fields), AlgorithmConfig())
        return cls("log-normal lengths" if spread else "equal lengths", lengths, batch)

    def run(self, actor: ActorWorker, trace: str) -> None:
        """One update; profiled into the file `trace`, and then not measured, where that is named."""
        on_cuda = actor.layout.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        begun = time.perf_counter()
        if trace and dist.get_rank() == 0:
            with torch.profiler.profile() as profile:
                actor.update_minibatch(self.batch)
            profile.export_chrome_trace(trace)
            print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90))
            return
        self.metrics = actor.update_minibatch(self.batch)
        self.seconds.append(time.perf_counter() - begun)
        self.peak = torch.cuda.max_memory_allocated() if on_cuda else most_resident()

    def report(self, actor: ActorWorker, prompt: int) -> float:
        """Print what was measured after the first two rounds; returns the tokens per second of a device."""
        seconds = statistics.median(self.seconds[2:])
        world, tokens = dist.get_world_size(), sum(self.lengths)
        speed = 3 * float(actor.flops.forward(self.lengths, tokens - prompt * len(self.lengths))) / world / seconds
        rate = tokens / world / seconds
        line = f"{self.name}: {seconds:.4f} s ({min(self.seconds[2:]):.4f} to {max(self.seconds[2:]):.4f}), "
        line += f"first {self.seconds[0]:.1f} s; {rate:,.0f} tokens/s and {speed / 1e12:.0f} TFLOP/s a device"
        if actor.peak:
            line += f", MFU {speed / actor.peak:.1%}"
        if self.peak:
            line += f"; peak memory {gib(self.peak)}"
        for name in ("perf/update_balance", "perf/update_bubble", "perf/packing"):
            if name in self.metrics:
                line += f"; {name} {self.metrics[name]:.3f}"
        print(line)
        return rate


if __name__ == "__main__":
    main()
