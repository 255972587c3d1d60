"""python -m trainer generate: what a model, or a run's checkpoint, answers to a prompt, or in a chat."""

import argparse
import asyncio
import sys
from collections.abc import Callable

import torch

from grpo.config import ConfigError
from grpo.data import render, text_of, tokenize
from grpo.data_config import DataConfig
from trainer.checkpoint import model_at
from trainer.pulse import Pulse
from workers.config import ModelConfig
from workers.engines.files import serve_files
from workers.engines.protocol import Response, Sampling
from workers.engines.stop import UNDECIDED
from workers.engines.torch_engine import TorchEngine, share_of_memory
from workers.models.hub import check_weights, read_config, read_tokenizer, stop_tokens


def generate(given: argparse.Namespace, device: torch.device, pulse: Pulse) -> None:
    """Answer the prompt of the arguments `given`, else standard input, which in a terminal is a chat, line by line.

    With a chat template in that, else as text that goes on. pulse: tells what is being done until the model is there.
    Raises ConfigError for what cannot be answered.
    """
    prompt = given.prompt if given.prompt is not None or sys.stdin.isatty() else sys.stdin.read().strip()
    if prompt == "":
        raise ConfigError("There is nothing to answer: give a PROMPT, or write one to standard input.")
    with model_at(given.model, given.step) as (path, _, _):
        model = ModelConfig(path=path)
        check_weights(model)
        tokenizer, stop = read_tokenizer(model), stop_tokens(model)
        positions = read_config(model).max_position_embeddings
        if given.system and not tokenizer.chat_template:
            raise ConfigError(f"--system needs a chat template, which {given.model} lacks: write it into the prompt.")
        engine = TorchEngine(model, device, 1, share_of_memory(device, 0.9))
        serve_files(engine, model, device)
    pulse.end()

    def read(tokens: list[int]) -> str:
        return text_of(tokens, tokenizer, stop)

    messages = [{"role": "system", "content": given.system}] if given.system else []
    while said := prompt or _ask():
        messages.append({"role": "user", "content": said})
        text = render(messages, tokenizer, DataConfig(chat=bool(tokenizer.chat_template)))
        tokens = tokenize([text], tokenizer, add_special_tokens=not tokenizer.chat_template)[0]
        if not 0 < len(tokens) < positions:
            raise ConfigError(f"The prompt has {len(tokens)} tokens, and the model reads 1 to {positions - 1}.")
        most = min(given.max_tokens, positions - len(tokens))
        sampling = Sampling(given.temperature, 1.0, 0, most, stop, given.seed + len(messages))
        response = engine.run(_stream(engine, tokens, sampling, read))
        messages.append({"role": "assistant", "content": read(response.tokens)})
        if response.finish_reason == "length":
            print(f"(cut after {most} tokens)", file=sys.stderr)
        if prompt:
            return


def _ask() -> str:
    try:
        return input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


async def _stream(
    engine: TorchEngine, tokens: list[int], sampling: Sampling, read: Callable[[list[int]], str]
) -> Response:
    """The response to `tokens`, whose text is printed as it grows."""
    shown, task = "", asyncio.create_task(engine.sample(tokens, sampling))
    while not task.done():
        await asyncio.sleep(0)  # one token further
        for request in filter(None, engine.batch.rows):
            if (text := read(request.tokens)).startswith(shown) and not text.endswith(UNDECIDED):
                print(text.removeprefix(shown), end="", flush=True)
                shown = text
    print(read(task.result().tokens).removeprefix(shown), flush=True)
    return task.result()
