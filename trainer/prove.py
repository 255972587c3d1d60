"""python -m trainer prove CONFIG: that an update is the same however it is cut, and that a run that stands still does.

Both with the run's own model, algorithm and rewards, on as many processes as torchrun started. What one number of
processes found is kept in the run's folder, and the next number is held against it.
"""

import copy
import gc
import json
import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict

from grpo.advantages import compute_advantages, weigh_tokens
from grpo.batch import jagged, make_batch, select, with_values
from grpo.config import ConfigError
from grpo.data import PromptStream, load_prompts
from trainer.config import TrainConfig
from trainer.controller import cast_of, check_reward_columns
from trainer.record import read_metrics
from trainer.runs import Run
from trainer.trainer import Trainer
from workers.actor import ActorWorker
from workers.dispatch import from_controller, on_controller
from workers.models import family_of
from workers.models.hub import compute_dtype, read_config, read_tokenizer
from workers.parallel.mesh import is_controller, make_training_layout

TOLERANCE = 1e-5
"""How far two updates in float64 may be apart, relative to their size. Right ones were at most 3e-8 apart, by the loss,
which is added up in float32."""
ROUNDING = 1e-2
"""How far one in float32 may be apart from them. It was 2.2e-4 for a model of 135 million parameters that was trained,
and 6e-7 for a small one of random weights."""
CUTS = (("one", 1 << 20, False), ("many", 64, False), ("shuffled", 96, True))
"""How the batch is cut: name, most tokens of a micro-batch, whether in another order."""
STILL_STEPS = 3


@dataclass
class Update:
    """What one update came to: loss and gradient norm, and on the controller gradient and weights afterwards."""

    loss: float
    norm: float
    gradient: list[torch.Tensor] = field(repr=False)
    weights: list[torch.Tensor] = field(repr=False)

    def apart(self, other: "Update") -> float:
        """The largest of the differences of the two, each relative to its size; nothing but numbers off rank 0."""
        return max(
            # A loss is a sum of terms of both signs and may be near 0: the gradient says what is small.
            abs(self.loss - other.loss) / max(abs(other.loss), other.norm),
            abs(self.norm / other.norm - 1),
            distance(self.gradient, other.gradient),
            distance(self.weights, other.weights),
        )


def prove(config: TrainConfig, device: torch.device, run_folder: Path) -> bool:
    """Run both proofs and print what they found; returns whether all of it held, the same on every rank."""
    console = Console(quiet=not is_controller())
    on_controller(lambda: read_data(config))
    held = prove_cuts(config, device, run_folder / "proof.json", console)
    console.print(f"{STILL_STEPS} steps of the run at a learning rate of 0, which take as long as those of a run:")
    held &= prove_stillness(config, device, run_folder / "proof-scratch", console)
    console.print("All of it holds." if held else "[bold red]Not all of it holds: see the rows marked above.[/]")
    return from_controller(held)


def read_data(config: TrainConfig) -> None:
    """Raise ConfigError for data that the second proof could not be made with, before the first takes its minutes."""
    tokenizer = read_tokenizer(config.model)
    cast = cast_of(config, tokenizer)
    prompts = load_prompts(config.data, tokenizer, "train", tools=cast and cast.tools_of)
    check_reward_columns(config, prompts, "data.train")
    PromptStream(prompts, config.batch.prompts_per_step, config.seed, config.data.shuffle)


# the same update however it is cut


