"""From rewards to advantages, and from tokens to one loss: what a response is worth, and what a token weighs.

All of it happens once, on the controller, over the whole minibatch: no denominator depends on how the batch is cut over
ranks and micro-batches. A loss is then a plain sum over tokens, each times its loss weight. At the end stands dynamic
sampling, which replaces groups whose rewards are all equal by further prompts (DAPO, arXiv:2503.14476).
"""

import math
from collections.abc import Mapping

import torch
from tensordict import TensorDict
from torch import Tensor

from grpo.algorithm import AlgorithmConfig
from grpo.batch import concatenate, response_lengths, select, with_values
from grpo.choices import Returns, apply, groups_with_signal, sums_by


def _seq_ids(mask: Tensor) -> Tensor:
    """[N] int64: the row of each response token, given response_mask [B, *]."""
    return torch.arange(len(mask)).repeat_interleave(mask.offsets().diff())[mask.values()]


def _at_responses(batch: TensorDict, values_N: Tensor, by_token: bool = False) -> Tensor:
    """[B, *] float32: the values at the response tokens, 0 elsewhere; [B], as given, where the batch has no tokens.

    by_token: the values are of tokens, not of samples.
    """
    if "response_mask" not in batch:
        return values_N.float()
    mask = batch["response_mask"]
    values_N = values_N if by_token else values_N[_seq_ids(mask)]
    return with_values(mask, torch.zeros(len(mask.values())).masked_scatter_(mask.values(), values_N.float()))


def signal_of(batch: TensorDict, config: AlgorithmConfig) -> Tensor:
    """[B] float32: what groups are judged by, NaN for a sample that is left out as it could not be graded.

    A penalty for length is no part of it, or a group without a right answer would learn length alone. Where
    `config.signal_reward` does not apply, the total counts.
    """
    signal_B = batch["rewards"]
    if config.signal_reward is not None:
        component_B = batch[f"rewards/{config.signal_reward}"]
        signal_B = component_B.where(~component_B.isnan(), signal_B)
    if config.ungraded == "left_out" and "failures" in batch:
        signal_B = signal_B.masked_fill(batch["failures"] > 0, torch.nan)
    return signal_B


def compute_advantages(
    batch: TensorDict | None, config: AlgorithmConfig, weights: Mapping[str, float] | None = None
) -> TensorDict | None:
    """Add the field `advantages` [B, *] float32: what each response token is worth by `config`, 0 elsewhere.

    Reads rewards, group, response_mask (or response_length: then advantages are [B], of all tokens of a response), and
    failures and penalties [B] where there are any; also old_logprobs and ref_logprobs where the KL term is part of the
    reward, old_logprobs and teacher_logprobs where there is a teacher. Baselines of groups compare whole responses and
    subtract the KL of the whole response; the others subtract at each token the KL of this token and those after it.
    weights: of each reward, where config.combine needs them.
    """
    if batch is None:
        return None
    _, group_B = batch["group"].unique(return_inverse=True)
    graded_B = ~signal_of(batch, config).isnan()
    components_KB = [batch[f"rewards/{name}"].double().where(graded_B, torch.nan) for name in weights or ()]
    total_B = apply("combine", config, batch["rewards"].double(), components_KB, (weights or {}).values(), group_B)
    total_B = total_B + batch.get("penalties", torch.zeros(())).double()
    by_token = config.kl_in_reward or "teacher_logprobs" in batch
    if by_token:
        mask = batch["response_mask"]
        old_N, ref_N, teacher_N = (
            batch[name].values()[mask.values()].double() if name in batch else None
            for name in ("old_logprobs", "ref_logprobs", "teacher_logprobs")
        )
        seq_id_N = _seq_ids(mask)
        count_N = torch.ones(len(seq_id_N))
    else:
        seq_id_N, count_N = torch.arange(len(batch)), response_lengths(batch)
    whole_B, to_go_N = total_B, total_B[seq_id_N]
    if config.kl_in_reward:
        kl_N = config.kl_coefficient * apply("kl_estimator", config, old_N - ref_N)
        kl_B = sums_by(seq_id_N, kl_N, len(whole_B))
        # From this token to the response's end: the running sum at that end, less the running sum before this token.
        to_go_N = to_go_N - (kl_B.cumsum(0)[seq_id_N] - (kl_N.cumsum(0) - kl_N))
        whole_B = whole_B - kl_B
    graded_N = graded_B[seq_id_N]
    advantages_N = to_go_N.new_zeros(len(to_go_N))
    if graded_N.any():
        place_B = graded_B.cumsum(0) - 1
        group_B = group_B[graded_B].unique(return_inverse=True)[1]
        tokens_N = place_B[seq_id_N[graded_N]], count_N[graded_N].double()
        returns = Returns(to_go_N[graded_N], whole_B[graded_B], *tokens_N, group_B)
        advantages_N[graded_N] = apply("scale", config, apply("baseline", config, returns), returns)
    if "teacher_logprobs" in batch:
        advantages_N = advantages_N - config.teacher_coefficient * (old_N - teacher_N)
    batch["advantages"] = _at_responses(batch, advantages_N, by_token)
    return batch


