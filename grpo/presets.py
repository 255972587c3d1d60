"""The published algorithms: the settings in which each differs from grpo (grpo/algorithm.py says what they mean)."""

from dataclasses import dataclass
from typing import Any

from grpo.config import ConfigError, nearest


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
    "sapo": Preset(
        "Soft Adaptive Policy Optimization, arXiv:2511.20347, equations 5 and 6",
        "No ratio is cut off: the further it is from 1, the less its token counts, a little sooner where the advantage "
        "is negative.",
        {"clip": "sapo"},
    ),
    "dppo": Preset(
        "Divergence PPO, arXiv:2602.04879, binary total variation; the drift term is that of arXiv:2602.02276",
        "A token is left out where its probability, not the ratio, moved too far in the direction it is pushed: rare "
        "tokens may move freely. Compared with the engine's own probabilities, so that there is no pass for old ones.",
        {
            "clip": "dppo",
            "clip_low": 0.15,
            "clip_high": 0.15,
            "ratio_to": "rollout",
            "aggregate": "token_mean",
            "drift_coefficient": 1e-3,
        },
    ),
    "maxrl": Preset(
        "Maximum Likelihood Reinforcement Learning, arXiv:2602.02710",
        "Divided by the group's mean instead of its deviation: a prompt that is answered once in n counts n times, as "
        "in the gradient of log(probability of a right answer). For rewards that are not negative.",
        {"scale": "group_mean", "aggregate": "sequence_sum"},
    ),
    "gdpo": Preset(
        "GDPO, arXiv:2601.05242, equations 4 to 6",
        "Each of several rewards is normalised within its group before they are weighed and added, so that one of "
        "large spread does not drown the others; then the batch's deviation divides.",
        {"combine": "normalised", "baseline": "none", "scale": "sample_std"},
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
        {"baseline": "batch_mean", "scale": "token_std", **KL_IN_REWARD},
    ),
    "reinforce++-baseline": Preset(
        "REINFORCE++, arXiv:2501.03262, the variant with a baseline",
        "What a reward is above the mean of its group, in standard deviations of the whole batch's tokens: no group is "
        "enlarged because its rewards hardly differ. The KL term, where there is one, is k2 in the loss.",
        {"scale": "token_std", "kl_estimator": "k2"},
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
