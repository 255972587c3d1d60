"""The loop: rollout, rewards, advantages, log-probabilities, update, sync, evaluation, tracking.

Every process runs these lines. On the controller (rank 0) `batch` is the global TensorDict, elsewhere it is None;
worker methods split it over the ranks and collect what they return (workers/dispatch.py).
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict

import rewards
from grpo.advantages import compute_advantages, groups_with_signal, overlong_penalty, owners
from grpo.batch import concatenate, examples_of, jagged, lengths_of, make_batch, select
from grpo.config import ConfigError, to_yaml
from grpo.data import Prompt, Prompts, PromptStream, load_prompts
from rewards import RewardPool
from trainer.checkpoint import Checkpoints
from trainer.config import TrainConfig, sizes_table
from trainer.memory import job_of, measured_table, plan_table
from trainer.report import closing_table, read_metrics
from trainer.tracking import Stopwatch, Tracker
from workers.actor import ActorWorker
from workers.dispatch import on_controller
from workers.parallel.mesh import make_inference_layout, make_training_layout
from workers.parallel.policy import ModelConfig, read_config, read_tokenizer, why_not_flash4
from workers.plan import Parts, Peaks, advice, predict
from workers.ref import RefWorker
from workers.rollout import RolloutWorker, make_engine
from workers.sharding import ShardingManager


class Trainer:
    """GRPO from a config to a trained policy. The process group must have been joined."""

    def __init__(self, config: TrainConfig, device: torch.device, run_folder: Path) -> None:
        self.config, self.device, self.run_folder = config, device, run_folder
        self.controls = dist.get_rank() == 0
        self.stack = ExitStack()
        self.held_out: Sequence[Prompt] = []  # on the controller alone, as is the tracker
        self.tracker: Tracker | None = None
        self.plan: dict[str, Parts] = {}  # on the controller, as is the tracker, and of a GPU alone
        self.peaks = Peaks(device.type == "cuda")
        self.watch = Stopwatch(device.type == "cuda", self.peaks)
        self.checkpoints = Checkpoints(run_folder, config.checkpoint.keep)
        resumed = self.checkpoints.newest() if config.checkpoint.resume else None
        self.step = 0 if resumed is None else self.checkpoints.progress(resumed)["step"]
        self.began_after = self.step
        on_controller(lambda: self._open_controller(resumed))
        layout = make_training_layout(device, config.actor.replicate, config.actor.tensor_parallel)
        # First of all, as it takes its share of the memory that it finds free; the prompts are shared out among the
        # engines, whatever the layout of the trained model.
        engines = make_inference_layout(device, config.rollout.tensor_parallel)
        log = run_folder / f"engine-{engines.dp_rank}.log"
        with self.watch("engine_start"):
            engine = make_engine(config.model, config.rollout, engines, config.seed + engines.dp_rank, log)
        self.stack.callback(engine.shutdown)
        temperature = config.rollout.temperature
        self.actor = ActorWorker(
            config.model, config.actor, config.algorithm, layout, temperature, config.total_updates
        )
        self.ref = None
        if config.algorithm.kl_coefficient:
            self.ref = RefWorker(config.model, config.actor, layout, temperature, self.actor.policy)
        self.rollout = RolloutWorker(
            config.rollout, engine, engines, stop_tokens(config.model), config.seed, self.show_progress
        )
        self.sharding = ShardingManager(self.actor, self.rollout, self.ref, self.peaks)
        if resumed is not None:
            self.checkpoints.load(resumed, self.actor)

    def _open_controller(self, resumed: Path | None) -> None:
        """What only the controller holds: the data, the tokenizer, the reward pool. Nothing here loads weights."""
        config = self.config
        self.tokenizer = read_tokenizer(config.model)
        prompts = load_prompts(config.data, self.tokenizer, "train")
        check_reward_columns(config, prompts)
        self.stream = PromptStream(prompts, config.algorithm.prompts_per_step, config.seed, config.data.shuffle)
        if resumed is not None:
            self.stream.load_state_dict(self.checkpoints.progress(resumed)["data"])
        if config.data.eval is not None:
            self.held_out = load_prompts(config.data, self.tokenizer, "eval")
            check_reward_columns(config, self.held_out)
            engines = dist.get_world_size() // config.rollout.tensor_parallel
            if len(self.held_out) < engines:
                raise ConfigError(f"data.eval has {len(self.held_out)} rows, fewer than the {engines} engines.")
        self.pool = self.stack.enter_context(RewardPool(config.rewards))
        self.tracker = Tracker(config.tracking, self.run_folder, config.steps, asdict(config), self.step)
        self.stack.enter_context(self.tracker)
        self.watch = Stopwatch(self.device.type == "cuda", self._phase)
        (self.run_folder / "config.yaml").write_text(f"# algorithm: {config.algorithm.name()}\n{to_yaml(config)}")
        self.tracker.say(f"Algorithm: {config.algorithm.name()}")
        self.tracker.say(sizes_table(config, dist.get_world_size()))
        if self.device.type == "cuda":
            self._plan_memory(torch.cuda.mem_get_info()[1])
        if resumed is None:
            self.checkpoints.start_anew()
        else:
            self.tracker.say(f"Going on after step {self.step} from {resumed}.")

    def _plan_memory(self, total: int) -> None:
        """Show what a GPU of `total` bytes will be asked for, and what would help where that is too much."""
        job = job_of(self.config, dist.get_world_size(), self.device, total)
        weights = job.weights()
        self.plan = predict(job, weights)
        reason = why_not_flash4(self.config.model, job.model, self.device)
        self.tracker.say(f"Attention: {f'torch, because {reason}' if reason else 'FlashAttention 4'}.")
        self.tracker.say(plan_table(self.plan, total))
        for sentence in advice(job, weights):
            self.tracker.say(sentence)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self.tracker.phase(name), self.peaks(name):
            yield

    def run(self) -> None:
        """Train to the last step."""
        with self.stack:
            if self.step == 0:
                self.log(self.evaluate())
            while self.step < self.config.steps:
                self.step += 1
                with self.watch("step"):
                    metrics = self.learn()
                if self.is_due(self.config.evaluation.every):
                    metrics |= self.evaluate()
                self.log(metrics)  # before the checkpoint: a run that goes on from it must have this row
                if self.is_due(self.config.checkpoint.every):
                    with self.watch("checkpoint"):  # its time stands in the next row
                        position = self.stream.state_dict() if self.controls else None
                        self.checkpoints.save(self.step, self.actor, position)
            if self.tracker is not None:
                self.tracker.close()
                table = closing_table(read_metrics(self.run_folder), self.run_folder, self.tracker.elapsed)
                self.tracker.say(table)

    def learn(self) -> dict[str, float]:
        """One step: sample and grade, compare, update."""
        config = self.config.algorithm
        batch, metrics = self.collect()
        self.sharding.expect_current(batch)
        if self.ref is not None:
            with self.watch("ref"):
                attach(batch, self.ref.compute_logprobs(batch))
        if config.needs_old_logprobs:
            with self.watch("old_logprobs"):
                attach(batch, self.actor.compute_logprobs(batch))
        batch = compute_advantages(batch, config)
        metrics |= advantage_metrics(batch)
        with self.watch("update"):
            metrics |= self.actor.update(batch)
        if warning := self.sharding.judge_gap(metrics):
            self.say(warning)
        return metrics | self.rollout.metrics | self.sharding.metrics

    def collect(self) -> tuple[TensorDict | None, dict[str, float]]:
        """The graded samples of a step, on the controller, and what was sampled for them as metrics.

        Where groups without signal are replaced, further prompts are sampled until there are enough groups with one,
        at most `resample_rounds` times; what is missing then is filled with groups without.
        """
        config, longest = self.config.algorithm, self.config.rollout.max_response_tokens
        rounds: list[TensorDict | None] = []
        metrics: dict[str, float] = Counter()  # which adds up what the rounds say
        count = config.prompts_per_step
        with self.sharding.serving():
            while count and len(rounds) <= config.resample_rounds:
                prompts = self.make_prompts(self.stream.next(count) if self.controls else [])
                with self.watch("rollout"):
                    batch = self.rollout.generate(prompts, config.samples_per_prompt)
                with self.watch("rewards"):
                    metrics.update(self.grade(batch, prompts, config.samples_per_prompt))
                rounds.append(batch)
                count = self._still_wanted(rounds) if config.resample_rounds else 0
        if not self.controls:
            return None, {}
        batch = join_rounds(rounds)
        metrics = {**metrics, **batch_metrics(batch)}
        if config.resample_rounds:
            metrics |= {"resampling/rounds": len(rounds) - 1, "resampling/groups": len(batch["group"].unique())}
            batch = keep_groups(batch, config.prompts_per_step)
            signal = groups_with_signal(batch["rewards"], batch["group"])
            metrics["resampling/filled"] = 1 - float(signal.float().mean())
        if config.overlong_share:
            penalty = overlong_penalty(response_lengths(batch), longest, config.overlong_share)
            batch["rewards"] = batch["rewards"] + penalty
            metrics["reward/overlong/mean"] = float(penalty.mean())
        return batch, metrics

    def _still_wanted(self, rounds: list[TensorDict | None]) -> int:
        """How many further prompts to sample, the same on every rank: as many as should give what is missing."""
        count = torch.zeros((), dtype=torch.int64)
        if self.controls:
            signal = torch.cat([groups_with_signal(batch["rewards"], batch["group"]) for batch in rounds])
            wanted, found = self.config.algorithm.prompts_per_step, int(signal.sum())
            if found < wanted:
                likely = math.ceil((wanted - found) * len(signal) / max(found, 1))
                engines = dist.get_world_size() // self.config.rollout.tensor_parallel
                count.fill_(max(min(likely, wanted), engines))
        dist.broadcast(count, 0)
        return int(count)

    def evaluate(self) -> dict[str, float]:
        """Accuracy and length on the held-out prompts, as metrics under eval/; empty where there are none."""
        if self.config.data.eval is None:
            return {}
        config = self.config.evaluation
        with self.watch("evaluation"):
            prompts = self.make_prompts(self.held_out)
            with self.sharding.serving():
                batch = self.rollout.generate(prompts, config.samples_per_prompt, config.temperature)
            self.sharding.expect_current(batch)
            metrics = self.grade(batch, prompts, config.samples_per_prompt)
        if batch is None:
            return {}
        metrics |= batch_metrics(batch)
        metrics["time/sync"] = self.sharding.metrics["time/sync"]
        accuracy = config.accuracy or next(iter(self.config.rewards.weights))
        metrics["accuracy"] = float((batch[f"rewards/{accuracy}"] >= 1 - 1e-6).float().mean())
        return {f"eval/{name}": value for name, value in metrics.items()}

    def make_prompts(self, prompts: Sequence[Prompt]) -> TensorDict | None:
        """A batch with tokens [P, *], group [P] and example [P], on the controller."""
        if not self.controls:
            return None
        prompts = list(prompts)
        tokens = jagged([torch.tensor(prompt.tokens) for prompt in prompts])
        rows = [{**prompt.row, "prompt_text": prompt.text} for prompt in prompts]
        return make_batch({"tokens": tokens, "group": torch.arange(len(prompts))}, rows)

    def grade(self, batch: TensorDict | None, prompts: TensorDict | None, samples: int) -> dict[str, float]:
        """Add group, example, rewards and its parts to the batch; returns what grading came to as metrics."""
        if batch is None:
            return {}
        batch["group"] = prompts["group"].repeat_interleave(samples)
        examples = [row for row in examples_of(prompts) for _ in range(samples)]
        texts = self.response_texts(batch)
        scores = self.pool.score(texts, examples)
        batch["rewards"] = torch.tensor(scores.total, dtype=torch.float32)
        for name, part in scores.parts.items():
            batch[f"rewards/{name}"] = torch.tensor(part, dtype=torch.float32)
        for failure in scores.failures[:3]:
            shown = f"{failure.reward}: {failure.kind}: {failure.message}"
            self.tracker.say(
                f"A completion could not be graded and counts as 0 ({shown}): {failure.completion[:200]!r}"
            )
        if self.tracker.wants_samples(self.step) and samples == self.config.algorithm.samples_per_prompt:
            self.tracker.samples(self.step, sample_rows(batch, texts, examples))
        return {"reward/failed": len(scores.failures), "time/rewards_pool": scores.seconds}

    def response_texts(self, batch: TensorDict) -> list[str]:
        """What the policy wrote in each sample, as text, without the stop token it ended with."""
        stop = set(self.rollout.stop)
        ids = []
        for tokens, mask in zip(batch["tokens"].unbind(), batch["response_mask"].unbind(), strict=True):
            response = tokens[mask].tolist()
            ids.append(response[:-1] if response and response[-1] in stop else response)
        return self.tokenizer.batch_decode(ids)

    def say(self, what: str) -> None:
        if self.tracker is not None:
            self.tracker.say(what)

    def show_progress(self, done: int, total: int, tokens: int) -> None:
        if self.tracker is not None:
            self.tracker.progress(done, total, tokens)

    def is_due(self, every: int) -> bool:
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    def log(self, metrics: dict[str, float]) -> None:
        if self.tracker is None:
            self.watch.metrics()
            return
        times = self.watch.metrics()
        if "time/step" in times and "tokens/total" in metrics:
            rate = metrics["tokens/total"] / times["time/step"] / dist.get_world_size()
            metrics["throughput/tokens_per_second_per_gpu"] = rate
        peaks = self.peaks.metrics()
        if metrics:
            self.tracker.log(self.step, {**metrics, **times, **peaks})
        # The first update has no optimizer state yet.
        if self.plan and self.step == self.began_after + 2:
            self.tracker.say(measured_table(self.plan, peaks))


def attach(batch: TensorDict | None, fields: TensorDict | None) -> None:
    """Add computed fields to the controller's batch; nothing elsewhere."""
    if batch is not None:
        batch.update(fields)


