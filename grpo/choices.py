"""The choices that an algorithm is made of, in one table: what each value of a setting means, as formula and function.

Checks, --help, the docs and `python -m trainer algorithms` list what stands in CHOICES. A function's keyword-only
parameters are the other settings of the algorithm that it reads.

Shapes: N response tokens of B samples in G groups. In formulas o_i is response i, and sg[] has no gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names of choices are asked for where torch is not wanted yet
    from torch import Tensor


@dataclass(frozen=True)
class Choice:
    formula: str
    function: Callable[..., Tensor]

    @property
    def uses(self) -> list[str]:
        """The other settings that the function reads."""
        return inspect.getfullargspec(self.function).kwonlyargs


def apply(setting: str, config: Any, *tensors: Any) -> Tensor:
    """Call the function that `config` names for `setting`, with the settings that it uses taken from `config`."""
    chosen = CHOICES[setting][getattr(config, setting)]
    return chosen.function(*tensors, **{name: getattr(config, name) for name in chosen.uses})


@dataclass(frozen=True)
class Returns:
    """The rewards of B samples, less the KL term where it is part of the reward; float64."""

    to_go_N: Tensor  # the reward less the KL of this token and those after it
    whole_B: Tensor  # the reward less the KL of the whole response
    seq_id_N: Tensor  # [N] int64, the sample of each token
    group_B: Tensor  # [B] int64, 0 to G - 1


def groups_with_signal(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """[G] bool, in ascending order of the group's number: whether its rewards are not all equal."""
    groups, group_B = group_B.unique(return_inverse=True)
    lowest_G, highest_G = (
        rewards_B.new_zeros(len(groups)).scatter_reduce_(0, group_B, rewards_B, reduce, include_self=False)
        for reduce in ("amin", "amax")
    )
    return highest_G > lowest_G


def sums_by(index: Tensor, values: Tensor, count: int) -> Tensor:
    """[count]: the sum of the values of each index, 0 to count - 1."""
    return values.new_zeros(count).index_add_(0, index, values)


def centred(returns: Returns) -> Tensor:
    """[B]: each response's return less the mean of its group."""
    count_G = returns.group_B.bincount()
    means_G = sums_by(returns.group_B, returns.whole_B, len(count_G)) / count_G
    return returns.whole_B - means_G[returns.group_B]


def group_mean(returns: Returns) -> Tensor:
    signal_B = groups_with_signal(returns.whole_B, returns.group_B)[returns.group_B]
    return centred(returns).where(signal_B, 0.0)[returns.seq_id_N]  # exactly 0 where a group's rewards are all equal


def leave_one_out(returns: Returns) -> Tensor:
    """What a return is above the mean of the other n - 1 is n / (n - 1) times what it is above the mean of all n."""
    count_G = returns.group_B.bincount()
    factor_B = (count_G / (count_G - 1).clamp(min=1))[returns.group_B]
    return group_mean(returns) * factor_B[returns.seq_id_N]


def group_std(returns: Returns, advantages_N: Tensor) -> Tensor:
    count_G = returns.group_B.bincount()
    squares_G = sums_by(returns.group_B, centred(returns) ** 2, len(count_G))
    deviation_G = (squares_G / (count_G - 1).clamp(min=1)).sqrt()
    return deviation_G[returns.group_B][returns.seq_id_N] + 1e-6


def batch_std(returns: Returns, advantages_N: Tensor) -> Tensor:
    return advantages_N.std(correction=min(1, len(advantages_N) - 1)) + 1e-6


def sequence_sums(values_N: Tensor, seq_id_N: Tensor) -> Tensor:
    """[N]: at each token the sum of its sequence's values. The tokens of a sequence stand side by side."""
    place_N = (seq_id_N.diff(prepend=seq_id_N[:1]) != 0).cumsum(0)
    # N places are enough for as many sequences; to count them would make the host wait for the device.
    return sums_by(place_N, values_N, len(values_N))[place_N]


def sequence_ratio(logprobs_N: Tensor, old_N: Tensor, seq_id_N: Tensor) -> Tensor:
    """Each token has its sequence's value and its own gradient, whose mean is the sequence's (GSPO-token, eq. 14)."""
    gap_N = (logprobs_N - old_N).detach()
    mean_N = sequence_sums(gap_N, seq_id_N) / sequence_sums(gap_N.new_ones(len(gap_N)), seq_id_N)
    return (mean_N + logprobs_N - logprobs_N.detach()).exp()