def prove_cuts(config: TrainConfig, device: torch.device, record: Path, console: Console) -> bool:
    """Take the same update in one micro-batch, in many, in another order, and on every layout of the processes.

    In float64: float32's rounding, which a trained model makes larger, could hide a mistake. It is shown beside them.
    """
    world, config = dist.get_world_size(), copy.deepcopy(config)
    config.model.dtype, config.model.attention = "float64", "torch"
    # Every cut would be traced anew, and float32 attention breaks a layer in three: only where it is asked for.
    config.actor.compile = bool(config.actor.compile)
    proven = f"{config.model} {config.algorithm} {config.actor} {config.rollout.temperature} {config.seed}"
    proven += f" {config.rewards.weights}"
    known = json.loads(record.read_text()) if record.is_file() else {}
    known = known if known.pop("of", None) == proven else {}
    table = Table("dp_replicate x dp_shard x tp", "micro-batches", "loss", "gradient norm", "apart", "", box=None)
    held, first, layouts = True, None, layouts_of(world, config)
    count = len(layouts) * len(CUTS) + 1
    console.print(f"{count} updates of up to 64 short samples; how long they take is said after the first of them.")

    def add(shape: str, cut: str, loss: float, norm: float, apart: float, most: float = TOLERANCE) -> None:
        nonlocal held
        held &= apart <= most
        table.add_row(shape, cut, f"{loss:.8f}", f"{norm:.8f}", f"{apart:.1e}", _mark(apart <= most))

    for replicate, tensor in layouts:
        shape = f"{replicate} x {world // replicate // tensor} x {tensor}"
        for cut, budget, shuffled in CUTS:
            begun = time.perf_counter()
            update = one_update(config, device, replicate, tensor, budget, shuffled)
            if first is None:
                minutes, first = (count - 1) * (time.perf_counter() - begun) / 60, update
                console.print(f"By the first of them the others take about {minutes:.1f} minutes.")
            add(shape, cut, update.loss, update.norm, update.apart(first))
    config.model.dtype = "float32"  # on the last layout, which is as good as any
    rounded = one_update(config, device, replicate, tensor, *CUTS[0][1:])
    add(shape, "in float32", rounded.loss, rounded.norm, rounded.apart(first), ROUNDING)
    mine = {"loss": first.loss, "norm": first.norm}
    for processes, other in known.items():
        apart = max(abs(mine[name] - other[name]) for name in mine) / max(abs(other["loss"]), other["norm"])
        add(f"{processes} process(es), before", "one", other["loss"], other["norm"], apart)
    console.print(
        f"The same update on {world} process(es), in float64, at most {TOLERANCE:g} apart, "
        f"and once in float32, where rounding may make it {ROUNDING:g}:"
    )
    console.print(table)
    if is_controller():
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps({"of": proven, **known, str(world): mine}))
    return held


def layouts_of(world: int, config: TrainConfig) -> list[tuple[int, int]]:
    """(dp_replicate, tp_size) of every layout of `world` processes that the model can be cut into."""
    family, found = family_of(read_config(config.model)), []
    for tensor in (n for n in range(1, world + 1) if world % n == 0):
        try:
            family.check_tensor_parallel(tensor)
            config.actor.lora.check(tensor)
        except ConfigError:
            continue
        dp_size = world // tensor
        found += [(replicate, tensor) for replicate in range(1, dp_size + 1) if dp_size % replicate == 0]
    return found


def one_update(
    config: TrainConfig, device: torch.device, replicate: int, tensor: int, budget: int, shuffled: bool
) -> Update:
    """One update of the model at its start, on a random ragged batch that depends on the seed alone."""
    gc.collect()  # FSDP's modules refer to each other: the model before would stay beside this one
    torch.compiler.reset()  # past a number of traces, torch goes on without compiling
    settings = copy.deepcopy(config.actor)
    settings.replicate, settings.tensor_parallel, settings.max_tokens_per_microbatch = replicate, tensor, budget
    layout = make_training_layout(device, replicate, tensor)
    actor = ActorWorker(config.model, settings, config.algorithm, layout, config.rollout.temperature, 10)
    batch = actor.compute_logprobs(random_batch(config) if is_controller() else None)
    if batch is not None:
        mask, ours, noise = (batch[name].values() for name in ("response_mask", "old_logprobs", "noise"))
        # Off-policy, so that the ratio counts.
        teacher = ["teacher_logprobs"] if config.teacher is not None else []
        for i, name in enumerate(["old_logprobs", "ref_logprobs", "rollout_logprobs", *teacher]):
            batch[name] = with_values(batch["response_mask"], ours + noise.roll(i) * mask)
        batch = compute_advantages(batch, config.algorithm, config.rewards.weights)
        batch = weigh_tokens(batch, config.algorithm)
        if shuffled:
            batch = select(batch, torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)).tolist())
    metrics = actor.update_minibatch(batch)
    # Adam's first mean is the gradient times a constant; weights alone hide most of a gradient's size.
    # An update that is not finite leaves none: then nothing is near it.
    trained = [parameter for parameter in actor.parameters if parameter.requires_grad]
    gradient = [_whole(actor.optimizer.state[p].get("exp_avg", p.detach() * math.nan)) for p in trained]
    return Update(metrics["loss"], metrics["grad_norm"], gradient, [_whole(p.detach()) for p in actor.parameters])