def join_rounds(rounds: Sequence[TensorDict]) -> TensorDict:
    """The rows of all rounds, whose groups get numbers of their own."""
    if len(rounds) == 1:
        return rounds[0]
    joined, first = [], 0
    for batch in rounds:
        batch = batch.exclude("example")
        batch["group"] = batch["group"] + first
        first = int(batch["group"].max()) + 1
        joined.append(batch)
    return concatenate(joined)


def keep_groups(batch: TensorDict, count: int) -> TensorDict:
    """The rows of `count` groups: the first with signal, and where those are too few the first of the others."""
    groups, group_B = batch["group"].unique(return_inverse=True)
    signal_G = groups_with_signal(batch["rewards"], group_B)
    kept = (~signal_G).int().argsort(stable=True)[:count]
    return select(batch, torch.isin(batch["group"], groups[kept]).nonzero()[:, 0].tolist())


def response_lengths(batch: TensorDict) -> torch.Tensor:
    """[B] float32: how many tokens of each sample the policy sampled."""
    return torch.bincount(owners(batch["response_mask"]), minlength=len(batch)).float()


def batch_metrics(batch: TensorDict) -> dict[str, float]:
    """What a graded batch looks like: rewards, their parts, groups without signal, lengths."""
    total, lengths = batch["rewards"], response_lengths(batch)
    metrics = {
        "reward/mean": total.mean(),
        "reward/std": total.std(),
        "groups/no_signal": 1 - groups_with_signal(total, batch["group"]).float().mean(),
        "response_length/mean": lengths.mean(),
        "response_length/max": lengths.max(),
        "response_length/truncated": batch["truncated"].float().mean(),
        "tokens/total": sum(lengths_of(batch["tokens"])),
    }
    parts = {name: field for name, field in batch.items() if name.startswith("rewards/")}
    for name, field in parts.items():
        name = name.removeprefix("rewards/")
        metrics |= {f"reward/{name}/mean": field.mean(), f"reward/{name}/std": field.std()}
    return {name: float(value) for name, value in metrics.items()}


