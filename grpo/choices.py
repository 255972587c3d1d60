"""The choices that an algorithm is made of, in one table: what each value of a setting means, as formula and function.

Checks, --help, the docs and `python -m trainer algorithms` list what stands in CHOICES. A function's keyword-only
parameters are the other settings of the algorithm that it reads.

Shapes: N response tokens of B samples in G groups. In formulas o_i is response i, and sg[] has no gradient. Where all
tokens of a response are worth the same, advantages are computed with one value for each response, so N = B.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # names of choices are asked for where torch is not wanted yet
    from torch import Tensor

EPSILON = 1e-6
"""What keeps a deviation of nearly 0 from making an advantage of next to nothing."""


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
    count_N: Tensor  # of how many tokens it is the value
    group_B: Tensor  # [B] int64, 0 to G - 1


def groups_with_signal(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """[G] bool, in ascending order of the group's number: whether its rewards, but for those that are NaN, differ."""
    groups, group_B = group_B.unique(return_inverse=True)
    lowest_G = rewards_B.new_full((len(groups),), math.inf)
    lowest_G.scatter_reduce_(0, group_B, rewards_B.nan_to_num(math.inf), "amin")
    highest_G = rewards_B.new_full((len(groups),), -math.inf)
    highest_G.scatter_reduce_(0, group_B, rewards_B.nan_to_num(-math.inf), "amax")
    return highest_G > lowest_G


def sums_by(index: Tensor, values: Tensor, count: int) -> Tensor:
    """[count]: the sum of the values of each index, 0 to count - 1."""
    return values.new_zeros(count).index_add_(0, index, values)


def group_means(values_B: Tensor, group_B: Tensor) -> Tensor:
    """[B]: at each sample the mean of its group's values."""
    count_G = group_B.bincount()
    return (sums_by(group_B, values_B, len(count_G)) / count_G)[group_B]


def centred(values_B: Tensor, group_B: Tensor) -> Tensor:
    """[B]: each value less the mean of its group, exactly 0 where those of a group are all equal."""
    signal_B = groups_with_signal(values_B, group_B)[group_B]
    return (values_B - group_means(values_B, group_B)).where(signal_B, 0.0)


def deviations(values_B: Tensor, group_B: Tensor) -> Tensor:
    """[B]: at each sample the deviation of its group's values, n - 1 below."""
    count_G = group_B.bincount()
    squares_G = sums_by(group_B, centred(values_B, group_B) ** 2, len(count_G))
    return (squares_G / (count_G - 1).clamp(min=1)).sqrt()[group_B]


def normalised(total_B: Tensor, components_KB: Tensor, weights_K: Sequence[float], group_B: Tensor) -> Tensor:
    """A sample to which a reward does not apply, where it is NaN, has no part in that reward's mean."""
    total_B = total_B.new_zeros(len(group_B))
    for weight, values_B in zip(weights_K, components_KB, strict=True):
        there = ~values_B.isnan()
        own, group = values_B[there], group_B[there].unique(return_inverse=True)[1]
        total_B[there] += weight * centred(own, group) / (deviations(own, group) + EPSILON)
    return total_B


def group_mean(returns: Returns) -> Tensor:
    return centred(returns.whole_B, returns.group_B)[returns.seq_id_N]


def leave_one_out(returns: Returns) -> Tensor:
    """What a return is above the mean of the other n - 1 is n / (n - 1) times what it is above the mean of all n."""
    count_G = returns.group_B.bincount()
    factor_B = (count_G / (count_G - 1).clamp(min=1))[returns.group_B]
    return group_mean(returns) * factor_B[returns.seq_id_N]


def by_group_std(advantages_N: Tensor, returns: Returns) -> Tensor:
    return advantages_N / (deviations(returns.whole_B, returns.group_B)[returns.seq_id_N] + EPSILON)


def by_group_mean(advantages_N: Tensor, returns: Returns) -> Tensor:
    means_N = group_means(returns.whole_B, returns.group_B)[returns.seq_id_N]
    if ((means_N <= 0) & (advantages_N != 0)).any():
        raise ValueError(
            "algorithm.scale=group_mean divides by the mean reward of a group, which is not above 0 here: use rewards "
            "that are never negative, without a penalty or a KL term in them, or another algorithm.scale."
        )
    return advantages_N / means_N.where(means_N > 0, 1.0)


def by_sample_std(advantages_N: Tensor, returns: Returns) -> Tensor:
    return advantages_N / (returns.whole_B.std(correction=min(1, len(returns.whole_B) - 1)) + EPSILON)


