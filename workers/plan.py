"""How much memory of a GPU, or of a host without, each phase of a step takes on one rank, predicted from the settings.

docs/memory.md has the formulas in words. A prediction is the fullest moment of its phase: micro-batches full to the
last token, samples as long as they may be, and all that a phase holds at once. MARGIN is for what is not in it: CUDA
contexts and graphs, SGLang's activations and what torch's allocator loses in fragments.
"""

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, prod
from typing import Any

import torch
import transformers

from workers.config import ActorConfig
from workers.memory import MARGIN, PHASES
from workers.models import family_of
from workers.models.llama import Llama
from workers.parallel import policy
from workers.parallel.logprobs import Head
from workers.rollout import RolloutConfig
from workers.sharding import BUCKET_BYTES

OUTSIDE = "SGLang"  # takes memory in processes of its own
HOST_MARGIN = 0.2  # MARGIN of a host, where what is resident was a fifth more than predicted (docs/memory.md)
MASTER, ADAM = 4, 8  # bytes of each parameter
STEP = 1024  # tokens

Breakdown = dict[str, int]  # bytes by what takes them


@dataclass(frozen=True)
class Weights:
    """How many parameters one rank deals with; tied embeddings count once."""

    total: int  # of the whole model
    largest: int  # of its largest weight
    local: int  # on the rank that stores most, cut over dp_shard and tp_size
    root: int  # what is gathered with the embeddings, cut over tp_size alone
    layer: int  # a layer, cut over tp_size alone; 0 where layers are gathered with the embeddings
    head: int  # [V_local, H], this rank's rows of the vocabulary
    teacher: "Weights | None" = None  # those of a teacher

    @classmethod
    def of(cls, config: transformers.PretrainedConfig, dp_shard: int, tp_size: int) -> "Weights":
        """Those of the model of `config` on dp_shard x tp_size ranks, as load_policy cuts it."""
        family, local, gathered = family_of(config), 0, {}
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            shape, placement = list(parameter.shape), family.placement(name)
            if placement.is_shard():
                shape[placement.dim] //= tp_size
            gathered[name] = prod(shape)
            local += ceil(shape[0] / dp_shard) * prod(shape[1:])
        layer = 0
        if sum(parameter.numel() for parameter in model.model.layers[0].parameters()) >= policy.SMALLEST_UNIT:
            layer = sum(size for name, size in gathered.items() if name.startswith("model.layers.0."))
        root = sum(gathered.values()) - layer * family.layers
        sizes = [parameter.numel() for parameter in model.parameters()]
        return cls(sum(sizes), max(sizes), local, root, layer, family.vocab // tp_size * family.hidden)


@dataclass(frozen=True)
class Job:
    """What decides the memory of one rank of a run."""

    model: transformers.PretrainedConfig
    compute: torch.dtype
    actor: ActorConfig
    rollout: RolloutConfig
    compiled: bool  # layers and head
    dp_shard: int
    total: int  # bytes of the device
    samples: int  # of an update, on one data-parallel rank
    longest: int  # tokens of the longest sample
    rows: int  # samples of a step, of one engine
    reference: bool = False
    teacher: transformers.PretrainedConfig | None = None
    off_policy: bool = False  # the step begins with the policy's own log-probabilities
    on_cpu: bool = False  # `total` is of the host, to which nothing can be offloaded

    @property
    def family(self) -> Llama:
        return family_of(self.model)

    def weights(self) -> Weights:
        cuts = self.dp_shard, self.actor.tensor_parallel
        teacher = Weights.of(self.teacher, *cuts) if self.teacher is not None else None
        return replace(Weights.of(self.model, *cuts), teacher=teacher)

    @property
    def cache(self) -> int:
        """Bytes of the keys and values of the longest sample, over all ranks of its engine."""
        heads = self.family.kv_heads * self.family.head_dim
        return self.longest * 2 * self.family.layers * heads * self.compute.itemsize

    @property
    def room(self) -> float:
        """Bytes of the device that may be filled."""
        return self.total * (1 - (HOST_MARGIN if self.on_cpu else MARGIN))

    @property
    def copies_logits(self) -> bool:
        """Whether the head makes float32 copies of a chunk's logits, which on a CPU are of a few rows alone."""
        return not self.compiled and not self.on_cpu

    @property
    def learned(self) -> int:
        """The most tokens of an update, on one data-parallel rank."""
        return self.samples * self.longest

    @property
    def tokens(self) -> int:
        """The most tokens of a micro-batch."""
        return min(self.actor.max_tokens_per_microbatch, self.learned)

    def having(self, group: str, **settings: Any) -> "Job":
        """This job with other settings of the group actor or rollout."""
        return replace(self, **{group: replace(getattr(self, group), **settings)})


def concurrent_samples(job: Job) -> int:
    """How many samples an SGLang engine works on at once: as set, or those of a step that its memory holds.

    A sample is counted with a quarter of its longest: few get there, and SGLang puts back what it has no room for.
    """
    if job.rollout.concurrent_samples is not None:
        return job.rollout.concurrent_samples
    held = job.rollout.tensor_parallel * int(job.rollout.memory_fraction * job.total)
    return max(1, min(job.rows, (held - job.compute.itemsize * job.weights().total) // (job.cache // 4)))


def predict(job: Job, weights: Weights | None = None) -> dict[str, Breakdown]:
    """What takes how many bytes at the fullest moment of each of PHASES that the job has, and between them (`rest`)."""
    w, e, family = weights or job.weights(), job.compute.itemsize, job.family
    stored = {"weights": MASTER * w.local, "optimizer": ADAM * w.local, "reference": e * w.local * job.reference}
    stored["teacher"] = e * w.teacher.local if w.teacher else 0
    names = {"optimizer": ["optimizer"], "parameters": ["weights"], "reference": ["reference", "teacher"]}
    offloaded = [] if job.on_cpu else [name for what in job.actor.offload for name in names[what]]
    kept = {what: size for what, size in stored.items() if what not in offloaded}
    copy, share = e * w.total // job.rollout.tensor_parallel, int(job.rollout.memory_fraction * job.total)
    if job.rollout.engine == "sglang":
        engine, left, served = OUTSIDE, {"none": share, "kv": copy}.get(job.rollout.release, 0), share
    else:
        # KV cache of the samples at work, and of each a row of float32 logits with what drawing from it makes of it.
        row = job.cache + 6 * 4 * family.vocab
        served = copy + min(job.rows, job.rollout.concurrent_samples or job.rows) * row
        engine, left, served = "engine", copy, max(copy, min(share, served))
    rest = stored | {engine: left}
    bucket = min(max(BUCKET_BYTES, e * w.largest), e * w.total)
    buckets = bucket * (2 if job.dp_shard * job.actor.tensor_parallel > 1 else 1)
    awake = {"buckets": buckets, engine: max(left, copy)}
    phases = {"rest": rest, "sync": {"weights": stored["weights"]} | kept | awake, "rollout": kept | {engine: served}}
    if job.reference:
        phases["ref"] = rest | _logprobs(job, w)
        rest = rest | {"reference": kept.get("reference", 0)}  # nothing else needs it
    if w.teacher:
        phases["teacher"] = rest | _logprobs(replace(job, model=job.teacher), w.teacher)
        rest = rest | {"teacher": kept.get("teacher", 0)}
    if job.off_policy:
        phases["old_logprobs"] = rest | _logprobs(job, w)
    return phases | {"update": rest | _update(job, w)}


def _update(job: Job, w: Weights) -> Breakdown:
    """The fullest moment of an update, without what is stored throughout."""
    e, tokens, hidden, layers = job.compute.itemsize, job.tokens, job.family.hidden, job.family.layers
    inner = job.family.feed_forward // job.actor.tensor_parallel
    # Until the last micro-batch reduces them, FSDP adds up whole gradients in float32.
    adds_up = job.learned > tokens
    each = job.family.activations(job.actor.tensor_parallel, job.compute, job.compiled)
    recompute = {"none": (), "selective": range(1, layers, 2), "full": range(layers)}[job.actor.recompute]
    before = [0, *accumulate(hidden * e if i in recompute else each for i in range(layers))]
    logits = min(Head.chunk_size, tokens) * (w.head // hidden)
    # Activations, gradients and the head. First in the head: the last norm, the hidden states that it sees and their
    # gradient; a chunk's logits, of which eager arithmetic makes five float32 copies, and the weight's gradient.
    head = e * logits + 4 * w.head + max(e * w.head, 5 * 4 * logits * job.copies_logits)
    moments = [(tokens * (before[-1] + hidden * (4 + 4 * e)), 4 * (w.root + layers * w.layer) * adds_up, head)]
    for i in reversed(range(layers)):
        # Of the layers up to this one, and gradients that pass through its feed-forward part.
        passing = before[i] + each + e * hidden * (i in recompute) + e * (2 * inner + 3 * hidden)
        # Of the layers after this one; of this one as autograd makes them and as they are reduced.
        reduced = (layers - 1 - i) * w.layer
        gradients = 4 * reduced // job.dp_shard + (e + 4) * w.layer
        gradients += 4 * (w.root + layers * w.layer - reduced) * adds_up
        moments.append((tokens * passing, gradients, e * w.head))
    # Last come the embeddings, whose gradient is the sum of two where they are the head too.
    moments.append((tokens * e * hidden, 4 * w.local + (e + 4 + 4 * adds_up) * w.root, e * w.head))
    return _gathered(job, w) | dict(zip(("activations", "gradients", "head"), max(moments, key=sum), strict=True))


def _logprobs(job: Job, w: Weights) -> Breakdown:
    """The fullest moment of a forward pass without gradients, without what is stored throughout."""
    e, tokens, hidden = job.compute.itemsize, job.tokens, job.family.hidden
    logits = min(Head.chunk_size, tokens) * (w.head // hidden)
    in_a_layer = {"activations": tokens * e * 3 * (job.family.feed_forward // job.actor.tensor_parallel + hidden)}
    in_the_head = {"activations": tokens * e * 2 * hidden, "head": logits * (e + 3 * 4 * job.copies_logits)}
    return _gathered(job, w) | max(in_a_layer, in_the_head, key=lambda parts: sum(parts.values()))


def _gathered(job: Job, w: Weights) -> Breakdown:
    """Weights in the compute type: the embeddings throughout; of the layers the one at work and the next, or all."""
    at_once = min(job.family.layers, 2) if job.actor.reshards(job.dp_shard) else job.family.layers
    return {"gathered": job.compute.itemsize * (w.root + w.layer * at_once)}


def most_tokens(job: Job, weights: Weights) -> int | None:
    """The largest multiple of 1024 that fits as actor.max_tokens_per_microbatch, up to an update's tokens, if any."""

    def too_large(steps: int) -> bool:
        other = job.having("actor", max_tokens_per_microbatch=steps * STEP)
        return bool(_too_large(other, weights, ("ref", "teacher", "old_logprobs", "update")))

    least, most = ceil(job.longest / STEP), ceil(job.learned / STEP)
    # The whole update at once may fit where a little less does not: then no gradients are added up.
    if not too_large(most):
        return most * STEP
    fitting = bisect_left(range(least, most), True, key=too_large)
    return (least + fitting - 1) * STEP if fitting else None


def most_memory_fraction(job: Job, weights: Weights) -> float | None:
    """The largest rollout.memory_fraction, in twentieths, that fits and holds the weights; None where none does."""
    phases = PHASES if job.rollout.release == "none" else ("sync", "rollout")
    copy = job.compute.itemsize * weights.total / job.rollout.tensor_parallel
    for fraction in (twentieths / 20 for twentieths in range(19, 0, -1)):
        other = job.having("rollout", memory_fraction=fraction)
        if fraction * job.total > copy and not _too_large(other, weights, phases):
            return fraction
    return None


def advice(job: Job, weights: Weights) -> list[str]:
    """A sentence for each phase that does not fit, with what would help; else one of how far two settings could go."""
    limits = {}
    if tokens := most_tokens(job, weights):
        limits[f"actor.max_tokens_per_microbatch={tokens}"] = job.having("actor", max_tokens_per_microbatch=tokens)
    if fraction := most_memory_fraction(job, weights):
        limits[f"rollout.memory_fraction={fraction:g}"] = job.having("rollout", memory_fraction=fraction)
    if not (too_large := _too_large(job, weights)):
        return [f"It fits. The largest that would, each alone: {', '.join(limits)}."]
    ways = limits | {
        "rollout.release=kv+weights": job.having("rollout", release="kv+weights"),
        "actor.reshard=true": job.having("actor", reshard=True),
        "actor.recompute=selective": job.having("actor", recompute="selective"),
        "actor.recompute=full": job.having("actor", recompute="full"),
        "actor.offload=[reference]": job.having("actor", offload=["reference"]),
        "actor.offload=[optimizer]": job.having("actor", offload=["optimizer"]),
        "actor.offload=[optimizer,parameters]": job.having("actor", offload=["optimizer", "parameters"]),
    }
    if not job.on_cpu:  # more processes share the same host
        ways["twice as many GPUs"] = replace(job, dp_shard=2 * job.dp_shard, samples=ceil(job.samples / 2))
    sizes = {way: _sizes(other, weights if other.dp_shard == job.dp_shard else None) for way, other in ways.items()}
    limit, sentences = job.room, []
    for name, size in too_large.items():
        enough = [way for way in ways if sizes[way][name] <= limit]
        less = [way for way in ways if sizes[way][name] < size]
        help_ = f"enough alone: {', '.join(enough)}" if enough else f"not enough alone, but less: {', '.join(less)}"
        sentences.append(f"{name} is predicted to need {gib(size)} of {gib(limit)}; {help_}.")
    return sentences


def _sizes(job: Job, weights: Weights | None) -> dict[str, int]:
    """The bytes of each phase."""
    return {name: sum(parts.values()) for name, parts in predict(job, weights).items()}


def _too_large(job: Job, weights: Weights, phases: Collection[str] = ("rest", *PHASES)) -> dict[str, int]:
    """The bytes of those of `phases` that do not leave MARGIN of the device."""
    limit = job.room
    return {name: size for name, size in _sizes(job, weights).items() if name in phases and size > limit}


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
