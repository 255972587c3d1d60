"""The RolloutWorker: turns prompts into sampled responses with the engine of this process."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from grpo.batch import make_batch
from grpo.config import ConfigError, choose, option
from grpo.packing import balance
from workers.dispatch import Worker
from workers.engines.protocol import Engine, Response, Sampling
from workers.parallel.mesh import InferenceLayout
from workers.parallel.policy import ModelConfig

ENGINES = ("torch", "sglang")
RELEASE_CHOICES = ("auto", "none", "kv", "kv+weights", "all")


@dataclass
class RolloutConfig:
    engine: str = option("torch", "Inference engine: torch (embedded, for CPUs and small models) or sglang.")
    tensor_parallel: int = option(1, "Processes of one machine that share an engine (sglang).")
    temperature: float = option(1.0, "Divides the logits, in sampling and in training.")
    top_p: float = option(1.0, "Sample from the fewest tokens that hold this share of the probability; 1 is all.")
    top_k: int = option(0, "Sample from this many most likely tokens; 0 is all.")
    min_response_tokens: int = option(0, "No response ends before it has so many tokens.")
    max_response_tokens: int = option(1024, "Longest response; a longer one is cut and marked as truncated.")
    concurrent_samples: int = option(512, "Samples that one engine works on at once (sglang).")
    memory_fraction: float = option(0.5, "Share of a GPU for an engine's weights and KV cache as it serves (sglang).")
    release: str = option(
        "auto",
        "What the engine lets go of while the trainer works (sglang): none, kv, kv+weights, all (CUDA graphs too), or "
        "auto: the least that leaves the trainer what its fullest step so far took.",
    )
    bucket_megabytes: int = option(512, "Weights that travel to the engine at once; up to two such buckets are held.")
    verify_every: int = option(
        20, "Weight updates between two comparisons of the engine's weights with the actor's, from the first; 0: never."
    )
    gap_warning: float = option(
        0.05, "Mean difference of rollout and trainer log-probabilities from which on the likely cause is told."
    )
    gap_error: float = option(0.5, "The same, from which on the run ends.")
    stall_seconds: float = option(45.0, "Longest silence of a working engine before the run ends (sglang).")
    sglang: dict[str, Any] = option({}, "Options of SGLang's own, such as {attention_backend: triton}.")

    def check(self, world: int, local_world: int) -> None:
        """Raise ConfigError for the first value that cannot work with `world` processes, `local_world` a machine."""
        choose(self.engine, ENGINES, "rollout.engine")
        choose(self.release, RELEASE_CHOICES, "rollout.release")
        if self.temperature <= 0:
            raise ConfigError(
                f"rollout.temperature={self.temperature} must be above 0: GRPO needs samples that differ."
            )
        for name in ("top_p", "memory_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"rollout.{name}={getattr(self, name)} must be above 0 and at most 1.")
        if self.top_k < 0 or self.max_response_tokens < 1:
            raise ConfigError("rollout.top_k must be at least 0 and rollout.max_response_tokens at least 1.")
        if not 0 <= self.min_response_tokens <= self.max_response_tokens:
            raise ConfigError(
                f"rollout.min_response_tokens={self.min_response_tokens} must be between 0 and "
                f"rollout.max_response_tokens={self.max_response_tokens}."
            )
        for name in ("tensor_parallel", "concurrent_samples", "bucket_megabytes", "stall_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"rollout.{name}={getattr(self, name)} must be above 0.")
        if self.verify_every < 0:
            raise ConfigError(f"rollout.verify_every={self.verify_every} must be at least 0.")
        if not 0 < self.gap_warning <= self.gap_error:
            raise ConfigError(
                f"rollout.gap_warning={self.gap_warning} must be above 0 and at most "
                f"rollout.gap_error={self.gap_error}."
            )
        if self.engine == "torch":
            if self.tensor_parallel > 1 or self.sglang:
                raise ConfigError("rollout.tensor_parallel and rollout.sglang need rollout.engine=sglang.")
            return
        if world % self.tensor_parallel or local_world % self.tensor_parallel:
            raise ConfigError(
                f"rollout.tensor_parallel={self.tensor_parallel} does not divide the {local_world} process(es) of a "
                "machine, and an engine does not span machines."
            )
        from workers.engines.sglang_engine import check_sglang

        check_sglang(self.sglang)


def make_engine(
    model: ModelConfig, config: RolloutConfig, layout: InferenceLayout, seed: int, log: Path | None = None
) -> Engine:
    """The engine of `config` on the ranks of `layout`, asleep; `log` receives what it says."""
    if config.engine == "sglang":
        from workers.engines.sglang_engine import SGLangEngine

        return SGLangEngine(model, config, layout, seed, log)
    from workers.engines.torch_engine import TorchEngine

    return TorchEngine(model, layout.device)


class Handout:
    """Which prompts one of several engines works on: its own share, then what the others have not begun.

    So a slow engine leaves no other idle. `shares`: prompts of each part; every part takes its first one itself, and
    a counter for each in the process group's store says how many of the rest are taken.
    """

    def __init__(self, shares: Sequence[Sequence[int]], part: int, store: dist.Store) -> None:
        self.shares, self.part, self.store = shares, part, store

    def __iter__(self) -> Iterator[int]:
        yield self.shares[self.part][0]
        for offset in range(len(self.shares)):
            part = (self.part + offset) % len(self.shares)
            while (taken := self.store.add(f"taken/{part}", 1)) < len(self.shares[part]):
                yield self.shares[part][taken]


class RolloutWorker(Worker):
    """Samples with whatever weights its engine holds. `version` is theirs; the ShardingManager sets it.

    layout: as many parts as there are engines. progress: called on the controller with samples done, samples in all
    and tokens done, whenever there is news.
    """

    def __init__(
        self,
        config: RolloutConfig,
        engine: Engine,
        layout: InferenceLayout,
        stop: tuple[int, ...],
        seed: int,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> None:
        super().__init__(layout)
        self.config, self.engine, self.stop, self.seed = config, engine, stop, seed
        self.progress = progress
        self.version = -1
        self.metrics: dict[str, float] = {}  # of the last rollout

    def generate(self, prompts: TensorDict | None, samples: int, temperature: float | None = None) -> TensorDict | None:
        """`samples` responses to each prompt: the batch fields tokens to truncated, `samples` rows a prompt.

        prompts: on the controller a batch with tokens [P, *] int64, elsewhere None. temperature: another than the
        configured one, as evaluations may want; 0 takes the most likely token. Returns B = P x samples rows, those of
        a prompt side by side, on the controller and None elsewhere.
        """
        what = "RolloutWorker.generate"
        store = dist.distributed_c10d._get_default_store()
        if prompts is not None:
            number = torch.full((len(prompts),), store.add("rollouts", 1))
            prompts = make_batch({"tokens": prompts["tokens"], "rollout": number})
        prompts = self.group.share(prompts, ("tokens", "rollout"), what)
        answers, begun = None, time.perf_counter()
        if self.layout.tp_rank == 0:
            # What the engines tell one another about this rollout, and no other.
            store = dist.PrefixStore(f"rollout-{int(prompts['rollout'][0])}", store)
            questions = [row.tolist() for row in prompts["tokens"].unbind()]
            answers = self._generate(questions, samples, temperature, store)
        self.metrics = self._waiting(time.perf_counter() - begun)
        answers = self.group.gather(answers, what)
        if answers is not None and len(answers) != len(prompts) * samples:
            raise RuntimeError(f"{len(answers)} samples came back of {len(prompts)} prompts x {samples}.")
        return answers

    def _waiting(self, seconds: float) -> dict[str, float]:
        """The share of the rollout in which the mean engine had nothing left to do, given this one's `seconds`."""
        most = torch.tensor(seconds if self.layout.tp_rank == 0 else 0.0, dtype=torch.double)
        total = most.clone()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dist.all_reduce(total)
        return {"perf/rollout_bubble": 1 - float(total) / self.layout.dp_size / float(most)}

    def _generate(
        self, prompts: list[list[int]], samples: int, temperature: float | None, store: dist.Store
    ) -> TensorDict:
        """What this engine answered, with the prompt of each row in the field `row`."""
        sampling = Sampling(
            temperature=self.config.temperature if temperature is None else temperature,
            top_p=self.config.top_p,
            top_k=self.config.top_k,
            min_new_tokens=self.config.min_response_tokens,
            max_new_tokens=self.config.max_response_tokens,
            stop=self.stop,
            # A function of what is sampled alone, so that a resumed run samples what the unbroken one did.
            seed=hash((self.seed, self.version, self.layout.dp_rank, samples)) % 2**31,
        )
        parts = self.layout.dp_size
        shares = balance([len(prompt) for prompt in prompts], parts)
        if parts == 1 or self.engine.concurrent_samples is None:
            mine = shares[self.layout.dp_rank]
        else:
            mine = Handout(shares, self.layout.dp_rank, store)
        rows: list[tuple[int, list[int], Response]] = []
        for index, responses in self.engine.generate(((i, prompts[i]) for i in mine), samples, sampling):
            rows += [(index, prompts[index], response) for response in responses]
            done = store.add("samples", samples)
            tokens = store.add("tokens", sum(len(response.tokens) for response in responses))
            if self.progress is not None:
                self.progress(done, len(prompts) * samples, tokens)
        rows.sort(key=lambda row: row[0])
        return self._batch(rows)

    def _batch(self, rows: list[tuple[int, list[int], Response]]) -> TensorDict:
        """The batch of rows of (index of the prompt, prompt, response)."""
        # All rows' values at once, and not through lists: a tensor for each row takes a tenth of a second and more.
        lengths = torch.tensor([[len(prompt), len(response.tokens)] for _, prompt, response in rows])
        mask = torch.tensor([False, True]).repeat(len(rows)).repeat_interleave(lengths.view(-1))
        tokens = chain.from_iterable(chain(prompt, response.tokens) for _, prompt, response in rows)
        sampled = chain.from_iterable(response.logprobs for *_, response in rows)
        logprobs = torch.zeros(len(mask))
        logprobs[mask] = torch.from_numpy(np.fromiter(sampled, np.float32))
        offsets = torch.nn.functional.pad(lengths.sum(1).cumsum(0), (1, 0))
        values = {
            "tokens": torch.from_numpy(np.fromiter(tokens, np.int64)),
            "response_mask": mask,
            "rollout_logprobs": logprobs,
        }
        return make_batch(
            {
                **{name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in values.items()},
                "truncated": torch.tensor([response.truncated for *_, response in rows]),
                "version": torch.full((len(rows),), self.version),
                "row": torch.tensor([index for index, *_ in rows]),
            }
        )