def over_tokens(values_N: Tensor, count_N: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation, n - 1 below, of values of which each stands for so many tokens."""
    tokens = count_N.sum()
    mean = (values_N * count_N).sum() / tokens
    return mean, (((values_N - mean) ** 2 * count_N).sum() / (tokens - 1).clamp(min=1)).sqrt()


def by_token_std(advantages_N: Tensor, returns: Returns) -> Tensor:
    mean, deviation = over_tokens(advantages_N, returns.count_N)
    return (advantages_N - mean) / (deviation + EPSILON)


def sequence_sums(values_N: Tensor, seq_id_N: Tensor) -> Tensor:
    """[N]: at each token the sum of its sequence's values. The tokens of a sequence stand side by side."""
    place_N = (seq_id_N.diff(prepend=seq_id_N[:1]) != 0).cumsum(0)
    # N places are enough for as many sequences; to count them would make the host wait for the device.
    return sums_by(place_N, values_N, len(values_N))[place_N]


def sequence_means(values_N: Tensor, seq_id_N: Tensor) -> Tensor:
    """[N]: at each token the mean of its sequence's values."""
    return sequence_sums(values_N, seq_id_N) / sequence_sums(values_N.new_ones(len(values_N)), seq_id_N)


def sequence_ratio(logprobs_N: Tensor, old_N: Tensor, seq_id_N: Tensor) -> Tensor:
    """Each token has its sequence's value and its own gradient, whose mean is the sequence's (GSPO-token, eq. 14)."""
    mean_N = sequence_means((logprobs_N - old_N).detach(), seq_id_N)
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


def probability_change(ratio_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """[N] without gradient: pi(o_t) - pi_old(o_t), given their ratio."""
    return (logprobs_N.exp() * (1 - 1 / ratio_N)).detach()


def dppo(ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    change_N = probability_change(ratio_N, logprobs_N)
    far = ((advantages_N > 0) & (change_N > clip_high)) | ((advantages_N < 0) & (change_N < -clip_low))
    return (ratio_N * advantages_N).where(~far, 0.0)


def sapo(
    ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, *, sapo_positive: float, sapo_negative: float
) -> Tensor:
    heat_N = advantages_N.new_full((), sapo_negative).where(advantages_N <= 0, sapo_positive)
    return 4 / heat_N * (heat_N * (ratio_N - 1)).sigmoid() * advantages_N


def mask(weight_N: Tensor, *, correction_low: float, correction_high: float) -> Tensor:
    inside = (weight_N >= correction_low) & (weight_N <= correction_high)
    return weight_N.where(inside, 0.0)  # masked tokens still count in the denominators


def prompt_mean(lengths_B: Tensor, group_B: Tensor) -> Tensor:
    tokens_G = sums_by(group_B, lengths_B, int(group_B.max()) + 1)
    return (lengths_B > 0) / ((tokens_G > 0).sum() * tokens_G[group_B])


CHOICES: dict[str, dict[str, Choice]] = {
    # How the rewards of a sample become one [B]: from their weighted sum [B], themselves [K, B], their weights and the
    # groups.
    "combine": {
        "sum": Choice("sum over k of weight_k R_k", lambda total_B, components_KB, weights_K, group_B: total_B),
        "normalised": Choice(
            "sum over k of weight_k (R_k - mean(R_k of the group)) / (std(R_k of the group) + 1e-6)", normalised
        ),
    },
    # What a reward is compared with: advantages before scaling [N], from the returns.
    "baseline": {
        "group_mean": Choice("R_i - mean(R of the group)", group_mean),
        "leave_one_out": Choice("R_i - mean(R of the group's others)", leave_one_out),
        "batch_mean": Choice(
            "R_t - mean(R_t of the batch's tokens)", lambda r: r.to_go_N - over_tokens(r.to_go_N, r.count_N)[0]
        ),
        "none": Choice("R_t", lambda returns: returns.to_go_N),
    },
    # The advantages [N] from those before scaling, A0, and the returns. Deviations are a sample's (n - 1).
    "scale": {
        "group_std": Choice("A0 / (std(R of the group) + 1e-6)", by_group_std),
        "group_mean": Choice("A0 / mean(R of the group)", by_group_mean),
        "sample_std": Choice("A0 / (std(R of the batch's responses) + 1e-6)", by_sample_std),
        "token_std": Choice(
            "(A0 - mean(A0 of the batch's tokens)) / (std(A0 of the batch's tokens) + 1e-6)", by_token_std
        ),
        "none": Choice("A0", lambda advantages_N, returns: advantages_N),
    },
    # The loss weight of a sample's tokens [B], from the samples' lengths and groups; one that is left out has length 0.
    "aggregate": {
        "token_mean": Choice("1 / N", lambda lengths_B, _: (lengths_B > 0) / lengths_B.sum()),
        "prompt_mean": Choice("1 / (G N_g), the tokens of the group", prompt_mean),
        "sequence_mean": Choice("1 / (B |o_i|)", lambda lengths_B, _: 1 / ((lengths_B > 0).sum() * lengths_B)),
        "sequence_sum": Choice("1 / B", lambda lengths_B, _: (lengths_B > 0) / (lengths_B > 0).sum()),
        "constant": Choice(
            "1 / (B constant_length)",
            lambda lengths_B, _, *, constant_length: (lengths_B > 0) / (lengths_B > 0).sum() / constant_length,
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
        "dppo": Choice("r A, but 0 where A > 0 and pi - pi_old > clip_high or A < 0 and pi_old - pi > clip_low", dppo),
        "sapo": Choice("4 / h sigmoid(h (r - 1)) A, h = sapo_positive where A > 0, else sapo_negative", sapo),
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
        "geometric": Choice(
            "w_i = (pi_old(o_i) / pi_rollout(o_i))^(1 / |o_i|)",
            lambda log_N, seq_id_N: sequence_means(log_N, seq_id_N).exp(),
        ),
    },
    "correction": {
        "none": Choice("1", lambda weight_N: weight_N.new_ones(len(weight_N))),
        "truncate": Choice(
            "clip(w, correction_low, correction_high)",
            lambda w_N, *, correction_low, correction_high: w_N.clamp(correction_low, correction_high),
        ),
        "mask": Choice("w if correction_low <= w <= correction_high else 0", mask),
    },
}
