"""The embedded engine: transformers' model with a KV cache of its own, for CPUs, small models and tests.

All prompts run as one batch. Rows are aligned to the left, each with its own length, so that nothing is
left-padded; finished rows leave the batch a fifth of it at a time, and it ends with the last one.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from workers.engines.protocol import Response, Sampling
from workers.parallel.policy import ModelConfig, compute_dtype, read_config

# All but cuDNN, which plans anew for every length: tens of milliseconds a token.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class _Cache:
    """Keys and values of every layer, [rows, KV heads, longest, head size] each, and where each row stands."""

    def __init__(self, layers: int, lengths_R: torch.Tensor, longest: int) -> None:
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers
        self.longest = longest
        self.lengths_R = lengths_R  # tokens of each row that the cache holds
        self.mask: torch.Tensor | None = None  # [rows, 1, new tokens, cells in use] bool
        self.in_use = 0

    def begin(self, positions_RQ: torch.Tensor) -> None:
        """Prepare for new tokens at `positions_RQ`, the same number in every row."""
        self.positions_RQ = positions_RQ
        self.in_use = int(positions_RQ.max()) + 1
        cells = torch.arange(self.in_use, device=positions_RQ.device)
        self.mask = (cells <= positions_RQ[:, :, None])[:, None]

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
    # The query heads of one key head stand in line as its queries, which every kernel takes, unlike grouped heads.
    rows, kv_heads, _, size = keys.shape
    lined_up = query.reshape(rows, kv_heads, -1, size)
    mask = cache.mask.repeat(1, 1, query.shape[1] // kv_heads, 1)
    with sdpa_kernel(_KERNELS):
        out = F.scaled_dot_product_attention(lined_up, keys, values, attn_mask=mask, scale=scaling)
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
        self.serving = False

    def sleep(self) -> None:
        self.serving = False

    def wake_weights(self) -> None:
        pass

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        missing = set(self.weights)
        for name, tensor in weights:
            if name not in self.weights:
                raise ValueError(f"The engine's model has no weight {name!r}.")
            if self.weights[name].shape != tensor.shape:
                expected, given = tuple(self.weights[name].shape), tuple(tensor.shape)
                raise ValueError(f"The engine's weight {name!r} has the shape {expected}, not {given}.")
            if name not in missing:
                raise ValueError(f"The weight {name!r} was sent twice.")
            missing.discard(name)
            self.weights[name].data.copy_(tensor)
        if missing:
            raise ValueError(f"The weight {min(missing)!r} was not sent ({len(missing)} in all).")

    def wake(self) -> None:
        self.serving = True

    def shutdown(self) -> None:
        self.serving = False

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], samples: int, sampling: Sampling) -> list[list[Response]]:
        if not self.serving:
            raise RuntimeError("The engine is asleep: it serves inside `with sharding.serving()` alone.")
        generator = torch.Generator(self.device).manual_seed(sampling.seed)
        lengths_P = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        longest = int(lengths_P.max())
        padded = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=self.device)
        cache = _Cache(self.model.config.num_hidden_layers, lengths_P, longest + sampling.max_new_tokens)
        # Cells past a prompt's end hold padding until its own tokens overwrite them; no mask reaches there before.
        cells = torch.arange(longest, device=self.device).expand(len(prompts), -1)
        hidden = self._forward(padded, cells, cache)
        last_PH = hidden[torch.arange(len(prompts), device=self.device), lengths_P - 1]
        rows = torch.arange(len(prompts), device=self.device).repeat_interleave(samples)
        cache.keep(rows)
        hidden_RH = last_PH[rows]
        responses = [Response([], [], True) for _ in range(len(rows))]
        alive = torch.arange(len(rows), device=self.device)
        stop = torch.tensor(sampling.stop, device=self.device)
        done_R = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
        steps = []
        for left in reversed(range(sampling.max_new_tokens)):
            tokens_R, logprobs_R = _sample(self.model.lm_head(hidden_RH), sampling, generator)
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
    logits_RV = logits_RV.float()
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
