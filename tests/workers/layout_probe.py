"""Run by test_layouts.py under torchrun: one step of every model kind on every layout of this many processes.

    torchrun --nproc-per-node N layout_probe.py MODELS OUT REPLICATE,TENSOR[,compiled] [REPLICATE,TENSOR ...]

leaves OUT/KIND-SHARD-TENSOR-rREPLICATE[-compiled].pt with what the controller saw.
"""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.advantages import weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import jagged, make_batch, with_values
from trainer.trainer import attach
from workers.actor import ActorConfig, ActorWorker
from workers.engines.torch_engine import TorchEngine
from workers.parallel import policy
from workers.parallel.mesh import TrainingLayout, join, leave, make_training_layout, pick_device
from workers.parallel.policy import PREFIX, SMALLEST_UNIT, ModelConfig
from workers.ref import RefWorker
from workers.rollout import RolloutConfig, RolloutWorker
from workers.sharding import ShardingManager

TEMPERATURE = 0.8
COMPILED = ("qwen2", "qwen3")
"""The kinds that are compiled too: what the others have, these have; one has biases and one norms of its heads."""


def ragged_batch(seed: int = 1):
    """24 samples of 6 prompts, lengths 6 to 40, off-policy enough that some ratios are clipped."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 41, (24,), generator=random).tolist()
    tokens = [torch.randint(2, 118, (n,), generator=random) for n in lengths]
    mask = [torch.arange(n) >= 4 for n in lengths]
    noise = [0.3 * torch.randn(n, generator=random) for n in lengths]
    advantages = torch.randn(24, generator=random)
    batch = make_batch(
        {
            "tokens": jagged(tokens),
            "response_mask": jagged(mask),
            "advantages": jagged([a * m for a, m in zip(advantages, mask, strict=True)]),
            "group": torch.arange(24) // 4,
        }
    )
    return batch, jagged(noise)


def attach_logprobs(batch, noise: torch.Tensor, logprobs, ref) -> None:
    """Give the controller's batch the log-probabilities of the reference, and the actor's with and without noise."""
    if batch is None:
        return
    attach(batch, ref)
    mask, ours = batch["response_mask"], logprobs["old_logprobs"]
    batch["old_logprobs"] = with_values(mask, ours.values() + noise.values() * mask.values())
    batch["rollout_logprobs"] = ours


def traced_graphs() -> int:
    """How many graphs torch.compile has traced since it was reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's value, which no later update changes."""
    return tensor.detach().full_tensor().clone()


def step(kind: str, models: Path, layout: TrainingLayout, compiled: bool) -> dict[str, torch.Tensor]:
    """Log-probabilities, one update, one sync, one rollout; what the controller knows of each.

    "graphs": how many torch.compile had traced by then, and where layers are compiled after two updates more.
    """
    controls = dist.get_rank() == 0
    # The layers are gathered one by one, as large ones are, but for one kind where they go with the rest.
    policy.SMALLEST_UNIT = SMALLEST_UNIT if kind == "llama" else 0
    algorithm = AlgorithmConfig(
        minibatches_per_step=2, aggregate="token_mean", kl_coefficient=0.1, entropy_coefficient=0.01
    )
    model, start = ModelConfig(path=str(models / "policy" / kind)), ModelConfig(path=str(models / "reference" / kind))
    # 128 tokens a micro-batch make several passes, and a different number of samples in each.
    config = ActorConfig(learning_rate=1e-2, max_tokens_per_microbatch=128, compile=compiled)
    actor = ActorWorker(model, config, algorithm, layout, TEMPERATURE, 10)
    # With Adam's usual epsilon the rounding of a gradient near 0 decides the sign of a whole step.
    for group in actor.optimizer.param_groups:
        group["eps"] = 1e-3
    reference = RefWorker(start, config, layout, TEMPERATURE)
    batch, noise = ragged_batch()
    batch = batch if controls else None
    logprobs = actor.compute_logprobs(batch)
    ref = reference.compute_logprobs(batch)
    attach_logprobs(batch, noise, logprobs, ref)
    metrics = actor.update(batch)

    engine = TorchEngine(model, layout.device)
    everyone = make_training_layout(layout.device)
    rollout = RolloutWorker(RolloutConfig(max_response_tokens=12), engine, everyone, (1,), seed=3)
    sharding = ShardingManager(actor, rollout)
    prompts = make_batch({"tokens": jagged([torch.arange(2, 6 + i) for i in range(8)])}) if controls else None
    with sharding.serving():
        samples = rollout.generate(prompts, 2, TEMPERATURE)
    sharding.expect_current(samples)
    again = actor.compute_logprobs(samples)

    weights = {name.removeprefix(PREFIX): whole(parameter) for name, parameter in actor.policy.named_parameters()}
    # Adam's running mean is linear in the gradients, unlike the weights, which hide most of a gradient's size.
    means = [whole(actor.optimizer.state[parameter]["exp_avg"]) for parameter in actor.parameters]
    same = all(torch.equal(weights[name], tensor) for name, tensor in engine.weights.items())
    everywhere = torch.tensor(float(same))
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    version = actor.version
    graphs = [traced_graphs()]
    if compiled:
        for seed in (2, 3):
            more, _ = ragged_batch(seed)
            actor.imitate(weigh_tokens(more if controls else None, algorithm))
        graphs.append(traced_graphs())
    if not controls:
        return {}
    return {
        "logprobs": logprobs["old_logprobs"].values(),
        "ref_logprobs": ref["ref_logprobs"].values(),
        "metrics": metrics,
        "weights": weights,
        "gradient_means": dict(zip(weights, means, strict=True)),
        "engine_holds_the_weights": bool(everywhere),
        "rollout_gap": (again["old_logprobs"].values() - samples["rollout_logprobs"].values()).abs().max(),
        "rollout_prompts": [row[: 4 + i // 2].tolist() for i, row in enumerate(samples["tokens"].unbind())],
        "version": (int(samples["version"].min()), version),
        "graphs": graphs,
    }


def main() -> None:
    models, out = Path(sys.argv[1]), Path(sys.argv[2])
    device = pick_device("cpu")
    join(device, 120.0)
    # All passes of torch.compile but the slow last, which makes kernels of what was traced; and never eager instead.
    torch.compile = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for cut in sys.argv[3:]:
        replicate, tensor, *compiled = cut.split(",")
        layout = make_training_layout(device, int(replicate), int(tensor))
        for folder in sorted((models / "policy").iterdir()):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            if compiled and folder.name not in COMPILED:
                continue
            result = step(folder.name, models, layout, bool(compiled))
            if dist.get_rank() == 0:
                name = "-".join([folder.name, str(layout.dp_size), tensor, f"r{replicate}", *compiled])
                torch.save(result, out / f"{name}.pt")
    leave()


if __name__ == "__main__":
    main()
