"""Models with the shapes of well-known ones and random weights, on disk, and the settings that benchmarks share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from grpo.config import option
from grpo.data import Prompt

SHAPES = {
    # name: hidden, layers, heads, key heads, feed-forward, vocabulary, tied
    "qwen2.5-0.5b": (896, 24, 14, 2, 4864, 151936, True),
    "qwen2.5-1.5b": (1536, 28, 12, 2, 8960, 151936, True),
    "qwen2.5-7b": (3584, 28, 28, 4, 18944, 152064, False),
    "smollm2-135m": (576, 30, 9, 3, 1536, 49152, True),
    "tiny": (64, 2, 4, 2, 96, 128, True),
}


@dataclass
class Settings:
    shape: str = option("qwen2.5-1.5b", "qwen2.5-0.5b, -1.5b, -7b, smollm2-135m or tiny", choices=tuple(SHAPES))
    device: str = option("auto", "auto, cpu or cuda")
    folder: str = option("/tmp/shapes", "where models are made")


@dataclass
class EngineSettings(Settings):
    memory_fraction: float = option(0.4, "share of the GPU that the engine takes")
    options: dict[str, Any] = option({}, "SGLang's own, such as {attention_backend: triton}")


def make(shape: str, folder: Path, device: torch.device) -> str:
    """The folder of a Qwen2 of `shape` with random bfloat16 weights; written once, by the first rank of a machine."""
    path = folder / shape
    if device.index in (None, 0) and not list(path.glob("*.safetensors")):
        hidden, layers, heads, kv_heads, feed_forward, vocabulary, tied = SHAPES[shape]
        config = transformers.Qwen2Config(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=feed_forward,
            vocab_size=vocabulary,
            tie_word_embeddings=tied,
            max_position_embeddings=32768,
            rope_theta=1e6,
        )
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # Biases begin as zeros, with which a bias sent to a wrong place would not be seen.
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.02)
        model.save_pretrained(path, max_shard_size="4GB")
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    return str(path)


def random_prompts(shape: str, count: int, length: int, generator: torch.Generator) -> list[Prompt]:
    """Prompts of `length` random ids each."""
    rows = torch.randint(2, SHAPES[shape][5], (count, length), generator=generator).tolist()
    return [Prompt(index, row, "", {}) for index, row in enumerate(rows)]
