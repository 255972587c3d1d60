"""The published algorithms as slow as their formulas: loops over prompts, responses and tokens, in float64.

Nothing of grpo/ is used here. A function returns the loss, minus the paper's objective, of one batch: the expectation
over prompts is the mean over the batch's. Ratios are to `old`, which on-policy is the value of `logprobs` itself.

Two things the papers leave open are settled as their authors' code does: a deviation has n - 1 below, and a group (or
batch) of equal rewards is worth 0.
"""

import math
from dataclasses import dataclass

import torch


@dataclass
class Sample:
    """One response of T tokens."""

    prompt: int
    reward: float
    truncated: bool
    logprobs: torch.Tensor  # [T] float64, with gradient
    entropy: torch.Tensor  # [T] float64, with gradient
    old: list[float]
    ref: list[float]
    rollout: list[float]


def by_prompt(samples):
    groups = {}
    for sample in samples:
        groups.setdefault(sample.prompt, []).append(sample)
    return list(groups.values())


def mean(values):
    return math.fsum(values) / len(values)


def deviation(values):
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def normalised(values):
    if max(values) == min(values):
        return [0.0 for _ in values]
    middle, spread = mean(values), deviation(values)
    return [(value - middle) / spread for value in values]


def clip(ratio, low, high):
    if ratio < low:
        return torch.tensor(low, dtype=torch.float64)
    if ratio > high:
        return torch.tensor(high, dtype=torch.float64)
    return ratio


def smaller(first, second):
    return first if first <= second else second


def ratio_at(sample, t):
    return torch.exp(sample.logprobs[t] - sample.old[t])


def k3_at(sample, t):
    """DeepSeekMath, arXiv:2402.03300, equation 4."""
    gap = sample.ref[t] - sample.logprobs[t]
    return torch.exp(gap) - gap - 1


# the presets


def grpo(samples, beta=0.0, epsilon=0.2):
    """DeepSeekMath, arXiv:2402.03300, equations 3 and 4."""
    groups = by_prompt(samples)
    objective = 0.0
    for group in groups:
        advantages = normalised([sample.reward for sample in group])
        for sample, advantage in zip(group, advantages, strict=True):
            of_response = 0.0
            for t in range(len(sample.logprobs)):
                ratio = ratio_at(sample, t)
                surrogate = smaller(ratio * advantage, clip(ratio, 1 - epsilon, 1 + epsilon) * advantage)
                of_response = of_response + surrogate - beta * k3_at(sample, t)
            objective = objective + of_response / len(sample.logprobs) / len(group)
    return -objective / len(groups)


def dr_grpo(samples, constant, beta=0.0, epsilon=0.2):
    """Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.

    GRPO's equation without 1 / |o_i| and without the deviation; its Listing 1 divides by a constant instead.
    """
    groups = by_prompt(samples)
    objective = 0.0
    for group in groups:
        middle = mean([sample.reward for sample in group])
        for sample in group:
            advantage = sample.reward - middle
            for t in range(len(sample.logprobs)):
                ratio = ratio_at(sample, t)
                surrogate = smaller(ratio * advantage, clip(ratio, 1 - epsilon, 1 + epsilon) * advantage)
                objective = objective + (surrogate - beta * k3_at(sample, t)) / constant / len(group)
    return -objective / len(groups)


def dapo(samples, longest, buffer, beta=0.0, epsilon_low=0.2, epsilon_high=0.28):
    """DAPO, arXiv:2503.14476, equations 8, 9, 12 and 13.

    The sum of lengths below is that of the whole batch, as in its code; written for one prompt, the formula leaves it
    open. The paper has no KL term: what `beta` adds is GRPO's, aggregated as the rest.
    """
    tokens = sum(len(sample.logprobs) for sample in samples)
    objective = 0.0
    for group in by_prompt(samples):
        rewards = []
        for sample in group:
            length = len(sample.logprobs)
            if length <= longest - buffer:
                punishment = 0.0
            elif length <= longest:
                punishment = ((longest - buffer) - length) / buffer
            else:
                punishment = -1.0
            rewards.append(sample.reward + punishment)
        for sample, advantage in zip(group, normalised(rewards), strict=True):
            for t in range(len(sample.logprobs)):
                ratio = ratio_at(sample, t)
                clipped = clip(ratio, 1 - epsilon_low, 1 + epsilon_high)
                surrogate = smaller(ratio * advantage, clipped * advantage)
                objective = objective + (surrogate - beta * k3_at(sample, t)) / tokens
    return -objective


def gspo(samples, beta=0.0, epsilon_low=3e-4, epsilon_high=4e-4):
    """Group Sequence Policy Optimization, arXiv:2507.18071, equations 5, 6 and 7: one s_i for each response.

    The paper leaves its KL term out of the formula: here it is GRPO's.
    """
    groups = by_prompt(samples)
    objective = 0.0
    for group in groups:
        advantages = normalised([sample.reward for sample in group])
        for sample, advantage in zip(group, advantages, strict=True):
            length = len(sample.logprobs)
            gap, divergence = 0.0, 0.0
            for t in range(length):
                gap = gap + sample.logprobs[t] - sample.old[t]
                divergence = divergence + k3_at(sample, t)
            s = torch.exp(gap / length)
            surrogate = smaller(s * advantage, clip(s, 1 - epsilon_low, 1 + epsilon_high) * advantage)
            objective = objective + (surrogate - beta * divergence / length) / len(group)
    return -objective / len(groups)