def weigh_tokens(minibatch: TensorDict | None, config: AlgorithmConfig) -> TensorDict | None:
    """Add the field `loss_weights` [B, *] float32: what each response token's loss counts in that of the minibatch.

    Samples that `config` masks weigh nothing and do not count in any denominator; if it masks all, all weights are 0.
    Where groups without signal are replaced, those that are left after the last round weigh nothing either.
    """
    if minibatch is None:
        return None
    group_B, lengths_B = torch.arange(len(minibatch)), response_lengths(minibatch).double()
    if config.mask_truncated:
        lengths_B[minibatch["truncated"]] = 0
    if "rewards" in minibatch:  # demonstrations have neither these nor groups
        _, group_B = minibatch["group"].unique(return_inverse=True)
        signal_B = signal_of(minibatch, config)
        if config.mask_no_signal or config.resample_rounds:
            lengths_B[~groups_with_signal(signal_B, group_B)[group_B]] = 0
        if config.teacher is None:  # which judges what the rewards could not
            lengths_B[signal_B.isnan()] = 0
    weights_B = apply("aggregate", config, lengths_B, group_B).where(lengths_B > 0, 0.0)
    minibatch["loss_weights"] = _at_responses(minibatch, weights_B)
    return minibatch


def overlong_penalty(lengths_B: Tensor, longest: int, share: float) -> Tensor:
    """[B] float32: 0 down to -1 as a response's length runs through the last `share` of `longest` tokens."""
    buffer = share * longest  # DAPO's soft overlong punishment (arXiv:2503.14476, equation 13)
    return ((longest - buffer - lengths_B) / buffer).clamp(-1, 0).float()


def prompts_missing(rounds: list[TensorDict], wanted: int, config: AlgorithmConfig) -> int:
    """How many further prompts should give the groups with signal that `rounds` lack of `wanted`; 0 where none do."""
    signal = torch.cat([groups_with_signal(signal_of(batch, config), batch["group"]) for batch in rounds])
    found = int(signal.sum())
    return min(wanted, math.ceil((wanted - found) * len(signal) / max(found, 1))) if found < wanted else 0


def join_rounds(rounds: list[TensorDict]) -> TensorDict:
    """The rows of all rounds, whose groups get numbers of their own."""
    first = 0
    for batch in rounds:
        batch["group"] = batch["group"] + first
        first = int(batch["group"].max()) + 1
    return concatenate(rounds) if len(rounds) > 1 else rounds[0]


def keep_groups(batch: TensorDict, count: int, config: AlgorithmConfig) -> TensorDict:
    """The rows of `count` groups: the first with signal, and where those are too few the first of the others."""
    groups, group_B = batch["group"].unique(return_inverse=True)
    signal_G = groups_with_signal(signal_of(batch, config), group_B)
    kept = (~signal_G).int().argsort(stable=True)[:count]
    return select(batch, torch.isin(batch["group"], groups[kept]).nonzero()[:, 0].tolist())
