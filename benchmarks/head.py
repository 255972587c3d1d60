"""How fast log-probabilities and their gradients come from hidden states, and in how much memory, beside full logits.

    python -m benchmarks.head                                       # 32,768 tokens, Qwen2.5-1.5B's head
    python -m benchmarks.head tokens=512 vocabulary=1000 hidden=64 device=cpu

Full logits are those of a plain matrix product in the compute type with torch's cross entropy, forward and backward.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks import read
from grpo.config import option
from workers.parallel.logprobs import Head, head_logprobs, head_loss
from workers.parallel.mesh import pick_device


@dataclass
class Settings:
    tokens: int = option(32768, "positions")
    vocabulary: int = option(151936, "rows of the head")
    hidden: int = option(1536, "width of the hidden states")
    chunk: int = option(0, "positions at a time; 0: the trainer's")
    rounds: int = option(5, "measured ones, after two that are not")
    device: str = option("auto", "auto, cpu or cuda")


def main() -> None:
    settings = read(Settings, sys.argv[1:])
    device = pick_device(settings.device)
    cuda = device.type == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    hidden = torch.randn(settings.tokens, settings.hidden, device=device).to(dtype).requires_grad_()
    weight = (0.05 * torch.randn(settings.vocabulary, settings.hidden, device=device)).to(dtype).requires_grad_()
    targets = torch.randint(0, settings.vocabulary, (settings.tokens,), device=device)
    slopes = torch.randn(settings.tokens, device=device)
    head = Head(weight, targets, 1.0, chunk_size=settings.chunk or Head.chunk_size, compiled=cuda)

    def alone() -> None:
        head_logprobs(hidden, head)[0].backward(slopes)

    def inside() -> None:
        head_loss(hidden, head, lambda logprobs, entropy, here: (logprobs * slopes[here]).sum()).backward()

    def full() -> None:
        (-F.cross_entropy(hidden @ weight.T, targets, reduction="none")).backward(slopes.to(dtype))

    ways: dict[str, Callable[[], None]] = {"log-probabilities": alone, "with the loss inside": inside, "full": full}
    for name, way in ways.items():
        seconds = []
        for _ in range(settings.rounds + 2):
            hidden.grad = weight.grad = None
            before = 0
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            begun = time.perf_counter()
            way()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        line = f"{name:22} {statistics.median(seconds[2:]) * 1e3:8.1f} ms"
        if cuda:
            gradients = hidden.grad.nbytes + weight.grad.nbytes
            beyond = torch.cuda.max_memory_allocated() - before - gradients
            line += f", {beyond / 2**30:6.2f} GiB beyond inputs and gradients"
        print(line, flush=True)


if __name__ == "__main__":
    main()
