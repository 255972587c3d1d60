"""A real model on a CPU against transformers' own: the embedded engine, and the actor's forward and backward pass.

    python -m benchmarks.cpu MODEL_FOLDER rounds=3

In turns: the engine samples `samples` responses of `tokens` tokens to prompts of `prompt`, as `generate` does; the
actor learns from as many rows of `tokens`, all but the first, as the model's own loss does, without the optimizer.
Nothing is padded on either side.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from benchmarks import read
from grpo.algorithm import AlgorithmConfig
from grpo.config import option
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.engines.protocol import Response, Sampling
from workers.engines.torch_engine import TorchEngine
from workers.microbatch import MicroBatch
from workers.parallel.mesh import join, leave, make_training_layout


@dataclass
class Settings:
    samples: int = option(16, "responses sampled, and rows learned from")
    prompt: int = option(32, "tokens of each prompt")
    tokens: int = option(128, "tokens of each response and row")
    rounds: int = option(5, "measured ones, after one that is not")


def in_turns(ours: Callable[[], None], theirs: Callable[[], None], tokens: int, rounds: int, name: str) -> None:
    """Print the tokens a second of both, medians of `rounds` after one that is not measured, and how they compare.

    Also by the processor's seconds, which other programs on the machine change less.
    """
    taken: list[list[tuple[float, float]]] = [[], []]
    for _ in range(rounds + 1):
        for work, seconds in zip((ours, theirs), taken, strict=True):
            begun, busy = time.perf_counter(), time.process_time()
            work()
            seconds.append((time.perf_counter() - begun, time.process_time() - busy))
    of_ours, of_theirs = ([statistics.median(column) for column in zip(*seconds[1:], strict=True)] for seconds in taken)
    (mine, my_busy), (other, other_busy) = of_ours, of_theirs
    print(f"{name}: {tokens / mine:,.1f} tokens/s, transformers' own {tokens / other:,.1f}: ", end="")
    print(f"{other / mine:.2f} times as many, {other_busy / my_busy:.2f} a processor's second")


def main() -> None:
    path, *overrides = sys.argv[1:] or [""]
    if not Path(path, "config.json").is_file():
        sys.exit(f"error: '{path}' is no folder of a model, which comes first: see python -m benchmarks.cpu --help.")
    settings, device, model = read(Settings, overrides), torch.device("cpu"), ModelConfig(path=path)
    join(device, 300.0)
    print(f"{torch.get_num_threads()} thread(s)")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    random, vocabulary = torch.Generator().manual_seed(0), theirs.config.vocab_size
    prompts = torch.randint(2, vocabulary, (settings.samples, settings.prompt), generator=random)
    engine = TorchEngine(model, device)
    for name, weight in theirs.named_parameters():
        engine.weights[name].data.copy_(weight.data)
    engine.wake()

    def sample() -> None:
        async def ask_all() -> list[Response]:
            limits = 1.0, 1.0, 0, settings.tokens, ()
            asked = (engine.sample(row, Sampling(*limits, seed=i)) for i, row in enumerate(prompts.tolist()))
            return await asyncio.gather(*asked)

        assert all(len(answer.tokens) == settings.tokens for answer in engine.run(ask_all()))

    def generate() -> None:
        length = {"min_new_tokens": settings.tokens, "max_new_tokens": settings.tokens}
        choices = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        theirs.generate(prompts, attention_mask=torch.ones_like(prompts), **choices, **length)

    tokens = settings.samples * settings.tokens
    in_turns(sample, generate, tokens, settings.rounds, "engine")
    actor = ActorWorker(model, ActorConfig(), AlgorithmConfig(), make_training_layout(device), 1.0, 10)
    rows = torch.randint(2, vocabulary, (settings.samples, settings.tokens), generator=random)
    learned = (torch.arange(settings.tokens) > 0).repeat(settings.samples)
    fields, lengths = {"tokens": rows.flatten(), "response_mask": learned}, [settings.tokens] * settings.samples

    def learn() -> None:
        micro = MicroBatch.of(fields, lengths, device, list(range(settings.samples)))
        actor.policy(micro, 1.0, loss=lambda logprobs, entropy, chunk: -logprobs.sum()).backward()
        actor.optimizer.zero_grad()

    def learn_with_transformers() -> None:
        theirs(rows, labels=rows, use_cache=False).loss.backward()
        theirs.zero_grad()

    in_turns(learn, learn_with_transformers, tokens, settings.rounds, "actor")
    leave()


if __name__ == "__main__":
    main()
