"""The Controller: what rank 0 alone holds, which is the data, the record of the run, and what its user sees."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import torch
import torch.distributed as dist
from rich.table import Column, Table
from tensordict import TensorDict

import rewards
from grpo.advantages import groups_with_signal
from grpo.batch import Trajectory, lengths_of
from grpo.config import ConfigError, to_yaml
from grpo.data import Prompt, Prompts, PromptStream, load_prompts
from trainer.config import TrainConfig, sizes_table
from trainer.record import read_metrics
from trainer.report import closing_table
from trainer.runs import Run
from trainer.tracking import Tracker
from workers.memory import Peaks
from workers.models.hub import compute_dtype, read_config, read_tokenizer
from workers.parallel.attention_backend import why_not_flash4
from workers.parallel.mesh import count_shards
from workers.plan import OUTSIDE, Breakdown, Job, advice, predict


class Controller:
    """Nothing here loads weights. Raises ConfigError for data that does not fit; what it opens, `stack` closes."""

    def __init__(self, config: TrainConfig, device: torch.device, run: Run, peaks: Peaks, stack: ExitStack) -> None:
        self.config, self.run, self.peaks = config, run, peaks
        tokenizer = read_tokenizer(config.model)
        prompts = load_prompts(config.data, tokenizer, "train")
        check_reward_columns(config, prompts)
        self.stream = PromptStream(prompts, config.batch.prompts_per_step, config.seed, config.data.shuffle)
        if run.data is not None:
            self.stream.load_state_dict(run.data)
        self.held_out: Sequence[Prompt] = []
        if config.data.eval is not None:
            self.held_out = load_prompts(config.data, tokenizer, "eval")
            check_reward_columns(config, self.held_out)
            engines = dist.get_world_size() // config.rollout.tensor_parallel
            if len(self.held_out) < engines:
                raise ConfigError(f"data.eval has {len(self.held_out)} rows, fewer than the {engines} engines.")
        said = run.begin()
        self.tracker = Tracker(config.tracking, run.folder, config.steps, asdict(config), run.step)
        stack.enter_context(self.tracker)
        (run.folder / "config.yaml").write_text(f"# algorithm: {config.algorithm.name()}\n{to_yaml(config)}")
        for what in (said, f"Algorithm: {config.algorithm.name()}", sizes_table(config, dist.get_world_size())):
            self.tracker.say(what)
        self.plan: dict[str, Breakdown] = {}  # of a GPU alone
        if device.type == "cuda":
            self._plan_memory(device, torch.cuda.mem_get_info()[1])

    def _plan_memory(self, device: torch.device, total: int) -> None:
        """Show what a GPU of `total` bytes will be asked for, and what would help where that is too much."""
        job = job_of(self.config, dist.get_world_size(), device, total)
        weights = job.weights()
        self.plan = predict(job, weights)
        reason = why_not_flash4(self.config.model, job.model, device)
        self.tracker.say(f"Attention: {f'torch, because {reason}' if reason else 'FlashAttention 4'}.")
        self.tracker.say(plan_table(self.plan, total))
        for sentence in advice(job, weights):
            self.tracker.say(sentence)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` as what the run is doing, and watch its memory."""
        with self.tracker.phase(name), self.peaks(name):
            yield

    def record(self, step: int, metrics: dict[str, float]) -> None:
        """Log a step's metrics, with its speed and its peaks of memory."""
        if "time/step" in metrics and "tokens/total" in metrics:
            rate = metrics["tokens/total"] / metrics["time/step"] / dist.get_world_size()
            metrics["throughput/tokens_per_second_per_gpu"] = rate
        peaks = self.peaks.metrics()
        self.tracker.log(step, metrics | peaks)
        # The first update has no optimizer state yet.
        if self.plan and step == self.run.step + 2:
            self.tracker.say(measured_table(self.plan, peaks))

    def show(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Say which completions could not be graded, and keep samples where the step's are kept."""
        failures = [failure for trajectory in trajectories for failure in trajectory.failures]
        for failure in failures[:3]:
            self.tracker.say(
                f"A completion could not be graded and counts as 0 ({failure.reward}: {failure.kind}: "
                f"{failure.message}): {failure.completion[:200]!r}"
            )
        if self.tracker.wants_samples(step):
            self.tracker.samples(step, [sample_row(trajectory) for trajectory in trajectories])

    def close(self) -> None:
        """End the record with a table of what the run came to."""
        self.tracker.close()
        self.tracker.say(closing_table(read_metrics(self.run.folder), self.run.folder, self.tracker.elapsed))


def sample_row(trajectory: Trajectory) -> dict:
    """A sample as it is kept in samples.jsonl."""
    components = {f"rewards/{name}": value for name, value in trajectory.components.items()}
    return {
        "held_out": trajectory.held_out,
        "prompt": trajectory.prompt,
        "response": trajectory.response,
        "reward": trajectory.reward,
        **components,
        "finish_reason": trajectory.finish_reason,
        "row": trajectory.info,
    }


def check_reward_columns(config: TrainConfig, prompts: Prompts) -> None:
    """Raise ConfigError where a reward needs a column that the data does not have."""
    columns = list(prompts[0].row)
    for name, missing in rewards.missing_columns(config.rewards, columns).items():
        raise ConfigError(
            f"Reward {name!r} needs the column {missing[0]!r}, which the data does not have: its columns are "
            f"{', '.join(columns)}."
        )


def response_lengths(batch: TensorDict) -> torch.Tensor:
    """[B] float32: how many tokens of each sample the policy sampled."""
    return torch.stack([mask.sum() for mask in batch["response_mask"].unbind()]).float()


def batch_metrics(batch: TensorDict) -> dict[str, float]:
    """Of a graded batch: rewards, their components, groups without signal, lengths."""
    total, lengths = batch["rewards"], response_lengths(batch)
    metrics = {
        "reward/mean": total.mean(),
        "reward/std": total.std(),
        "reward/failed": batch["failures"].sum(),
        "groups/no_signal": 1 - groups_with_signal(total, batch["group"]).float().mean(),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/truncated": batch["truncated"].float().mean(),
        "tokens/total": sum(lengths_of(batch["tokens"])),
    }
    for name, field in batch.items():
        if name.startswith("rewards/"):
            component = name.removeprefix("rewards/")
            metrics |= {f"reward/{component}/mean": field.mean(), f"reward/{component}/std": field.std()}
    return {name: float(value) for name, value in metrics.items()}


def advantage_metrics(batch: TensorDict | None) -> dict[str, float]:
    """How far the advantages of a step's response tokens spread."""
    if batch is None:
        return {}
    values = batch["advantages"].values()[batch["response_mask"].values()]
    metrics = {"advantages/std": values.std(), "advantages/min": values.min(), "advantages/max": values.max()}
    return {name: float(value) for name, value in metrics.items()}


def job_of(config: TrainConfig, world: int, device: torch.device, total: int) -> Job:
    """What decides the memory of one of `world` ranks, on devices like `device` with `total` bytes."""
    batch, tp_size, engines = config.batch, config.actor.tensor_parallel, world // config.rollout.tensor_parallel
    return Job(
        read_config(config.model),
        compute_dtype(config.model, device),
        config.actor,
        config.rollout,
        compiled=config.actor.compiles(device),
        dp_shard=count_shards(world, config.actor.replicate, tp_size),
        total=total,
        samples=-(-batch.samples_per_update // (world // tp_size)),
        longest=config.data.max_prompt_tokens + config.rollout.max_response_tokens,
        rows=-(-batch.prompts_per_step // engines) * batch.samples_per_prompt,
        reference=bool(config.algorithm.kl_coefficient),
        off_policy=config.needs_old_logprobs,
    )


def plan_table(phases: Mapping[str, Breakdown], total: int) -> Table:
    """What takes how much at the fullest moment of each phase, as predicted for a device of `total` bytes."""
    table = _table(f"Memory predicted, GiB of {total / 2**30:.1f}", *phases)
    for what in dict.fromkeys(what for breakdown in phases.values() for what in breakdown):
        sizes = [breakdown.get(what, 0) for breakdown in phases.values()]
        if any(sizes):
            table.add_row(what, *(_gib(size) if size else "" for size in sizes))
    table.add_row("in all", *(_gib(sum(breakdown.values())) for breakdown in phases.values()), style="bold")
    return table


def measured_table(phases: Mapping[str, Breakdown], metrics: Mapping[str, float]) -> Table:
    """What the trainer takes in each phase, without the engine: as predicted, and as torch's peaks in `metrics` say."""
    table = _table("Memory of the trainer, GiB", "predicted", "measured")
    for name, breakdown in phases.items():
        if (measured := metrics.get(f"memory/{name}_peak_gib")) is not None:
            own = sum(size for what, size in breakdown.items() if what != OUTSIDE)
            table.add_row(name, _gib(own), f"{measured:.1f}")
    return table


def _table(title: str, *headings: str) -> Table:
    columns = (Column(heading, justify="right") for heading in headings)
    return Table("", *columns, title=title, title_justify="left", box=None, pad_edge=False)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
