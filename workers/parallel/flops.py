"""How many floating-point operations a sequence costs: what work is balanced by, and utilisation is counted in."""

from collections.abc import Sequence
from dataclasses import dataclass

PEAKS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "B200": 2250e12}
"""Dense bfloat16 operations a second from NVIDIA's data sheets, by a piece of the device's name."""


@dataclass(frozen=True)
class Flops:
    """The forward pass of a model: operations for each token, each pair of tokens, and each predicted token.

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


def peak_of(name: str) -> float | None:
    """The operations a second of a device called `name`, where they are known."""
    return next((peak for piece, peak in PEAKS.items() if piece in name), None)
