"""The published algorithms as slow as their formulas: loops over prompts, responses and tokens, in float64.

Nothing of grpo/ is used here. A function returns the loss, minus the paper's objective, of one batch: the expectation
over prompts is the mean over the batch's. Ratios are to `old`, which on-policy is the value of `logprobs` itself.

Two things the papers leave open are settled as their authors' code does: a deviation has n - 1 below, and a group (or
batch) of equal rewards is worth 0.
"""

import math
from dataclasses import dataclass, replace

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
    teacher: list[float]
    parts: list[float | None]  # the rewards before their weights, None where one does not apply
    ungraded: bool


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


def compared(samples, values_of=normalised):
    """(sample, its advantage, its share), group by group.

    The share is 1 / (size of a group x number of groups), which makes of groups of unequal sizes a mean over responses.
    """
    for group in by_prompt(samples):
        advantages = values_of([sample.reward for sample in group])
        yield from ((*pair, 1 / len(samples)) for pair in zip(group, advantages, strict=True))


def each_token(samples, values_of=normalised):
    """(sample, t, the sample's advantage, its share as above) of every token of every response."""
    for sample, advantage, share in compared(samples, values_of):
        yield from ((sample, t, advantage, share) for t in range(len(sample.old)))


def tokens_in(samples):
    return sum(len(sample.old) for sample in samples)


def clip(ratio, low, high):
    if low <= ratio <= high:
        return ratio
    return torch.tensor(low if ratio < low else high, dtype=torch.float64)


def surrogate(ratio, advantage, low=0.2, high=0.2):
    """min(r A, clip(r, 1 - low, 1 + high) A)"""
    free, clipped = ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage
    return free if free <= clipped else clipped


def ratio_at(sample, t):
    return torch.exp(sample.logprobs[t] - sample.old[t])


def k3_at(sample, t):
    """DeepSeekMath, arXiv:2402.03300, equation 4."""
    return estimate("k3", sample.logprobs[t] - sample.ref[t])


# the presets


def grpo(samples, beta=0.0):
    """DeepSeekMath, arXiv:2402.03300, equations 3 and 4."""
    return -sum(
        share / len(sample.old) * (surrogate(ratio_at(sample, t), advantage) - beta * k3_at(sample, t))
        for sample, t, advantage, share in each_token(samples)
    )


def dr_grpo(samples, constant, beta=0.0):
    """Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3.2.

    GRPO's equation without 1 / |o_i| and without the deviation; its Listing 1 divides by a constant instead.
    """
    return -sum(
        share / constant * (surrogate(ratio_at(sample, t), advantage) - beta * k3_at(sample, t))
        for sample, t, advantage, share in each_token(samples, lambda rewards: [r - mean(rewards) for r in rewards])
    )


def dapo(samples, longest, buffer, beta=0.0, epsilon_low=0.2, epsilon_high=0.28):
    """DAPO, arXiv:2503.14476, equations 8, 9, 12 and 13.

    The sum of lengths below is that of the whole batch, as in its code; written for one prompt, the formula leaves it
    open. Groups of equal rewards, before any punishment, are none of the batch (equation 11). The paper has no KL term:
    what `beta` adds is GRPO's, aggregated as the rest.
    """
    samples = [sample for group in by_prompt(samples) for sample in group if len({one.reward for one in group}) > 1]

    def punishment(length):
        if length <= longest - buffer:
            return 0.0
        return ((longest - buffer) - length) / buffer if length <= longest else -1.0

    punished = [replace(sample, reward=sample.reward + punishment(len(sample.old))) for sample in samples]
    return -sum(
        surrogate(ratio_at(sample, t), advantage, epsilon_low, epsilon_high) - beta * k3_at(sample, t)
        for sample, t, advantage, _ in each_token(punished)
    ) / tokens_in(samples)


def gspo(samples, beta=0.0, epsilon_low=3e-4, epsilon_high=4e-4):
    """Group Sequence Policy Optimization, arXiv:2507.18071, equations 5, 6 and 7: one s_i for each response.

    The paper leaves its KL term out of the formula: here it is GRPO's.
    """
    objective = 0.0
    for sample, advantage, share in compared(samples):
        length = len(sample.old)
        gap = sum(sample.logprobs[t] - sample.old[t] for t in range(length))
        divergence = sum(k3_at(sample, t) for t in range(length))
        gain = surrogate(torch.exp(gap / length), advantage, epsilon_low, epsilon_high)
        objective = objective + share * (gain - beta * divergence / length)
    return -objective


