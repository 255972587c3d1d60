"""The whole tree of settings, gathered from the components that own them, and the checks that span several.

What takes seconds to import (torch, transformers, datasets) is imported inside the checks that need it: --help and a
typing error are answered at once.
"""

import math
import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import environments
import rewards
from environments import EnvironmentsConfig
from grpo.algorithm import AlgorithmConfig, BatchConfig
from grpo.config import ConfigError, check_values, option
from grpo.data_config import DataConfig
from rewards import RewardsConfig
from workers.config import ActorConfig, ModelConfig
from workers.engines.config import RolloutConfig

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class CheckpointConfig:
    """How often a run is saved, and what happens to an earlier run of the same name."""

    every: int = option(50, "Steps between checkpoints; 0 saves after the last step only.", at_least=0)
    keep: int = option(2, "Newest checkpoints that are kept.", at_least=1)
    keep_best: bool = option(
        False,
        "Save the best by evaluation as well, as checkpoints/best beside the newest: by accuracy, in sft by the loss.",
    )
    background: bool = option(
        False, "Go on training while a checkpoint is written, from a copy in the host's memory of what it holds."
    )
    on_full_disk: str = option(
        "stop", "stop: a full disk ends the run; skip: it leaves out the checkpoint.", choices=("stop", "skip")
    )
    grace_seconds: float = option(
        120.0, "Time to end the step and save after SIGTERM or Ctrl-C; then the run ends at once.", above=0
    )
    resume: bool | str = option(
        False,
        "Go on from the newest whole checkpoint of the run tracking.name; auto: begin it where it has none, as it is "
        "under torchrun --max-restarts.",
    )
    overwrite: bool = option(False, "Begin anew under a name that has checkpoints; the earlier run is moved aside.")

    def check(self, name: str | None) -> None:
        """Raise ConfigError where the settings cannot work for a run of this `name`."""
        if self.resume not in (True, False, "auto"):
            raise ConfigError(f"checkpoint.resume={self.resume!r} is not a choice: use one of true, false, auto.")
        if self.resume and not name:
            raise ConfigError("checkpoint.resume needs tracking.name: the name of the run to go on with.")
        if self.resume and self.overwrite:
            both = "checkpoint.resume goes on with a run, checkpoint.overwrite=true begins it anew"
            raise ConfigError(f"{both}: set one of them.")


