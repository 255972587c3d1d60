"""What passes between the controller and the ranks in a step, and what processors do for it.

    torchrun --nproc-per-node 4 -m benchmarks.dispatch              # 64 x 8 samples of 128 + 512 tokens for each rank
    python -m benchmarks.dispatch response=4096                     # what is left where there is one

No model is there: prompts go out, what was sampled is told to the controller, and the rows of an update go to the ranks
that would work on them. Wall time counts waiting, here for ranks that share the cores; what the controller does beyond
another rank is its processor's time less theirs.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import read
from grpo.advantages import compute_advantages, weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import Trajectory
from grpo.config import option
from grpo.data import Prompt
from grpo.packing import balance
from workers.dispatch import HELD, WorkerGroup
from workers.engines.config import RolloutConfig
from workers.parallel.mesh import join, leave, make_inference_layout, make_training_layout
from workers.rollout import RolloutWorker, Task

FIELDS = ("tokens", "response_mask", "advantages", "loss_weights", "rollout_logprobs")  # of a step's only update


@dataclass
class Settings:
    prompts: int = option(64, "of each rank")
    samples: int = option(8, "for each prompt")
    prompt: int = option(128, "tokens of each prompt")
    response: int = option(512, "tokens of each response, at most: they have from half as many on")
    rounds: int = option(5, "measured ones, after one that is not")


def make_prompts(count: int, length: int) -> list[Prompt]:
    """Prompts of `length` random ids, with four characters for each, and the row of a small task."""
    ids = torch.randint(2, 150_000, (count, length)).tolist()
    return [Prompt(i, row, "w" * 4 * length, {"numbers": [3, 7, 25, 50], "target": 765}) for i, row in enumerate(ids)]


def sample(settings: Settings, prompt: Prompt, group: int) -> Trajectory:
    """A graded response, as an engine's rank has it."""
    made = Trajectory(prompt.tokens, group, False, prompt.row, prompt.text)
    length = np.random.randint(settings.response // 2, settings.response + 1)
    made.add_sampled(np.random.randint(2, 150_000, length), -np.random.rand(length), 3)
    made.response, made.reward = "w" * 4 * length, float(made.tokens[-1] % 2)
    made.components = {"right": made.reward}
    return made


def main() -> None:
    settings = read(Settings, sys.argv[1:])
    join(torch.device("cpu"), 300.0)
    world, rank, device = dist.get_world_size(), dist.get_rank(), torch.device("cpu")
    rollout = RolloutWorker(RolloutConfig(), SimpleNamespace(), make_inference_layout(device), (), 0)
    group, algorithm = WorkerGroup(make_training_layout(device)), AlgorithmConfig()
    taken: dict[str, list[tuple[float, float]]] = {}

    def measure(name: str, work: Callable[[], Any]) -> Any:
        dist.barrier()
        begun, busy = time.perf_counter(), time.process_time()
        result = work()
        taken.setdefault(name, []).append((time.perf_counter() - begun, time.process_time() - busy))
        return result

    for _ in range(settings.rounds + 1):
        HELD.clear()
        task = None
        if rank == 0:
            prompts = make_prompts(settings.prompts * world, settings.prompt)
            first = HELD.begin(len(prompts) * settings.samples)
            task = Task(prompts, settings.samples, False, 1.0, False, 0, first)
        task = measure("prompts out", lambda task=task: rollout.group.share(task, "prompts"))
        shares = measure("who samples what", lambda task=task: balance([len(p.tokens) for p in task.prompts], world))
        done = [sample(settings, task.prompts[i], i) for i in shares[rank] for _ in range(settings.samples)]
        batch = measure("samples told", lambda task=task, done=done: rollout.bring_together(task, done))
        weighed = measure(
            "advantages, loss weights",
            lambda batch=batch: weigh_tokens(compute_advantages(batch, algorithm), algorithm),
        )
        measure("rows to the ranks", lambda batch=weighed: group.scatter(batch, FIELDS, "rows"))
    medians = {name: [statistics.median(c) for c in zip(*each[1:], strict=True)] for name, each in taken.items()}
    everyones = [medians] * world
    dist.all_gather_object(everyones, medians)
    if rank == 0:
        print(f"{'':26}  wall, processor of the controller, of another rank: milliseconds")
        for name, (wall, own) in medians.items():
            other = statistics.median(each[name][1] for each in everyones[1:] or [medians])
            print(f"{name:26} {wall * 1e3:8.1f} {own * 1e3:8.1f} {other * 1e3:8.1f}")
    leave()


if __name__ == "__main__":
    main()
