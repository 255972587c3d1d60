"""The loop: rollout, advantages, log-probabilities, update, evaluation, record.

Every process runs these lines. On the controller (rank 0) `batch` is the global TensorDict, elsewhere it is None;
worker methods split it over the ranks and gather what they return (workers/dispatch.py).
"""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from grpo.advantages import (
    compute_advantages,
    groups_with_signal,
    join_rounds,
    keep_groups,
    overlong_penalty,
    prompts_missing,
    signal_of,
)
from grpo.data import Prompt
from trainer.checkpoint import Checkpoints
from trainer.config import TrainConfig
from trainer.controller import Controller, advantage_metrics, batch_metrics, cast_of, job_of
from trainer.death import Notice
from trainer.pulse import Pulse
from trainer.runs import Run
from trainer.scores import correct
from trainer.tracking import Stopwatch
from workers.actor import ActorWorker
from workers.conversation import Converser
from workers.dispatch import from_controller, on_controller
from workers.engines.protocol import Engine
from workers.engines.torch_engine import share_of_memory
from workers.memory import Peaks
from workers.models.hub import read_tokenizer, stop_tokens
from workers.parallel.mesh import InferenceLayout, make_inference_layout, make_training_layout
from workers.plan import concurrent_samples
from workers.ref import RefWorker
from workers.rollout import Grader, RolloutWorker, make_engine
from workers.sharding import ShardingManager, expect_current, judge_gap