@dataclass
class TrackingConfig:
    """Where a run's record goes and how much of it is kept."""

    folder: str = option("runs", "Folder that holds one folder a run.")
    name: str | None = option(None, "Name of the run's folder; null makes one from the date and time.")
    wandb: bool = option(False, "Copy metrics to Weights & Biases (offline where there is no API key).")
    wandb_project: str = option("grpo", "Weights & Biases project.")
    tensorboard: bool = option(False, "Copy metrics to TensorBoard event files.")
    samples_every: int = option(10, "Steps between those whose samples are kept in samples.jsonl; 0: none.", at_least=0)
    samples_kept: int = option(4, "Samples kept at each such step.", at_least=0)
    show_every: int = option(
        20, "Steps between those at which two completions are printed, from the first on; 0: none are.", at_least=0
    )

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot work, and where a dashboard is not installed."""
        check_values(self, "tracking.")
        for name in ("wandb", "tensorboard"):
            if getattr(self, name) and find_spec(name) is None:
                way_out = f"pip install {name}, or set tracking.{name}=false"
                raise ConfigError(f"tracking.{name}=true needs {name}: {way_out}.")


@dataclass
class EvaluationConfig:
    every: int = option(20, "Steps between evaluations; 0: before the first and after the last step only.", at_least=0)
    samples_per_prompt: int = option(1, "Responses sampled to each held-out prompt.", at_least=1)
    temperature: float | None = option(None, "Sampling temperature; null: the rollout's, 0: greedy.", at_least=0)
    accuracy: str | None = option(None, "The reward whose value 1 counts as correct; null is the first one.")
    answer_pattern: str | None = option(
        None,
        "Regular expression whose last match in a response, or the first group of it, is the answer that majorities of "
        "`eval` count; null: the last <answer> tag, or else the last \\boxed{}, or else the last number.",
    )

    def check(self, rewards: Collection[str]) -> None:
        """Raise ConfigError for the first value that cannot work with these `rewards`."""
        if self.accuracy is not None and self.accuracy not in rewards:
            fault = f"evaluation.accuracy={self.accuracy} is none of the rewards of rewards.weights"
            raise ConfigError(f"{fault}: use one of {', '.join(rewards)}.")
        if self.temperature == 0 and self.samples_per_prompt > 1:
            same = f"all {self.samples_per_prompt} samples of a prompt are the same"
            way_out = "set evaluation.samples_per_prompt=1, or a temperature"
            raise ConfigError(f"evaluation.temperature=0 takes the likeliest token, with which {same}: {way_out}.")
        try:
            re.compile(self.answer_pattern or "")
        except re.error as error:
            way_out = "correct it, or leave it out"
            raise ConfigError(f"evaluation.answer_pattern is no regular expression ({error}): {way_out}.") from error


@dataclass
class RunConfig:
    """What reinforcement and supervised training have in common."""

    steps: int | None = option(None, "Steps of the run; 100 where epochs is not set either.", at_least=1)
    epochs: float | None = option(
        None, "How often the run goes over its prompts, instead of steps.", above=0, below=math.inf
    )
    seed: int = option(0, "Decides the order of the data and what is sampled.", at_least=0, below=2**32)
    device: str = option("auto", "auto (CUDA where there is one), cpu or cuda.")
    timeout_seconds: float = option(
        600.0, "Longest wait of one process for another before the run ends with an error.", above=0, at_most=1e9
    )
    model: ModelConfig = option(ModelConfig, "")
    data: DataConfig = option(DataConfig, "")
    actor: ActorConfig = option(ActorConfig, "")
    checkpoint: CheckpointConfig = option(CheckpointConfig, "")
    tracking: TrackingConfig = option(TrackingConfig, "")

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            self.steps = 100

    def count_steps(self, prompts: int, each: int) -> None:
        """Set the steps that the epochs over `prompts` come to, `each` a step, in the place of epochs."""
        if self.epochs is not None:
            self.steps, self.epochs = math.ceil(round(self.epochs * prompts / each, 6)), None

    def is_due(self, step: int, every: int) -> bool:
        """Whether what is done each `every` steps (0: never else) and after the last one is done after `step`."""
        return step == self.steps or (every > 0 and step % every == 0)

    def check(self, world: int) -> None:
        """Raise ConfigError for the first setting that cannot work on `world` processes; loads no weights."""
        check_values(self)
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"steps={self.steps} and epochs={self.epochs} are both set: unset one, as by steps=null.")
        self.checkpoint.check(self.tracking.name)
        if self.checkpoint.keep_best and not self.data.eval:
            raise ConfigError("checkpoint.keep_best=true needs evaluations: set data.eval, or leave it out.")
        self.tracking.check()
        self.actor.check()
        from workers.parallel.mesh import count_shards

        count_shards(world, self.actor.replicate, self.actor.tensor_parallel)
        self.check_model(self.model)

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError for a model that is not supported, or not on this layout or device."""
        from workers.models import family_of
        from workers.models.hub import read_config
        from workers.parallel.attention_backend import why_not_flash4
        from workers.parallel.mesh import pick_device

        config = read_config(model)
        family_of(config).check_tensor_parallel(self.actor.tensor_parallel)
        why_not_flash4(model, config, pick_device(self.device))

    def check_length(self, tokens: int, made_of: str) -> None:
        """Raise ConfigError where a sample of `tokens` tokens fits neither a micro-batch nor the model."""
        from workers.models.hub import read_config

        budget, positions = self.actor.max_tokens_per_microbatch, read_config(self.model).max_position_embeddings
        for most, what, way_out in (
            (budget, f"actor.max_tokens_per_microbatch={budget}", f"raise it to at least {tokens}"),
            (positions, f"the {positions} positions of the model", "lower one of the two"),
        ):
            if tokens > most:
                raise ConfigError(f"A sample may have {tokens} tokens ({made_of}), more than {what}: {way_out}.")


