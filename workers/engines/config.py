"""The settings of the rollout and its engine."""

import inspect
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from grpo.config import ConfigError, check_values, nearest, option

FIRST, BEYOND = (0, 5, 17), (0, 5, 22)
INSTALL = "pip install -e '.[sglang]'"

OWNED = ("model_path", "tokenizer_path", "device", "dtype", "base_gpu_id", "tp_size", "random_seed", "load_format")
OWNED += ("custom_weight_loader", "skip_tokenizer_init", "enable_memory_saver", "mem_fraction_static")
OWNED += ("max_running_requests",)
"""SGLang's options that the trainer decides, from the settings of its own that they belong to."""


@dataclass
class RolloutConfig:
    engine: str = option(
        "torch", "Inference engine: torch (embedded, for CPUs and small models) or sglang.", choices=("torch", "sglang")
    )
    tensor_parallel: int = option(1, "Processes of one machine that share an engine (sglang).", above=0)
    temperature: float = option(1.0, "Divides the logits, in sampling and in training.", above=0, below=math.inf)
    top_p: float = option(
        1.0, "Sample from the fewest tokens that hold this share of the probability; 1 is all.", above=0, at_most=1
    )
    top_k: int = option(0, "Sample from this many most likely tokens; 0 is all.", at_least=0)
    max_response_tokens: int = option(
        1024, "Longest response; a longer one is cut and marked as truncated.", at_least=1
    )
    concurrent_samples: int | None = option(
        None, "Samples that one engine works on at once; null: all of a step, as far as its memory holds them.", above=0
    )
    stop: list[str] = option(
        [], "Strings that end a response, which includes the token that completes one: for base models ['</answer>']."
    )
    memory_fraction: float = option(
        0.5, "Share of the memory for an engine's weights and KV cache.", above=0, at_most=1
    )
    release: str = option(
        "auto",
        "What the engine lets go of while the trainer works (sglang): none, kv, kv+weights, all (CUDA graphs too), or "
        "auto: the least that leaves the trainer what its fullest step so far took.",
        choices=("auto", "none", "kv", "kv+weights", "all"),
    )
    verify_every: int = option(
        20,
        "Weight updates from one comparison of the engine's weights with the actor's to the next; 0: never.",
        at_least=0,
    )
    gap_warning: float = option(
        0.05,
        "Mean difference of rollout and trainer log-probabilities past which the likely cause is told; in bfloat16 up "
        "to twice this, as far as rounding explains it.",
        above=0,
    )
    gap_error: float = option(0.5, "The same, from which on the run ends.", above=0)
    stall_seconds: float = option(45.0, "Longest silence of a working engine before the run ends (sglang).", above=0)
    sglang: dict[str, Any] = option({}, "Options of SGLang's own, such as {attention_backend: triton}.")

    def check(self, world: int, local_world: int) -> None:
        """Raise ConfigError for the first value that cannot work with `world` processes, `local_world` a machine."""
        check_values(self, "rollout.")
        for string in self.stop:
            if not string or "\ufffd" in string:
                raise ConfigError(f"rollout.stop holds {string!r}, which is no text to stop at: leave it out.")
        if self.gap_warning > self.gap_error:
            limits = f"rollout.gap_warning={self.gap_warning} must be at most rollout.gap_error={self.gap_error}"
            raise ConfigError(f"{limits}: a run is warned before it ends.")
        if self.engine == "torch":
            if self.tensor_parallel > 1 or self.sglang:
                raise ConfigError("rollout.tensor_parallel and rollout.sglang need rollout.engine=sglang.")
            return
        if world % self.tensor_parallel or local_world % self.tensor_parallel:
            fault = f"rollout.tensor_parallel={self.tensor_parallel} does not divide the {local_world} process(es)"
            raise ConfigError(f"{fault} of a machine, and an engine does not span machines.")
        check_sglang(self.sglang)


def check_sglang(options: Mapping[str, Any]) -> None:
    """Raise ConfigError where SGLang is missing, of a version that was not tried, or does not know one of `options`."""
    try:
        installed = version("sglang")
    except PackageNotFoundError as error:
        newer = sys.version_info >= (3, 13)
        way = "it has nothing for a Python past 3.12, so use another environment" if newer else f"use {INSTALL}"
        raise ConfigError(f"rollout.engine=sglang needs SGLang, which is not installed: {way}.") from error
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:3] if part.isdigit())
    if not FIRST <= numbers < BEYOND:
        first, beyond = (".".join(map(str, edge)) for edge in (FIRST, BEYOND))
        known = f"{first} up to, but not, {beyond} are supported"
        raise ConfigError(f"SGLang {installed} is installed, and {known}: use {INSTALL}.")
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        why = "with which memory cannot be shared with SGLang: leave it out"
        raise ConfigError(f"PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, {why}.")
    if not options:
        return
    from sglang.srt.server_args import ServerArgs

    known = [name for name in inspect.signature(ServerArgs).parameters if name not in OWNED]
    for name in options:
        if name in OWNED:
            raise ConfigError(f"rollout.sglang.{name} is decided by the trainer: leave it out.")
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else "see python -m sglang.launch_server --help."
            raise ConfigError(f"rollout.sglang.{name} is not an option of SGLang {installed}: {hint}")