def cispo(samples, beta=0.0, epsilon_low=1.0, epsilon_high=4.0):
    """MiniMax-M1, arXiv:2506.13585, equations 4 and 5.

    The sum of lengths is that of the batch, as for DAPO, and the KL term, which the paper has none of, GRPO's.
    """
    tokens = sum(len(sample.logprobs) for sample in samples)
    objective = 0.0
    for group in by_prompt(samples):
        advantages = normalised([sample.reward for sample in group])
        for sample, advantage in zip(group, advantages, strict=True):
            for t in range(len(sample.logprobs)):
                weight = clip(ratio_at(sample, t), 1 - epsilon_low, 1 + epsilon_high).item()
                surrogate = weight * advantage * sample.logprobs[t]
                objective = objective + (surrogate - beta * k3_at(sample, t)) / tokens
    return -objective


def _less_log_ratios(sample, beta, first=0):
    """The reward less beta times the sum of log(pi / ref) from the token `first` on; the policy is the one sampled."""
    return sample.reward - beta * math.fsum(sample.old[t] - sample.ref[t] for t in range(first, len(sample.old)))


def rloo(samples, beta=0.0):
    """Back to Basics, arXiv:2402.14740, equation 8, with the reward of equation 3.

    The formula is a gradient on-policy (`rloo_gradient`). Off-policy each token's is weighted with its ratio, which is
    the gradient of the ratio itself.
    """
    groups = by_prompt(samples)
    objective = 0.0
    for group in groups:
        returns = [_less_log_ratios(sample, beta) for sample in group]
        for i, sample in enumerate(group):
            others = [value for j, value in enumerate(returns) if j != i]
            for t in range(len(sample.logprobs)):
                objective = objective + ratio_at(sample, t) * (returns[i] - mean(others)) / len(group)
    return -objective / len(groups)


def rloo_gradient(samples, beta=0.0):
    """What has the gradient of equation 8 of arXiv:2402.14740, to the letter; on-policy only."""
    groups = by_prompt(samples)
    objective = 0.0
    for group in groups:
        returns = [_less_log_ratios(sample, beta) for sample in group]
        for i, sample in enumerate(group):
            baseline = math.fsum(returns[j] for j in range(len(group)) if j != i) / (len(group) - 1)
            objective = objective + (returns[i] - baseline) * sample.logprobs.sum() / len(group)
    return -objective / len(groups)


def reinforce_plus_plus(samples, beta=0.0, epsilon=0.2):
    """REINFORCE++, arXiv:2501.03262, equations 8 to 10 in PPO's objective."""
    returns = [[_less_log_ratios(sample, beta, t) for t in range(len(sample.old))] for sample in samples]
    flat = [value for row in returns for value in row]
    if max(flat) == min(flat):
        return 0 * sum(sample.logprobs.sum() for sample in samples)
    middle, spread = mean(flat), deviation(flat)
    objective = 0.0
    for sample, row in zip(samples, returns, strict=True):
        for t in range(len(sample.logprobs)):
            advantage, ratio = (row[t] - middle) / spread, ratio_at(sample, t)
            surrogate = smaller(ratio * advantage, clip(ratio, 1 - epsilon, 1 + epsilon) * advantage)
            objective = objective + surrogate / len(row) / len(samples)
    return -objective


def reinforce(samples, beta=0.0):
    """Williams 1992, doi:10.1007/BF00992696: the return from a token on times the gradient of its log-probability.

    Off-policy as for `rloo`; on-policy `reinforce_gradient`.
    """
    objective = 0.0
    for sample in samples:
        for t in range(len(sample.logprobs)):
            objective = objective + ratio_at(sample, t) * _less_log_ratios(sample, beta, t) / len(samples)
    return -objective


def reinforce_gradient(samples, beta=0.0):
    """What has REINFORCE's gradient, to the letter; on-policy only."""
    objective = 0.0
    for sample in samples:
        for t in range(len(sample.logprobs)):
            objective = objective + _less_log_ratios(sample, beta, t) * sample.logprobs[t] / len(samples)
    return -objective


# the choices that are no preset's


def dual_clip(samples, c, epsilon=0.2):
    """GRPO with Dual-clip PPO, arXiv:1912.09729, equation 5: max(min(r A, clip(r) A), c A) where A < 0."""
    groups = by_prompt(samples)
    objective = 0.0
    for group in groups:
        advantages = normalised([sample.reward for sample in group])
        for sample, advantage in zip(group, advantages, strict=True):
            for t in range(len(sample.logprobs)):
                ratio = ratio_at(sample, t)
                surrogate = smaller(ratio * advantage, clip(ratio, 1 - epsilon, 1 + epsilon) * advantage)
                if advantage < 0 and surrogate < c * advantage:
                    surrogate = torch.tensor(c * advantage, dtype=torch.float64)
                objective = objective + surrogate / len(sample.logprobs) / len(group)
    return -objective / len(groups)


