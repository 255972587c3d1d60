"""What goes from the controller to the ranks and back in a step: its bytes, and the controller's seconds.

    torchrun --nproc-per-node 4 -m benchmarks.dispatch              # 64 x 8 samples of 128 + 512 tokens for each rank
    python -m benchmarks.dispatch response=4096                     # what the controller does without other ranks

No model is there: prompts go out, samples come back and become a batch, and the rows of an update go out. Of the
seconds, those in brackets are the controller's own work; the rest it waits, here for ranks that share its cores.
"""

import itertools
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import read
from grpo.advantages import compute_advantages, weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import Trajectory, batch_of
from grpo.config import option
from grpo.data import Prompt
from grpo.packing import balance
from workers.dispatch import WorkerGroup
from workers.parallel.mesh import join, leave, make_training_layout

FIELDS = ("tokens", "response_mask", "advantages", "loss_weights", "rollout_logprobs")  # of a step's only update


@dataclass
class Settings:
    prompts: int = option(64, "of each rank")
    samples: int = option(8, "for each prompt")
    prompt: int = option(128, "tokens of each prompt")
    response: int = option(512, "tokens of each response")
    rounds: int = option(5, "measured ones, after one that is not")


def make_prompts(count: int, length: int) -> list[Prompt]:
    """Prompts of `length` random ids, with four characters for each, and the row of a small task."""
    ids = torch.randint(2, 150_000, (count, length)).tolist()
    return [Prompt(i, row, "w" * 4 * length, {"numbers": [3, 7, 25, 50], "target": 765}) for i, row in enumerate(ids)]


def sample(settings: Settings, prompt: Prompt, group: int) -> Trajectory:
    """A graded response, as an engine's rank has it."""
    made = Trajectory(prompt.tokens, group, False, prompt.row, prompt.text)
    made.add_sampled(np.random.randint(2, 150_000, settings.response), -np.random.rand(settings.response), 3)
    made.response, made.reward = "w" * 4 * settings.response, float(made.tokens[-1] % 2)
    made.components = {"right": made.reward}
    return made


def main() -> None:
    settings = read(Settings, sys.argv[1:])
    join(torch.device("cpu"), 300.0)
    world, rank = dist.get_world_size(), dist.get_rank()
    group, algorithm = WorkerGroup(make_training_layout(torch.device("cpu"))), AlgorithmConfig()
    taken: dict[str, list[tuple[float, float]]] = {}

    def measure(name: str, work: Callable[[], Any]) -> Any:
        dist.barrier()
        begun, busy = time.perf_counter(), time.process_time()
        result = work()
        taken.setdefault(name, []).append((time.perf_counter() - begun, time.process_time() - busy))
        return result

    for _ in range(settings.rounds + 1):
        prompts = make_prompts(settings.prompts * world, settings.prompt) if rank == 0 else None
        told = measure("prompts out", lambda prompts=prompts: group.share(prompts, "prompts"))
        shares = measure("who samples what", lambda told=told: balance([len(each.tokens) for each in told], world))
        mine = [sample(settings, told[i], i) for i in shares[rank] for _ in range(settings.samples)]
        found = measure("samples back", lambda mine=mine: group.collect(mine, "sampling"))

        def put_together(found: list[list[Trajectory]] | None = found) -> Any:
            if found is None:
                return None
            batch = batch_of(sorted(itertools.chain.from_iterable(found), key=lambda each: each.group))
            return weigh_tokens(compute_advantages(batch, algorithm), algorithm)

        batch = measure("a batch of them", put_together)
        rows = measure("rows out", lambda batch=batch: group.scatter(batch, FIELDS, "rows"))
    if rank == 0:
        each = sum(field.values().nbytes if field.is_nested else field.nbytes for field in rows.values())
        sizes = {"prompts out": len(pickle.dumps(told)), "rows out": each, "samples back": len(pickle.dumps(mine))}
        for name, seconds in taken.items():
            wall, own = (statistics.median(column) for column in zip(*seconds[1:], strict=True))
            size = (
                f"{sizes[name] / 2**20:8.2f} MiB {'to each' if 'out' in name else 'of each'}" if name in sizes else ""
            )
            print(f"{name:18} {wall * 1e3:8.1f} ms ({own * 1e3:.1f}) {size}")
    leave()


if __name__ == "__main__":
    main()
