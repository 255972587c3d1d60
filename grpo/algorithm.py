"""What an algorithm is: a handful of choices. The published ones are presets of them.

The choices are functions of a few lines, in grpo/advantages.py (baseline, scale, aggregate) and grpo/losses.py (ratio,
clip, KL estimator, correction); the first line of each one's docstring is its formula.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from grpo.config import ConfigError, choose, nearest, option

BASELINES = ("group_mean", "leave_one_out", "batch_mean", "none")
SCALES = ("group_std", "batch_std", "none")
RATIOS = ("token", "sequence")
CLIPS = ("ppo", "cispo", "none")
AGGREGATES = ("token_mean", "sequence_mean", "sequence_sum", "constant")
KL_PLACES = ("loss", "reward")
KL_ESTIMATORS = ("k1", "k2", "k3")
CORRECTIONS = ("none", "truncate", "mask")


@dataclass(frozen=True)
class Preset:
    """A published algorithm: what it chooses where grpo chooses something else."""

    paper: str
    about: str
    choices: dict[str, Any]


PRESETS = {
    "grpo": Preset(
        "DeepSeekMath, arXiv:2402.03300, equations 3 and 4",
        "A response is worth what it is above the mean of its group, in standard deviations. "
        "The paper has a KL term of 0.04; here it is 0 until algorithm.kl_coefficient says otherwise.",
        {},
    ),
    "dr_grpo": Preset(
        "Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2",
        "Neither the group's deviation nor the response's own length divides: both weigh some questions and some "
        "lengths more than others.",
        {"scale": "none", "aggregate": "constant"},
    ),
    "dapo": Preset(
        "DAPO, arXiv:2503.14476, equations 8 to 13",
        "More room to raise rare tokens, every token weighs the same, groups without signal are replaced, and what "
        "comes near the longest length is punished. Its 20,480 tokens end with 4096 of punishment: a fifth. It samples "
        "until it has its prompts; here the rounds are bounded.",
        {"clip_high": 0.28, "aggregate": "token_mean", "resample_rounds": 10, "overlong_share": 0.2},
    ),
    "gspo": Preset(
        "Group Sequence Policy Optimization, arXiv:2507.18071, equations 5 and 7",
        "One ratio for a whole response, the geometric mean of its tokens', and clips as narrow as it needs.",
        {"ratio": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
    ),
    "cispo": Preset(
        "MiniMax-M1, arXiv:2506.13585, equations 4 and 5",
        "The ratio weighs a token's gradient, bounded, and no token loses its gradient. The paper bounds it above "
        "alone and names no number; here it is 5.",
        {"clip": "cispo", "clip_low": 1.0, "clip_high": 4.0, "aggregate": "token_mean"},
    ),
    "rloo": Preset(
        "Back to Basics, arXiv:2402.14740, equation 8",
        "REINFORCE with the mean of the group's other responses as baseline; the KL term, where there is one, is part "
        "of the reward.",
        {
            "baseline": "leave_one_out",
            "scale": "none",
            "clip": "none",
            "aggregate": "sequence_sum",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    ),
    "reinforce++": Preset(
        "REINFORCE++, arXiv:2501.03262, equations 8 to 10",
        "No groups: the return of a token, less what the KL term takes from there on, is compared with those of the "
        "whole batch.",
        {
            "baseline": "batch_mean",
            "scale": "batch_std",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    ),
    "reinforce": Preset(
        "Williams 1992, doi:10.1007/BF00992696",
        "The return itself times the gradient of the log-probability. For rewards that have both signs.",
        {
            "baseline": "none",
            "scale": "none",
            "clip": "none",
            "aggregate": "sequence_sum",
            "kl_in": "reward",
            "kl_estimator": "k1",
        },
    ),
}


def values_of(preset: str) -> dict[str, Any]:
    """The settings that `preset` stands for; raises ConfigError for a name that is none."""
    if not isinstance(preset, str) or preset not in PRESETS:
        near = (
            f"did you mean {near}?" if (near := nearest(str(preset), PRESETS)) else f"use one of {', '.join(PRESETS)}."
        )
        raise ConfigError(f"algorithm.preset={preset!r} is not an algorithm: {near}")
    return PRESETS[preset].choices


@dataclass
class AlgorithmConfig:
    preset: str = option(
        "grpo",
        f"The published algorithm that the choices below are those of, but for the ones you set: {', '.join(PRESETS)}. "
        "`python -m trainer algorithms` lists them.",
        stands_for=values_of,
    )
    prompts_per_step: int = option(32, "Prompts of one step: each is answered samples_per_prompt times.")
    samples_per_prompt: int = option(8, "Responses sampled to each prompt: one group.")
    minibatches_per_step: int = option(1, "Optimizer updates that one pass over a step's samples is cut into.")
    epochs_per_step: int = option(1, "Passes over a step's samples.")
    baseline: str = option(
        "group_mean", "What a reward is compared with: group_mean, leave_one_out, batch_mean or none."
    )
    scale: str = option("group_std", "What the difference is divided by: group_std, batch_std or none.")
    ratio: str = option("token", "What the ratio of new and old probability is of: token or sequence.")
    clip: str = option("ppo", "What bounds the ratio: ppo, cispo or none.")
    clip_low: float = option(0.2, "The ratio is clipped below at 1 - clip_low.")
    clip_high: float = option(0.2, "The ratio is clipped above at 1 + clip_high.")
    dual_clip: float = option(
        0.0, "With negative advantages the ratio counts as this much at most (arXiv:1912.09729 has 3); 0 for no bound."
    )
    aggregate: str = option(
        "sequence_mean",
        "How tokens become one loss: token_mean, sequence_mean (of token means), sequence_sum (mean of token sums) or "
        "constant (mean of token sums over constant_length).",
    )
    constant_length: int | None = option(
        None, "What aggregate=constant divides by; where it is not said, rollout.max_response_tokens."
    )
    kl_coefficient: float = option(
        0.0, "Weight of the KL term towards the reference (the policy at the start), which 0 does not load."
    )
    kl_in: str = option("loss", "Where the KL term stands: loss or reward.")
    kl_estimator: str = option("k3", "k1 = log r, k2 = (log r)^2 / 2, k3 = 1 / r - 1 + log r, with r = policy / ref.")
    kl_ratio: bool = option(
        False,
        "Multiply the KL term by the ratio of new and old probability, which makes its gradient that of "
        "KL(policy, ref) for k1 and k3 (arXiv:2512.02556); without it k2's is that, and k3's that of KL(ref, policy).",
    )
    entropy_coefficient: float = option(0.0, "Weight of the entropy bonus.")
    correction: str = option(
        "none",
        "Weigh the policy's term by trainer / rollout probability: none, truncate (at correction_high) or mask "
        "(nothing outside correction_low to correction_high).",
    )
    correction_level: str = option("token", "What the weight of the correction is of: token or sequence.")
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
        """The algorithm of a preset, with `settings` of your own before its choices."""
        return cls(preset=preset, **(values_of(preset) | settings))

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        return self.samples_per_step // self.minibatches_per_step

    @property
    def kl_in_reward(self) -> bool:
        return self.kl_in == "reward" and self.kl_coefficient > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the policy's log-probabilities before the first update are asked for.

        With one update a step they are what the update computes itself, so that only a KL term in the reward needs
        them earlier.
        """
        return self.minibatches_per_step > 1 or self.epochs_per_step > 1 or self.kl_in_reward

    @property
    def sees_whole_responses(self) -> bool:
        """Whether a token's loss needs log-probabilities of other tokens, so that they must all be there first."""
        by_ratio = self.ratio == "sequence" and self.needs_old_logprobs
        return by_ratio or (self.correction != "none" and self.correction_level == "sequence")

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """The choices that are not the preset's: name to (value, the preset's)."""
        whole = {field.name: field.default for field in dataclasses.fields(self) if field.name in CHOICES}
        whole |= values_of(self.preset)
        return {name: (getattr(self, name), value) for name, value in whole.items() if getattr(self, name) != value}

    def name(self) -> str:
        """The preset and what was changed of it, in one line."""
        changed = [
            f"{name}={value} ({self.preset}: {of_preset})" for name, (value, of_preset) in self.changes().items()
        ]
        return self.preset + (f" but for {', '.join(changed)}" if changed else "")

    def check(self) -> None:
        """Raise ConfigError for the first value, or pair of values, that cannot work."""
        values_of(self.preset)
        for name in ("prompts_per_step", "samples_per_prompt", "minibatches_per_step", "epochs_per_step"):
            if getattr(self, name) < 1:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)} must be at least 1.")
        if self.prompts_per_step % self.minibatches_per_step:
            raise ConfigError(
                f"algorithm.prompts_per_step={self.prompts_per_step} cannot be cut into "
                f"algorithm.minibatches_per_step={self.minibatches_per_step} equal minibatches: use a divisor."
            )
        for name, allowed in (
            ("baseline", BASELINES),
            ("scale", SCALES),
            ("ratio", RATIOS),
            ("clip", CLIPS),
            ("aggregate", AGGREGATES),
            ("kl_in", KL_PLACES),
            ("kl_estimator", KL_ESTIMATORS),
            ("correction", CORRECTIONS),
            ("correction_level", RATIOS),
        ):
            choose(getattr(self, name), allowed, f"algorithm.{name}")
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

    def _check_pairs(self) -> None:
        def refuse(first: str, second: str, why: str) -> None:
            raise ConfigError(
                f"algorithm.{first}={getattr(self, first)} and algorithm.{second}={getattr(self, second)} contradict "
                f"each other: {why}"
            )

        grouped = self.baseline in ("group_mean", "leave_one_out")
        if self.samples_per_prompt == 1:
            alone = "one response has nothing to be compared with: use 2 samples or more"
            if grouped:
                refuse("baseline", "samples_per_prompt", f"{alone}, or the baseline batch_mean.")
            for name in ("mask_no_signal", "resample_rounds"):
                if getattr(self, name):
                    refuse(name, "samples_per_prompt", f"{alone}.")
        if self.scale == "group_std" and not grouped:
            refuse("scale", "baseline", "a group's deviation is about the group's mean; use batch_std or none.")
        if self.ratio == "sequence" and self.aggregate != "sequence_mean":
            refuse("ratio", "aggregate", "a sequence's ratio is one number for all its tokens; use sequence_mean.")
        if self.dual_clip:
            if self.clip != "ppo":
                refuse(
                    "dual_clip", "clip", "the second clip bounds what PPO's first leaves; use clip=ppo or dual_clip=0."
                )
            if self.dual_clip <= 1 + self.clip_high:
                refuse("dual_clip", "clip_high", "the second bound lies above 1 + clip_high; 3 is usual.")
        if self.correction_low >= self.correction_high:
            refuse("correction_low", "correction_high", "no weight lies between them.")
        if self.kl_coefficient:
            if self.kl_ratio and self.ratio == "sequence":
                refuse("kl_ratio", "ratio", "a token's KL term needs the token's own ratio; use kl_ratio=false.")
            if self.kl_ratio and self.kl_estimator == "k2":
                refuse("kl_ratio", "kl_estimator", "k2's own gradient is right already; use kl_ratio=false.")
            if self.kl_in == "reward" and self.kl_ratio:
                refuse("kl_in", "kl_ratio", "a reward has no gradient to set right; use kl_in=loss or kl_ratio=false.")
            if self.kl_in == "loss" and self.kl_estimator == "k1" and not self.kl_ratio:
                refuse("kl_estimator", "kl_ratio", "k1's own gradient is 0 on average; use kl_ratio=true, k2 or k3.")
        else:
            for name in ("kl_in", "kl_estimator", "kl_ratio"):
                if name in self.changes():
                    refuse(name, "kl_coefficient", "without a weight there is no KL term and no reference; set one.")


CHOICES = tuple(
    field.name
    for field in dataclasses.fields(AlgorithmConfig)
    if field.name not in ("preset", "constant_length") and not field.name.endswith("_per_step")
    if field.name != "samples_per_prompt"
)
"""The settings that make an algorithm: those that a preset stands for."""