def advantage_metrics(batch: TensorDict | None) -> dict[str, float]:
    """How far the advantages of a step's response tokens spread."""
    if batch is None:
        return {}
    values = batch["advantages"].values()[batch["response_mask"].values()]
    metrics = {"advantages/std": values.std(), "advantages/min": values.min(), "advantages/max": values.max()}
    return {name: float(value) for name, value in metrics.items()}


def sample_rows(batch: TensorDict, texts: list[str], examples: list[dict]) -> list[dict[str, Any]]:
    """The samples of a batch as rows to keep: prompt, response, reward and its parts, and the dataset row."""
    parts = [name for name in batch.keys() if name.startswith("rewards/")]  # noqa: SIM118 - not a dict
    rows = []
    for i, (text, example) in enumerate(zip(texts, examples, strict=True)):
        row = {"prompt": example["prompt_text"], "response": text, "reward": float(batch["rewards"][i])}
        row |= {name: float(batch[name][i]) for name in parts}
        row["finish_reason"] = "length" if batch["truncated"][i] else "stop"
        rows.append({**row, "example": {k: v for k, v in example.items() if k != "prompt_text"}})
    return rows


def check_reward_columns(config: TrainConfig, prompts: Prompts) -> None:
    """Raise ConfigError where a reward needs a column that the data does not have."""
    columns = list(prompts[0].row)
    for name, missing in rewards.missing_columns(config.rewards, columns).items():
        raise ConfigError(
            f"Reward {name!r} needs the column {missing[0]!r}, which the data does not have: its columns are "
            f"{', '.join(columns)}."
        )


def stop_tokens(model: ModelConfig) -> tuple[int, ...]:
    """The ids that end a response: the end of sequence of the tokenizer, of the model and of its generation config."""
    found = [read_tokenizer(model).eos_token_id, read_config(model).eos_token_id]
    with suppress(OSError):
        found.append(transformers.GenerationConfig.from_pretrained(model.path).eos_token_id)
    return tuple(sorted({i for ids in found if ids is not None for i in (ids if isinstance(ids, list) else [ids])}))