def cispo(samples, beta=0.0, epsilon_low=1.0, epsilon_high=4.0):
    """MiniMax-M1, arXiv:2506.13585, equations 4 and 5.

    The sum of lengths is that of the batch, as for DAPO, and the KL term, which the paper has none of, GRPO's.
    """
    objective = 0.0
    for sample, t, advantage, _ in each_token(samples):
        weight = clip(ratio_at(sample, t), 1 - epsilon_low, 1 + epsilon_high).item()
        objective = objective + weight * advantage * sample.logprobs[t] - beta * k3_at(sample, t)
    return -objective / tokens_in(samples)


def sapo(samples, beta=0.0, positive=1.0, negative=1.05):
    """Soft Adaptive Policy Optimization, arXiv:2511.20347, equations 5 and 6: a gate 4 / tau sigmoid(tau (r - 1))."""
    objective = 0.0
    for sample, t, advantage, share in each_token(samples):
        tau = positive if advantage > 0 else negative
        gate = 4 / tau / (1 + torch.exp(-tau * (ratio_at(sample, t) - 1)))
        objective = objective + share / len(sample.old) * (gate * advantage - beta * k3_at(sample, t))
    return -objective


def dppo(samples, beta=0.0, low=0.15, high=0.15, drift=1e-3):
    """Divergence PPO, arXiv:2602.04879, binary total variation, to what the engine sampled from.

    |pi - pi_rollout| of the sampled token is the total variation of "this token" and "any other". The drift term is
    that of arXiv:2602.02276. The mean over the batch's tokens is that of prime-rl's code, where the two stand together.
    """
    objective = 0.0
    for sample, t, advantage, _ in each_token(samples):
        gap = sample.logprobs[t] - sample.rollout[t]
        change = math.exp(sample.logprobs[t].item()) - math.exp(sample.rollout[t])
        stopped = change > high if advantage > 0 else change < -low
        gain = 0.0 if stopped else torch.exp(gap) * advantage
        objective = objective + gain - beta * k3_at(sample, t) - drift * gap**2
    return -objective / tokens_in(samples)


def over_the_mean(rewards):
    middle = mean(rewards)
    return [(reward - middle) / middle if reward != middle else 0.0 for reward in rewards]


def maxrl(samples, beta=0.0):
    """Maximum Likelihood Reinforcement Learning, arXiv:2602.02710, Algorithm 1, with the ratio that PPO bounds.

    The sum over a response's tokens is the log-probability of the response. The KL term is GRPO's, summed as the rest.
    """
    return -sum(
        share * (surrogate(ratio_at(sample, t), advantage) - beta * k3_at(sample, t))
        for sample, t, advantage, share in each_token(samples, over_the_mean)
    )


def maxrl_gradient(samples):
    """What has MaxRL's gradient for rewards of 0 and 1: 1/K sum of right S_i - 1/N sum of S_i, S_i of log pi."""
    objective = 0.0
    for group in (groups := by_prompt(samples)):
        right = [sample.logprobs.sum() for sample in group if sample.reward == 1]
        if right:
            objective = objective + sum(right) / len(right) - sum(s.logprobs.sum() for s in group) / len(group)
    return -objective / len(groups)


def each_normalised(samples, weights):
    """Each sample with the weighed sum of its rewards, each normalised among those of its group that it applies to."""
    totals = {id(sample): 0.0 for sample in samples}
    for group in by_prompt(samples):
        for k, weight in enumerate(weights):
            there = [sample for sample in group if sample.parts[k] is not None]
            values = [sample.parts[k] for sample in there]
            for sample, value in zip(there, normalised(values) if values else [], strict=True):
                totals[id(sample)] += weight * value
    return [replace(sample, reward=totals[id(sample)]) for sample in samples]


def gdpo(samples, weights, beta=0.0):
    """GDPO, arXiv:2601.05242, equations 4 to 6: each reward by itself, then their sum over the batch's samples."""
    summed = each_normalised(samples, weights)
    objective = 0.0
    for sample, advantage in zip(summed, normalised([sample.reward for sample in summed]), strict=True):
        for t in range(len(sample.old)):
            gain = surrogate(ratio_at(sample, t), advantage) - beta * k3_at(sample, t)
            objective = objective + gain / len(sample.old) / len(samples)
    return -objective


def reinforce_plus_plus_baseline(samples, beta=0.0):
    """REINFORCE++ with a baseline, arXiv:2501.03262: less the group's mean, then normalised over the batch's tokens.

    The KL term is k2 in the loss, as the paper has it.
    """
    tokens = list(each_token(samples, lambda rewards: [reward - mean(rewards) for reward in rewards]))
    values = normalised([advantage for _, _, advantage, _ in tokens])
    return -sum(
        share
        / len(sample.old)
        * (surrogate(ratio_at(sample, t), value) - beta * estimate("k2", sample.logprobs[t] - sample.ref[t]))
        for (sample, t, _, share), value in zip(tokens, values, strict=True)
    )


