"""The losses: pure functions of log-probabilities of response tokens, each token with its weight in the minibatch.

The loss weights (grpo/advantages.py) hold the denominators, counted over all ranks and micro-batches: a loss is a plain
sum here, and its gradient is the same however the batch was cut.
"""

import math

from torch import Tensor

from grpo.algorithm import AlgorithmConfig
from grpo.choices import apply, probability_change, sequence_means
from grpo.metrics import Line, Max, Mean, Metric


def policy_loss(
    logprobs_N: Tensor, entropy_N: Tensor, fields: dict[str, Tensor], config: AlgorithmConfig
) -> tuple[Tensor, dict[str, Metric]]:
    """loss = sum of weight_t (-w_t objective_t + kl_coefficient kl_t + drift_coefficient d_t - entropy_coefficient H_t)

    `fields`, each [N]: advantages and loss_weights float32; seq_id int64, which sequence a token is of (those of one
    stand side by side); float32 old_logprobs, ref_logprobs if there is a KL term, rollout_logprobs if the ratio, the
    correction or a mask is about them. Without old_logprobs the samples are on-policy: the ratio is 1, with the
    log-probability's gradient. If `config.sees_whole_responses`, the N tokens must be whole responses; otherwise any
    tokens will do.

    Returns the loss, a scalar with gradient, and metrics of the N tokens.
    """
    advantages, seq_id = fields["advantages"], fields["seq_id"]
    now = logprobs_N.detach()
    old = fields.get("rollout_logprobs" if config.ratio_to == "rollout" else "old_logprobs", now)
    log_ratio = logprobs_N - old
    ratio = log_ratio.exp() if old is now else apply("ratio", config, logprobs_N, old, seq_id)
    loss = -apply("clip", config, ratio, logprobs_N, advantages)
    metrics = {"entropy": Mean(entropy_N.detach().sum()), "ratio/max": Max.of(ratio.detach())}
    change = probability_change(ratio, logprobs_N) if config.clip == "dppo" else ratio.detach() - 1
    low, high = change < -config.clip_low, change > config.clip_high
    if config.clip in ("ppo", "dppo"):
        low, high = low & (advantages < 0), high & (advantages > 0)
    metrics |= {"clip/low": Mean(low.sum()), "clip/high": Mean(high.sum())}
    if config.correction != "none":
        weight = apply("correction_level", config, old - fields["rollout_logprobs"], seq_id)
        bounded = apply("correction", config, weight)
        loss = loss * bounded
        metrics |= {"correction/mean": Mean(bounded.sum()), "correction/bounded": Mean((bounded != weight).sum())}
    if config.rejects:
        mean = sequence_means(old - fields["rollout_logprobs"], seq_id).exp()
        out = (mean < config.reject_low) | (mean > (math.inf if config.reject_high is None else config.reject_high))
        loss = loss.where(~out, 0.0)
        metrics["correction/rejected"] = Mean(out.sum())
    if config.off_policy_mask is not None:
        far = sequence_means(fields["rollout_logprobs"] - now, seq_id) > config.off_policy_mask
        out = far & (advantages < 0)
        loss = loss.where(~out, 0.0)
        metrics["correction/off_policy"] = Mean(out.sum())
    if "ref_logprobs" in fields:
        kl = apply("kl_estimator", config, logprobs_N - fields["ref_logprobs"])
        metrics["kl"] = Mean(kl.detach().sum())
        if config.kl_in == "loss":
            loss = loss + config.kl_coefficient * (ratio * kl if config.kl_ratio else kl)
    if config.drift_coefficient:
        loss = loss + config.drift_coefficient * log_ratio.square()
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * entropy_N
    return (fields["loss_weights"] * loss).sum(), metrics


def sft_loss(logprobs_N: Tensor, loss_weights_N: Tensor) -> Tensor:
    """The weighted negative log-likelihood of the response tokens: what supervised training minimises."""
    return -(loss_weights_N * logprobs_N).sum()


def gap_metrics(logprobs_N: Tensor, fields: dict[str, Tensor]) -> dict[str, Metric]:
    """How rollout_logprobs differ from the trainer's: another temperature alone makes the gap follow them."""
    ours = fields.get("old_logprobs", logprobs_N.detach())
    gap = fields["rollout_logprobs"] - ours
    return {
        "rollout/logprob_gap": Mean(gap.abs().sum()),
        "rollout/logprob_gap_max": Max.of(gap.abs()),
        # Over samples of the rollout policy the mean of the gap itself estimates KL(rollout || trainer).
        "rollout/kl": Mean(gap.sum()),
        "rollout/gap": Line.of(ours, gap),
    }
