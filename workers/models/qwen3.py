"""Qwen3: Llama with a norm of each head's queries and keys."""

import torch
from torch import Tensor

from workers.models.llama import Llama
from workers.parallel.attention import PackedSelfAttention
from workers.parallel.tensor import HeadNorm


class NormedSelfAttention(PackedSelfAttention):
    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(hidden_states)
        return self.q_norm(query), self.k_norm(key), value


class Qwen3(Llama):
    """See Llama."""

    attention = NormedSelfAttention
    cuts = Llama.cuts | {"q_norm": HeadNorm, "k_norm": HeadNorm}

    def activations(self, tp_size: int, compute: torch.dtype, compiled: bool) -> int:
        # Of these norms the divisor and the input; eager, that is in float32 and kept normalised too.
        e, heads = compute.itemsize, (self.heads + self.kv_heads) // tp_size
        norms = 4 * heads + heads * self.head_dim * (e if compiled else 4 + e)
        return super().activations(tp_size, compute, compiled) + norms
