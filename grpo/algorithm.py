"""What an algorithm is, a handful of choices (grpo/choices.py) with their settings, and how large its batches are."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from grpo.choices import CHOICES
from grpo.config import ConfigError, choose, option
from grpo.presets import PRESETS, values_of

KL_PLACES = ("loss", "reward")


def names_of(setting: str) -> str:
    """The choices of a setting, as the end of a sentence."""
    *first, last = CHOICES[setting]
    return f"{', '.join(first)} or {last}"


@dataclass
class BatchConfig:
    prompts_per_step: int = option(32, "Prompts of one step: each is answered samples_per_prompt times.")
    samples_per_prompt: int = option(8, "Responses sampled to each prompt: one group.")
    minibatches_per_step: int = option(1, "Optimizer updates that one pass over a step's samples is cut into.")
    epochs_per_step: int = option(1, "Passes over a step's samples.")

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
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ConfigError(f"batch.{name}={value} must be at least 1.")
        if self.prompts_per_step % self.minibatches_per_step:
            raise ConfigError(
                f"batch.prompts_per_step={self.prompts_per_step} cannot be cut into "
                f"batch.minibatches_per_step={self.minibatches_per_step} equal minibatches: use a divisor."
            )


@dataclass
class AlgorithmConfig:
    preset: str = option(
        "grpo",
        f"The published algorithm that you begin from: {', '.join(PRESETS)}. Settings of your own win over its "
        "choices; `python -m trainer algorithms` lists them.",
        stands_for=values_of,
    )
    baseline: str = option("group_mean", f"What a reward is compared with: {names_of('baseline')}.")
    scale: str = option("group_std", f"What the difference is divided by: {names_of('scale')}.")
    ratio: str = option("token", f"What the ratio of new and old probability is of: {names_of('ratio')}.")
    clip: str = option("ppo", f"What bounds the ratio: {names_of('clip')}.")
    clip_low: float = option(0.2, "The ratio is clipped below at 1 - clip_low.")
    clip_high: float = option(0.2, "The ratio is clipped above at 1 + clip_high.")
    dual_clip: float = option(
        0.0, "With negative advantages the ratio counts as this much at most (arXiv:1912.09729 has 3); 0 for no bound."
    )
    aggregate: str = option(
        "sequence_mean",
        f"How tokens become one loss: {names_of('aggregate')}. The last three are a mean over responses: of a "
        "response's mean, of its sum, or of its sum over constant_length.",
    )
    constant_length: int | None = option(
        None, "What aggregate=constant divides by; null is rollout.max_response_tokens."
    )
    kl_coefficient: float = option(
        0.0, "Weight of the KL term towards the reference, the policy at the start; with 0 no reference is loaded."
    )
    kl_in: str = option("loss", "Where the KL term stands: loss or reward.")
    kl_estimator: str = option(
        "k3", f"KL(policy, ref) as {', '.join(f'{k} = {c.formula}' for k, c in CHOICES['kl_estimator'].items())}."
    )
    kl_ratio: bool = option(
        False,
        "Multiply the KL term by the ratio of new and old probability: k1 and k3 then have the gradient of "
        "KL(policy, ref) (arXiv:2512.02556). Without it k2 has that gradient, and k3 has that of KL(ref, policy).",
    )
    entropy_coefficient: float = option(0.0, "Weight of the entropy bonus.")
    correction: str = option(
        "none",
        f"Weigh the policy's term by trainer / rollout probability: {names_of('correction')}. Weights are truncated "
        "at correction_high, or masked outside correction_low to correction_high.",
    )
    correction_level: str = option("token", f"What the weight of the correction is of: {names_of('correction_level')}.")
    correction_high: float = option(2.0, "The largest weight of the correction.")
    correction_low: float = option(0.0, "The smallest weight that correction=mask lets through.")
    mask_truncated: bool = option(False, "Learn nothing from responses that were cut at their longest length.")
    mask_no_signal: bool = option(False, "Leave groups whose rewards are all equal out of the loss's denominator too.")
    resample_rounds: int = option(
        0, "Most further rounds of prompts that replace groups whose rewards are all equal; 0 keeps those groups."
    )
    overlong_share: float = option(
        0.0,
        "The last share of rollout.max_response_tokens over which the reward falls by 1 in all (DAPO); 0 for none.",
    )

    @classmethod
    def of(cls, preset: str, **settings: Any) -> "AlgorithmConfig":
        """The algorithm of a preset, but for `settings`."""
        return cls(preset=preset, **(values_of(preset) | settings))

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_in == "reward" and self.kl_coefficient > 0

    def sees_whole_responses(self, off_policy: bool) -> bool:
        """Whether a token's loss needs log-probabilities of its response's other tokens.

        off_policy: there are old log-probabilities, so that the ratio is not 1 anyway.
        """
        by_ratio = self.ratio == "sequence" and off_policy
        return by_ratio or (self.correction != "none" and self.correction_level == "sequence")

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The settings that are not the preset's: name to (value, the preset's)."""
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.name in PRESET_SETTINGS}
        of_preset = defaults | values_of(self.preset)
        return {name: (getattr(self, name), value) for name, value in of_preset.items() if getattr(self, name) != value}

    def name(self) -> str:
        """The preset and what was changed of it, in one line."""
        changed = [f"{name}={value} ({self.preset}: {usual})" for name, (value, usual) in self.changes().items()]
        return self.preset + (f" but for {', '.join(changed)}" if changed else "")

    def check(self) -> None:
        """Raise ConfigError for the first value, or pair of values, that cannot work."""
        values_of(self.preset)
        for name, allowed in (CHOICES | {"kl_in": KL_PLACES}).items():
            choose(getattr(self, name), tuple(allowed), f"algorithm.{name}")
        positive = ("clip_low", "clip_high", "kl_coefficient", "entropy_coefficient", "correction_low")
        for name in (*positive, "resample_rounds", "overlong_share"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)} must not be negative.")
        if self.clip_low > 1:
            raise ConfigError(f"algorithm.clip_low={self.clip_low} must be at most 1: the ratio cannot be negative.")
        if self.overlong_share > 1:
            raise ConfigError(f"algorithm.overlong_share={self.overlong_share} is a share: use at most 1.")
        if self.constant_length is not None and self.constant_length < 1:
            raise ConfigError(f"algorithm.constant_length={self.constant_length} must be at least 1 token.")
        self._check_pairs()

    def check_group_size(self, samples_per_prompt: int) -> None:
        """Raise ConfigError where a choice compares the samples of a prompt, and there is only one."""
        if samples_per_prompt > 1:
            return
        more = "use 2 samples or more"
        for name, compares, way_out in (
            ("baseline", self.grouped, f"{more}, or the baseline batch_mean."),
            ("mask_no_signal", self.mask_no_signal, f"{more}."),
            ("resample_rounds", self.resample_rounds, f"{more}."),
        ):
            if compares:
                raise ConfigError(
                    f"algorithm.{name}={getattr(self, name)} and batch.samples_per_prompt=1 contradict each other: "
                    f"one response has nothing to be compared with: {way_out}"
                )

    @property
    def grouped(self) -> bool:
        """Whether rewards are compared within their group."""
        return self.baseline in ("group_mean", "leave_one_out")

    def _check_pairs(self) -> None:
        def refuse(first: str, second: str, why: str) -> None:
            raise ConfigError(
                f"algorithm.{first}={getattr(self, first)} and algorithm.{second}={getattr(self, second)} contradict "
                f"each other: {why}"
            )

        if self.scale == "group_std" and not self.grouped:
            refuse("scale", "baseline", "a group's deviation is about the group's mean; use batch_std or none.")
        if self.ratio == "sequence" and self.aggregate != "sequence_mean":
            refuse("ratio", "aggregate", "a sequence's ratio is one number for all its tokens; use sequence_mean.")
        if self.dual_clip and self.clip != "ppo":
            refuse("dual_clip", "clip", "the second clip bounds what PPO's first leaves; use clip=ppo or dual_clip=0.")
        if self.dual_clip and self.dual_clip <= 1 + self.clip_high:
            refuse("dual_clip", "clip_high", "the second bound lies above 1 + clip_high; 3 is usual.")
        if self.correction_low >= self.correction_high:
            refuse("correction_low", "correction_high", "no weight lies between them.")
        if not self.kl_coefficient:
            for name in ("kl_in", "kl_estimator", "kl_ratio"):
                if name in self.changes():
                    refuse(name, "kl_coefficient", "without a weight there is no KL term and no reference; set one.")
            return
        if self.kl_ratio and self.ratio == "sequence":
            refuse("kl_ratio", "ratio", "a token's KL term needs the token's own ratio; use kl_ratio=false.")
        if self.kl_ratio and self.kl_estimator == "k2":
            refuse("kl_ratio", "kl_estimator", "k2's own gradient is right already; use kl_ratio=false.")
        if self.kl_in == "reward" and self.kl_ratio:
            refuse("kl_in", "kl_ratio", "a reward has no gradient to set right; use kl_in=loss or kl_ratio=false.")
        if self.kl_in == "loss" and self.kl_estimator == "k1" and not self.kl_ratio:
            refuse("kl_estimator", "kl_ratio", "k1's own gradient is 0 on average; use kl_ratio=true, k2 or k3.")


PRESET_SETTINGS = tuple(
    field.name for field in dataclasses.fields(AlgorithmConfig) if field.name not in ("preset", "constant_length")
)
"""The settings that make an algorithm, which a preset stands for; a length of responses is none."""
