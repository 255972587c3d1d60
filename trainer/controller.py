"""The Controller: what rank 0 alone holds, which is the data, the record of the run, and what its user sees."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import torch
import torch.distributed as dist
from rich.table import Column, Table
from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

import rewards
from grpo.advantages import groups_with_signal
from grpo.batch import Trajectory, response_lengths
from grpo.choices import over_tokens
from grpo.config import ConfigError, to_yaml, without_secrets
from grpo.conversation import Dialogue
from grpo.data import Prompt, Prompts, PromptStream, load_held_out, load_prompts, overlap
from trainer.config import TrainConfig, sizes_table
from trainer.health import Health
from trainer.record import read_metrics
from trainer.report import closing_table
from trainer.runs import Run
from trainer.scores import powers, score
from trainer.tracking import Tracker
from trainer.transcript import pick, render
from workers.conversation import Cast
from workers.memory import Peaks
from workers.models.hub import compute_dtype, read_config, read_tokenizer, stop_tokens
from workers.parallel.attention_backend import why_not_flash4
from workers.parallel.mesh import count_shards, memory_for_each
from workers.plan import OUTSIDE, Breakdown, Job, advice, predict
from workers.rollout import Failures


class Controller:
    """Nothing here loads weights. Raises ConfigError for data that does not fit; what it opens, `stack` closes."""

    def __init__(self, config: TrainConfig, device: torch.device, run: Run, peaks: Peaks, stack: ExitStack) -> None:
        self.config, self.run, self.peaks = config, run, peaks
        tokenizer = read_tokenizer(config.model)
        cast = cast_of(config, tokenizer)
        prompts = load_prompts(config.data, tokenizer, "train", tools=cast and cast.tools_of)
        check_reward_columns(config, prompts, "data.train")
        self.stream = PromptStream(prompts, config.batch.prompts_per_step, config.seed, config.data.shuffle)
        if run.data is not None:
            self.stream.load_state_dict(run.data)
        epochs = config.epochs
        config.count_steps(len(prompts), config.batch.prompts_per_step)
        run.check_unfinished(config.steps)
        self.held_out: list[Prompt] = []
        self.sets: list[str] = []  # the name of each held-out prompt's set
        sets = load_sets(config, tokenizer, cast)
        for name, those in sets.items():
            self.held_out += those
            self.sets += [name] * len(those)
        said = run.begin()
        self.tracker = Tracker(config.tracking, run.folder, config.steps, without_secrets(config), run.step)
        stack.enter_context(self.tracker)
        self.health = Health(self.tracker, run.folder, config.actor.skipped_limit)
        self.failures_told: dict[tuple, tuple[int, float]] = {}  # as describe_failures left it
        taught = f", taught by {config.algorithm.teacher}" if config.teacher is not None else ""
        algorithm = config.algorithm.name() + taught
        (run.folder / "config.yaml").write_text(f"# algorithm: {algorithm}\n{to_yaml(config)}")
        for what in (said, f"Algorithm: {algorithm}", sizes_table(config, dist.get_world_size())):
            self.tracker.say(what)
        if epochs is not None:
            self.tracker.say(f"{epochs:g} epoch(s) of {len(prompts)} prompts are {config.steps} steps.")
        if same := overlap(prompts, sets.values()):
            self.tracker.say(describe_overlap(same, len(self.held_out)))
        if tokenizer.chat_template and not config.data.chat:
            self.tracker.say(
                "The tokenizer has a chat template, and with data.chat=false prompts are plain text, as a base model "
                "wants them: for one that was trained to chat set data.chat=true."
            )
        self.shown: dict[bool, int] = {}  # held out or not: at which step completions were printed last
        self.plan: dict[str, Breakdown] = {}  # of a GPU alone: what is used of a host, torch does not count
        if device.type == "cuda":
            self._plan_memory(device, torch.cuda.mem_get_info()[1])
        else:
            self._plan_memory(device, memory_for_each(), host=True)

    def _plan_memory(self, device: torch.device, total: int, host: bool = False) -> None:
        """Show what a GPU of `total` bytes, or the `host` with so many for each process, will be asked for."""
        job = job_of(self.config, dist.get_world_size(), device, total)
        weights = job.weights()
        plan = predict(job, weights)
        if host:
            self.tracker.say(f"This host has {_gib(total)} GiB of memory free for each process.")
        else:
            self.plan = plan
            reason = why_not_flash4(self.config.model, job.model, device)
            self.tracker.say(f"Attention: {f'torch, because {reason}' if reason else 'FlashAttention 4'}.")
        self.tracker.say(plan_table(plan, total))
        for sentence in advice(job, weights):
            self.tracker.say(sentence)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` as what the run is doing, and watch its memory."""
        with self.tracker.phase(name), self.peaks(name):
            yield

    def record(self, step: int, metrics: dict[str, float], batch: TensorDict | None = None) -> None:
        """Log a step's metrics, with its speed and its peaks of memory; raises ConfigError as Health does."""
        if "time/step" in metrics and "tokens/total" in metrics:
            rate = metrics["tokens/total"] / metrics["time/step"] / dist.get_world_size()
            metrics["throughput/tokens_per_second_per_gpu"] = rate
        peaks = self.peaks.metrics()
        self.health.record(step, metrics | peaks, batch)
        # The first update has no optimizer state yet.
        if self.plan and step == self.run.step + 2:
            self.tracker.say(measured_table(self.plan, peaks))

    def show(self, step: int, trajectories: Sequence[Trajectory], failures: Failures, count: int) -> None:
        """Say which of `count` completions failed, print two, and keep samples, each where the step asks for it."""
        held_out, every = trajectories[0].held_out, self.config.tracking.show_every
        for sentence in describe_failures(failures, count, held_out, step, self.failures_told):
            self.tracker.say(sentence)
        if every and step - self.shown.get(held_out, -every) >= every:
            self.shown[held_out] = step
            self.tracker.say(render(step, pick(trajectories)))
        if self.tracker.wants_samples(step):
            rows = [sample_row(trajectory) for trajectory in trajectories]
            for row, trajectory in zip(rows, trajectories, strict=True):
                if trajectory.held_out and self.sets[trajectory.group]:
                    row["set"] = self.sets[trajectory.group]
            self.tracker.samples(step, rows)

    def judge(self, batch: TensorDict, right: torch.Tensor) -> dict[str, float]:
        """Accuracy and pass@k of an evaluation's batch, `right` [B] as of `correct`; also of each set with a name."""
        samples, lengths = self.config.evaluation.samples_per_prompt, batch["response_length"].float()
        ks, right, metrics = powers(samples), right.view(-1, samples), {}
        for name in dict.fromkeys(["", *self.sets]):
            mine = torch.tensor([name in ("", other) for other in self.sets])
            scores = {key: value for key, value in score(right[mine], ks).items() if not key.endswith("/error")}
            if name:
                mine = mine.repeat_interleave(samples)
                scores["reward/mean"] = float(batch["rewards"][mine].mean())
                scores["response_length/mean"] = float(lengths[mine].mean())
            metrics |= {f"{name}/{key}" if name else key: value for key, value in scores.items()}
        return metrics

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
        **({"turns": [asdict(turn) for turn in trajectory.turns]} if trajectory.turns else {}),
        "reward": trajectory.reward,
        **components,
        "finish_reason": trajectory.finish_reason,
        "row": trajectory.info,
    }


