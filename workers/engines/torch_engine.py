"""The embedded engine: transformers' model in a continuous batch, for CPUs, small models and tests.

In the batch requests of any length lie side by side in one KV cache, each leaving when it is done. Rows are aligned to
the left, each with its own length, so that nothing is left-padded. A request joins as soon as there is room, in the row
of one that left or in a new one.
"""

import asyncio
import random
from collections import deque
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from workers.config import ModelConfig
from workers.engines.protocol import Bucket, Response, Sampling, T, checked
from workers.engines.stop import StopSearch, StopStrings
from workers.models.hub import compute_dtype, read_config
from workers.parallel.mesh import memory_for_each

# All but cuDNN, which plans anew for every length: tens of milliseconds a token.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_IDLE = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_new_tokens=1, stop=(), seed=0)
"""Of a row in which no request is."""


def share_of_memory(device: torch.device, fraction: float) -> int:
    """Bytes of the device's memory, or of what the host has free, that one process's engine may fill."""
    if device.type == "cuda":
        return int(fraction * torch.cuda.get_device_properties(device).total_memory)
    return int(fraction * memory_for_each())


class TorchEngine:
    """A whole copy of the model in every process. Asleep it keeps its weights: they are small beside the actor's.

    `Sampling.seed` decides a response, but for rounding: which requests share a batch decides how products round, and
    that is the same in each run with the same requests. most_rows: requests at once. memory: bytes for weights,
    KV cache and logits.
    """

    concurrent_samples = None

    def __init__(self, model: ModelConfig, device: torch.device, most_rows: int = 512, memory: int = 2**32) -> None:
        causal_lm = transformers.AutoModelForCausalLM.from_config(
            read_config(model), dtype=compute_dtype(model, device), attn_implementation="cached"
        )
        self.model = causal_lm.to(device).eval().requires_grad_(False)
        self.weights = dict(self.model.named_parameters())
        self.shapes = {name: weight.shape for name, weight in self.weights.items()}
        self.dtype = self.model.dtype
        weights = sum(weight.nbytes for weight in self.weights.values())
        self.batch = ContinuousBatch(self.model, most_rows, memory - weights)
        self.asleep, self.freed = (), 0
        self.serving = self.holds_weights = False
        self.stops = StopStrings(model)

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

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self.serving:
            work.close()
            raise RuntimeError("The engine is asleep: it serves inside `with sharding.serving()` alone.")
        return asyncio.run(self._serve(work))

    async def _serve(self, work: Coroutine[Any, Any, T]) -> T:
        self.news = asyncio.Event()
        task = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self.news.set())
        try:
            while not task.done():
                # Those who were answered go on, and may ask for more, before the next step.
                await asyncio.sleep(0)
                if self.batch:
                    self.batch.step()
                elif not task.done():
                    self.news.clear()
                    await self.news.wait()
            return task.result()
        finally:
            self.batch.abort()

    async def sample(self, tokens: Sequence[int] | np.ndarray, sampling: Sampling) -> Response:
        search = StopSearch(self.stops, sampling.stop_strings) if sampling.stop_strings else None
        request = Request(np.asarray(tokens).tolist(), sampling, asyncio.get_running_loop().create_future(), search)
        self.batch.waiting.append(request)
        self.news.set()
        return await request.answer

    @property
    def tokens_at_work(self) -> int:
        return sum(len(request.tokens) for request in self.batch.rows if request is not None)

    def abort(self) -> None:
        self.batch.abort()


@dataclass(eq=False)
class Request:
    """A response in the making. Its draws depend on its seed alone, whatever it shares the batch with."""

    prompt: list[int]
    sampling: Sampling
    answer: asyncio.Future
    search: StopSearch | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.sampling.seed)

    @property
    def longest(self) -> int:
        """The most tokens that it may come to."""
        return len(self.prompt) + self.sampling.max_new_tokens

    def end(self, reason: str) -> None:
        if not self.answer.done():  # nobody waits for it any more
            self.answer.set_result(Response(self.tokens, self.logprobs, reason))


