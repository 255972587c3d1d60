"""How many floating-point operations a sequence costs: what work is balanced by, and utilisation is counted in."""

from collections.abc import Sequence
from dataclasses import dataclass

import transformers

PEAKS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12}
"""Dense bfloat16 operations a second of NVIDIA's data sheets, by a part of the device's name."""


@dataclass(frozen=True)
class Flops:
    """The forward pass of a model: operations for each token, each pair of tokens, and each predicted token.

    Matrix products alone, two operations for a multiplication with its addition, as is usual since PaLM
    (arXiv:2204.02311, appendix B), but that causal attention counts the pairs that it computes, half of all, and the
    head counts where it is computed. A backward pass costs twice as much; what is computed again counts once.
    """

    token: int
    pair: int
    head: int

    @classmethod
    def of(cls, config: transformers.PretrainedConfig) -> "Flops":
        """Those of a dense Qwen2, Qwen3 or Llama."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        width = head_width(config)
        attention = hidden * width * (2 * heads + 2 * config.num_key_value_heads)
        layer = attention + 3 * hidden * config.intermediate_size
        layers = config.num_hidden_layers
        return cls(2 * layers * layer, 4 * layers * heads * width, 2 * hidden * config.vocab_size)

    def forward(self, lengths: Sequence[int], predicted: int) -> int:
        """Of sequences of `lengths`, of whose tokens `predicted` get a log-probability."""
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return self.token * sum(lengths) + self.pair * pairs + self.head * predicted

    def cost(self, length: int) -> int:
        """Of one sequence whose tokens are all predicted, as what balances work."""
        return self.forward([length], length)


def head_width(config: transformers.PretrainedConfig) -> int:
    """The size of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def peak_of(name: str) -> float | None:
    """The operations a second of a device called `name`, where they are known."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)
