"""Run by test_layouts.py under torchrun: one step of every model kind on layouts of this many processes.

    torchrun --nproc-per-node N -m tests.workers.layout_probe MODELS OUT LAYOUT ...

A LAYOUT is DP_SIZE-TP_SIZE-rREPLICATE[-compiled]. Leaves OUT/KIND-LAYOUT.pt with what the controller saw.
"""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from grpo.advantages import weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import jagged, make_batch, with_values
from tests.workers.conftest import prompts_of
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.dispatch import HELD
from workers.engines.config import RolloutConfig
from workers.engines.torch_engine import TorchEngine
from workers.parallel import mesh, policy
from workers.parallel.mesh import TrainingLayout, is_controller
from workers.parallel.policy import PREFIX, SMALLEST_UNIT
from workers.ref import RefWorker
from workers.rollout import RolloutWorker
from workers.sharding import ShardingManager, expect_current

TEMPERATURE = 0.8
ALGORITHM = AlgorithmConfig(aggregate="token_mean", kl_coefficient=0.1, entropy_coefficient=0.01)
COMPILED = ("qwen2", "qwen3")
"""The kinds that are compiled too: what the others have, these have; one has biases and one norms of its heads."""


def ragged_batch(seed: int = 1):
    """24 samples of 6 prompts, lengths 6 to 40, off-policy enough that some ratios are clipped."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 41, (24,), generator=random).tolist()
    fields = {"tokens": jagged([torch.randint(2, 118, (n,), generator=random) for n in lengths])}
    mask = [torch.arange(n) >= 4 for n in lengths]
    noise = jagged([0.3 * torch.randn(n, generator=random) for n in lengths])
    advantages = jagged([a * m for a, m in zip(torch.randn(24, generator=random), mask, strict=True)])
    fields |= {"response_mask": jagged(mask), "advantages": advantages, "group": torch.arange(24) // 4}
    return make_batch(fields), noise


def make_off_policy(batch, noise: torch.Tensor) -> None:
    """Take the old log-probabilities of the controller's batch for those of the rollout, and add noise to them."""
    if batch is not None:
        batch["rollout_logprobs"], mask = batch["old_logprobs"], batch["response_mask"]
        batch["old_logprobs"] = with_values(mask, batch["old_logprobs"].values() + noise.values() * mask.values())


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's value, which no later update changes."""
    return tensor.detach().full_tensor().clone()


def make_workers(kind: str, models: Path, layout: TrainingLayout, compiled: bool) -> tuple[ActorWorker, RefWorker]:
    # The layers are gathered one by one, as large ones are, but for one kind where they go with the rest.
    policy.SMALLEST_UNIT = SMALLEST_UNIT if kind == "llama" else 0
    model, start = (ModelConfig(path=str(models / role / kind)) for role in ("policy", "reference"))
    # 128 tokens a micro-batch make several passes, and a different number of samples in each.
    config = ActorConfig(learning_rate=1e-2, max_tokens_per_microbatch=128, compile=compiled)
    actor = ActorWorker(model, config, ALGORITHM, layout, TEMPERATURE, 10, minibatches=2)
    # With Adam's usual epsilon the rounding of a gradient near 0 decides the sign of a whole step.
    for group in actor.optimizer.param_groups:
        group["eps"] = 1e-3
    return actor, RefWorker(start, config, layout, TEMPERATURE)


def train(actor: ActorWorker, reference: RefWorker) -> dict:
    """Log-probabilities and one step of two updates: what the controller knows of them, and the weights after it."""
    batch, noise = ragged_batch()
    batch = reference.compute_logprobs(actor.compute_logprobs(batch if is_controller() else None))
    names = ("old_logprobs", "ref_logprobs")
    result = {name: batch[name].values() for name in names} if batch is not None else {}
    make_off_policy(batch, noise)
    result["metrics"] = actor.update(batch)
    parameters = {name.removeprefix(PREFIX): parameter for name, parameter in actor.policy.named_parameters()}
    result["weights"] = {name: full(parameter) for name, parameter in parameters.items()}
    # Adam's running mean is linear in the gradients, unlike the weights, which hide most of a gradient's size.
    means = {name: actor.optimizer.state[parameter]["exp_avg"] for name, parameter in parameters.items()}
    return result | {"gradient_means": {name: full(mean) for name, mean in means.items()}}


def roll_out(actor: ActorWorker, reference: RefWorker | None = None, dtype: str = "auto"):
    """One sync and one rollout: the engine, the samples, and how far its log-probabilities are from the actor's."""
    layout = mesh.make_inference_layout(actor.layout.device)
    engine = TorchEngine(ModelConfig(path=actor.policy.causal_lm.config.name_or_path, dtype=dtype), layout.device)
    rollout = RolloutWorker(RolloutConfig(max_response_tokens=12), engine, layout, (1,), seed=3)
    prompts = prompts_of(*(range(2, 6 + i) for i in range(8))) if is_controller() else None
    with ShardingManager(actor, rollout, [reference] if reference else []).serving():
        samples = rollout.generate(prompts, 2, TEMPERATURE)
    assert len(HELD.rows) <= 16, "tokens of an earlier rollout are still held"
    expect_current(samples, actor.version)
    samples = actor.group.fetch(actor.compute_logprobs(samples), "the tokens of the probe")
    if samples is None:
        return engine, None, None
    return engine, samples, (samples["old_logprobs"].values() - samples["rollout_logprobs"].values()).abs().max()


def serve(actor: ActorWorker, weights: dict[str, torch.Tensor]) -> dict:
    """What the controller knows of one rollout, and whether every engine holds `weights`."""
    engine, samples, gap = roll_out(actor)
    same = torch.tensor(float(all(torch.equal(weights[name], tensor) for name, tensor in engine.weights.items())))
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    if samples is None:
        return {}
    prompts = [row[: 4 + i // 2].tolist() for i, row in enumerate(samples["tokens"].unbind())]
    version = (int(samples["newest_version"].max()), actor.version)
    return {"engine_holds_the_weights": bool(same), "rollout_gap": gap, "rollout_prompts": prompts, "version": version}


def step(kind: str, models: Path, layout: TrainingLayout, compiled: bool) -> dict:
    """All that is compared over layouts.

    "graphs": how many torch.compile had traced by then, and where layers are compiled after two updates more.
    """
    torch._dynamo.reset()
    traced = torch._dynamo.utils.counters
    traced.clear()
    actor, reference = make_workers(kind, models, layout, compiled)
    result = train(actor, reference)
    result |= serve(actor, result["weights"]) | {"graphs": [traced["stats"]["unique_graphs"]]}
    if compiled:
        for seed in (2, 3):
            actor.sft_update(weigh_tokens(ragged_batch(seed)[0] if is_controller() else None, ALGORITHM))
        result["graphs"].append(traced["stats"]["unique_graphs"])
    return result


def main() -> None:
    models, out, *layouts = sys.argv[1:]
    device = mesh.pick_device("cpu")
    mesh.join(device, 120.0)
    # All passes of torch.compile but the slow last, which makes kernels of what was traced; and never eager instead.
    torch.compile = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for name in layouts:
        _, tensor, replicate, *compiled = name.split("-")
        layout = mesh.make_training_layout(device, int(replicate.removeprefix("r")), int(tensor))
        for kind in COMPILED if compiled else sorted(folder.name for folder in Path(models, "policy").iterdir()):
            result = step(kind, Path(models), layout, bool(compiled))
            if is_controller():
                torch.save(result, Path(out, f"{kind}-{name}.pt"))
    mesh.leave()


if __name__ == "__main__":
    main()
