"""The losses: pure functions of log-probabilities, each a sum over tokens that the caller divides by a global count.

Dividing by the number of response tokens of the whole minibatch, over all ranks and micro-batches, makes the
gradient independent of how the batch was cut (that every token weighs the same is DAPO's choice, arXiv:2503.14476,
section 3.3).
"""

from dataclasses import dataclass

import torch

from grpo.config import ConfigError, option


@dataclass
class AlgorithmConfig:
    prompts_per_step: int = option(32, "Prompts of one step: each is answered samples_per_prompt times.")
    samples_per_prompt: int = option(8, "Responses sampled to each prompt: one group.")
    minibatches_per_step: int = option(1, "Optimizer updates that one pass over a step's samples is cut into.")
    epochs_per_step: int = option(1, "Passes over a step's samples.")
    clip_low: float = option(0.2, "The ratio is clipped below at 1 - clip_low.")
    clip_high: float = option(0.2, "The ratio is clipped above at 1 + clip_high.")
    scale_by_std: bool = option(True, "Divide a group's advantages by their standard deviation.")
    kl_coefficient: float = option(0.0, "Weight of the KL term towards the reference (the policy at the start).")
    entropy_coefficient: float = option(0.0, "Weight of the entropy bonus.")

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        return self.samples_per_step // self.minibatches_per_step

    @property
    def on_policy(self) -> bool:
        """Whether a step's samples are used for one update alone, whose ratio is 1."""
        return self.minibatches_per_step == 1 and self.epochs_per_step == 1

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot work."""
        counts = ("prompts_per_step", "samples_per_prompt", "minibatches_per_step", "epochs_per_step")
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)} must be at least 1.")
        if self.samples_per_prompt < 2:
            raise ConfigError(
                "algorithm.samples_per_prompt=1 leaves nothing to compare a response with: use 2 or more."
            )
        if self.prompts_per_step % self.minibatches_per_step:
            raise ConfigError(
                f"algorithm.prompts_per_step={self.prompts_per_step} cannot be cut into "
                f"algorithm.minibatches_per_step={self.minibatches_per_step} equal minibatches: use a divisor."
            )
        for name in ("clip_low", "clip_high", "kl_coefficient", "entropy_coefficient"):
            if getattr(self, name) < 0:
                raise ConfigError(f"algorithm.{name}={getattr(self, name)} must not be negative.")
        if self.clip_low >= 1:
            raise ConfigError(f"algorithm.clip_low={self.clip_low} must be below 1: the ratio cannot be negative.")


def grpo_loss(
    logprobs_N: torch.Tensor,
    entropy_N: torch.Tensor,
    advantages_N: torch.Tensor,
    old_logprobs_N: torch.Tensor | None,
    ref_logprobs_N: torch.Tensor | None,
    config: AlgorithmConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped surrogate of PPO, summed over tokens, with KL and entropy terms (arXiv:2402.03300, equation 3).

    loss = sum_t [ -min(r A, clip(r, 1 - low, 1 + high) A) + kl_coefficient k3 - entropy_coefficient H ]

    with the ratio r = exp(logp - old_logp) and k3 = exp(ref - logp) - (ref - logp) - 1
    (http://joschu.net/blog/kl-approx.html). All tensors are [N] float32, one entry a response token. Without old
    log-probabilities the samples are on-policy: the ratio is 1 in value and carries the gradient all the same.
    Returns the sum and a dict of detached sums over tokens (and, for ratio/max, a maximum).
    """
    old = logprobs_N.detach() if old_logprobs_N is None else old_logprobs_N
    ratio = (logprobs_N - old).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -torch.minimum(ratio * advantages_N, clipped * advantages_N).sum()
    sums = {
        "entropy": entropy_N.detach().sum(),
        "clip/low": ((ratio < 1 - config.clip_low) & (advantages_N < 0)).sum(),
        "clip/high": ((ratio > 1 + config.clip_high) & (advantages_N > 0)).sum(),
        "ratio/max": ratio.detach().max() if len(ratio) else ratio.new_zeros(()),
    }
    if ref_logprobs_N is not None:
        log_ratio = ref_logprobs_N - logprobs_N
        kl = log_ratio.expm1() - log_ratio  # expm1 keeps the digits of a small difference
        sums["kl"] = kl.detach().sum()
        loss = loss + config.kl_coefficient * kl.sum()
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * entropy_N.sum()
    return loss, sums


def imitation_loss(logprobs_N: torch.Tensor) -> torch.Tensor:
    """The negative log-likelihood of the response tokens, summed: what supervised training minimises."""
    return -logprobs_N.sum()