def random_batch(config: TrainConfig) -> TensorDict:
    """Samples of 8 to 24 random tokens, of which 4 are the prompt and others observed; rewards of 0, 1/2 and 1."""
    random, vocabulary = torch.Generator().manual_seed(config.seed), read_config(config.model).vocab_size
    groups, size = 16, max(1, min(4, config.batch.samples_per_prompt))
    lengths = torch.randint(8, 25, (groups * size,), generator=random).tolist()
    fields = {
        "tokens": jagged([torch.randint(0, vocabulary, (n,), generator=random) for n in lengths]),
        "response_mask": jagged([(torch.arange(n) >= 4) & (torch.arange(n) // 2 % 5 != 4) for n in lengths]),
        "noise": jagged([0.1 * torch.randn(n, generator=random) for n in lengths]),
        "rewards": torch.randint(0, 3, (groups * size,), generator=random) / 2,
        "truncated": torch.rand(groups * size, generator=random) < 0.2,
        "group": torch.arange(groups * size) // size,
    }
    for name in config.rewards.weights:
        fields[f"rewards/{name}"] = torch.randint(0, 3, (groups * size,), generator=random) / 2
    return make_batch(fields)


def distance(ours: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The length of the difference of two lists of tensors, relative to that of the second; 0 where there are none."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(ours, others, strict=True))
    size = sum(float(tensor.double().square().sum()) for tensor in others)
    return (apart / size) ** 0.5 if size else 0.0


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor on the host of the controller; nothing elsewhere."""
    full = tensor.full_tensor()
    return full.cpu() if is_controller() else full.new_zeros(0)


# standing still


def prove_stillness(config: TrainConfig, device: torch.device, run_folder: Path, console: Console) -> bool:
    """Train with a learning rate of 0: ratio 1, KL 0, the rollout's gap flat, and no weight another than before.

    A ratio to the engine's probabilities is as far from 1 as these are from the trainer's, and no further.
    """
    config = copy.deepcopy(config)
    config.steps, config.epochs, config.actor.learning_rate, config.data.eval = STILL_STEPS, None, 0.0, None
    # Two passes, so that the ratio is of log-probabilities that were computed twice; a KL term for the reference.
    config.batch.epochs_per_step, config.algorithm.resample_rounds = 2, 0
    config.algorithm.kl_coefficient = config.algorithm.kl_coefficient or 1e-3
    config.checkpoint.every, config.tracking.name = 0, run_folder.name
    if is_controller():
        shutil.rmtree(run_folder, ignore_errors=True)  # what an earlier proof left
    trainer = Trainer(config, device, Run(run_folder))
    named = dict(trainer.actor.policy.named_parameters())
    before = {name: _fingerprint(parameter) for name, parameter in named.items()}
    trainer.run()
    mine = [name for name, parameter in named.items() if not torch.equal(_fingerprint(parameter), before[name])]
    everyones = [mine] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    moved = list(dict.fromkeys(name for names in everyones for name in names))
    if not is_controller():
        return True
    rows = read_metrics(run_folder)
    exact = compute_dtype(config.model, device) == torch.float32
    gaps = [row["rollout/logprob_gap"] for row in rows]
    apart = max(math.expm1(row["rollout/logprob_gap_max"]) for row in rows) * (config.algorithm.ratio_to == "rollout")
    ratio = max(abs(row["ratio/max"] - 1) for row in rows)
    findings = [
        ("ratio, furthest from 1", ratio, (1e-4 if exact else 0.1) + apart),
        ("KL to the reference", max(abs(row["kl"]) for row in rows), 1e-6 if exact else 1e-3),
        ("gap to the rollout, largest over smallest", max(gaps) / max(min(gaps), 1e-7), 2.0),
        ("weights that moved", len(moved), 0),
    ]
    table = Table(f"over {STILL_STEPS} steps with a learning rate of 0", "found", "at most", "", box=None)
    for name, found, most in findings:
        shown = f"{found:.2e}" if isinstance(found, float) else str(found)
        table.add_row(name, shown, f"{most:g}", _mark(found <= most))
    console.print(table)
    if moved:
        console.print(f"These moved: {', '.join(moved[:5])}{' ...' if len(moved) > 5 else ''}")
    return all(found <= most for _, found, most in findings)


def _fingerprint(parameter: torch.Tensor) -> torch.Tensor:
    local = parameter.detach().to_local().double()
    return torch.stack([local.sum(), local.abs().sum(), local.square().sum()]).cpu()


def _mark(good: bool) -> str:
    return "" if good else "[bold red]too far[/]"
