"""The settings of the model and of the actor. No torch is imported here: --help and a typing error want no wait."""

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from grpo.config import ConfigError, check_values, option

if TYPE_CHECKING:
    import torch

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class ModelConfig:
    path: str = option("", "Hugging Face folder or hub name of the policy to start from.")
    dtype: str = option(
        "auto",
        "Compute type: auto (bfloat16 on CUDA, float32 on a CPU), bfloat16 or float32. "
        "Master weights and optimizer state are float32 always.",
        choices=("auto", "bfloat16", "float32"),
    )
    attention: str = option(
        "auto",
        "Attention of the trainer on CUDA: torch (its own), flash4 (FlashAttention 4, which SGLang's CUDA packages "
        "bring) or auto (flash4 where a trial at the start agrees with torch, else torch).",
    )


@dataclass
class OptimizerConfig:
    learning_rate: float = option(1e-6, "Highest learning rate of AdamW.", above=0, below=math.inf)
    betas: list[float] = option([0.9, 0.95], "AdamW's decay rates of the mean and the squared mean.")
    weight_decay: float = option(0.0, "AdamW's weight decay of matrices; norms and biases have none.", at_least=0)
    warmup_updates: int = option(0, "Optimizer updates over which the learning rate rises from 0.", at_least=0)
    schedule: str = option(
        "constant",
        "Learning rate after the warm-up: constant, linear or cosine.",
        choices=("constant", "linear", "cosine"),
    )
    final_learning_rate_ratio: float = option(
        0.0, "The last learning rate of linear and cosine, over the highest.", at_least=0, at_most=1
    )
    max_grad_norm: float = option(1.0, "Longest gradient; a longer one is scaled down to it.", above=0)
    skipped_limit: int = option(
        5,
        "Steps in a row with an update that was skipped, as loss or gradient was not finite, after which the run ends.",
        at_least=1,
    )

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot work."""
        check_values(self, "actor.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"actor.betas={self.betas} must be two numbers of at least 0 and below 1.")


@dataclass
class LoraConfig:
    rank: int = option(
        0, "Train adapters of this rank instead of the weights (LoRA, needs peft); 0 trains the weights.", at_least=0
    )
    alpha: float = option(32.0, "What an adapter adds is scaled by alpha / rank.", above=0, below=math.inf)
    targets: list[str] = option(
        list(TARGETS), f"The linear layers with an adapter, of {', '.join(TARGETS)}.", choices=TARGETS
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def check(self, tensor_parallel: int) -> None:
        """Raise ConfigError for the first value that cannot work, and where peft is missing."""
        check_values(self, "actor.lora.")
        if not self.rank:
            return
        if not self.targets:
            raise ConfigError("actor.lora.targets is empty, which leaves nothing to train: name at least one layer.")
        if tensor_parallel > 1:
            pair = f"actor.lora.rank={self.rank} does not go with actor.tensor_parallel={tensor_parallel}"
            way_out = "use actor.tensor_parallel=1, which shards the model over all processes"
            raise ConfigError(f"{pair}, as adapters are not cut that way: {way_out}.")
        if find_spec("peft") is None:
            raise ConfigError(f"actor.lora.rank={self.rank} needs the package peft: pip install peft.")


@dataclass
class ActorConfig(OptimizerConfig):
    tensor_parallel: int = option(1, "Processes that share every layer's matrices.", above=0)
    replicate: int = option(1, "Copies of the sharded model (hybrid sharding); 1 shards over all.", above=0)
    max_tokens_per_microbatch: int = option(16384, "Most tokens in a forward and backward pass of a process.", above=0)
    compile: bool | None = option(None, "Compile layers with torch.compile and the head with Triton; null: on CUDA.")
    recompute: str = option(
        "none",
        "Layers computed again in the backward pass to save their activations: none, selective (every other) or full.",
        choices=("none", "selective", "full"),
    )
    reshard: bool | None = option(
        None,
        "Free a layer's gathered weights after each use instead of keeping them until the update is done; null does so "
        "if they are sharded over several processes, or frozen beside adapters.",
    )
    offload: list[str] = option(
        [],
        "What waits in the host's memory while the engine serves: optimizer, parameters, reference (and a teacher; "
        "both also while the actor learns). Gradients are freed always.",
        choices=("optimizer", "parameters", "reference"),
    )
    lora: LoraConfig = option(LoraConfig, "")

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot work."""
        super().check()
        self.lora.check(self.tensor_parallel)

    def compiles(self, device: "torch.device") -> bool:
        """Whether layers are compiled for `device`."""
        return device.type == "cuda" if self.compile is None else self.compile

    def reshards(self, shards: int) -> bool:
        """Whether a layer's weights, gathered from `shards` processes (from none if 1), are freed after each use."""
        return shards > 1 or self.lora.rank > 0 if self.reshard is None else self.reshard