def _less_log_ratios(sample, beta, first=0):
    """The reward less beta times the sum of log(pi / ref) from the token `first` on; the policy is the one sampled."""
    return sample.reward - beta * math.fsum(sample.old[t] - sample.ref[t] for t in range(first, len(sample.old)))


def _against_the_others(samples, beta):
    """As `each_token`, with the sample's return less the mean of those of its group's others for the advantage."""

    def less_the_others(values):
        return [v - mean(values[:i] + values[i + 1 :]) if len(values) > 1 else 0.0 for i, v in enumerate(values)]

    return each_token([replace(s, reward=_less_log_ratios(s, beta)) for s in samples], less_the_others)


def rloo(samples, beta=0.0):
    """Back to Basics, arXiv:2402.14740, equation 8, with the reward of equation 3.

    The formula is a gradient on-policy (`rloo_gradient`). Off-policy each token's is weighted with its ratio, which is
    the gradient of the ratio itself.
    """
    return -sum(share * ratio_at(sample, t) * gain for sample, t, gain, share in _against_the_others(samples, beta))


def rloo_gradient(samples, beta=0.0):
    """What has the gradient of equation 8 of arXiv:2402.14740, to the letter; on-policy only."""
    return -sum(share * gain * sample.logprobs[t] for sample, t, gain, share in _against_the_others(samples, beta))


def reinforce_plus_plus(samples, beta=0.0):
    """REINFORCE++, arXiv:2501.03262, equations 8 to 10 in PPO's objective."""
    returns = [[_less_log_ratios(sample, beta, t) for t in range(len(sample.old))] for sample in samples]
    flat = [value for row in returns for value in row]
    if max(flat) == min(flat):
        return 0 * sum(sample.logprobs.sum() for sample in samples)
    middle, spread = mean(flat), deviation(flat)
    return -sum(
        surrogate(ratio_at(sample, t), (value - middle) / spread) / len(row) / len(samples)
        for sample, row in zip(samples, returns, strict=True)
        for t, value in enumerate(row)
    )


def reinforce(samples, beta=0.0):
    """Williams 1992, doi:10.1007/BF00992696: the return from a token on times the gradient of its log-probability.

    Off-policy as for `rloo`; on-policy `reinforce_gradient`.
    """
    return -sum(
        ratio_at(sample, t) * _less_log_ratios(sample, beta, t) / len(samples)
        for sample in samples
        for t in range(len(sample.old))
    )


def reinforce_gradient(samples, beta=0.0):
    """What has REINFORCE's gradient, to the letter; on-policy only."""
    return -sum(
        _less_log_ratios(sample, beta, t) * sample.logprobs[t] / len(samples)
        for sample in samples
        for t in range(len(sample.old))
    )


# the choices that are no preset's


def dual_clip(samples, c):
    """GRPO with Dual-clip PPO, arXiv:1912.09729, equation 5: max(min(r A, clip(r) A), c A) where A < 0."""
    objective = 0.0
    for sample, t, advantage, share in each_token(samples):
        gain = surrogate(ratio_at(sample, t), advantage)
        if advantage < 0 and gain < c * advantage:
            gain = torch.tensor(c * advantage, dtype=torch.float64)
        objective = objective + share * gain / len(sample.old)
    return -objective


def estimate(estimator, gap):
    """http://joschu.net/blog/kl-approx.html, from gap = log(pi / ref) of a sample of pi."""
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap**2 / 2
    return math.exp(-gap) - 1 + gap if isinstance(gap, float) else torch.exp(-gap) - 1 + gap


def kl_term(samples, estimator, with_ratio):
    """What beta multiplies in GRPO's loss, with another estimator; `with_ratio` as arXiv:2512.02556 has it."""
    total = 0.0
    for sample, t, _, share in each_token(samples):
        kl = estimate(estimator, sample.logprobs[t] - sample.ref[t])
        total = total + share * (ratio_at(sample, t) * kl if with_ratio else kl) / len(sample.old)
    return total


def entropy_term(samples):
    """The mean over responses of the mean entropy of their tokens."""
    return sum(sample.entropy.sum() / len(sample.old) / len(samples) for sample in samples)


def unlike(sample, t, level):
    """The trainer's probability over the rollout's, of a token, of its response, or of that by geometric mean.

    https://fengyao.notion.site/off-policy-rl has the first; the weight of a sequence is the product of its tokens'.
    """
    gaps = [old - rollout for old, rollout in zip(sample.old, sample.rollout, strict=True)]
    return math.exp({"token": gaps[t], "sequence": math.fsum(gaps), "geometric": mean(gaps)}[level])