def cast_of(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Cast | None:
    """The environments of a run; None where each prompt has a single answer."""
    if not config.converses:
        return None
    dialogue = Dialogue(tokenizer, config.data, stop_tokens(config.model))
    return Cast(config.environment, config.environments.column, dialogue)


def load_sets(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, cast: Cast | None = None) -> dict[str, Prompts]:
    """The held-out prompts of each set; raises ConfigError where a reward lacks a column, or an engine a prompt.

    Or where an environment cannot begin, one that `cast` knows already included.
    """
    cast = cast or cast_of(config, tokenizer)
    sets = load_held_out(config.data, tokenizer, cast and cast.tools_of)
    for name, those in sets.items():
        check_reward_columns(config, those, f"data.eval.{name}" if name else "data.eval")
    engines, rows = dist.get_world_size() // config.rollout.tensor_parallel, sum(map(len, sets.values()))
    if sets and rows < engines:
        raise ConfigError(f"data.eval has {rows} rows, fewer than the {engines} engines.")
    if cast is not None:
        cast.rehearse(config.environments)
    return sets


def describe_failures(
    failures: Failures, samples: int, held_out: bool, step: int = 0, told: dict[tuple, tuple[int, float]] | None = None
) -> list[str]:
    """What to say of completions that could not be graded and of environments that failed, a sentence for each kind.

    told: when each was said, and of which share; again it is after 50 steps, or where the share has doubled.
    """
    told, said = {} if told is None else told, []
    for what, (count, first) in failures.items():
        before, share = told.get((*what, held_out), (step, 0.0))
        if share and count < 2 * share * samples and step - before < 50:
            continue
        told[*what, held_out] = step, count / samples
        said.append(
            f"{count} of {samples} {what[0]} {first.reward} ({first.kind}: {first.message}), such as "
            f"{first.completion[:200]!r}."
        )
    return said


def describe_overlap(same: Sequence[str], held_out: int) -> str:
    """What to say of the prompts, `same`, that stand among the held-out ones and in the training data."""
    found = f"{len(same)} of {held_out} held-out prompts stand in data.train as well, such as {same[0]!r:.100}"
    return f"warning: {found}: what is measured on them is no generalisation; take them out of one of the two."


def check_reward_columns(config: TrainConfig, prompts: Prompts, key: str) -> None:
    """Raise ConfigError where a reward needs a column that the data of `key` does not have, or only nulls in it."""
    columns = list(prompts[0].row)
    for name, missing in rewards.missing_columns(config.rewards, columns).items():
        raise ConfigError(
            f"Reward {name!r} needs the column {missing[0]!r}, which {key} does not have: take it from another one by "
            f"data.columns={{{missing[0]}: COLUMN}} (its columns are {', '.join(columns)})."
        )
    if key.count(".") > 1:  # one of several held-out sets, each of which may be for some of the rewards
        return
    for name, needed in rewards.missing_columns(config.rewards, []).items():
        for column in needed:
            if all(prompt.row[column] is None for prompt in prompts):
                raise ConfigError(
                    f"Reward {name!r} needs the column {column!r}, which holds nothing but nulls in {key}: fill it, or "
                    f"take it from another one by data.columns={{{column}: COLUMN}}."
                )


def batch_metrics(batch: TensorDict, signal: torch.Tensor | None = None) -> dict[str, float]:
    """Of a graded batch: rewards, their components, groups without `signal` [B] (None: the rewards), lengths.

    And of conversations, what they came to.
    """
    total, lengths = batch["rewards"], batch["response_length"].float()
    metrics = {
        "reward/mean": total.mean(),
        "reward/std": total.std(),
        "reward/failed": batch["failures"].sum(),
        "reward/ungraded": (batch["failures"] > 0).float().mean(),
        "groups/no_signal": 1 - groups_with_signal(total if signal is None else signal, batch["group"]).float().mean(),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/truncated": batch["truncated"].float().mean(),
        "tokens/total": batch["length"].sum(),
    }
    if "environment/turns" in batch:
        metrics |= {name: field.mean() for name, field in batch.items() if name.startswith("environment/")}
        metrics["time/environment"] = metrics.pop("environment/waited")
        heard, misfits = metrics.pop("environment/observed"), metrics.pop("environment/misfits")
        metrics["environment/observed_share"] = heard / (heard + lengths.mean()).clamp(min=1 / len(batch))
        if calls := metrics["environment/calls"]:
            metrics["environment/calls_fit"] = 1 - misfits / calls
    for name, field in batch.items():
        if name.startswith("rewards/"):
            component, applies = name.removeprefix("rewards/"), field[~field.isnan()]
            if len(applies):
                metrics[f"reward/{component}/mean"] = applies.mean()
            if len(applies) > 1:
                metrics[f"reward/{component}/std"] = applies.std()
    return {name: float(value) for name, value in metrics.items()}


def advantage_metrics(batch: TensorDict | None) -> dict[str, float]:
    """How far the advantages of a step's response tokens spread, and how far the policy is from a teacher."""
    if batch is None:
        return {}
    values, counts = batch["advantages"], response_lengths(batch)
    if values.is_nested:
        values, counts = values.values()[batch["response_mask"].values()], torch.ones(())
    else:
        values, counts = values[counts > 0], counts[counts > 0]
    _, deviation = over_tokens(values.double(), counts.expand(len(values)).double())
    metrics = {"advantages/std": deviation, "advantages/min": values.min(), "advantages/max": values.max()}
    if "teacher_logprobs" in batch:
        apart = batch["old_logprobs"].values() - batch["teacher_logprobs"].values()
        metrics["teacher/kl"] = apart[batch["response_mask"].values()].mean()
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
        teacher=read_config(config.teacher) if config.teacher is not None else None,
        off_policy=config.needs_old_logprobs,
        on_cpu=device.type == "cpu",
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
