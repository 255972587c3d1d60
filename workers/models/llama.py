"""Llama, the base of the other families: a dense decoder with grouped-query attention and a gated feed-forward part.

A family owns what its name decides about a model: sizes, tensor-parallel cuts, names of weights, attention over packed
sequences, operations and activations. The others say what differs from this one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch.distributed.tensor import Placement

from grpo.config import ConfigError
from workers.parallel import tensor
from workers.parallel.attention import PackedSelfAttention


@dataclass(frozen=True)
class Flops:
    """The operations of a forward pass: for each token, each pair of tokens, and each token predicted.

    As is usual since PaLM (arXiv:2204.02311, appendix B), these are matrix products alone, with two operations for a
    multiplication and its addition. Unlike there, causal attention counts only the pairs that it computes, half of all,
    and the head only the tokens that it is computed for. A backward pass costs twice as much; recomputing counts as 0.
    """

    token: int
    pair: int
    head: int

    def forward(self, lengths: Sequence[int], predicted: int) -> int:
        """Of sequences of `lengths`, of whose tokens `predicted` get a log-probability."""
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return self.token * sum(lengths) + self.pair * pairs + self.head * predicted

    def cost(self, length: int) -> int:
        """Of one sequence whose tokens are all predicted: the measure by which work is balanced."""
        return self.forward([length], length)


class Llama:
    """The family of one model, by its Hugging Face config."""

    attention = PackedSelfAttention  # what Hugging Face's self-attention becomes

    cuts = (
        dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"), tensor.ColumnParallelLinear)
        | dict.fromkeys(("o_proj", "down_proj"), tensor.RowParallelLinear)
        | dict.fromkeys(("input_layernorm", "post_attention_layernorm"), tensor.InputNorm)
        | {"norm": tensor.ReplicatedNorm, "embed_tokens": tensor.VocabParallelEmbedding}
    )
    """What a module becomes under tensor parallelism, by the last part of its name."""

    fused = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    fused |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
    """The modules of which SGLang makes one, and its name."""

    def __init__(self, config: transformers.PretrainedConfig) -> None:
        self.config = config
        self.layers, self.vocab = config.num_hidden_layers, config.vocab_size
        self.hidden, self.feed_forward = config.hidden_size, config.intermediate_size
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or self.hidden // self.heads

    def check_tensor_parallel(self, tp_size: int) -> None:
        """Raise ConfigError for the first size of the model that `tp_size` does not divide."""
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
            if (size := getattr(self.config, name)) % tp_size:
                fault = f"does not divide the model's {name}={size}: use a divisor of {size}."
                raise ConfigError(f"actor.tensor_parallel={tp_size} {fault}")

    def placement(self, name: str) -> Placement:
        """How the parameter `name` is cut under tensor parallelism."""
        *_, module, which = name.split(".")
        return self.cuts[module].placements[which]

    def file_name(self, name: str) -> str:
        """What the parameter `name` is called in the model's safetensors files."""
        return name

    def engine_name(self, name: str) -> str:
        """What the parameter of SGLang's model is called that holds the parameter `name`, alone or with others."""
        return ".".join(self.fused.get(part, part) for part in name.split("."))

    def flops(self) -> Flops:
        """The operations of a forward pass."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.feed_forward
        pair = 4 * self.layers * self.heads * self.head_dim
        return Flops(token=2 * self.layers * layer, pair=pair, head=2 * self.hidden * self.vocab)

    def activations(self, tp_size: int, compute: torch.dtype, compiled: bool) -> int:
        """Bytes that a layer keeps of each token for its backward pass.

        Eager: what autograd saves of Hugging Face's layer with varlen attention, whose norms compute in float32.
        Compiled: inputs and outputs of matrix products and of attention; torch's min-cut partitioner lets the backward
        pass compute the rest again.
        """
        e, hidden, inner = compute.itemsize, self.hidden, self.feed_forward // tp_size
        queries, keys = (count * self.head_dim // tp_size for count in (self.heads, self.kv_heads))
        # Query, key, value, attention's output and log-sum-exp; the divisors of two norms.
        either = 2 * (queries + keys) * e + 4 * self.heads // tp_size + 2 * 4
        if compiled:
            return either + 4 * hidden * e + 3 * inner * e
        # Of each of the two norms the input in float32, that normalised, and the output.
        return either + 2 * hidden * (4 + 2 * e) + 4 * inner * e