def too_far_off(sample, advantage, most):
    """DeepSeek-V3.2, arXiv:2512.02556, section 3.1: A < 0 and the response's mean log(pi_rollout / pi) above `most`."""
    return advantage < 0 and mean([r - p for r, p in zip(sample.rollout, sample.logprobs.tolist(), strict=True)]) > most


def weighted(samples, weight):
    """GRPO, the objective of each token times weight(sample, t, its advantage)."""
    return -sum(
        share * weight(sample, t, advantage) * surrogate(ratio_at(sample, t), advantage) / len(sample.old)
        for sample, t, advantage, share in each_token(samples)
    )


def taught(samples, coefficient):
    """GRPO, each token's advantage less coefficient * log(pi_old / teacher): the reverse KL as a reward of its own."""
    return -sum(
        share
        * surrogate(ratio_at(sample, t), advantage - coefficient * (sample.old[t] - sample.teacher[t]))
        / len(sample.old)
        for sample, t, advantage, share in each_token(samples)
    )


def sequence_ratio(samples, aggregate, constant, low, high):
    """GSPO's ratio for all tokens of a response; with sequence_sum LUSPO, arXiv:2602.05261: |o_i| times GSPO's term."""
    objective = 0.0
    for sample, advantage, _ in compared(samples):
        length = len(sample.old)
        gap = sum(sample.logprobs[t] - sample.old[t] for t in range(length))
        gain = length * surrogate(torch.exp(gap / length), advantage, low, high)
        objective = objective + gain / divisor(sample, samples, aggregate, constant)
    return -objective


def divisor(sample, samples, aggregate, constant):
    """What a token's term is divided by among those of `samples`: as GRPO, DAPO, RLOO and Dr. GRPO have it.

    prompt_mean is DAPO's equation 8 to the letter: the mean over the tokens of a prompt, then over prompts.
    """
    return {
        "token_mean": tokens_in(samples),
        "prompt_mean": len(by_prompt(samples)) * tokens_in([s for s in samples if s.prompt == sample.prompt]),
        "sequence_mean": len(samples) * len(sample.old),
        "sequence_sum": len(samples),
        "constant": len(samples) * constant,
    }[aggregate]


def masked(samples, truncated, no_signal, aggregate, constant, judged=lambda sample: sample.reward):
    """GRPO over the responses that are not masked, as if the others had only served for comparison.

    `truncated` is the overlong filtering of arXiv:2503.14476, section 3.4; groups have no signal where all that is
    `judged` is equal.
    """
    silent = [group[0].prompt for group in by_prompt(samples) if len({judged(sample) for sample in group}) == 1]

    def counts(sample):
        return not (no_signal and sample.prompt in silent) and not (truncated and sample.truncated)

    left = [sample for sample in samples if counts(sample)]
    tokens = [(sample, t, advantage) for sample, t, advantage, _ in each_token(samples) if counts(sample)]
    return -sum(
        surrogate(ratio_at(sample, t), advantage) / divisor(sample, left, aggregate, constant)
        for sample, t, advantage in tokens
    )


def advantages(samples, baseline, scale, beta=0.0, estimator="k1"):
    """Each sample's list of its tokens' advantages, by the two choices; a KL term of weight beta is in the reward."""

    def to_go(sample, first):
        gaps = [sample.old[t] - sample.ref[t] for t in range(first, len(sample.old))]
        return sample.reward - beta * math.fsum(estimate(estimator, gap) for gap in gaps)

    rows = [[to_go(sample, t) for t in range(len(sample.old))] for sample in samples]
    everywhere = mean([value for row in rows for value in row])
    found, groups = [], []
    for sample, row in zip(samples, rows, strict=True):
        mine = [to_go(other, 0) for other in samples if other.prompt == sample.prompt]
        others = [to_go(other, 0) for other in samples if other.prompt == sample.prompt and other is not sample]
        groups.append(mine)
        if baseline == "group_mean":
            found.append([row[0] - mean(mine) for _ in row])
        elif baseline == "leave_one_out":
            found.append([row[0] - mean(others) if others else 0.0 for _ in row])
        else:
            found.append([value - everywhere if baseline == "batch_mean" else value for value in row])
    if scale == "none":
        return found
    if scale == "token_std":
        values = [value for row in found for value in row]
        return [[(value - mean(values)) / deviation(values) for value in row] for row in found]
    if scale == "sample_std":
        spread = deviation([to_go(sample, 0) for sample in samples])
        return [[value / spread for value in row] for row in found]
    below = mean if scale == "group_mean" else deviation
    return [
        [value / below(mine) if max(mine) > min(mine) else 0.0 for value in row]
        for row, mine in zip(found, groups, strict=True)
    ]