@dataclass
class SftEvaluationConfig:
    every: int = option(
        100, "Steps between losses on data.eval; 0: before the first and after the last step only.", at_least=0
    )


@dataclass
class SftConfig(RunConfig):
    """Settings of `python -m trainer sft`."""

    samples_per_step: int = option(32, "Demonstrations of one step, which is one optimizer update.")
    evaluation: SftEvaluationConfig = option(SftEvaluationConfig, "")

    def check(self, world: int) -> None:
        super().check(world)
        dp_size = world // self.actor.tensor_parallel
        if self.samples_per_step < dp_size:
            idle = f"some of {dp_size} data-parallel ranks without a sample"
            raise ConfigError(f"samples_per_step={self.samples_per_step} leaves {idle}: use at least {dp_size}.")

    def sizes(self) -> dict[str, int]:
        """What a step has how many of."""
        return {"samples of a step": self.samples_per_step}


@dataclass
class TrainConfig(RunConfig):
    """Settings of `python -m trainer train`."""

    batch: BatchConfig = option(BatchConfig, "")
    algorithm: AlgorithmConfig = option(AlgorithmConfig, "")
    rollout: RolloutConfig = option(RolloutConfig, "")
    rewards: RewardsConfig = option(RewardsConfig, "")
    environment: str | None = option(
        None, "The environment that the policy converses with (docs/environments.md); null: each prompt has one answer."
    )
    environments: EnvironmentsConfig = option(EnvironmentsConfig, "")
    evaluation: EvaluationConfig = option(EvaluationConfig, "")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm.aggregate == "constant" and self.algorithm.constant_length is None:
            self.algorithm.constant_length = self.rollout.max_response_tokens

    def check(self, world: int) -> None:
        super().check(world)
        self.batch.check()
        self.algorithm.check()
        self.algorithm.check_group_size(self.batch.samples_per_prompt)
        if (named := self.algorithm.signal_reward) is not None and named not in self.rewards.weights:
            has = ", ".join(self.rewards.weights)
            raise ConfigError(f"algorithm.signal_reward={named!r} is none of rewards.weights: use one of {has}.")
        self.check_sampling(world)
        update, dp_size = self.batch.samples_per_update, world // self.actor.tensor_parallel
        if update < dp_size:
            has = f"An update has {update} samples (prompts_per_step x samples_per_prompt / minibatches_per_step)"
            raise ConfigError(f"{has}, fewer than the {dp_size} data-parallel ranks: raise batch.prompts_per_step.")
        prompts, engines = self.batch.prompts_per_step, world // self.rollout.tensor_parallel
        if prompts < engines:
            idle = f"some of {engines} engines without a prompt"
            raise ConfigError(f"batch.prompts_per_step={prompts} leaves {idle}: use at least {engines}.")
        self.check_longest()
        for name in ("mask_no_signal", "resample_rounds"):
            by_total = getattr(self.algorithm, name) and self.algorithm.signal_reward is None
            if by_total and not any(self.rewards.weights.values()):
                gives_up = f"algorithm.{name}={getattr(self.algorithm, name)} gives up groups of equal rewards"
                way_out = "leave it out, or name the reward to judge by as algorithm.signal_reward"
                raise ConfigError(f"{gives_up}, and with all of rewards.weights 0 that is each: {way_out}.")
        if self.teacher is not None:
            self.check_teacher(self.teacher)

    def check_teacher(self, teacher: ModelConfig) -> None:
        """Raise ConfigError where `teacher` cannot be used, or cannot read all that the policy may sample."""
        from workers.models.hub import check_same_tokens, check_weights, read_config

        try:
            self.check_model(teacher)
            check_same_tokens(self.model, teacher)
            longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
            if longest > (most := read_config(teacher).max_position_embeddings):
                way_out = "lower data.max_prompt_tokens or rollout.max_response_tokens"
                raise ConfigError(f"a sample may have {longest} tokens, more than its {most} positions: {way_out}.")
            check_weights(teacher)
        except ConfigError as error:
            fault = str(error).replace("model.path", "algorithm.teacher")
            raise ConfigError(f"The teacher cannot be used: {fault}") from error

    def check_sampling(self, world: int) -> None:
        """The part of `check` that is about what is sampled, how it is graded, and evaluations."""
        self.rollout.check(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        try:
            rewards.validate(self.rewards)
            environments.validate(self.environments, self.environment)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if not self.converses and "environment" in self.rewards.weights:
            way_out = "set environment to a name, or leave it out"
            raise ConfigError(f"rewards.weights has 'environment', and there is no environment: {way_out}.")
        most, turn = self.rollout.max_response_tokens, self.environments.max_turn_tokens
        if turn is not None and turn > most:
            whole = f"a whole conversation may have, rollout.max_response_tokens={most}"
            raise ConfigError(f"environments.max_turn_tokens={turn} is more than {whole}: lower it, or leave it out.")
        self.evaluation.check(self.rewards.weights)

    def check_longest(self) -> None:
        """Raise ConfigError where the longest sample fits neither a micro-batch nor the model."""
        prompt, response = self.data.max_prompt_tokens, self.rollout.max_response_tokens
        self.check_length(
            prompt + response, f"data.max_prompt_tokens={prompt} + rollout.max_response_tokens={response}"
        )

    def sizes(self) -> dict[str, int]:
        """What a step has how many of."""
        return {
            "prompts of a step": self.batch.prompts_per_step,
            "samples of a step": self.batch.samples_per_step,
            "samples of an update": self.batch.samples_per_update,
            "updates of a step": self.batch.updates_per_step,
        }

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether old log-probabilities need a pass of their own: a single update a step computes them itself."""
        compares = self.batch.updates_per_step > 1 and self.algorithm.ratio_to == "old"
        return compares or self.algorithm.needs_policy_logprobs

    @property
    def converses(self) -> bool:
        """Whether samples are conversations with an environment."""
        return self.environment is not None or self.environments.column is not None

    @property
    def teacher(self) -> ModelConfig | None:
        """The model that teaches, computed as the policy is."""
        return None if (path := self.algorithm.teacher) is None else replace(self.model, path=path)

    @property
    def accuracy_reward(self) -> str:
        """The reward whose value 1 counts as correct."""
        return self.evaluation.accuracy or next(iter(self.rewards.weights))

    @property
    def total_updates(self) -> int:
        return self.steps * self.batch.updates_per_step


def sizes_table(config: SftConfig | TrainConfig, world: int) -> "Table":
    """How many of what a step has, in all and for each data-parallel rank."""
    from rich.table import Column, Table

    from workers.parallel.mesh import count_shards

    tensor, replicate = config.actor.tensor_parallel, config.actor.replicate
    shards = count_shards(world, replicate, tensor)
    layout = f"{world} process(es) = {replicate} replica(s) x {shards} shard(s) x {tensor} tensor-parallel"
    columns = (Column(heading, justify="right") for heading in ("in total", "per rank"))
    table = Table("", *columns, title=layout, title_justify="left", box=None, pad_edge=False)
    for what, total in config.sizes().items():
        each = total if what.startswith("updates") else total / (replicate * shards)
        table.add_row(what, str(total), f"{each:g}")
    table.add_row("most tokens of a micro-batch", "", str(config.actor.max_tokens_per_microbatch))
    return table