class _Cache:
    """Keys and values of every layer, [rows, KV heads, cells, head size] each.

    Layers are tensors of their own and change size one by one, so that there are never two whole caches.
    """

    def __init__(self, model: transformers.PreTrainedModel, rows: int, cells: int) -> None:
        config = model.config
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.group = config.num_attention_heads // heads  # query heads of one key head
        like = {"dtype": model.dtype, "device": model.device}
        layers, shape = range(config.num_hidden_layers), (rows, heads, cells, width)
        self.keys, self.values = ([torch.zeros(shape, **like) for _ in layers] for _ in range(2))
        self.rows, self.cells = rows, cells

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in (*self.keys, *self.values))

    def begin(self, positions_RQ: Tensor) -> None:
        """Prepare for new tokens at `positions_RQ`, the same number in every row."""
        self.positions_RQ = positions_RQ
        self.in_use = int(positions_RQ.max()) + 1
        cells = torch.arange(self.in_use, device=positions_RQ.device)
        # The query heads of one key head stand in line as its queries, which every kernel takes, unlike grouped heads.
        self.mask = (cells <= positions_RQ[:, :, None])[:, None].repeat(1, 1, self.group, 1)

    def append(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(key.shape[0], device=key.device)[:, None]
        for store, new in ((self.keys, key), (self.values, value)):
            store[layer][rows, :, self.positions_RQ] = new.transpose(1, 2)
        return self.keys[layer][:, :, : self.in_use], self.values[layer][:, :, : self.in_use]

    def take(self, other: "_Cache", rows: Sequence[int], into: Sequence[int]) -> None:
        """Copy `rows` of another cache, which may repeat, to the rows `into` of this one."""
        cells = min(self.cells, other.cells)
        for ours, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            ours[list(into), :, :cells] = theirs[list(rows), :, :cells]

    def resize(self, kept: Sequence[int], rows: int, cells: int) -> None:
        """Keep the rows `kept` as the first of `rows`, of `cells` tokens each."""
        both = min(cells, self.cells)
        for layers in (self.keys, self.values):
            for i, before in enumerate(layers):
                layers[i] = before.new_zeros(rows, before.shape[1], cells, before.shape[3])
                layers[i][: len(kept), :, :both] = before[list(kept), :, :both]
        self.rows, self.cells = rows, cells


def _cached_attention(module, query, key, value, attention_mask, *, scaling, cache, **_):
    keys, values = cache.append(module.layer_idx, key, value)
    rows, kv_heads, _, size = keys.shape
    lined_up = query.reshape(rows, kv_heads, -1, size)
    out = F.scaled_dot_product_attention(lined_up, keys, values, attn_mask=cache.mask, scale=scaling)
    return out.reshape(query.shape).transpose(1, 2), None


AttentionInterface.register("cached", _cached_attention)


class ContinuousBatch:
    """What `model` works on: at most `most_rows` requests at once, in `memory` bytes. Their order alone decides."""

    def __init__(self, model: transformers.PreTrainedModel, most_rows: int, memory: int) -> None:
        self.model, self.most_rows, self.memory = model, most_rows, memory
        self.waiting: deque[Request] = deque()
        self.rows: list[Request | None] = []  # None: the request that was there is done
        self.hidden_RH: Tensor | None = None  # from which each row draws its next token
        self.passes = 0  # forward passes so far
        self.cache = _Cache(model, 0, 0)
        one_cell = _Cache(model, 1, 1)
        self.cell_bytes, config = one_cell.nbytes, model.config
        # Of a prompt's token, what a layer makes of it; a float32 row of logits, and what drawing from it makes of it.
        self.read_bytes = self.cell_bytes + 4 * (config.hidden_size + config.intermediate_size) * model.dtype.itemsize
        self.row_bytes = 6 * 4 * config.vocab_size

    def __len__(self) -> int:
        return len(self.waiting) + sum(row is not None for row in self.rows)

    def abort(self) -> None:
        """End all requests with what they have."""
        for request in (*self.waiting, *self.rows):
            if request is not None:
                request.end("abort")
        self.waiting.clear()
        self.rows, self.cache = [], _Cache(self.model, 0, 0)

    @torch.no_grad()
    @sdpa_kernel(_KERNELS)
    def step(self) -> None:
        """Let in the requests that there is room for, and draw one token for each that is at work."""
        if joining := self._choose():
            self._admit(joining)
        self._draw()
        at_work = [row for row, request in enumerate(self.rows) if request is not None]
        # To drop rows copies the whole cache, so finished ones are computed on until there are enough of them.
        if not at_work or (not self.waiting and len(at_work) <= 0.8 * len(self.rows)):
            self._resize(at_work, len(at_work), max((self.rows[row].longest for row in at_work), default=0))
        if at_work:
            # In the row of a finished request nothing is read: its first cell takes what is computed there.
            tokens = [[0] if request is None else request.tokens[-1:] for request in self.rows]
            lengths = [
                [0] if request is None else [len(request.prompt) + len(request.tokens) - 1] for request in self.rows
            ]
            self.hidden_RH = self._forward(tokens, lengths, self.cache)[:, 0]

    def _choose(self) -> list[Request]:
        """The requests that have waited longest, as many as there is room for; one at least where none is at work."""
        joining: list[Request] = []
        prompts: set[tuple[int, ...]] = set()
        at_work, cells = sum(row is not None for row in self.rows), self.cache.cells
        while self.waiting and at_work + len(joining) < self.most_rows:
            cells = max(cells, self.waiting[0].longest)
            rows = max(len(self.rows), at_work + len(joining) + 1)
            prompts.add(tuple(self.waiting[0].prompt))
            if self.most_bytes(rows, cells, prompts) > self.memory and at_work + len(joining):
                break
            joining.append(self.waiting.popleft())
        return joining

    def most_bytes(self, rows: int, cells: int, prompts: Collection[Sequence[int]]) -> int:
        """What it takes, at most, to read `prompts`, to give their requests some of `rows` of `cells`, and to draw."""
        cache, read = rows * cells * self.cell_bytes, len(prompts) * max(map(len, prompts), default=0)
        # While the keys or values of a layer change size, they are there up to three times.
        return cache + cache // self.model.config.num_hidden_layers + rows * self.row_bytes + read * self.read_bytes

    def _admit(self, joining: list[Request]) -> None:
        """Read the prompts of `joining`, each different one once, and give every request a row."""
        prompts = list(dict.fromkeys(tuple(request.prompt) for request in joining))
        longest = max(map(len, prompts))
        # Cells past a prompt's end hold padding until its own tokens overwrite them; no mask reaches there before.
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
        cache = _Cache(self.model, len(prompts), longest)
        hidden = self._forward(padded, [list(range(longest))] * len(prompts), cache)
        last_PH = hidden[range(len(prompts)), [len(prompt) - 1 for prompt in prompts]]
        free = [row for row, request in enumerate(self.rows) if request is None]
        rows = len(self.rows) + max(0, len(joining) - len(free))
        cells = max(self.cache.cells, *(request.longest for request in joining))
        if rows > len(self.rows) or cells > self.cache.cells:
            free += range(len(self.rows), rows)
            self._resize(list(range(len(self.rows))), rows, cells)
        sources = [prompts.index(tuple(request.prompt)) for request in joining]
        targets = free[: len(joining)]
        self.cache.take(cache, sources, targets)
        self.hidden_RH[targets] = last_PH[sources]
        for row, request in zip(targets, joining, strict=True):
            self.rows[row] = request

    def _resize(self, kept: list[int], rows: int, cells: int) -> None:
        """Keep the rows `kept`, and make room for `rows` in all of `cells` tokens each."""
        hidden_RH = self.hidden_RH
        self.cache.resize(kept, rows, cells)
        self.hidden_RH = torch.zeros(
            rows, self.model.config.hidden_size, dtype=self.model.dtype, device=self.model.device
        )
        if kept:
            self.hidden_RH[: len(kept)] = hidden_RH[kept]
        self.rows = [self.rows[row] for row in kept] + [None] * (rows - len(kept))

    def _draw(self) -> None:
        """Draw the next token of each request; those that end leave their rows."""
        uniform = [0.0 if request is None else request.random.random() for request in self.rows]
        sampling = [_IDLE if request is None else request.sampling for request in self.rows]
        tokens_R, logprobs_R = draw(self.model.lm_head(self.hidden_RH).float(), sampling, uniform)
        for row, (token, logprob) in enumerate(zip(tokens_R.tolist(), logprobs_R.tolist(), strict=True)):
            if (request := self.rows[row]) is None:
                continue
            request.tokens.append(token)
            request.logprobs.append(logprob)
            stopped = token in request.sampling.stop
            if request.search is not None:
                stopped = request.search.end(request.tokens) is not None or stopped
            if stopped or len(request.tokens) == request.sampling.max_new_tokens:
                request.end("stop" if stopped else "length")
            if request.answer.done():
                self.rows[row] = None

    def _forward(self, tokens: list[list[int]], positions: list[list[int]], cache: _Cache) -> Tensor:
        self.passes += 1
        tokens_RQ, positions_RQ = (torch.tensor(ids, device=self.model.device) for ids in (tokens, positions))
        cache.begin(positions_RQ)
        return self.model.model(
            input_ids=tokens_RQ, position_ids=positions_RQ, cache=cache, use_cache=False
        ).last_hidden_state


def draw(logits_RV: Tensor, sampling: Sequence[Sampling], uniform: Sequence[float]) -> tuple[Tensor, Tensor]:
    """A token a row, [R] int64, by `uniform` in [0, 1), or the likeliest at temperature 0; its logprob, [R] float32."""

    def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits_RV.device)[:, None]

    temperature_R1 = column([s.temperature for s in sampling])
    greedy_R1 = temperature_R1 == 0
    logprobs_RV = (logits_RV / temperature_R1.where(~greedy_R1, 1.0)).log_softmax(-1)
    weights_RV = logprobs_RV.exp()
    if any(s.top_k or s.top_p < 1 for s in sampling):
        sorted_RV, order_RV = weights_RV.sort(-1, descending=True)
        ranks_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
        beyond_RV = sorted_RV.cumsum(-1) - sorted_RV >= column([s.top_p if s.top_p < 1 else 2.0 for s in sampling])
        beyond_RV |= ranks_V >= column([s.top_k or len(ranks_V) for s in sampling])
        weights_RV = weights_RV.masked_fill(beyond_RV.gather(1, order_RV.argsort(-1)), 0.0)
    # The first token at which the sum of probabilities passes the draw.
    reach_RV = weights_RV.double().cumsum(-1)
    drawn_R1 = torch.searchsorted(reach_RV, column(list(uniform), torch.double) * reach_RV[:, -1:], right=True)
    drawn_R1.clamp_(max=logits_RV.shape[1] - 1)  # logits that are NaN lead past it, and the update will say so
    tokens_R1 = drawn_R1.where(~greedy_R1, logprobs_RV.argmax(-1, keepdim=True))
    return tokens_R1[:, 0], logprobs_RV.gather(1, tokens_R1)[:, 0]
