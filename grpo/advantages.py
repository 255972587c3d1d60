"""From rewards to advantages, and from tokens to one loss: what a response is worth, and what a token weighs.

All of it happens once, on the controller, over the whole minibatch. So no denominator depends on how the batch is cut
over ranks and micro-batches: a loss is a sum over tokens, each with the weight that stands in the batch.
"""

from dataclasses import dataclass

import torch
from tensordict import TensorDict

from grpo.algorithm import AlgorithmConfig
from grpo.batch import lengths_of, with_values
from grpo.losses import ESTIMATORS


@dataclass(frozen=True)
class Returns:
    """What N response tokens of B samples in G groups brought, float64."""

    to_go_N: torch.Tensor  # the reward, less what the KL term takes from this token on
    whole_B: torch.Tensor  # the same from the first token on
    owner_N: torch.Tensor  # [N] int64, the sample of each token
    group_B: torch.Tensor  # [B] int64, 0 to G - 1


def groups_with_signal(rewards_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """[groups] bool, in ascending order of the group's number: whether its rewards are not all equal."""
    _, group_B = group_B.unique(return_inverse=True)
    count = int(group_B.max()) + 1
    highest_G = rewards_B.new_full((count,), -torch.inf).scatter_reduce_(0, group_B, rewards_B, "amax")
    lowest_G = rewards_B.new_full((count,), torch.inf).scatter_reduce_(0, group_B, rewards_B, "amin")
    return highest_G > lowest_G


def _sums(values: torch.Tensor, owner: torch.Tensor, count: int) -> torch.Tensor:
    """[count]: the sum of the values of each owner, 0 to count - 1."""
    return values.new_zeros(count).index_add_(0, owner, values)


def _centred(returns: Returns) -> torch.Tensor:
    """[B]: each response's return less the mean of its group."""
    count_G = torch.bincount(returns.group_B)
    means_G = _sums(returns.whole_B, returns.group_B, len(count_G)) / count_G
    return returns.whole_B - means_G[returns.group_B]


# baselines: [N], what a token is worth


def group_mean(returns: Returns) -> torch.Tensor:
    """R_i - mean(R of the group)

    Exactly 0 in a group whose rewards are all equal.
    """
    signal_B = groups_with_signal(returns.whole_B, returns.group_B)[returns.group_B]
    return _centred(returns).where(signal_B, 0.0)[returns.owner_N]


def leave_one_out(returns: Returns) -> torch.Tensor:
    """R_i - mean(R of the group's others)"""
    count_G = torch.bincount(returns.group_B)
    others_B = (count_G / (count_G - 1).clamp(min=1))[returns.group_B]
    return group_mean(returns) * others_B[returns.owner_N]


def batch_mean(returns: Returns) -> torch.Tensor:
    """R_t - mean(R_t of the batch's tokens)"""
    return returns.to_go_N - returns.to_go_N.mean()


def no_baseline(returns: Returns) -> torch.Tensor:
    """R_t"""
    return returns.to_go_N


# scales: [N], by what it is divided


def group_std(returns: Returns, worth_N: torch.Tensor) -> torch.Tensor:
    """std(R of the group) + 1e-6

    That of a sample (n - 1).
    """
    count_G = torch.bincount(returns.group_B)
    squares_G = _sums(_centred(returns) ** 2, returns.group_B, len(count_G))
    deviation_G = (squares_G / (count_G - 1).clamp(min=1)).sqrt()
    return deviation_G[returns.group_B][returns.owner_N] + 1e-6


def batch_std(returns: Returns, worth_N: torch.Tensor) -> torch.Tensor:
    """std(A of the batch's tokens) + 1e-6"""
    return worth_N.std(correction=min(1, len(worth_N) - 1)) + 1e-6


def no_scale(returns: Returns, worth_N: torch.Tensor) -> torch.Tensor:
    """1"""
    return torch.ones_like(worth_N)


BASELINES = {"group_mean": group_mean, "leave_one_out": leave_one_out, "batch_mean": batch_mean, "none": no_baseline}
SCALES = {"group_std": group_std, "batch_std": batch_std, "none": no_scale}


# aggregates: [B], what each token of a sample weighs, from the lengths of the samples that count (0 for the others)


def token_mean(lengths_B: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """1 / N"""
    return (lengths_B > 0) / lengths_B.sum()


def sequence_mean(lengths_B: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """1 / (B |o_i|)"""
    return 1 / ((lengths_B > 0).sum() * lengths_B)


def sequence_sum(lengths_B: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """1 / B"""
    return (lengths_B > 0) / (lengths_B > 0).sum()


def constant(lengths_B: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """1 / (B constant_length)"""
    return sequence_sum(lengths_B, config) / config.constant_length


AGGREGATES = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "sequence_sum": sequence_sum,
    "constant": constant,
}


def owners(mask: torch.Tensor) -> torch.Tensor:
    """[N] int64: the row of each response token, given response_mask [B, *]."""
    lengths = torch.tensor(lengths_of(mask))
    return torch.arange(len(lengths)).repeat_interleave(lengths)[mask.values()]


def _at_responses(mask: torch.Tensor, values_N: torch.Tensor) -> torch.Tensor:
    """[B, *] float32: the values at the response tokens of response_mask [B, *], 0 elsewhere."""
    return with_values(mask, torch.zeros(len(mask.values())).masked_scatter_(mask.values(), values_N.float()))


def compute_advantages(batch: TensorDict | None, config: AlgorithmConfig) -> TensorDict | None:
    """Add the field `advantages` [B, *] float32: what each response token is worth by `config`, 0 elsewhere.

    Reads rewards, group and response_mask, and where the KL term is part of the reward also old_logprobs and
    ref_logprobs. A group's baseline compares whole responses, so it counts the KL of the whole response; the others
    count it from the token on.
    """
    if batch is None:
        return None
    mask = batch["response_mask"]
    owner_N = owners(mask)
    _, group_B = batch["group"].unique(return_inverse=True)
    whole_B = batch["rewards"].double()
    to_go_N = whole_B[owner_N]
    if config.kl_in_reward:
        old_N, ref_N = (batch[name].values()[mask.values()].double() for name in ("old_logprobs", "ref_logprobs"))
        kl_N = config.kl_coefficient * ESTIMATORS[config.kl_estimator](old_N - ref_N)
        total_B = _sums(kl_N, owner_N, len(whole_B))
        # What has come by the end of a token's response, less what had come before the token.
        to_go_N = to_go_N - (total_B.cumsum(0)[owner_N] - (kl_N.cumsum(0) - kl_N))
        whole_B = whole_B - total_B
    returns = Returns(to_go_N, whole_B, owner_N, group_B)
    worth_N = BASELINES[config.baseline](returns)
    worth_N = worth_N / SCALES[config.scale](returns, worth_N)
    batch["advantages"] = _at_responses(mask, worth_N)
    return batch


def weigh_tokens(minibatch: TensorDict | None, config: AlgorithmConfig) -> TensorDict | None:
    """Add the field `weights` [B, *] float32: what each response token's loss counts in that of the minibatch.

    Samples that `config` masks weigh nothing and are not counted either; where it masks all, nothing is learned.
    """
    if minibatch is None:
        return None
    mask = minibatch["response_mask"]
    owner_N = owners(mask)
    lengths_B = torch.bincount(owner_N, minlength=len(minibatch)).double()
    if config.mask_truncated:
        lengths_B[minibatch["truncated"]] = 0
    if config.mask_no_signal:
        _, group_B = minibatch["group"].unique(return_inverse=True)
        lengths_B[~groups_with_signal(minibatch["rewards"], group_B)[group_B]] = 0
    weights_B = AGGREGATES[config.aggregate](lengths_B, config).where(lengths_B > 0, 0.0)
    minibatch["weights"] = _at_responses(mask, weights_B[owner_N])
    return minibatch


def overlong_penalty(lengths_B: torch.Tensor, longest: int, share: float) -> torch.Tensor:
    """[B] float32: 0 down to -1 as a response's length runs through the last `share` of `longest` tokens.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13).
    """
    buffer = share * longest
    return ((longest - buffer - lengths_B) / buffer).clamp(-1, 0).float()
