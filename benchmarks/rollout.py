"""What the RolloutWorker costs beside the bare engine: the same requests, in the same engine, in one run.

    python -m benchmarks.rollout                                # 1.5B shape on one GPU, 64 x 8, 128 + 512 tokens
    python -m benchmarks.rollout shape=tiny device=cpu prompts=4 samples=2 response=32      # anywhere, in seconds

Each round has other prompts, which no cache knows.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks import read, shapes
from benchmarks.shapes import make, random_prompts
from grpo.algorithm import AlgorithmConfig
from grpo.config import option
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.engines.config import RolloutConfig
from workers.parallel.mesh import join, leave, make_inference_layout, make_training_layout, pick_device
from workers.rollout import RolloutWorker, make_engine
from workers.sharding import ShardingManager


@dataclass
class Settings(shapes.EngineSettings):
    prompts: int = option(64, "in a rollout")
    samples: int = option(8, "for each prompt")
    prompt: int = option(128, "tokens of each prompt")
    response: int = option(512, "tokens of each response")
    rounds: int = option(4, "measured ones, after one that is not")


def main() -> None:
    settings = read(Settings, sys.argv[1:])
    device = pick_device(settings.device)
    join(device, 300.0)
    model = ModelConfig(path=make(settings.shape, Path(settings.folder), device))
    config = RolloutConfig(
        engine="sglang",
        max_response_tokens=settings.response,
        concurrent_samples=settings.prompts * settings.samples,
        memory_fraction=settings.memory_fraction,
        release="none",
        sglang=settings.options,
    )
    config.check(1, 1)
    layout, engines = make_training_layout(device), make_inference_layout(device)
    begun = time.perf_counter()
    engine = make_engine(model, config, engines, seed=0)
    print(f"engine started in {time.perf_counter() - begun:.1f} s")
    actor = ActorWorker(model, ActorConfig(), AlgorithmConfig(), layout, 1.0, 10)
    worker = RolloutWorker(config, engine, engines, (), seed=0)
    sharding = ShardingManager(actor, worker)
    random = torch.Generator().manual_seed(0)
    sampling = {"temperature": 1.0, "max_new_tokens": settings.response, "ignore_eos": True}
    manager = engine.process.engine.tokenizer_manager
    its_own = type(manager)._handle_batch_output.__get__(manager)  # as before this project's Requests took its place
    bare, ours = [], []
    for _ in range(settings.rounds + 1):
        # Other prompts each time, so that no cache knows them.
        prompts = random_prompts(settings.shape, settings.prompts, settings.prompt, random)
        requests = [prompt.tokens for prompt in prompts for _ in range(settings.samples)]
        with sharding.serving(), patch.object(manager, "_handle_batch_output", its_own):
            begun = time.perf_counter()
            answers = engine.process.ask(
                "generation",
                lambda requests=requests: engine.process.engine.generate(
                    input_ids=requests, sampling_params=sampling, return_logprob=True
                ),
                600,
            )
            bare.append(time.perf_counter() - begun)
        assert all(len(answer["meta_info"]["output_token_logprobs"]) == settings.response for answer in answers)
        prompts = random_prompts(settings.shape, settings.prompts, settings.prompt, random)
        with sharding.serving():
            begun = time.perf_counter()
            batch = worker.generate(prompts, settings.samples)
            ours.append(time.perf_counter() - begun)
        assert len(batch["tokens"].values()) == len(requests) * (settings.prompt + settings.response)
    tokens = len(requests) * settings.response
    for name, seconds in (("bare engine", bare[1:]), ("RolloutWorker", ours[1:])):
        median = statistics.median(seconds)
        print(f"{name:14} {median:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), {tokens / median:,.0f} tokens/s")
    ratio = statistics.median(bare[1:]) / statistics.median(ours[1:])
    print(f"throughput of the worker over the bare engine's: {ratio:.3f}")
    engine.shutdown()
    leave()


if __name__ == "__main__":
    main()
