"""The optimizer: AdamW, its learning rate over a run, and the norm of the gradient."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from workers.config import OptimizerConfig
from workers.parallel.mesh import TrainingLayout


def make_optimizer(parameters: list[Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW for those of the parameters that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": config.weight_decay},
        # Norms and biases: to pull them to 0 would change what a layer does, not how large its weights are.
        {"params": [parameter for parameter in trained if parameter.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=tuple(config.betas), fused=True)


def learning_rate(config: OptimizerConfig, update: int, total_updates: int) -> float:
    """The learning rate of update 0, 1, ...: a linear warm-up, then the schedule, at its end after the last update."""
    if update < config.warmup_updates:
        return config.learning_rate * (update + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (update - config.warmup_updates) / max(1, total_updates - config.warmup_updates))
    if config.schedule == "cosine":
        progress = 0.5 - 0.5 * float(torch.cos(torch.tensor(torch.pi * progress, dtype=torch.double)))
    return config.learning_rate * (1 - (1 - config.final_learning_rate_ratio) * progress)


@torch.no_grad()
def clip_gradients(parameters: list[Parameter], longest: float, layout: TrainingLayout, loss: Tensor) -> Tensor:
    """Scale the gradients down to the norm `longest` if they are longer; returns their norm before, a float64 scalar.

    It is the norm of the whole gradient on every layout: what is replicated over the tensor mesh counts once. It is
    not finite, on every rank alike, if a gradient or the `loss` of any rank is not.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    locals_ = [grad.to_local() for grad in grads]
    tensor_copies = [layout.tp_size if grad.placements[-1].is_replicate() else 1 for grad in grads]
    copies = [float(layout.dp_replicate * count) for count in tensor_copies]
    # Scalars go along with the kernels: a tensor of them would make the device wait.
    squares = torch._foreach_div(torch._foreach_pow(torch._foreach_norm(locals_), 2.0), copies)
    total = torch.stack(squares).double().sum() + 0 * loss.detach()  # NaN for a loss that is not finite
    dist.all_reduce(total)
    norm = total.sqrt()
    torch._foreach_mul_(locals_, (longest / (norm + 1e-6)).clamp(max=1.0).to(locals_[0].dtype))
    return norm
