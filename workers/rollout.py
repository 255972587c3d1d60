"""The RolloutWorker: turns prompts into sampled responses with the engine of this process."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict

from grpo.batch import jagged, make_batch
from grpo.config import ConfigError, choose, option
from workers.dispatch import Worker, dispatched
from workers.engines.protocol import Engine, Sampling
from workers.parallel.mesh import Layout

ENGINES = ("torch", "sglang")


@dataclass
class RolloutConfig:
    engine: str = option("torch", "Inference engine: torch (embedded, for CPUs and small models) or sglang.")
    temperature: float = option(1.0, "Divides the logits, in sampling and in training.")
    top_p: float = option(1.0, "Sample from the fewest tokens that hold this share of the probability; 1 is all.")
    top_k: int = option(0, "Sample from this many most likely tokens; 0 is all.")
    max_response_tokens: int = option(1024, "Longest response; a longer one is cut and marked as truncated.")

    def check(self) -> None:
        """Raise ConfigError for the first value that cannot work."""
        choose(self.engine, ENGINES, "rollout.engine")
        if self.engine == "sglang":
            raise ConfigError("rollout.engine=sglang is not there yet: use rollout.engine=torch.")
        if self.temperature <= 0:
            raise ConfigError(
                f"rollout.temperature={self.temperature} must be above 0: GRPO needs samples that differ."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"rollout.top_p={self.top_p} must be above 0 and at most 1.")
        if self.top_k < 0 or self.max_response_tokens < 1:
            raise ConfigError("rollout.top_k must be at least 0 and rollout.max_response_tokens at least 1.")


class RolloutWorker(Worker):
    """Samples with whatever weights its engine holds. `version` is theirs; the ShardingManager sets it."""

    def __init__(self, config: RolloutConfig, engine: Engine, layout: Layout, stop: tuple[int, ...], seed: int) -> None:
        super().__init__(layout)
        self.config, self.engine, self.stop, self.seed = config, engine, stop, seed
        self.version = -1

    @dispatched("tokens")
    def generate(self, prompts: TensorDict, samples: int, temperature: float | None = None) -> TensorDict:
        """`samples` responses to each prompt: the batch fields tokens to truncated, `samples` rows a prompt.

        prompts: a batch with tokens [P, *] int64. temperature: another than the configured one, as evaluations
        may want; 0 takes the most likely token. Returns B = P x samples rows, those of a prompt side by side.
        """
        sampling = Sampling(
            temperature=self.config.temperature if temperature is None else temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            max_new_tokens=self.config.max_response_tokens,
            stop=self.stop,
            # A function of what is sampled alone, so that a resumed run samples what the unbroken one did.
            seed=hash((self.seed, self.version, self.layout.part, samples)) % 2**31,
        )
        questions = [row.tolist() for row in prompts["tokens"].unbind()]
        answers = self.engine.generate(questions, samples, sampling)
        tokens, mask, logprobs, truncated = [], [], [], []
        for question, responses in zip(questions, answers, strict=True):
            for response in responses:
                tokens.append(torch.tensor(question + response.tokens))
                mask.append(torch.arange(len(tokens[-1])) >= len(question))
                logprobs.append(torch.tensor([0.0] * len(question) + response.logprobs))
                truncated.append(response.truncated)
        return make_batch(
            {
                "tokens": jagged(tokens),
                "response_mask": jagged(mask),
                "rollout_logprobs": jagged(logprobs),
                "truncated": torch.tensor(truncated),
                "version": torch.full((len(tokens),), self.version),
            }
        )