def ppo(
    ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> Tensor:
    clipped = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    objective = (ratio_N * advantages_N).minimum(clipped * advantages_N)
    if dual_clip:  # where A < 0, no less than dual_clip A (arXiv:1912.09729, equation 5)
        objective = objective.where(advantages_N >= 0, objective.maximum(dual_clip * advantages_N))
    return objective


def cispo(ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    return ratio_N.detach().clamp(1 - clip_low, 1 + clip_high) * advantages_N * logprobs_N


def mask(weight_N: Tensor, *, correction_low: float, correction_high: float) -> Tensor:
    inside = (weight_N >= correction_low) & (weight_N <= correction_high)
    return weight_N.where(inside, 0.0)  # masked tokens still count in the denominators


CHOICES: dict[str, dict[str, Choice]] = {
    # What a reward is compared with: advantages before scaling [N], from the returns.
    "baseline": {
        "group_mean": Choice("R_i - mean(R of the group)", group_mean),
        "leave_one_out": Choice("R_i - mean(R of the group's others)", leave_one_out),
        "batch_mean": Choice("R_t - mean(R_t of the batch's tokens)", lambda r: r.to_go_N - r.to_go_N.mean()),
        "none": Choice("R_t", lambda returns: returns.to_go_N),
    },
    # What the advantages are divided by [N], from the returns and the advantages. Deviations are a sample's (n - 1).
    "scale": {
        "group_std": Choice("std(R of the group) + 1e-6", group_std),
        "batch_std": Choice("std(A of the batch's tokens) + 1e-6", batch_std),
        "none": Choice("1", lambda returns, advantages_N: advantages_N.new_ones(len(advantages_N))),
    },
    # The loss weight of a sample's tokens [B], from the samples' lengths; a sample that is left out has length 0.
    "aggregate": {
        "token_mean": Choice("1 / N", lambda lengths_B: (lengths_B > 0) / lengths_B.sum()),
        "sequence_mean": Choice("1 / (B |o_i|)", lambda lengths_B: 1 / ((lengths_B > 0).sum() * lengths_B)),
        "sequence_sum": Choice("1 / B", lambda lengths_B: (lengths_B > 0) / (lengths_B > 0).sum()),
        "constant": Choice(
            "1 / (B constant_length)",
            lambda lengths_B, *, constant_length: (lengths_B > 0) / (lengths_B > 0).sum() / constant_length,
        ),
    },
    # Of new and old probability [N]; its gradient is that of the log-probability, on-policy too, where it is 1.
    "ratio": {
        "token": Choice("r_t = pi(o_t) / pi_old(o_t)", lambda logprobs_N, old_N, seq_id_N: (logprobs_N - old_N).exp()),
        "sequence": Choice("r_i = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)", sequence_ratio),
    },
    # The objective, which is maximised [N], from ratio, log-probabilities and advantages.
    "clip": {
        "ppo": Choice("min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)", ppo),
        "cispo": Choice("sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi(o_t)", cispo),
        "none": Choice("r A", lambda ratio_N, logprobs_N, advantages_N: ratio_N * advantages_N),
    },
    # Of KL(policy, reference) [N], from log(pi / ref) (http://joschu.net/blog/kl-approx.html).
    "kl_estimator": {
        "k1": Choice("log(pi / ref)", lambda log_ratio_N: log_ratio_N),
        "k2": Choice("log(pi / ref)^2 / 2", lambda log_ratio_N: log_ratio_N.square() / 2),
        # expm1 keeps the digits of a small difference.
        "k3": Choice("ref / pi - 1 - log(ref / pi)", lambda log_ratio_N: (-log_ratio_N).expm1() + log_ratio_N),
    },
    # Weights [N] that make up for an engine that samples with not quite the trainer's probabilities, from the
    # logarithm of w_t, and what bounds them (truncate: https://fengyao.notion.site/off-policy-rl, mask: IcePop,
    # arXiv:2510.18855).
    "correction_level": {
        "token": Choice("w_t = pi_old(o_t) / pi_rollout(o_t)", lambda log_N, seq_id_N: log_N.exp()),
        "sequence": Choice(
            "w_i = pi_old(o_i) / pi_rollout(o_i)", lambda log_N, seq_id_N: sequence_sums(log_N, seq_id_N).exp()
        ),
    },
    "correction": {
        "none": Choice("1", lambda weight_N: weight_N.new_ones(len(weight_N))),
        "truncate": Choice("min(w, correction_high)", lambda w_N, *, correction_high: w_N.clamp(max=correction_high)),
        "mask": Choice("w if correction_low <= w <= correction_high else 0", mask),
    },
}
