"""What the tests of the workers share: a process group of one, a tiny model, and one launch of four processes."""

import asyncio
import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from examples.countdown import make_model
from grpo.data import Prompt
from workers.config import ModelConfig
from workers.engines.protocol import Bucket, Engine, Response, Sampling
from workers.parallel.mesh import (
    InferenceLayout,
    TrainingLayout,
    join,
    make_inference_layout,
    make_training_layout,
    pick_device,
)


def buckets_of(weights: Iterable[tuple[str, torch.Tensor]], each: int = 5) -> Iterator[Bucket]:
    """Named weights in buckets of `each`."""
    weights = list(weights)
    for first in range(0, len(weights), each):
        part = weights[first : first + each]
        # A name may come twice in what a test sends.
        for chunk in [part] if len(dict(part)) == len(part) else [[weight] for weight in part]:
            flat = torch.cat([tensor.detach().reshape(-1) for _, tensor in chunk])
            yield Bucket(flat, {name: tensor.shape for name, tensor in chunk})


def prompts_of(*tokens: list[int]) -> list[Prompt]:
    """Prompts of these ids, with nothing else to them."""
    return [Prompt(index, [*ids], "", {}) for index, ids in enumerate(tokens)]


def answers_of(engine: Engine, prompts: list, samples: int, sampling: Sampling) -> list[list[Response]]:
    """What the engine answers to `samples` requests of each prompt, all in flight at once."""

    async def ask(index: int, sample: int) -> Response:
        seed = hash((sampling.seed, index, sample))
        return await engine.sample(prompts[index], dataclasses.replace(sampling, seed=seed))

    async def ask_all() -> list[Response]:
        return await asyncio.gather(*(ask(i, s) for i in range(len(prompts)) for s in range(samples)))

    answers = engine.run(ask_all())
    return [answers[i : i + samples] for i in range(0, len(answers), samples)]


@pytest.fixture(scope="module")
def layout() -> Iterator[TrainingLayout]:
    """The layout of this process alone, in the process group that is there or in one of its own."""
    device, joined = pick_device("cpu"), dist.is_initialized()
    if not joined:
        join(device, 60.0)
    yield make_training_layout(device)
    if not joined:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def engines(layout) -> InferenceLayout:
    """An engine in this process alone."""
    return make_inference_layout(layout.device)


@pytest.fixture(scope="session")
def hf_model() -> transformers.PreTrainedModel:
    """A qwen3 of two layers with two query heads to a key head; treat as read-only."""
    model = make_model("qwen3", hidden=32, layers=2, heads=4, kv_heads=2, feed_forward=48, vocab=117, tied=True, seed=5)
    return model.eval()


@pytest.fixture(scope="session")
def model_config(hf_model, tmp_path_factory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    hf_model.save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.fixture(scope="session")
def four_processes(tmp_path_factory) -> dict:
    """What collective_probe.py saw on each of four processes."""
    out = tmp_path_factory.mktemp("collective")
    probe = Path(__file__).with_name("collective_probe.py")
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(probe), str(out)],
        check=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    return {
        name: [torch.load(out / f"{name}-{rank}.pt", weights_only=False) for rank in range(4)]
        for name in ("heads", "transport", "held", "gathered", "stealing", "missing")
    }
