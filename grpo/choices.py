"""The choices that an algorithm is made of: a small function each, registered under its setting and name.

`@choice("clip", "ppo")` makes a function what algorithm.clip=ppo means. The first line of its docstring is its formula;
its keyword-only parameters are the other settings of the algorithm that it reads. Checks, --help, the docs and
`python -m trainer algorithms` list what is registered here.

Shapes: N response tokens of B samples in G groups. In formulas o_i is response i, and sg[] has no gradient.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Choice:
    """What `setting` = `name` means: a function, its formula, and the settings that it uses."""

    setting: str
    name: str
    function: Callable[..., Tensor]

    @property
    def formula(self) -> str:
        return self.function.__doc__.splitlines()[0]

    @property
    def uses(self) -> list[str]:
        return inspect.getfullargspec(self.function).kwonlyargs


CHOICES: dict[str, dict[str, Choice]] = {}
"""By setting and name."""


def choice(setting: str, name: str) -> Callable:
    """Register the function below as what `setting` = `name` means."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        CHOICES.setdefault(setting, {})[name] = Choice(setting, name, function)
        return function

    return register


def chosen(setting: str, config: Any) -> Choice:
    """What `config` names for `setting`."""
    return CHOICES[setting][getattr(config, setting)]


def apply(setting: str, config: Any, *tensors: Any) -> Tensor:
    """Call the function that `config` names for `setting`, with the settings that it uses taken from `config`."""
    found = chosen(setting, config)
    return found.function(*tensors, **{name: getattr(config, name) for name in found.uses})


# baseline: what a reward is compared with; advantages before scaling [N]


@dataclass(frozen=True)
class Returns:
    """The rewards of B samples, less the KL term where it is part of the reward; float64."""

    to_go_N: Tensor  # the reward less the KL of this token and those after it
    whole_B: Tensor  # the reward less the KL of the whole response
    seq_id_N: Tensor  # [N] int64, the sample of each token
    group_B: Tensor  # [B] int64, 0 to G - 1


def groups_with_signal(rewards_B: Tensor, group_B: Tensor) -> Tensor:
    """[G] bool, in ascending order of the group's number: whether its rewards are not all equal."""
    _, group_B = group_B.unique(return_inverse=True)
    count = int(group_B.max()) + 1
    highest_G = rewards_B.new_full((count,), -torch.inf).scatter_reduce_(0, group_B, rewards_B, "amax")
    lowest_G = rewards_B.new_full((count,), torch.inf).scatter_reduce_(0, group_B, rewards_B, "amin")
    return highest_G > lowest_G


def sums_by(index: Tensor, values: Tensor, count: int) -> Tensor:
    """[count]: the sum of the values of each index, 0 to count - 1."""
    return values.new_zeros(count).index_add_(0, index, values)


def _centred(returns: Returns) -> Tensor:
    """[B]: each response's return less the mean of its group."""
    count_G = torch.bincount(returns.group_B)
    means_G = sums_by(returns.group_B, returns.whole_B, len(count_G)) / count_G
    return returns.whole_B - means_G[returns.group_B]


@choice("baseline", "group_mean")
def group_mean(returns: Returns) -> Tensor:
    """R_i - mean(R of the group)

    Exactly 0 in a group whose rewards are all equal.
    """
    signal_B = groups_with_signal(returns.whole_B, returns.group_B)[returns.group_B]
    return _centred(returns).where(signal_B, 0.0)[returns.seq_id_N]


@choice("baseline", "leave_one_out")
def leave_one_out(returns: Returns) -> Tensor:
    """R_i - mean(R of the group's others)"""
    count_G = torch.bincount(returns.group_B)
    others_B = (count_G / (count_G - 1).clamp(min=1))[returns.group_B]
    return group_mean(returns) * others_B[returns.seq_id_N]


@choice("baseline", "batch_mean")
def batch_mean(returns: Returns) -> Tensor:
    """R_t - mean(R_t of the batch's tokens)"""
    return returns.to_go_N - returns.to_go_N.mean()


@choice("baseline", "none")
def no_baseline(returns: Returns) -> Tensor:
    """R_t"""
    return returns.to_go_N


# scale: what the advantages are divided by [N]


@choice("scale", "group_std")
def group_std(returns: Returns, advantages_N: Tensor) -> Tensor:
    """std(R of the group) + 1e-6

    The standard deviation of a sample (n - 1).
    """
    count_G = torch.bincount(returns.group_B)
    squares_G = sums_by(returns.group_B, _centred(returns) ** 2, len(count_G))
    deviation_G = (squares_G / (count_G - 1).clamp(min=1)).sqrt()
    return deviation_G[returns.group_B][returns.seq_id_N] + 1e-6


@choice("scale", "batch_std")
def batch_std(returns: Returns, advantages_N: Tensor) -> Tensor:
    """std(A of the batch's tokens) + 1e-6"""
    return advantages_N.std(correction=min(1, len(advantages_N) - 1)) + 1e-6


@choice("scale", "none")
def no_scale(returns: Returns, advantages_N: Tensor) -> Tensor:
    """1"""
    return torch.ones_like(advantages_N)


# aggregate: the loss weight of a sample's tokens [B], from the samples' lengths; a sample that is left out has length 0


