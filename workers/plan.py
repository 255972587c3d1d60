"""How much GPU memory each phase of a step takes on one rank: predicted from the settings alone, and measured.

The formulas stand in words in docs/memory.md. A prediction is the fullest moment of its phase: micro-batches full to
the last token, samples as long as they may be, and all that a phase holds at once. CUDA contexts and graphs, SGLang's
activations and what torch's allocator loses in fragments are not in it: MARGIN is for them.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, prod

import torch
import transformers

from workers.actor import ActorConfig
from workers.parallel import policy
from workers.parallel.flops import head_width
from workers.parallel.logprobs import Head
from workers.rollout import RolloutConfig

MARGIN = 0.05
"""The share of a GPU's memory that is left unused, for what no prediction counts and what a later step needs more."""

PHASES = ("sync", "rollout", "ref", "old_logprobs", "update")
"""Of a step, as its times are named. What stands between them is `rest`."""

OUTSIDE = "SGLang"
"""The part of a phase that lies in processes of its own."""

MASTER, ADAM, STEP = 4, 8, 1024
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj.weight", "down_proj.weight")

Parts = dict[str, int]
"""Bytes by what takes them."""


@dataclass(frozen=True)
class Weights:
    """How many parameters one rank deals with; tied embeddings count once."""

    whole: int  # of the whole model
    largest: int  # of its largest weight
    held: int  # on the rank that holds most, cut over shards and tensor slices
    root: int  # what is gathered with the embeddings, cut over the slices alone
    layer: int  # a layer, cut over the slices alone; 0 where layers are gathered with the embeddings
    head: int  # [V_local, H], the rows of the vocabulary of this slice

    @classmethod
    def of(cls, config: transformers.PretrainedConfig, shards: int, slices: int) -> "Weights":
        """Those of the model of `config` on shards x slices ranks, as load_policy cuts it."""
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        held = 0
        sliced = {}
        for name, parameter in model.named_parameters():
            rows, *others = parameter.shape
            by_rows = any(part in name for part in ROWS)
            columns = prod(others) // (slices if name.endswith(COLUMNS) else 1)
            rows //= slices if by_rows else 1
            sliced[name] = rows * columns
            held += ceil(rows / shards) * columns
        first = model.model.layers[0]
        alone = sum(parameter.numel() for parameter in first.parameters()) >= policy.SMALLEST_UNIT
        layer = sum(sliced[f"model.layers.0.{name}"] for name, _ in first.named_parameters()) if alone else 0
        sizes = [parameter.numel() for parameter in model.parameters()]
        root = sum(sliced.values()) - layer * len(model.model.layers)
        return cls(sum(sizes), max(sizes), held, root, layer, config.vocab_size // slices * config.hidden_size)


@dataclass(frozen=True)
class Job:
    """What decides the memory of one rank of a run."""

    model: transformers.PretrainedConfig
    compute: torch.dtype
    actor: ActorConfig
    rollout: RolloutConfig
    fuse: bool  # layers are compiled
    shards: int
    total: int  # bytes of the device
    samples: int  # of an update, on one data-parallel part
    longest: int  # tokens of the longest sample
    rows: int  # samples of a step, of one engine
    reference: bool = False
    off_policy: bool = False  # the step begins with the policy's own log-probabilities

    def weights(self) -> Weights:
        return Weights.of(self.model, self.shards, self.actor.tensor_parallel)

    @property
    def learned(self) -> int:
        """The most tokens of an update, on one part."""
        return self.samples * self.longest

    @property
    def tokens(self) -> int:
        """The most tokens of a micro-batch."""
        return min(self.actor.max_tokens_per_microbatch, self.learned)

    def with_settings(self, actor: dict | None = None, rollout: dict | None = None) -> "Job":
        """This job with other settings."""
        return replace(
            self, actor=replace(self.actor, **(actor or {})), rollout=replace(self.rollout, **(rollout or {}))
        )


def predict(job: Job, weights: Weights | None = None) -> dict[str, Parts]:
    """The parts of the fullest moment of `rest` and of each of PHASES that the job has, in bytes.

    weights: those of the job, where they are at hand.
    """
    w, e = weights or job.weights(), job.compute.itemsize
    held = {"weights": MASTER * w.held, "optimizer": ADAM * w.held, "reference": e * w.held * job.reference}
    offloaded = [{"parameters": "weights"}.get(what, what) for what in job.actor.offload]
    engine = {OUTSIDE: 0} if job.rollout.engine == "sglang" else {"engine": e * w.whole}
    awake, served = dict(engine), dict(engine)
    if OUTSIDE in engine:
        copy, static = e * w.whole // job.rollout.tensor_parallel, int(job.rollout.memory_fraction * job.total)
        engine[OUTSIDE] = {"none": static, "kv": copy}.get(job.rollout.release, 0)
        awake[OUTSIDE], served[OUTSIDE] = max(engine[OUTSIDE], copy), static
    else:
        served["engine"] += _embedded_rollout(job)
    bucket = min(max(job.rollout.bucket_megabytes * 2**20, e * w.largest), e * w.whole)
    buckets = bucket * (2 if job.shards * job.actor.tensor_parallel > 1 else 1)
    phases = {
        "rest": held | engine,
        "sync": {what: size for what, size in held.items() if what == "weights" or what not in offloaded}
        | {"buckets": buckets}
        | awake,
        "rollout": {what: size for what, size in held.items() if what not in offloaded} | served,
        "update": held | {"reference": held["reference"] * ("reference" not in offloaded)} | _update(job, w) | engine,
    }
    if job.reference:
        phases["ref"] = held | _logprobs(job, w) | engine
    if job.off_policy:
        phases["old_logprobs"] = held | _logprobs(job, w) | engine
    return {name: phases[name] for name in ("rest", *PHASES) if name in phases}


def activations(config: transformers.PretrainedConfig, slices: int, compute: torch.dtype, fuse: bool) -> int:
    """Bytes that a layer keeps of each token for its backward pass.

    Eager: what autograd saves of transformers' layer with varlen attention, whose norms compute in float32. Compiled:
    what goes into matrix products and attention or comes out of them; torch's min-cut partitioner lets the backward
    pass compute the rest again.
    """
    e = compute.itemsize
    hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    width = head_width(config)
    queries, keys, inner = heads * width // slices, kv_heads * width // slices, config.intermediate_size // slices
    # Query, key, value, what comes out, its log-sum-exp; and the two norms' divisors.
    small = 2 * (queries + keys) * e + 4 * heads // slices + 2 * 4
    normed = queries + keys if config.model_type == "qwen3" else 0
    small += 4 * normed // width
    if fuse:
        return small + 4 * hidden * e + normed * e + 3 * inner * e
    # A norm keeps its input in float32, and that normalised; a layer's two also what they hand on.
    return small + 2 * hidden * (4 + 2 * e) + normed * (4 + e) + 4 * inner * e


def _update(job: Job, w: Weights) -> Parts:
    """The fullest moment of an update, without what is held throughout."""
    e, tokens, layers = job.compute.itemsize, job.tokens, job.model.num_hidden_layers
    hidden, inner = job.model.hidden_size, job.model.intermediate_size // job.actor.tensor_parallel
    # Until the last micro-batch reduces them, FSDP adds up whole gradients in float32.
    adds_up = job.learned > tokens
    each = activations(job.model, job.actor.tensor_parallel, job.compute, job.fuse)
    again = [
        job.actor.recompute == "full" or (job.actor.recompute == "selective" and i % 2 == 1) for i in range(layers)
    ]
    before = [0, *accumulate(hidden * e if recomputed else each for recomputed in again)]
    logits = min(Head.chunk, tokens) * (w.head // hidden)
    moments = [
        {
            # The last norm, the hidden states that the head sees, and their gradient.
            "activations": tokens * (before[-1] + hidden * (4 + 4 * e)),
            "gradients": 4 * (w.root + layers * w.layer) * adds_up,
            # A chunk's logits, of which eager arithmetic makes five float32 copies, and the weight's gradient.
            "head": e * logits + 4 * w.head + max(e * w.head, 0 if job.fuse else 5 * 4 * logits),
        }
    ]
    for i in reversed(range(layers)):
        reduced = (layers - 1 - i) * w.layer
        moments.append(
            {
                # What the layers keep up to this one, and gradients on their way through its feed-forward part.
                "activations": tokens * (before[i] + each + e * hidden * again[i] + e * (2 * inner + 3 * hidden)),
                # Of this layer as autograd makes them and as they are reduced.
                "gradients": 4 * reduced // job.shards
                + (e + 4) * w.layer
                + 4 * (w.root + layers * w.layer - reduced) * adds_up,
                "head": e * w.head,
            }
        )
    # Last come the embeddings, whose gradient is the sum of two where they are the head too.
    last = {"gradients": 4 * w.held + (e + 4 + 4 * adds_up) * w.root, "head": e * w.head}
    moments.append({"activations": tokens * e * hidden} | last)
    return _gathered(job, w) | max(moments, key=lambda parts: sum(parts.values()))


def _logprobs(job: Job, w: Weights) -> Parts:
    """The fullest moment of a forward pass without gradients, without what is held throughout."""
    e, tokens, hidden = job.compute.itemsize, job.tokens, job.model.hidden_size
    logits = min(Head.chunk, tokens) * (w.head // hidden)
    inner = job.model.intermediate_size // job.actor.tensor_parallel
    in_a_layer = {"activations": tokens * e * 3 * (inner + hidden)}
    in_the_head = {"activations": tokens * e * 2 * hidden, "head": logits * (e + (0 if job.fuse else 3 * 4))}
    return _gathered(job, w) | max(in_a_layer, in_the_head, key=lambda parts: sum(parts.values()))


def _gathered(job: Job, w: Weights) -> Parts:
    """Weights in the compute type: the embeddings all the time; of the layers the one at work and the next, or all."""
    layers = job.model.num_hidden_layers
    at_once = min(layers, 2) if job.actor.reshards(job.shards) else layers
    return {"gathered": job.compute.itemsize * (w.root + w.layer * at_once)}


def _embedded_rollout(job: Job) -> int:
    """KV cache of all samples at once, held twice as finished rows leave it, and their logits as they are sampled."""
    model = job.model
    cell = 2 * model.num_hidden_layers * model.num_key_value_heads * head_width(model) * job.compute.itemsize
    return job.rows * (2 * job.longest * cell + 5 * 4 * model.vocab_size)


def most_tokens(job: Job, weights: Weights) -> int | None:
    """The largest actor.max_tokens_per_microbatch, a multiple of 1024 and no more than an update needs, that fits.

    None where even the longest sample does not.
    """

    def too_large(steps: int) -> bool:
        other = job.with_settings(actor={"max_tokens_per_microbatch": steps * STEP})
        return bool(_too_large(other, weights, ("ref", "old_logprobs", "update")))

    least, most = ceil(job.longest / STEP), ceil(job.learned / STEP)
    # The whole update at once may fit where a little less does not: then no gradients are added up.
    if not too_large(most):
        return most * STEP
    fitting = bisect_left(range(least, most), True, key=too_large)
    return (least + fitting - 1) * STEP if fitting else None


def most_memory_fraction(job: Job, weights: Weights) -> float | None:
    """The largest rollout.memory_fraction, in twentieths, that fits and holds the weights; None where none does."""
    phases = PHASES if job.rollout.release == "none" else ("sync", "rollout")
    for fraction in (twentieths / 20 for twentieths in range(19, 0, -1)):
        other = job.with_settings(rollout={"memory_fraction": fraction})
        holds = fraction * job.total > job.compute.itemsize * weights.whole / job.rollout.tensor_parallel
        if holds and not _too_large(other, weights, phases):
            return fraction
    return None


def advice(job: Job, weights: Weights | None = None) -> list[str]:
    """A sentence for each phase that does not fit, with what would help; else one of how far two settings could go.

    weights: those of the job, where they are at hand.
    """
    weights = weights or job.weights()
    limits = {}
    if tokens := most_tokens(job, weights):
        limits[f"actor.max_tokens_per_microbatch={tokens}"] = job.with_settings(
            actor={"max_tokens_per_microbatch": tokens}
        )
    sglang = job.rollout.engine == "sglang"
    if sglang and (fraction := most_memory_fraction(job, weights)):
        limits[f"rollout.memory_fraction={fraction:g}"] = job.with_settings(rollout={"memory_fraction": fraction})
    too_large = _too_large(job, weights)
    if not too_large:
        return [f"It fits. The largest that would, each alone: {', '.join(limits)}."]
    ways = limits | {
        "rollout.release=kv+weights": job.with_settings(rollout={"release": "kv+weights"}) if sglang else job,
        "actor.reshard=true": job.with_settings(actor={"reshard": True}),
        "actor.recompute=selective": job.with_settings(actor={"recompute": "selective"}),
        "actor.recompute=full": job.with_settings(actor={"recompute": "full"}),
        "actor.offload=[optimizer]": job.with_settings(actor={"offload": ["optimizer"]}),
        "actor.offload=[optimizer,parameters]": job.with_settings(actor={"offload": ["optimizer", "parameters"]}),
        "twice as many GPUs": replace(job, shards=2 * job.shards, samples=ceil(job.samples / 2)),
    }
    sizes = {}
    for way, other in ways.items():
        phases = predict(other, weights if other.shards == job.shards else None)
        sizes[way] = {name: sum(parts.values()) for name, parts in phases.items()}
    limit, sentences = job.total * (1 - MARGIN), []
    for name, size in too_large.items():
        enough = [way for way in ways if sizes[way][name] <= limit]
        less = [way for way in ways if sizes[way][name] < size]
        help_ = f"enough alone: {', '.join(enough)}" if enough else f"not enough alone, but less: {', '.join(less)}"
        sentences.append(f"{name} is predicted to need {gib(size)} of {gib(limit)}; {help_}.")
    return sentences


def _too_large(job: Job, weights: Weights, phases: Collection[str] = ("rest", *PHASES)) -> dict[str, int]:
    """The bytes of those of `phases` that do not leave MARGIN of the device."""
    sizes = {name: sum(parts.values()) for name, parts in predict(job, weights).items() if name in phases}
    return {name: size for name, size in sizes.items() if size > job.total * (1 - MARGIN)}


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


class Peaks:
    """The fullest moment of each phase on this process's CUDA device; nothing where `cuda` is False.

    Torch counts one peak, which every look here begins anew: whoever else wants one asks here.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._open: list[str] = []
        self._peaks: dict[str, int] = {}
        self._reserved = 0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Watch the block as the phase `name`; phases may nest, and the same name keeps its largest."""
        self._look()
        self._open.append(name)
        try:
            yield
        finally:
            self._look()
            self._open.remove(name)

    def _look(self) -> None:
        if not self._cuda:
            return
        self._reserved = self.most_reserved()
        allocated = torch.cuda.max_memory_allocated()
        for name in self._open:
            self._peaks[name] = max(self._peaks.get(name, 0), allocated)
        torch.cuda.reset_peak_memory_stats()

    def most_reserved(self) -> int:
        """The most bytes that torch's allocator has held since the process began."""
        return max(self._reserved, torch.cuda.max_memory_reserved())

    def metrics(self) -> dict[str, float]:
        """Allocated GiB by "memory/NAME_peak_gib" of those of PHASES that ended since the last call."""
        peaks, self._peaks = self._peaks, {}
        return {f"memory/{name}_peak_gib": size / 2**30 for name, size in peaks.items() if name in PHASES}
