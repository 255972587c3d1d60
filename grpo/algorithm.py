"""What an algorithm is: choices (grpo/choices.py) with their settings, and the sizes of batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo.choices import CHOICES
from grpo.config import ConfigError, check_values, choose, option
from grpo.presets import PRESETS, values_of


def names_of(setting: str) -> str:
    """The choices of a setting, as the end of a sentence."""
    *first, last = CHOICES[setting]
    return f"{', '.join(first)} or {last}"


@dataclass
class BatchConfig:
    prompts_per_step: int = option(32, "Prompts of one step: each is answered samples_per_prompt times.", at_least=1)
    samples_per_prompt: int = option(8, "Responses sampled to each prompt: one group.", at_least=1)
    minibatches_per_step: int = option(1, "Optimizer updates of one pass over a step's samples.", at_least=1)
    epochs_per_step: int = option(1, "Passes over a step's samples.", at_least=1)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        return self.samples_per_step // self.minibatches_per_step

    @property
    def updates_per_step(self) -> int:
        return self.minibatches_per_step * self.epochs_per_step

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot work."""
        check_values(self, "batch.")
        if self.prompts_per_step % self.minibatches_per_step:
            cut = f"batch.minibatches_per_step={self.minibatches_per_step} equal minibatches: use a divisor"
            raise ConfigError(f"batch.prompts_per_step={self.prompts_per_step} cannot be cut into {cut}.")