@choice("aggregate", "token_mean")
def token_mean(lengths_B: Tensor) -> Tensor:
    """1 / N"""
    return (lengths_B > 0) / lengths_B.sum()


@choice("aggregate", "sequence_mean")
def sequence_mean(lengths_B: Tensor) -> Tensor:
    """1 / (B |o_i|)"""
    return 1 / ((lengths_B > 0).sum() * lengths_B)


@choice("aggregate", "sequence_sum")
def sequence_sum(lengths_B: Tensor) -> Tensor:
    """1 / B"""
    return (lengths_B > 0) / (lengths_B > 0).sum()


@choice("aggregate", "constant")
def constant(lengths_B: Tensor, *, constant_length: int) -> Tensor:
    """1 / (B constant_length)"""
    return sequence_sum(lengths_B) / constant_length


# ratio: of new and old probability [N]; its gradient is that of the log-probability, on-policy too, where it is 1


def _over_sequence(values_N: Tensor, seq_id_N: Tensor, mean: bool) -> Tensor:
    """[N]: at each token the sum, or mean, of its sequence's values. The tokens of a sequence stand side by side."""
    begins_N = torch.cat([torch.zeros_like(seq_id_N[:1]), (seq_id_N[1:] != seq_id_N[:-1]).long()])
    place_N = begins_N.cumsum(0)
    # N places are enough for as many sequences; to count them would make the host wait for the device.
    sums = torch.zeros_like(values_N).index_add_(0, place_N, values_N)
    counts = torch.zeros_like(values_N).index_add_(0, place_N, torch.ones_like(values_N))
    return (sums / counts if mean else sums)[place_N]


@choice("ratio", "token")
def token_ratio(logprobs_N: Tensor, old_N: Tensor, seq_id_N: Tensor) -> Tensor:
    """r_t = pi(o_t) / pi_old(o_t)"""
    return (logprobs_N - old_N).exp()


@choice("ratio", "sequence")
def sequence_ratio(logprobs_N: Tensor, old_N: Tensor, seq_id_N: Tensor) -> Tensor:
    """r_i = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)

    Each token has the sequence's value and its own gradient: their mean over the sequence has the gradient of the
    sequence's ratio (GSPO-token, arXiv:2507.18071, equation 14).
    """
    whole_N = _over_sequence((logprobs_N - old_N).detach(), seq_id_N, mean=True)
    return (whole_N + logprobs_N - logprobs_N.detach()).exp()


# clip: the objective, which is maximised [N]


@choice("clip", "ppo")
def ppo(
    ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float, dual_clip: float
) -> Tensor:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    With dual_clip c no less than c A where A < 0 (arXiv:1912.09729, equation 5).
    """
    clipped = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio_N * advantages_N, clipped * advantages_N)
    if dual_clip:
        objective = objective.where(advantages_N >= 0, torch.maximum(objective, dual_clip * advantages_N))
    return objective


@choice("clip", "cispo")
def cispo(ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi(o_t)"""
    return ratio_N.detach().clamp(1 - clip_low, 1 + clip_high) * advantages_N * logprobs_N


@choice("clip", "none")
def unclipped(ratio_N: Tensor, logprobs_N: Tensor, advantages_N: Tensor) -> Tensor:
    """r A"""
    return ratio_N * advantages_N


# kl_estimator: of KL(policy, reference), from log(pi / ref) (http://joschu.net/blog/kl-approx.html)


@choice("kl_estimator", "k1")
def k1(log_ratio_N: Tensor) -> Tensor:
    """log(pi / ref)"""
    return log_ratio_N


@choice("kl_estimator", "k2")
def k2(log_ratio_N: Tensor) -> Tensor:
    """log(pi / ref)^2 / 2"""
    return log_ratio_N.square() / 2


@choice("kl_estimator", "k3")
def k3(log_ratio_N: Tensor) -> Tensor:
    """ref / pi - 1 - log(ref / pi)"""
    return (-log_ratio_N).expm1() + log_ratio_N  # expm1 keeps the digits of a small difference


# correction: weights [N] that make up for an engine that samples with not quite the probabilities of the trainer


@choice("correction_level", "token")
def token_weight(gap_N: Tensor, seq_id_N: Tensor) -> Tensor:
    """w_t = pi_old(o_t) / pi_rollout(o_t)"""
    return gap_N.exp()


@choice("correction_level", "sequence")
def sequence_weight(gap_N: Tensor, seq_id_N: Tensor) -> Tensor:
    """w_i = pi_old(o_i) / pi_rollout(o_i)"""
    return _over_sequence(gap_N, seq_id_N, mean=False).exp()


@choice("correction", "none")
def uncorrected(weight_N: Tensor) -> Tensor:
    """1"""
    return torch.ones_like(weight_N)


@choice("correction", "truncate")
def truncate(weight_N: Tensor, *, correction_high: float) -> Tensor:
    """min(w, correction_high)

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl).
    """
    return weight_N.clamp(max=correction_high)


@choice("correction", "mask")
def mask(weight_N: Tensor, *, correction_low: float, correction_high: float) -> Tensor:
    """w if correction_low <= w <= correction_high else 0

    Masked tokens still count in the denominators (IcePop, arXiv:2510.18855).
    """
    inside = (weight_N >= correction_low) & (weight_N <= correction_high)
    return weight_N.where(inside, 0.0)
