"""The embedded engine: transformers' model with a KV cache of its own, for CPUs, small models and tests.

All prompts run as one batch. Rows are aligned to the left, each with its own length, so that nothing is
left-padded; finished rows leave the batch a fifth of it at a time, and it ends with the last one.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from workers.engines.protocol import Bucket, Response, Sampling, checked
from workers.parallel.policy import ModelConfig, compute_dtype, read_config

# All but cuDNN, which plans anew for every length: tens of milliseconds a token.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class _Cache:
    """Keys and values of every layer, [rows, KV heads, longest, head size] each, and where each row stands."""

    def __init__(self, layers: int, lengths_R: torch.Tensor, longest: int, group: int) -> None:
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers
        self.longest = longest
        self.lengths_R = lengths_R  # tokens of each row that the cache holds
        self.group = group  # query heads of one key head
        self.mask: torch.Tensor | None = None  # [rows, 1, group x new tokens, cells in use] bool
        self.in_use = 0

    def begin(self, positions_RQ: torch.Tensor) -> None:
        """Prepare for new tokens at `positions_RQ`, the same number in every row."""
        self.positions_RQ = positions_RQ
        self.in_use = int(positions_RQ.max()) + 1
        cells = torch.arange(self.in_use, device=positions_RQ.device)
        # The query heads of one key head stand in line as its queries, which every kernel takes, unlike grouped heads.
        self.mask = (cells <= positions_RQ[:, :, None])[:, None].repeat(1, 1, self.group, 1)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys[layer] is None:
            rows, heads, _, size = key.shape
            self.keys[layer] = key.new_zeros(rows, heads, self.longest, size)
            self.values[layer] = key.new_zeros(rows, heads, self.longest, size)
        rows = torch.arange(key.shape[0], device=key.device)[:, None]
        for store, new in ((self.keys[layer], key), (self.values[layer], value)):
            store[rows, :, self.positions_RQ] = new.transpose(1, 2)
        return self.keys[layer][:, :, : self.in_use], self.values[layer][:, :, : self.in_use]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but `rows` (indices, which may repeat)."""
        self.keys = [key[rows] for key in self.keys]
        self.values = [value[rows] for value in self.values]
        self.lengths_R = self.lengths_R[rows]


def _cached_attention(module, query, key, value, attention_mask, *, scaling, cache, **_):
    keys, values = cache.append(module.layer_idx, key, value)
    rows, kv_heads, _, size = keys.shape
    lined_up = query.reshape(rows, kv_heads, -1, size)
    out = F.scaled_dot_product_attention(lined_up, keys, values, attn_mask=cache.mask, scale=scaling)
    return out.reshape(query.shape).transpose(1, 2), None


AttentionInterface.register("cached", _cached_attention)


