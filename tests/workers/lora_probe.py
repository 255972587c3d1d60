"""Run by test_lora.py under torchrun, and with one process inside it: two updates of adapters, and a sync.

    torchrun --nproc-per-node N -m tests.workers.lora_probe MODEL OUT REPLICATE [REPLICATE ...]

leaves OUT/REPLICATE.pt with what the controller saw.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.algorithm import AlgorithmConfig
from tests.workers.layout_probe import TEMPERATURE, full, make_off_policy, ragged_batch, roll_out
from workers.actor import ActorWorker
from workers.config import ActorConfig, LoraConfig, ModelConfig
from workers.parallel import policy
from workers.parallel.lora import adapters_of
from workers.parallel.mesh import TrainingLayout, is_controller, join, leave, make_training_layout, pick_device
from workers.ref import RefWorker

LORA = LoraConfig(rank=3, alpha=6.0)  # two shards cannot have as many rows of A each


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
    actor, reference = make_workers(model, layout)
    batch, noise = ragged_batch()
    result = {"start": whole(actor)}
    # First of all, with the adapters off: what FSDP learns of the parameters at its first pass must still be right.
    batch = actor.compute_logprobs(reference.compute_logprobs(batch if is_controller() else None))
    fresh = batch.copy() if is_controller() else None
    make_off_policy(batch, noise)
    result |= {"metrics": actor.update(batch), "end": whole(actor)}
    result["means"] = [actor.optimizer.state[p]["exp_avg"].full_tensor() for p in actor.parameters if p.requires_grad]

    engine, _, result["rollout_gap"] = roll_out(actor, reference, engine_dtype)
    later, ref_later = actor.compute_logprobs(batch), reference.compute_logprobs(batch)
    result |= {"synced": whole(actor), "engine": dict(engine.weights)}
    hashes = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, [float(weight.double().sum()) for weight in engine.weights.values()])
    if not is_controller():
        return {}
    result["engines_agree"] = all(other == hashes[0] for other in hashes)
    result |= {"logprobs": fresh["old_logprobs"].values(), "later": later["old_logprobs"].values()}
    return result | {"ref": fresh["ref_logprobs"].values(), "ref_later": ref_later["ref_logprobs"].values()}


def main() -> None:
    device = pick_device("cpu")
    join(device, 120.0)
    policy.SMALLEST_UNIT = 0  # the layers are gathered one by one, as large ones are
    for replicate in sys.argv[3:]:
        result = step(ModelConfig(path=sys.argv[1]), make_training_layout(device, int(replicate), 1))
        if is_controller():
            torch.save(result, Path(sys.argv[2]) / f"{replicate}.pt")
    leave()


if __name__ == "__main__":
    main()
