"""What an algorithm is: choices (grpo/choices.py) with their settings, the published ones, and the sizes of batches."""

from dataclasses import dataclass
from typing import Any

from grpo.choices import CHOICES
from grpo.config import ConfigError, check_values, choose, nearest, option


@dataclass(frozen=True)
class Preset:
    """A published algorithm: the settings in which it differs from grpo."""

    paper: str
    about: str
    choices: dict[str, Any]


KL_IN_REWARD = {"kl_in": "reward", "kl_estimator": "k1"}

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
        {"baseline": "leave_one_out", "scale": "none", "clip": "none", "aggregate": "sequence_sum", **KL_IN_REWARD},
    ),
    "reinforce++": Preset(
        "REINFORCE++, arXiv:2501.03262, equations 8 to 10",
        "No groups: the return of a token, less what the KL term takes from there on, is compared with those of the "
        "whole batch.",
        {"baseline": "batch_mean", "scale": "batch_std", **KL_IN_REWARD},
    ),
    "reinforce": Preset(
        "Williams 1992, doi:10.1007/BF00992696",
        "The return itself times the gradient of the log-probability. For rewards that have both signs.",
        {"baseline": "none", "scale": "none", "clip": "none", "aggregate": "sequence_sum", **KL_IN_REWARD},
    ),
}


def values_of(preset: str) -> dict[str, Any]:
    """The settings that `preset` stands for; raises ConfigError for a name that is not a preset."""
    if not isinstance(preset, str) or preset not in PRESETS:
        near = nearest(str(preset), PRESETS)
        hint = f"did you mean {near}?" if near else f"use one of {', '.join(PRESETS)}."
        raise ConfigError(f"algorithm.preset={preset!r} is not an algorithm: {hint}")
    return PRESETS[preset].choices


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
    clip_low: float = option(0.2, "The ratio is clipped below at 1 - clip_low.", at_least=0, at_most=1)
    clip_high: float = option(0.2, "The ratio is clipped above at 1 + clip_high.", at_least=0)
    dual_clip: float = option(
        0.0, "With negative advantages the ratio counts as this much at most (arXiv:1912.09729 has 3); 0 for no bound."
    )
    aggregate: str = option(
        "sequence_mean",
        f"How tokens become one loss: {names_of('aggregate')}. The last three are a mean over responses: of a "
        "response's mean, of its sum, or of its sum over constant_length.",
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
    correction: str = option(
        "none",
        f"Weigh the policy's term by trainer / rollout probability: {names_of('correction')}. Weights are truncated "
        "at correction_high, or masked outside correction_low to correction_high.",
    )
    correction_level: str = option("token", f"What the weight of the correction is of: {names_of('correction_level')}.")
    correction_high: float = option(2.0, "The largest weight of the correction.")
    correction_low: float = option(0.0, "The smallest weight that correction=mask lets through.", at_least=0)
    mask_truncated: bool = option(False, "Learn nothing from responses that were cut at their longest length.")
    mask_no_signal: bool = option(False, "Leave groups whose rewards are all equal out of the loss's denominator too.")
    resample_rounds: int = option(
        0, "Most further rounds of prompts to replace groups of equal rewards; 0 keeps them.", at_least=0
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
        corrected = self.correction != "none" and self.correction_level == "sequence"
        return corrected or (self.ratio == "sequence" and off_policy)

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
            "baseline": self.grouped,
            "mask_no_signal": self.mask_no_signal,
            "resample_rounds": self.resample_rounds,
        }
        for name, needed in compares.items():
            if needed and samples_per_prompt < 2:
                raise ConfigError(
                    f"algorithm.{name}={getattr(self, name)} and batch.samples_per_prompt=1 contradict each other: one "
                    "response has nothing to be compared with: use 2 samples or more"
                    f"{', or the baseline batch_mean' if name == 'baseline' else ''}."
                )

    @property
    def grouped(self) -> bool:
        """Whether rewards are compared within their group."""
        return self.baseline in ("group_mean", "leave_one_out")

    def _check_pairs(self) -> None:
        def refuse(first: str, second: str, why: str) -> None:
            pair = f"algorithm.{first}={getattr(self, first)} and algorithm.{second}={getattr(self, second)}"
            raise ConfigError(f"{pair} contradict each other: {why}")

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
        if self.kl_ratio and self.ratio == "sequence":
            refuse("kl_ratio", "ratio", "a token's KL term needs the token's own ratio; use kl_ratio=false.")
        if self.kl_ratio and self.kl_estimator == "k2":
            refuse("kl_ratio", "kl_estimator", "k2's own gradient is right already; use kl_ratio=false.")
        if self.kl_in == "reward" and self.kl_ratio:
            refuse("kl_in", "kl_ratio", "a reward has no gradient to set right; use kl_in=loss or kl_ratio=false.")
        if self.kl_in == "loss" and self.kl_estimator == "k1" and not self.kl_ratio:
            refuse("kl_estimator", "kl_ratio", "k1's own gradient is 0 on average; use kl_ratio=true, k2 or k3.")


PRESET_SETTINGS = [name for name in AlgorithmConfig.__annotations__ if name not in ("preset", "constant_length")]
"""The settings that make an algorithm, which a preset stands for; a length of responses is none."""