@dataclass
class AlgorithmConfig:
    preset: str = option(
        "grpo",
        f"The published algorithm that you begin from: {', '.join(PRESETS)}. Settings of your own win over its "
        "choices; `python -m trainer algorithms` lists them.",
        stands_for=values_of,
    )
    combine: str = option(
        "sum", f"How a sample's rewards become one: {names_of('combine')}, each by itself within its group."
    )
    baseline: str = option("group_mean", f"What a reward is compared with: {names_of('baseline')}.")
    scale: str = option("group_std", f"What the difference is divided by: {names_of('scale')}.")
    ratio: str = option("token", f"What the ratio of new and old probability is of: {names_of('ratio')}.")
    ratio_to: str = option(
        "old",
        "What the new probability is compared with: the trainer's own before the step (old), or what the engine "
        "reported when it sampled (rollout), which needs no pass for old log-probabilities.",
        choices=("old", "rollout"),
    )
    clip: str = option("ppo", f"What bounds the ratio: {names_of('clip')}.")
    clip_low: float = option(
        0.2,
        "The ratio is clipped below at 1 - clip_low; with dppo: how far a probability may fall.",
        at_least=0,
        at_most=1,
    )
    clip_high: float = option(
        0.2, "The ratio is clipped above at 1 + clip_high; with dppo: how far a probability may rise.", at_least=0
    )
    sapo_positive: float = option(1.0, "How fast clip=sapo fades where the advantage is positive.", above=0)
    sapo_negative: float = option(1.05, "The same where it is negative.", above=0)
    dual_clip: float = option(
        0.0, "With negative advantages the ratio counts as this much at most (arXiv:1912.09729 has 3); 0 for no bound."
    )
    aggregate: str = option(
        "sequence_mean",
        f"How tokens become one loss: {names_of('aggregate')}. The first is a mean over tokens, the second over "
        "prompts of their tokens' mean, the others over responses: of a response's mean, its sum, or its sum over "
        "constant_length.",
    )
    constant_length: int | None = option(
        None, "What aggregate=constant divides by; null: rollout.max_response_tokens.", at_least=1
    )
    kl_coefficient: float = option(
        0.0, "Weight of the KL term towards the policy at the start; 0 loads no reference.", at_least=0
    )
    kl_in: str = option("loss", "Where the KL term stands: loss or reward.", choices=("loss", "reward"))
    kl_estimator: str = option(
        "k3", f"KL(policy, ref) as {', '.join(f'{k} = {c.formula}' for k, c in CHOICES['kl_estimator'].items())}."
    )
    kl_ratio: bool = option(
        False,
        "Multiply the KL term by the ratio of new and old probability: k1 and k3 then have the gradient of "
        "KL(policy, ref) (arXiv:2512.02556). Without it k2 has that gradient, and k3 has that of KL(ref, policy).",
    )
    entropy_coefficient: float = option(0.0, "Weight of the entropy bonus.", at_least=0)
    drift_coefficient: float = option(
        0.0, "Weight of log(pi / pi_old)^2, which holds the policy to what ratio_to names.", at_least=0
    )
    teacher: str | None = option(
        None, "A model of the same tokenizer, folder or hub name, to learn from on the policy's own samples."
    )
    teacher_coefficient: float = option(
        1.0, "What log(policy / teacher) of a token takes from its advantage, given a teacher.", above=0
    )
    correction: str = option(
        "none",
        f"Weigh the policy's term by trainer / rollout probability: {names_of('correction')}. Weights are truncated "
        "to correction_low to correction_high, or masked outside.",
    )
    correction_level: str = option("token", f"What the weight of the correction is of: {names_of('correction_level')}.")
    correction_high: float = option(2.0, "The largest weight of the correction.")
    correction_low: float = option(0.0, "The smallest weight of the correction.", at_least=0)
    reject_low: float = option(
        0.0, "Leave out responses whose trainer / rollout probability, its geometric mean, is below this.", at_least=0
    )
    reject_high: float | None = option(None, "Leave out those where it is above this; null: none.", above=0)
    off_policy_mask: float | None = option(
        None,
        "Leave out responses of negative advantage whose mean log(rollout / new probability) is above this "
        "(DeepSeek-V3.2, arXiv:2512.02556, section 3.1); null: none.",
        at_least=0,
    )
    mask_truncated: bool = option(False, "Learn nothing from responses that were cut at their longest length.")
    mask_no_signal: bool = option(False, "Leave groups whose rewards are all equal out of the loss's denominator too.")
    resample_rounds: int = option(
        0,
        "Most further rounds of prompts to replace groups of equal rewards; 0 keeps them. Those that are left after "
        "the last round fill the batch and weigh nothing.",
        at_least=0,
    )
    signal_reward: str | None = option(
        None, "The reward by which a group's rewards count as equal; null: the total, before any penalty."
    )
    ungraded: str = option(
        "left_out",
        "What a sample is worth that could not be graded: left_out of its group's mean and of the loss, as its reward "
        "is unknown, or zero.",
        choices=("left_out", "zero"),
    )
    overlong_share: float = option(
        0.0,
        "The last share of rollout.max_response_tokens, over which the reward falls by 1 (DAPO); 0 for none.",
        at_least=0,
        at_most=1,
    )

    @classmethod
    def of(cls, preset: str, **settings: Any) -> "AlgorithmConfig":
        """The algorithm of a preset, but for `settings`."""
        return cls(preset=preset, **(values_of(preset) | settings))

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_in == "reward" and self.kl_coefficient > 0

    def sees_whole_responses(self, off_policy: bool) -> bool:
        """Whether a token's loss needs those of its response's others; off_policy: old log-probabilities are there."""
        corrected = self.correction != "none" and self.correction_level != "token"
        masked = self.rejects or self.off_policy_mask is not None
        return corrected or masked or (self.ratio == "sequence" and (off_policy or self.ratio_to == "rollout"))

    @property
    def rejects(self) -> bool:
        """Whether responses are left out by their trainer / rollout probability."""
        return self.reject_low > 0 or self.reject_high is not None

    @property
    def needs_policy_logprobs(self) -> bool:
        """Whether advantages are made of the policy's log-probabilities before the update."""
        return self.kl_in_reward or self.teacher is not None

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The settings that are not the preset's: name to (value, the preset's)."""
        preset = AlgorithmConfig.of(self.preset)
        pairs = {name: (getattr(self, name), getattr(preset, name)) for name in PRESET_SETTINGS}
        return {name: (value, usual) for name, (value, usual) in pairs.items() if value != usual}

    def name(self) -> str:
        """The preset and what was changed of it, in one line."""
        changed = [f"{name}={value} ({self.preset}: {usual})" for name, (value, usual) in self.changes().items()]
        return self.preset + (f" but for {', '.join(changed)}" if changed else "")

    def check(self) -> None:
        """Raise ConfigError for the first value, or pair of values, that cannot work."""
        values_of(self.preset)
        check_values(self, "algorithm.")
        for name, allowed in CHOICES.items():
            choose(getattr(self, name), allowed, f"algorithm.{name}")
        self._check_pairs()

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Raise ConfigError where a choice compares the samples of a prompt, and there is only one."""
        compares = {
            "combine": self.combine == "normalised",
            "baseline": self.grouped,
            "mask_no_signal": self.mask_no_signal,
            "resample_rounds": self.resample_rounds,
        }
        for name, needed in compares.items():
            if needed and samples_per_prompt < 2:
                pair = f"algorithm.{name}={getattr(self, name)} and batch.samples_per_prompt=1 contradict each other"
                way_out = f"use 2 samples or more{', or the baseline batch_mean' * (name == 'baseline')}"
                raise ConfigError(f"{pair}: one response has nothing to be compared with: {way_out}.")

    @property
    def grouped(self) -> bool:
        """Whether rewards are compared within their group."""
        return self.baseline in ("group_mean", "leave_one_out")

    def _check_pairs(self) -> None:
        def refuse(first: str, second: str, why: str) -> None:
            pair = f"algorithm.{first}={getattr(self, first)} and algorithm.{second}={getattr(self, second)}"
            raise ConfigError(f"{pair} contradict each other: {why}")

        for name in self.changes():
            self._check_read(name, refuse)
        if self.scale in ("group_std", "group_mean") and not self.grouped:
            refuse("scale", "baseline", "it is about the group's mean; use token_std, sample_std or none.")
        if self.scale == "group_mean":
            below = {"combine": self.combine == "normalised", "overlong_share": self.overlong_share}
            for name in [name for name, there in (below | {"kl_in": self.kl_in_reward}).items() if there]:
                refuse("scale", name, "it makes rewards negative, whose mean cannot divide; use another scale.")
        for name in ("mask_no_signal", "resample_rounds"):
            if getattr(self, name) and self.combine == "normalised" and self.signal_reward is None:
                refuse(name, "combine", "equal totals of rewards that differ have a signal; set signal_reward.")
        if self.ratio == "sequence" and self.clip == "dppo":
            refuse("ratio", "clip", "the change of a probability is a token's own; use ratio=token.")
        if self.ratio_to == "rollout" and (self.correction != "none" or self.rejects):
            other = "correction" if self.correction != "none" else "reject_high" if self.reject_high else "reject_low"
            refuse("ratio_to", other, "the ratio makes up for the engine's probabilities already; use ratio_to=old.")
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            refuse("dual_clip", "clip_high", "the second bound lies above 1 + clip_high; 3 is usual.")
        if self.correction_low >= self.correction_high:
            refuse("correction_low", "correction_high", "no weight lies between them.")
        if self.reject_high is not None and self.reject_low >= self.reject_high:
            refuse("reject_low", "reject_high", "no response lies between them.")
        if self.teacher is None and "teacher_coefficient" in self.changes():
            refuse("teacher_coefficient", "teacher", "without a teacher there is nothing to weigh; name one.")
        if not self.kl_coefficient:
            for name in ("kl_in", "kl_estimator", "kl_ratio"):
                if name in self.changes():
                    refuse(name, "kl_coefficient", "without a weight there is no KL term and no reference; set one.")
        if self.kl_ratio and self.ratio == "sequence":
            refuse("kl_ratio", "ratio", "a token's KL term needs the token's own ratio; use kl_ratio=false.")
        if self.kl_ratio and self.kl_estimator == "k2":
            refuse("kl_ratio", "kl_estimator", "k2's own gradient is right already; use kl_ratio=false.")
        if self.kl_in == "reward" and self.kl_ratio:
            refuse("kl_in", "kl_ratio", "a reward has no gradient to set right; use kl_in=loss or kl_ratio=false.")
        if self.kl_in == "loss" and self.kl_estimator == "k1" and not self.kl_ratio:
            refuse("kl_estimator", "kl_ratio", "k1's own gradient is 0 on average; use kl_ratio=true, k2 or k3.")

    def _check_read(self, name: str, refuse: Callable[[str, str, str], None]) -> None:
        """Refuse a setting that was changed though none of the choices reads it."""
        if name == "correction_level" and self.correction == "none":
            refuse(name, "correction", "there is nothing to weigh; set correction, or leave the level out.")
        for setting, choices in CHOICES.items():
            readers = [choice for choice in choices if name in choices[choice].uses]
            if readers and getattr(self, setting) not in readers:
                refuse(name, setting, f"it would do nothing; it is for {setting}={' or '.join(readers)}.")


OWN = ("preset", "constant_length", "teacher", "signal_reward")
PRESET_SETTINGS = [name for name in AlgorithmConfig.__annotations__ if name not in OWN]
"""The settings that make an algorithm, which a preset stands for; a length, a folder or a reward's name is none."""
