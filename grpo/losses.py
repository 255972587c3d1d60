"""The losses: pure functions of log-probabilities of response tokens, each token with its weight in the minibatch.

The weights (grpo/advantages.py) hold the denominators, counted over all ranks and micro-batches: a loss is a plain sum
here, and its gradient is the same however the batch was cut.
"""

from collections.abc import Mapping

import torch

from grpo.algorithm import AlgorithmConfig

# ratios: what is one in value where the policy is the one that sampled, and carries the gradient


def token_ratio(logprobs_N: torch.Tensor, old_N: torch.Tensor, owner_N: torch.Tensor) -> torch.Tensor:
    """r_t = pi(o_t) / pi_old(o_t)"""
    return (logprobs_N - old_N).exp()


def sequence_ratio(logprobs_N: torch.Tensor, old_N: torch.Tensor, owner_N: torch.Tensor) -> torch.Tensor:
    """r_i = (pi(o_i) / pi_old(o_i))^(1 / |o_i|)

    Each token carries the sequence's value and its own gradient: their mean over the sequence has the gradient of the
    sequence's ratio (GSPO-token, arXiv:2507.18071, equation 14).
    """
    whole_N = _over_sequence((logprobs_N - old_N).detach(), owner_N, mean=True)
    return (whole_N + logprobs_N - logprobs_N.detach()).exp()


RATIOS = {"token": token_ratio, "sequence": sequence_ratio}


def _over_sequence(values_N: torch.Tensor, owner_N: torch.Tensor, mean: bool) -> torch.Tensor:
    """[N]: at each token the sum, or mean, of its sequence's values.

    owner_N: [N] int64, another number where another sequence begins; the tokens of one stand side by side.
    """
    begins_N = torch.cat([torch.zeros_like(owner_N[:1]), (owner_N[1:] != owner_N[:-1]).long()])
    place_N = begins_N.cumsum(0)
    # N places are enough for as many sequences; to count them would make the host wait for the device.
    sums = torch.zeros_like(values_N).index_add_(0, place_N, values_N)
    counts = torch.zeros_like(values_N).index_add_(0, place_N, torch.ones_like(values_N))
    return (sums / counts if mean else sums)[place_N]


# clips: what is to be raised, from ratio, log-probability and advantage


def ppo(
    ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor, config: AlgorithmConfig
) -> torch.Tensor:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    With dual_clip c no less than c A where A < 0 (arXiv:1912.09729, equation 5).
    """
    clipped = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)
    objective = torch.minimum(ratio_N * advantages_N, clipped * advantages_N)
    if config.dual_clip:
        objective = objective.where(advantages_N >= 0, torch.maximum(objective, config.dual_clip * advantages_N))
    return objective


def cispo(
    ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor, config: AlgorithmConfig
) -> torch.Tensor:
    """sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi(o_t)"""
    return ratio_N.detach().clamp(1 - config.clip_low, 1 + config.clip_high) * advantages_N * logprobs_N


def unclipped(
    ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor, config: AlgorithmConfig
) -> torch.Tensor:
    """r A"""
    return ratio_N * advantages_N


CLIPS = {"ppo": ppo, "cispo": cispo, "none": unclipped}


# estimators of KL(policy, reference), from log r = log policy - log reference (http://joschu.net/blog/kl-approx.html)


def k1(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """log(pi / ref)"""
    return log_ratio_N


def k2(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """log(pi / ref)^2 / 2"""
    return log_ratio_N.square() / 2


def k3(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """ref / pi - 1 - log(ref / pi)"""
    return (-log_ratio_N).expm1() + log_ratio_N  # expm1 keeps the digits of a small difference


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


# the correction: what the engine sampled from is not quite what the trainer computes


def truncate(weight_N: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """min(w, correction_high)

    Truncated importance sampling (https://fengyao.notion.site/off-policy-rl).
    """
    return weight_N.clamp(max=config.correction_high)


def mask(weight_N: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """w if correction_low <= w <= correction_high else 0

    What is masked still counts in the denominators (IcePop, arXiv:2510.18855).
    """
    inside = (weight_N >= config.correction_low) & (weight_N <= config.correction_high)
    return weight_N.where(inside, 0.0)


CORRECTIONS = {"truncate": truncate, "mask": mask}


def policy_loss(
    logprobs_N: torch.Tensor, entropy_N: torch.Tensor, fields: Mapping[str, torch.Tensor], config: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """loss = sum_t weight_t [ -w_t objective_t + kl_coefficient kl_t - entropy_coefficient H_t ]

    `fields`, each [N]: advantages and weights float32, owner int64 (which sequence a token is of; those of one stand
    side by side), rollout_logprobs where there is a correction, and where there are any old_logprobs and ref_logprobs,
    float32. Without old ones the samples are on-policy: the ratio is 1 in value and carries the gradient all the same.
    Where `config.sees_whole_responses`, the N tokens are those of whole responses; otherwise any tokens will do.

    Returns the sum and a dict of detached sums over tokens (for names that end in max, a maximum).
    """
    advantages, weights, owner = fields["advantages"], fields["weights"], fields["owner"]
    old = fields["old_logprobs"] if "old_logprobs" in fields else logprobs_N.detach()
    ratio = RATIOS[config.ratio if config.needs_old_logprobs else "token"](logprobs_N, old, owner)
    loss = -CLIPS[config.clip](ratio, logprobs_N, advantages, config)
    value = ratio.detach()
    low, high = value < 1 - config.clip_low, value > 1 + config.clip_high
    if config.clip == "ppo":
        low, high = low & (advantages < 0), high & (advantages > 0)
    sums = {
        "entropy": entropy_N.detach().sum(),
        "clip/low": low.sum(),
        "clip/high": high.sum(),
        "ratio/max": value.max() if len(value) else value.new_zeros(()),
    }
    if config.correction != "none":
        gap = old - fields["rollout_logprobs"]
        if config.correction_level == "sequence":
            gap = _over_sequence(gap, owner, mean=False)
        weight = gap.exp()
        corrected = CORRECTIONS[config.correction](weight, config)
        loss = loss * corrected
        sums |= {"correction/mean": corrected.sum(), "correction/bounded": (corrected != weight).sum()}
    if "ref_logprobs" in fields:
        kl = ESTIMATORS[config.kl_estimator](logprobs_N - fields["ref_logprobs"])
        sums["kl"] = kl.detach().sum()
        if config.kl_in == "loss":
            loss = loss + config.kl_coefficient * (ratio * kl if config.kl_ratio else kl)
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * entropy_N
    return (weights * loss).sum(), sums


def imitation_loss(logprobs_N: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood of the response tokens, weighted: what supervised training minimises."""
    return -(weights_N * logprobs_N).sum()