class Trainer:
    """GRPO from a config to a trained policy. The process group must have been joined."""

    def __init__(self, config: TrainConfig, device: torch.device, run: Run, notice: Notice | None = None) -> None:
        self.config, self.step, self.notice = config, run.step, notice or Notice()
        with ExitStack() as stack:  # ends all that was started where something here fails
            cuda = device.type == "cuda"
            peaks = Peaks(cuda)
            with Pulse("reading and tokenising the data"):
                made = on_controller(lambda: Controller(config, device, run, peaks, stack))
            self.controller: Controller | None = made  # all that only rank 0 holds; None elsewhere
            if made:
                self.notice.say = made.tracker.say
            config.steps = from_controller(config.steps)  # which epochs may stand for
            self.watch = Stopwatch(cuda, self.controller.phase if self.controller else peaks)
            layout = make_training_layout(device, config.actor.replicate, config.actor.tensor_parallel)
            engines = make_inference_layout(device, config.rollout.tensor_parallel)
            temperature, stop = config.rollout.temperature, stop_tokens(config.model)
            self.ref = self.teacher = grade = converse = None  # the last two on the ranks that lead an engine
            # A reward that fails its own examples is refused before anything heavy is loaded.
            if engines.tp_rank == 0:
                with self.watch("rewards_start"):
                    grade, converse = start_processes(config, stop, stack)
            # The engine before the actor, as it takes its share of the memory that it finds free.
            with self.watch("engine_start"):
                engine = start_engine(config, engines, run.folder / f"engine-{engines.dp_rank}.log")
            stack.callback(engine.shutdown)
            sizes = {"minibatches": config.batch.minibatches_per_step, "epochs": config.batch.epochs_per_step}
            with self.watch("actor_start"):
                self.actor = ActorWorker(
                    config.model, config.actor, config.algorithm, layout, temperature, config.total_updates, **sizes
                )
                if config.algorithm.kl_coefficient:
                    self.ref = RefWorker(config.model, config.actor, layout, temperature, self.actor.policy)
                if config.teacher is not None:
                    self.teacher = RefWorker(config.teacher, config.actor, layout, temperature, name="teacher")
            how = grade, self.progress, converse
            self.rollout = RolloutWorker(config.rollout, engine, engines, stop, config.seed, *how)
            refs = [ref for ref in (self.ref, self.teacher) if ref is not None]
            self.sharding = ShardingManager(self.actor, self.rollout, refs, peaks)
            self.checkpoints = Checkpoints(run.folder, config, self.notice)
            self.say(self.checkpoints.begin(self.actor))
            if run.resumed is not None:
                self.checkpoints.load(run.resumed, self.actor)
            self.stack = stack.pop_all()

    def train(self) -> None:
        """Train to the last step."""
        watch = self.watch
        if self.step == 0:
            self.record(self.evaluate())
        self.notice.stepping = True
        while self.step < self.config.steps:
            self.step += 1
            with watch("step"):
                with self.sharding.serving(), watch("rollout"):  # the engine holds exactly the actor's weights
                    rounds = [self.sample(self.config.batch.prompts_per_step)]  # graded as samples come
                    while missing := self.prompts_missing(rounds):  # only where groups without signal are replaced
                        rounds.append(self.sample(missing))
                batch, metrics = self.join(rounds)  # one batch, and what was sampled in numbers
                expect_current(batch, self.actor.version)  # a batch from stale weights is an error
                if self.ref is not None:  # only where a KL term asks for it
                    with watch("ref"):
                        batch = self.ref.compute_logprobs(batch)
                if self.teacher is not None:  # only where there is one to learn from
                    with watch("teacher"):
                        batch = self.teacher.compute_logprobs(batch)
                if self.config.needs_old_logprobs:  # only with several updates a step, or for advantages made of them
                    with watch("old_logprobs"):
                        batch = self.actor.compute_logprobs(batch)
                if self.config.algorithm.needs_policy_logprobs:  # and for these the tokens, which are elsewhere
                    batch = self.rollout.group.fetch(batch, "the tokens of the batch")
                batch = compute_advantages(batch, self.config.algorithm, self.config.rewards.weights)
                with watch("update"):
                    metrics |= advantage_metrics(batch) | self.actor.update(batch)
            self.say(judge_gap(metrics, self.sharding))  # do engine and trainer compute the same?
            metrics |= self.rollout.metrics | self.sharding.metrics
            if self.is_due(self.config.evaluation.every):
                metrics |= self.evaluate()
            self.record(metrics, batch)  # before the checkpoint: a run that goes on from it must have this row
            if self.checkpoints.wanted(self.step, metrics):  # it is due, the best so far, or the last for a signal
                with watch("checkpoint"):  # its time stands in the next row
                    position = self.controller.stream.state_dict() if self.controller else None
                    self.checkpoints.save(self.step, self.actor, position)

    def run(self) -> None:
        """Train, and end all that was started, whatever happens."""
        with self.stack:
            self.train()
            if self.controller:
                self.controller.close()

    def sample(self, count: int) -> TensorDict | None:
        """The graded responses to the next `count` prompts."""
        prompts = self.controller.stream.next(count) if self.controller else None
        return self.roll_out(prompts, self.config.batch.samples_per_prompt)

    def roll_out(self, prompts: list[Prompt] | None, samples: int, **how: Any) -> TensorDict | None:
        """What RolloutWorker.generate returns, shown and kept as the step asks for it."""
        kept = self.controller is not None and self.controller.tracker.wants_samples(self.step)
        batch = self.rollout.generate(prompts, samples, everyones=kept, **how)
        if self.controller:
            self.controller.show(self.step, self.rollout.trajectories, self.rollout.failures, len(batch))
        return batch

    def prompts_missing(self, rounds: list[TensorDict | None]) -> int:
        """How many further prompts to sample, the same on every rank; 0 where there are rounds enough."""
        config, count = self.config, torch.zeros((), dtype=torch.int64)
        if len(rounds) > config.algorithm.resample_rounds:
            return 0
        if self.controller and (missing := prompts_missing(rounds, config.batch.prompts_per_step, config.algorithm)):
            count.fill_(max(missing, self.rollout.layout.dp_size))  # each engine needs one
        dist.broadcast(count, 0)
        return int(count)

    def join(self, rounds: list[TensorDict | None]) -> tuple[TensorDict | None, dict[str, float]]:
        """What the step learns from, and what was sampled for it as metrics."""
        if not self.controller:
            return None, {}
        algorithm, batch = self.config.algorithm, join_rounds(rounds)
        metrics = batch_metrics(batch, signal_of(batch, algorithm))
        if algorithm.resample_rounds:
            metrics |= {"resampling/rounds": len(rounds) - 1, "resampling/groups": len(batch["group"].unique())}
            batch = keep_groups(batch, self.config.batch.prompts_per_step, algorithm)
            signal = groups_with_signal(signal_of(batch, algorithm), batch["group"])
            metrics["resampling/filled"] = 1 - float(signal.float().mean())
        if algorithm.overlong_share:
            longest = self.config.rollout.max_response_tokens
            batch["penalties"] = overlong_penalty(batch["response_length"], longest, algorithm.overlong_share)
            metrics["reward/overlong/mean"] = float(batch["penalties"].mean())
        return batch, metrics

    def evaluate(self) -> dict[str, float]:
        """Accuracy, pass@k and length on the held-out prompts, as metrics under eval/; empty where there are none."""
        if not self.config.data.eval:
            return {}
        config = self.config.evaluation
        with self.watch("evaluation"):
            prompts = self.controller.held_out if self.controller else None
            with self.sharding.serving():
                how = {"temperature": config.temperature, "held_out": True}
                batch = self.roll_out(prompts, config.samples_per_prompt, **how)
            expect_current(batch, self.actor.version)
        if not self.controller:
            return {}
        right = correct(batch, self.config.accuracy_reward)
        metrics = batch_metrics(batch) | self.controller.judge(batch, right)
        metrics["time/sync"] = self.sharding.metrics["time/sync"]
        return {f"eval/{name}": value for name, value in metrics.items()}

    def record(self, metrics: dict[str, float], batch: TensorDict | None = None) -> None:
        """Record a step that learned from `batch`; raises ConfigError on every rank where the run had better end."""
        if metrics.get("update/skipped"):  # such a batch is kept, with its tokens
            batch = self.rollout.group.fetch(batch, "the tokens of the batch")
        times = self.watch.metrics()
        # No metrics where there is nothing to evaluate before the first step.
        on_controller(lambda: metrics and self.controller.record(self.step, metrics | times, batch))

    def progress(self, *news: int) -> None:
        """Take news of the rollout, to show and as a sign of life."""
        self.notice.beat()
        if self.controller:
            self.controller.tracker.progress(*news)

    def say(self, what: str | None) -> None:
        if self.controller and what:
            self.controller.tracker.say(what)

    def is_due(self, every: int) -> bool:
        return self.config.is_due(self.step, every)


def start_processes(config: TrainConfig, stop: tuple[int, ...], stack: ExitStack) -> tuple[Grader, Converser | None]:
    """What grades samples and, where they are conversations, holds them; `stack` ends their processes."""
    tokenizer = read_tokenizer(config.model)
    grade, cast = stack.enter_context(Grader(config.rewards, tokenizer, stop)), cast_of(config, tokenizer)
    return grade, cast and stack.enter_context(Converser(cast, config.environments, config.rollout))


def start_engine(config: TrainConfig, layout: InferenceLayout, log: Path | None = None) -> Engine:
    """The engine of `config` on the ranks of `layout`, asleep; `log` receives what it says."""
    rollout, device = config.rollout, layout.device
    if rollout.engine == "sglang":  # the embedded one fills its memory by itself
        job = job_of(config, dist.get_world_size(), device, share_of_memory(device, 1.0))
        rollout = replace(rollout, concurrent_samples=concurrent_samples(job))
    return make_engine(config.model, rollout, layout, config.seed + layout.dp_rank, log, config.converses)
