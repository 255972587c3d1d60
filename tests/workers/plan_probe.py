"""Run by test_plan.py under torchrun: how many parameters each rank really holds and gathers.

    torchrun --nproc-per-node N -m tests.workers.plan_probe MODELS OUT TENSOR [TENSOR ...]

leaves OUT/KIND-N-TENSOR.pt with the counts of the rank that holds most.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from workers.config import ModelConfig
from workers.parallel import policy
from workers.parallel.mesh import TrainingLayout, join, leave, make_training_layout, pick_device


def local(module: torch.nn.Module) -> int:
    parameters = (p.to_local() if isinstance(p, DTensor) else p for p in module.parameters())
    return sum(parameter.numel() for parameter in parameters)


def counts(folder: Path, layout: TrainingLayout) -> dict[str, int]:
    """Parameters of this rank: its own shards, and while all are gathered those of a layer and of what is left."""
    model = policy.load_policy(ModelConfig(path=str(folder)), layout)
    shards = local(model)
    for module in model.sharded:
        module.unshard()
    layers, whole = [local(layer) for layer in model.causal_lm.model.layers], local(model)
    model.reshard_all()
    return {"local": shards, "layer": layers[0], "root": whole - sum(layers)}


def main() -> None:
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    device = pick_device("cpu")
    join(device, 120.0)
    policy.SMALLEST_UNIT = 0
    for tensor in map(int, sys.argv[3:]):
        layout = make_training_layout(device, 1, tensor)
        for folder in sorted(models.iterdir()):
            if folder.name.endswith("odd") and tensor > 1:
                continue
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, counts(folder, layout))
            if dist.get_rank() == 0:
                most = max(everyone, key=lambda counts: counts["local"])
                torch.save(most, out / f"{folder.name}-{dist.get_world_size()}-{tensor}.pt")
    leave()


if __name__ == "__main__":
    main()
