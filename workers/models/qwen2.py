"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, which are cut and fused as their weights are."""

from workers.models.llama import Llama


class Qwen2(Llama):
    """See Llama."""
