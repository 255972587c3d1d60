"""Run by test_lora.py under torchrun, and with one process inside it: two updates of adapters, and a sync.

    torchrun --nproc-per-node N -m tests.workers.lora_probe MODEL OUT REPLICATE [REPLICATE ...]

leaves OUT/REPLICATE.pt with what the controller saw.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.algorithm import AlgorithmConfig
from tests.workers.conftest import prompts_of
from tests.workers.layout_probe import TEMPERATURE, full, make_off_policy, ragged_batch
from workers.actor import ActorConfig, ActorWorker
from workers.engines.config import RolloutConfig
from workers.engines.torch_engine import TorchEngine
from workers.models.hub import ModelConfig
from workers.parallel import policy
from workers.parallel.lora import LoraConfig, adapters_of
from workers.parallel.mesh import TrainingLayout, join, leave, make_inference_layout, make_training_layout, pick_device
from workers.ref import RefWorker
from workers.rollout import RolloutWorker
from workers.sharding import ShardingManager

# Two shards cannot have as many rows of A each.
LORA = LoraConfig(rank=3, alpha=6.0)


def make_workers(model: ModelConfig, layout: TrainingLayout, lora: LoraConfig = LORA, minibatches: int = 2, **settings):
    """An actor and the reference it shares its weights with."""
    algorithm = AlgorithmConfig(aggregate="token_mean", kl_coefficient=0.1)
    # 128 tokens a micro-batch make several passes.
    config = ActorConfig(**{"learning_rate": 1e-2, "max_tokens_per_microbatch": 128, "lora": lora} | settings)
    actor = ActorWorker(model, config, algorithm, layout, TEMPERATURE, 10, minibatches)
    # With Adam's usual epsilon the rounding of a gradient near 0 decides the sign of a whole step.
    actor.optimizer.param_groups[0]["eps"] = 1e-3
    return actor, RefWorker(model, config, layout, TEMPERATURE, actor.policy)


def whole(actor: ActorWorker) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """The frozen weights and each adapter's A and B, whole, by the weights' Hugging Face names."""
    weights = {name: full(weight) for name, weight in actor.policy.weights().items()}
    adapters = adapters_of(actor.policy.causal_lm).items()
    return weights, {name: {"A": full(adapter.A), "B": full(adapter.B)} for name, adapter in adapters}


def step(model: ModelConfig, layout: TrainingLayout, engine_dtype: str = "float32") -> dict:
    """What the controller knows of a reference before and after two updates of the actor, and of the engine then."""
    controls = dist.get_rank() == 0
    actor, reference = make_workers(model, layout)
    batch, noise = ragged_batch()
    batch = batch if controls else None
    start = whole(actor)
    # First of all, with the adapters off: what FSDP learns of the parameters at its first pass must still be right.
    batch = actor.compute_logprobs(reference.compute_logprobs(batch))
    fresh = batch.copy() if controls else None
    make_off_policy(batch, noise)
    metrics = actor.update(batch)
    end = whole(actor)
    means = [actor.optimizer.state[p]["exp_avg"].full_tensor() for p in actor.parameters if p.requires_grad]

    engine = TorchEngine(ModelConfig(path=model.path, dtype=engine_dtype), layout.device)
    rollout = RolloutWorker(
        RolloutConfig(max_response_tokens=12), engine, make_inference_layout(layout.device), (1,), 3
    )
    sharding = ShardingManager(actor, rollout, reference)
    prompts = prompts_of(*(range(2, 6 + i) for i in range(8))) if controls else None
    with sharding.serving():
        samples = rollout.generate(prompts, 2, TEMPERATURE)
    again = actor.compute_logprobs(samples)
    later = actor.compute_logprobs(batch)
    ref_later = reference.compute_logprobs(batch)
    synced = whole(actor)
    hashes = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, [float(weight.double().sum()) for weight in engine.weights.values()])
    if not controls:
        return {}
    return {
        "start": start,
        "end": end,
        "synced": synced,
        "means": means,
        "metrics": metrics,
        "logprobs": fresh["old_logprobs"].values(),
        "later": later["old_logprobs"].values(),
        "ref": fresh["ref_logprobs"].values(),
        "ref_later": ref_later["ref_logprobs"].values(),
        "engine": dict(engine.weights),
        "engines_agree": all(other == hashes[0] for other in hashes),
        "rollout_gap": (again["old_logprobs"].values() - samples["rollout_logprobs"].values()).abs().max(),
    }


def main() -> None:
    device = pick_device("cpu")
    join(device, 120.0)
    policy.SMALLEST_UNIT = 0  # the layers are gathered one by one, as large ones are
    for replicate in sys.argv[3:]:
        result = step(ModelConfig(path=sys.argv[1]), make_training_layout(device, int(replicate), 1))
        if dist.get_rank() == 0:
            torch.save(result, Path(sys.argv[2]) / f"{replicate}.pt")
    leave()


if __name__ == "__main__":
    main()