class TorchEngine:
    """A whole copy of the model in every process. Asleep it keeps its weights: they are small beside the actor's."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        config = read_config(model)
        self.device = device
        self.model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=compute_dtype(model, device), attn_implementation="cached"
        )
        self.model = self.model.to(device).eval().requires_grad_(False)
        self.weights = dict(self.model.named_parameters())
        self.shapes = {name: weight.shape for name, weight in self.weights.items()}
        self.dtype = self.model.dtype
        self.concurrent_samples = None
        self.asleep, self.freed = (), 0
        self.serving = self.holds_weights = False

    def sleep(self, release: Collection[str]) -> None:
        self.serving = False

    def wake_weights(self) -> None:
        pass

    def update_weights(self, buckets: Iterable[Bucket]) -> None:
        self.holds_weights = False
        for bucket in checked(buckets, self.shapes):
            for name, tensor in bucket.items():
                self.weights[name].data.copy_(tensor)
        self.holds_weights = True

    def verify(self, buckets: Iterable[Bucket]) -> None:
        for bucket in checked(buckets, self.shapes):
            for name, tensor in bucket.items():
                if not torch.equal(self.weights[name], tensor):
                    raise RuntimeError(f"The engine's weights are not the actor's: {name!r} differs.")

    def wake(self) -> None:
        self.serving = True

    def shutdown(self) -> None:
        self.serving = False

    def generate(
        self, prompts: Iterable[tuple[int, list[int]]], samples: int, sampling: Sampling
    ) -> Iterator[tuple[int, list[Response]]]:
        if not self.serving:
            raise RuntimeError("The engine is asleep: it serves inside `with sharding.serving()` alone.")
        indices, questions = zip(*prompts, strict=True)
        yield from zip(indices, self._generate(questions, samples, sampling), strict=True)

    @torch.no_grad()
    @sdpa_kernel(_KERNELS)
    def _generate(self, prompts: Sequence[list[int]], samples: int, sampling: Sampling) -> list[list[Response]]:
        generator = torch.Generator(self.device).manual_seed(sampling.seed)
        lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest = int(lengths_P.max())
        padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=self.device)
        config = self.model.config
        group = config.num_attention_heads // config.num_key_value_heads
        cache = _Cache(config.num_hidden_layers, lengths_P, longest + sampling.max_new_tokens, group)
        # Cells past a prompt's end hold padding until its own tokens overwrite them; no mask reaches there before.
        cells = torch.arange(longest, device=self.device).expand(len(prompts), -1)
        hidden = self._forward(padded, cells, cache)
        last_PH = hidden[torch.arange(len(prompts), device=self.device), lengths_P - 1]
        rows = torch.arange(len(prompts), device=self.device).repeat_interleave(samples)
        cache.keep(rows)
        hidden_RH = last_PH[rows]
        responses = [Response([], [], True) for _ in range(len(rows))]
        alive = torch.arange(len(rows), device=self.device)
        stop = torch.tensor(sampling.stop, dtype=torch.int64, device=self.device)
        done_R = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        steps = []
        for left in reversed(range(sampling.max_new_tokens)):
            logits_RV = self.model.lm_head(hidden_RH).float()
            if len(steps) < sampling.min_new_tokens:
                logits_RV[:, stop] = -torch.inf
            tokens_R, logprobs_R = _sample(logits_RV, sampling, generator)
            before_R, done_R = done_R, done_R | torch.isin(tokens_R, stop)
            steps.append((alive, tokens_R, logprobs_R, before_R, done_R))
            staying = (~done_R).nonzero()[:, 0]
            if not left or not len(staying):
                break
            # Dropping rows copies the whole cache, so finished ones are computed on until there are enough of them.
            if len(staying) <= 0.8 * len(alive):
                alive, tokens_R, done_R = alive[staying], tokens_R[staying], done_R[staying]
                cache.keep(staying)
            hidden_RH = self._forward(tokens_R[:, None], cache.lengths_R[:, None], cache)[:, 0]
            cache.lengths_R = cache.lengths_R + 1
        for step in steps:
            for row, token, logprob, before, done in zip(*(column.tolist() for column in step), strict=True):
                if not before:
                    responses[row].tokens.append(token)
                    responses[row].logprobs.append(logprob)
                    responses[row].truncated = not done
        return [responses[i : i + samples] for i in range(0, len(responses), samples)]

    def _forward(self, tokens_RQ: torch.Tensor, positions_RQ: torch.Tensor, cache: _Cache) -> torch.Tensor:
        cache.begin(positions_RQ)
        return self.model.model(
            input_ids=tokens_RQ, position_ids=positions_RQ, cache=cache, use_cache=False
        ).last_hidden_state


def _sample(
    logits_RV: torch.Tensor, sampling: Sampling, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row, [R] int64, and its log-probability [R] float32; at temperature 0 the most likely token."""
    if sampling.temperature == 0:
        logprobs_RV = logits_RV.log_softmax(-1)
        tokens_R = logprobs_RV.argmax(-1)
    else:
        logprobs_RV = (logits_RV / sampling.temperature).log_softmax(-1)
        kept_RV = logprobs_RV
        if sampling.top_k or sampling.top_p < 1:
            sorted_RV, order_RV = logprobs_RV.sort(-1, descending=True)
            ranks_RV = order_RV.argsort(-1)
            before_RV = sorted_RV.exp().cumsum(-1) - sorted_RV.exp()
            out_RV = before_RV >= sampling.top_p
            if sampling.top_k:
                out_RV[:, sampling.top_k :] = True
            kept_RV = logprobs_RV.masked_fill(out_RV.gather(1, ranks_RV), -torch.inf)
        # The largest of log p plus Gumbel noise is a draw from p (Gumbel 1954).
        noise_RV = torch.empty_like(kept_RV).exponential_(generator=generator).log_()
        tokens_R = (kept_RV - noise_RV).argmax(-1)
    return tokens_R, logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
