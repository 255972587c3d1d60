"""The whole tree of settings, gathered from the components that own them, and the checks that span several."""

import os
from dataclasses import dataclass

from rich.table import Table

import rewards
from grpo.algorithm import AlgorithmConfig, BatchConfig
from grpo.config import ConfigError, option
from grpo.data import DataConfig
from rewards import RewardsConfig
from trainer.checkpoint import CheckpointConfig
from trainer.tracking import TrackingConfig
from workers.actor import ActorConfig
from workers.models import family_of
from workers.models.hub import ModelConfig, read_config
from workers.parallel.attention_backend import why_not_flash4
from workers.parallel.mesh import count_shards, pick_device
from workers.rollout import RolloutConfig


@dataclass
class EvaluationConfig:
    every: int = option(20, "Steps between evaluations; 0 evaluates before the first and after the last step only.")
    samples_per_prompt: int = option(1, "Responses sampled to each held-out prompt.")
    temperature: float | None = option(None, "Sampling temperature; null is that of the rollout, 0 is greedy.")
    accuracy: str | None = option(None, "The reward whose value 1 counts as correct; null is the first one.")


@dataclass
class RunConfig:
    """What reinforcement and supervised training have in common."""

    steps: int = option(100, "Steps of the run.")
    seed: int = option(0, "Decides the order of the data and what is sampled.")
    device: str = option("auto", "auto (CUDA where there is one), cpu or cuda.")
    timeout_seconds: float = option(600.0, "Longest wait of one process for another before the run ends with an error.")
    model: ModelConfig = option(ModelConfig, "")
    data: DataConfig = option(DataConfig, "")
    actor: ActorConfig = option(ActorConfig, "")
    checkpoint: CheckpointConfig = option(CheckpointConfig, "")
    tracking: TrackingConfig = option(TrackingConfig, "")

    def check(self, world: int) -> None:
        """Raise ConfigError for the first setting that cannot work on `world` processes; loads no weights."""
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps} must be at least 1.")
        if self.timeout_seconds <= 0:
            raise ConfigError(f"timeout_seconds={self.timeout_seconds} must be above 0.")
        self.checkpoint.check(self.tracking.name)
        self.tracking.check()
        self.actor.check()
        count_shards(world, self.actor.replicate, self.actor.tensor_parallel)
        model = read_config(self.model)
        family_of(model).check_tensor_parallel(self.actor.tensor_parallel)
        why_not_flash4(self.model, model, pick_device(self.device))

    def check_length(self, tokens: int, made_of: str) -> None:
        """Raise ConfigError where a sample of `tokens` tokens fits neither a micro-batch nor the model."""
        budget = self.actor.max_tokens_per_microbatch
        if tokens > budget:
            raise ConfigError(
                f"A sample may have {tokens} tokens ({made_of}), more than "
                f"actor.max_tokens_per_microbatch={budget}: raise it to at least {tokens}."
            )
        longest = read_config(self.model).max_position_embeddings
        if tokens > longest:
            raise ConfigError(
                f"A sample may have {tokens} tokens ({made_of}), more than the {longest} positions of the model: "
                "lower one of the two."
            )


@dataclass
class SftConfig(RunConfig):
    """Settings of `python -m trainer sft`."""

    samples_per_step: int = option(32, "Demonstrations of one step, which is one optimizer update.")

    def check(self, world: int) -> None:
        super().check(world)
        dp_size = world // self.actor.tensor_parallel
        if self.samples_per_step < dp_size:
            raise ConfigError(
                f"samples_per_step={self.samples_per_step} leaves some of {dp_size} data-parallel ranks without a "
                f"sample: use at least {dp_size}."
            )

    def sizes(self) -> list[tuple[str, int]]:
        """(what, how many), for the table printed before the model is loaded."""
        return [("samples of a step", self.samples_per_step)]


@dataclass
class TrainConfig(RunConfig):
    """Settings of `python -m trainer train`."""

    batch: BatchConfig = option(BatchConfig, "")
    algorithm: AlgorithmConfig = option(AlgorithmConfig, "")
    rollout: RolloutConfig = option(RolloutConfig, "")
    rewards: RewardsConfig = option(RewardsConfig, "")
    evaluation: EvaluationConfig = option(EvaluationConfig, "")

    def __post_init__(self) -> None:
        if self.algorithm.aggregate == "constant" and self.algorithm.constant_length is None:
            self.algorithm.constant_length = self.rollout.max_response_tokens

    def check(self, world: int) -> None:
        super().check(world)
        self.batch.check()
        self.algorithm.check()
        self.algorithm.check_group_size(self.batch.samples_per_prompt)
        self.rollout.check(world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        try:
            rewards.validate(self.rewards)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.evaluation.accuracy is not None and self.evaluation.accuracy not in self.rewards.weights:
            raise ConfigError(
                f"evaluation.accuracy={self.evaluation.accuracy} is not one of the rewards of rewards.weights: "
                f"{', '.join(self.rewards.weights)}."
            )
        if self.evaluation.samples_per_prompt < 1 or self.evaluation.every < 0:
            raise ConfigError("evaluation.samples_per_prompt must be at least 1 and evaluation.every at least 0.")
        update, dp_size = self.batch.samples_per_update, world // self.actor.tensor_parallel
        if update < dp_size:
            raise ConfigError(
                f"An update has {update} samples (prompts_per_step x samples_per_prompt / minibatches_per_step), "
                f"fewer than the {dp_size} data-parallel ranks: raise batch.prompts_per_step."
            )
        engines = world // self.rollout.tensor_parallel
        if self.batch.prompts_per_step < engines:
            raise ConfigError(
                f"batch.prompts_per_step={self.batch.prompts_per_step} leaves some of {engines} engines "
                f"without a prompt: use at least {engines}."
            )
        self.check_length(
            self.data.max_prompt_tokens + self.rollout.max_response_tokens,
            f"data.max_prompt_tokens={self.data.max_prompt_tokens} + "
            f"rollout.max_response_tokens={self.rollout.max_response_tokens}",
        )

    def sizes(self) -> list[tuple[str, int]]:
        """(what, how many), for the table printed before the model is loaded."""
        return [
            ("prompts of a step", self.batch.prompts_per_step),
            ("samples of a step", self.batch.samples_per_step),
            ("samples of an update", self.batch.samples_per_update),
            ("updates of a step", self.batch.updates_per_step),
        ]

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the policy's log-probabilities before the first update are computed beforehand.

        With one update a step, that update computes them itself: only a KL term in the reward needs them earlier.
        """
        return self.batch.updates_per_step > 1 or self.algorithm.kl_in_reward

    @property
    def total_updates(self) -> int:
        return self.steps * self.batch.updates_per_step


def sizes_table(config: SftConfig | TrainConfig, world: int) -> Table:
    """How many of what a step has, in all and for each data-parallel rank."""
    tensor, replicate = config.actor.tensor_parallel, config.actor.replicate
    shards = count_shards(world, replicate, tensor)
    layout = f"{world} process(es) = {replicate} replica(s) x {shards} shard(s) x {tensor} tensor-parallel"
    table = Table(title=layout, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("in total", justify="right")
    table.add_column("per rank", justify="right")
    for what, total in config.sizes():
        each = total if what.startswith("updates") else total / (replicate * shards)
        table.add_row(what, str(total), f"{each:g}")
    table.add_row("most tokens of a micro-batch", "", str(config.actor.max_tokens_per_microbatch))
    return table