def estimate(estimator, gap):
    """http://joschu.net/blog/kl-approx.html, from gap = log(pi / ref) of a sample of pi."""
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap**2 / 2
    return math.exp(-gap) - 1 + gap if isinstance(gap, float) else torch.exp(-gap) - 1 + gap


def kl_term(samples, estimator, with_ratio):
    """What beta multiplies in GRPO's loss, with another estimator; `with_ratio` as arXiv:2512.02556 has it."""
    groups = by_prompt(samples)
    total = 0.0
    for group in groups:
        for sample in group:
            for t in range(len(sample.logprobs)):
                kl = estimate(estimator, sample.logprobs[t] - sample.ref[t])
                kl = ratio_at(sample, t) * kl if with_ratio else kl
                total = total + kl / len(sample.logprobs) / len(group)
    return total / len(groups)


def entropy_term(samples):
    """The mean over responses of the mean entropy of their tokens."""
    total = 0.0
    for sample in samples:
        for t in range(len(sample.entropy)):
            total = total + sample.entropy[t] / len(sample.entropy) / len(samples)
    return total


def corrected(samples, bounded, level, epsilon=0.2):
    """GRPO, each token's term weighted with `bounded` of trainer / rollout probability.

    https://fengyao.notion.site/off-policy-rl has min(w, C); arXiv:2510.18855 has 0 outside [low, high]; the weight of
    a sequence is the product of its tokens'.
    """
    groups = by_prompt(samples)
    objective = 0.0
    for group in groups:
        advantages = normalised([sample.reward for sample in group])
        for sample, advantage in zip(group, advantages, strict=True):
            gaps = [sample.old[t] - sample.rollout[t] for t in range(len(sample.old))]
            for t in range(len(sample.logprobs)):
                weight = bounded(math.exp(gaps[t] if level == "token" else math.fsum(gaps)))
                ratio = ratio_at(sample, t)
                surrogate = smaller(ratio * advantage, clip(ratio, 1 - epsilon, 1 + epsilon) * advantage)
                objective = objective + weight * surrogate / len(sample.logprobs) / len(group)
    return -objective / len(groups)


def masked(samples, truncated, no_signal, aggregate, constant, epsilon=0.2):
    """GRPO over the responses that are not masked, as if the others had only served for comparison.

    `truncated` is the overlong filtering of arXiv:2503.14476, section 3.4. The aggregates are those of GRPO, DAPO,
    RLOO and Dr. GRPO over what is left.
    """
    left = []
    for group in by_prompt(samples):
        rewards = [sample.reward for sample in group]
        if no_signal and max(rewards) == min(rewards):
            continue
        for sample, advantage in zip(group, normalised(rewards), strict=True):
            if not (truncated and sample.truncated):
                left.append((sample, advantage))
    tokens = sum(len(sample.logprobs) for sample, _ in left)
    objective = 0.0
    for sample, advantage in left:
        below = {
            "token_mean": tokens,
            "sequence_mean": len(left) * len(sample.logprobs),
            "sequence_sum": len(left),
            "constant": len(left) * constant,
        }[aggregate]
        for t in range(len(sample.logprobs)):
            ratio = ratio_at(sample, t)
            clipped = clip(ratio, 1 - epsilon, 1 + epsilon)
            objective = objective + smaller(ratio * advantage, clipped * advantage) / below
    return -objective


def advantages(samples, baseline, scale, beta=0.0, estimator="k1"):
    """Each sample's list of its tokens' advantages, by the two choices; a KL term of weight beta is in the reward."""

    def taken(sample, first):
        gaps = [sample.old[t] - sample.ref[t] for t in range(first, len(sample.old))]
        return beta * math.fsum(estimate(estimator, gap) for gap in gaps)

    whole = [sample.reward - taken(sample, 0) for sample in samples]
    rows = [[sample.reward - taken(sample, t) for t in range(len(sample.old))] for sample in samples]
    everywhere = mean([value for row in rows for value in row])
    worth, groups = [], []
    for i, sample in enumerate(samples):
        mine = [whole[j] for j in range(len(samples)) if samples[j].prompt == sample.prompt]
        others = [whole[j] for j in range(len(samples)) if samples[j].prompt == sample.prompt and j != i]
        groups.append(mine)
        row = []
        for value in rows[i]:
            if baseline == "group_mean":
                row.append(whole[i] - mean(mine))
            elif baseline == "leave_one_out":
                row.append(whole[i] - mean(others) if others else 0.0)
            elif baseline == "batch_mean":
                row.append(value - everywhere)
            else:
                row.append(value)
        worth.append(row)
    if scale == "none":
        return worth
    if scale == "batch_std":
        spread = deviation([value for row in worth for value in row])
        return [[value / spread for value in row] for row in worth]
    return [
        [value / deviation(mine) if max(mine) > min(mine) else 0.0 for value in row]
        for row, mine in zip(worth, groups, strict=True)
    ]
