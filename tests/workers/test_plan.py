"""The memory plan against what FSDP really holds, what autograd really saves, and what an update really takes."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from examples.countdown import make_model
from tests.workers.launch import torchrun
from tests.workers.plan_probe import counts
from workers import plan
from workers.config import ActorConfig, LoraConfig, ModelConfig
from workers.engines.torch_engine import TorchEngine
from workers.memory import Peaks, SharedMemory
from workers.microbatch import MicroBatch
from workers.models import family_of
from workers.parallel import attention, policy
from workers.parallel.attention import PackedSequences, packed_class, rotary_angles
from workers.parallel.policy import load_policy
from workers.plan import Job, Weights, advice, most_memory_fraction, most_tokens, predict
from workers.rollout import RolloutConfig

KINDS = {"qwen2": False, "qwen2-tied": True, "qwen3": True, "llama": False, "llama-odd": False}
"""Tied or not. Two do not divide the rows of the odd one, which only shards may do."""
GIB, H200 = 2**30, 141 * 10**9


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, tied in KINDS.items():
        sizes = {"hidden": 36, "heads": 4, "kv_heads": 2, "head_dim": 6, "feed_forward": 51 if "odd" in name else 50}
        model = make_model(name.split("-")[0], tied=tied, **sizes)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def two_processes(models, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("plan")
    torchrun(2, "plan_probe", models, out, 1, 2, timeout=200)
    return out


# parameters


@pytest.fixture
def layers_alone(monkeypatch):
    """Layers are gathered one by one, however small."""
    monkeypatch.setattr(policy, "SMALLEST_UNIT", 0)


@pytest.mark.parametrize(
    ("kind", "cut"),
    [(kind, cut) for cut in ((1, 1), (2, 1), (1, 2)) for kind in KINDS if cut != (1, 2) or "odd" not in kind],
)
def test_parameters_are_counted_as_one_process_and_two_hold_them(
    kind, cut, models, layout, two_processes, layers_alone
):
    """cut: dp_shard and tp_size."""
    if cut == (1, 1):
        seen = counts(models / kind, layout)
    else:
        seen = torch.load(two_processes / f"{kind}-2-{cut[1]}.pt", weights_only=False)
    weights = Weights.of(transformers.AutoConfig.from_pretrained(models / kind), *cut)
    assert seen == {name: getattr(weights, name) for name in ("local", "layer", "root")}


def test_small_layers_are_gathered_with_the_embeddings(models):
    weights = Weights.of(transformers.AutoConfig.from_pretrained(models / "qwen3"), 2, 1)
    assert (weights.layer, weights.root) == (0, weights.total)


# activations


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Attention keeps and makes what its kernels do on CUDA, but without their arithmetic, which no CPU has."""

    def forward(q, k, v, **_):
        return torch.zeros_like(q), q.new_zeros(q.shape[1], q.shape[0], dtype=torch.float32)

    def backward(q, k, v, *_, **__):
        return [torch.zeros_like(x) for x in (q, k, v)]

    def packed_attention(q, k, v, scaling, sequences, by_flash4):
        return attention.flash4(q, k, v, sequences.cu_seqlens, sequences.max_seqlen, scaling)[0]

    monkeypatch.setattr(attention, "kernels", lambda: (forward, backward))
    monkeypatch.setattr(attention, "packed_attention", packed_attention)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_saves_what_the_formula_says(kind, dtype, compiled, as_on_cuda):
    model = make_model(kind).to(dtype)
    layer, family, tokens, saved = model.model.layers[0], family_of(model.config), 96, {}
    layer.self_attn.__class__ = packed_class(type(layer.self_attn), family.attention, flash4=False)
    forward = layer.forward
    if compiled:
        # The passes that torch.compile's default takes, without compiling kernels.
        torch._dynamo.reset()
        forward = torch.compile(forward, dynamic=True, backend="aot_eager_decomp_partition")
    hidden = torch.randn(1, tokens, 64, dtype=dtype, requires_grad=True)
    sequences = PackedSequences.of([tokens], torch.device("cpu"))
    angles = rotary_angles(*model.model.rotary_emb(hidden, sequences.positions[None]))
    # All layers share the angles, and parameters are there anyway.
    shared = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *angles]}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward(hidden, position_embeddings=angles, sequences=sequences)
    assert out.requires_grad
    a_token = sum(storage.nbytes() for storage in saved.values()) / tokens
    assert family.activations(1, dtype, compiled) == pytest.approx(a_token, rel=0.02)


class Live(TorchDispatchMode):
    """Follows the bytes of all storages that operations made; their most is in `most`."""

    def __init__(self):
        super().__init__()
        self.seen, self.most = {}, 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves((result, options)):
            if isinstance(tensor, torch.Tensor):
                tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                reference = StorageWeakRef(tensor.untyped_storage())
                self.seen.setdefault(reference.cdata, reference)
        found = {c: torch.UntypedStorage._new_with_weak_ptr(c) for c in self.seen}
        alive = {c: storage for c, storage in found.items() if storage is not None}
        self.seen = {c: self.seen[c] for c in alive}
        self.most = max(self.most, sum(storage.nbytes() for storage in alive.values()))
        return result


def job_like(config, **changes) -> Job:
    """A job of the embedded engine on one process, in bfloat16 and eager, of 8 samples with 128 tokens."""
    job = Job(config, torch.bfloat16, ActorConfig(), RolloutConfig(), False, 1, H200, 8, 128, 8)
    return dataclasses.replace(job, **changes)


def packed(samples: int = 8, length: int = 128) -> MicroBatch:
    mask = (torch.arange(length) > 0).repeat(samples)
    fields = {"tokens": torch.randint(2, 118, (len(mask),)), "response_mask": mask}
    return MicroBatch.of(fields, [length] * samples, torch.device("cpu"), list(range(samples)))


def learn(model: policy.Policy, micros: int, micro: MicroBatch) -> int:
    """The most bytes in `micros` passes there and back over `micro`, the last of which reduces the gradients."""
    with Live() as live:
        for i in range(micros):
            model.set_requires_gradient_sync(i == micros - 1)
            model(micro, 1.0, loss=lambda logprobs, entropy, chunk: logprobs.sum()).backward()
    return live.most


def working(parts: dict[str, int]) -> int:
    """The bytes of a phase beyond what is stored throughout."""
    return sum(parts.get(what, 0) for what in ("gathered", "activations", "gradients", "head"))


@pytest.fixture
def wide(tmp_path, layout, layers_alone):
    """Makes policies of four layers that are gathered alone, in bfloat16, of a kind."""

    def make(kind: str, sizes: dict[str, int], **settings) -> policy.Policy:
        make_model(kind, layers=4, seed=1, **sizes).save_pretrained(tmp_path)
        return load_policy(ModelConfig(path=str(tmp_path), dtype="bfloat16"), layout, **settings)

    return make


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("micros", [1, 3])
def test_an_update_takes_what_is_predicted(kind, recompute, micros, wide, as_on_cuda):
    model = wide(kind, {}, recompute=recompute)
    actor = ActorConfig(max_tokens_per_microbatch=1024, recompute=recompute, reshard=True)
    parts = predict(job_like(model.causal_lm.config, actor=actor, samples=8 * micros))["update"]
    assert working(parts) == pytest.approx(learn(model, micros, packed()), rel=0.1)


@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_and_gathered_weights_of_an_update_are_predicted(micros, reshard, wide, as_on_cuda):
    # With so few tokens nothing else counts.
    model = wide("qwen2", {"hidden": 128, "feed_forward": 512}, reshard=reshard)
    model.set_reshard_after_backward(reshard)
    actor = ActorConfig(max_tokens_per_microbatch=8, reshard=reshard)
    parts = predict(job_like(model.causal_lm.config, actor=actor, samples=micros, longest=8))["update"]
    assert working(parts) == pytest.approx(learn(model, micros, packed(1, 8)), rel=0.12)


def test_logprobs_take_what_is_predicted(wide, as_on_cuda):
    model, micro = wide("qwen2", {"feed_forward": 512}, trains=False), packed()
    with Live() as live, torch.no_grad():
        model(micro, 1.0, entropy=False)
    actor = ActorConfig(max_tokens_per_microbatch=1024, reshard=True)
    parts = predict(job_like(model.causal_lm.config, actor=actor, reference=True))["ref"]
    assert working(parts) == pytest.approx(live.most, rel=0.1)


@pytest.mark.parametrize(("dp_shard", "rank", "reshard"), [(1, 0, False), (4, 0, True), (1, 8, True)])
def test_by_default_one_shard_keeps_gathered_weights_and_several_or_adapters_free_them(dp_shard, rank, reshard):
    default, chosen = ActorConfig(lora=LoraConfig(rank=rank)), ActorConfig(reshard=reshard)
    jobs = [job_like(qwen("1.5b"), actor=actor, dp_shard=dp_shard) for actor in (default, chosen)]
    assert predict(jobs[0])["update"]["gathered"] == predict(jobs[1])["update"]["gathered"]


# known models

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
SHAPES = {"1.5b": (1536, 28, 12, 2, 8960), "7b": (3584, 28, 28, 4, 18944)}


def qwen(size: str) -> transformers.PretrainedConfig:
    tied, sizes = size == "1.5b", dict(zip(SIZES, SHAPES[size], strict=True))
    return transformers.Qwen2Config(vocab_size=151936 if tied else 152064, tie_word_embeddings=tied, **sizes)


def on_h200(size: str, dp_shard: int = 1, actor: dict | None = None, rollout: dict | None = None, **changes) -> Job:
    settings = {"actor": ActorConfig(**(actor or {})), "rollout": RolloutConfig(engine="sglang", **(rollout or {}))}
    usual = {"dp_shard": dp_shard, "samples": 64, "longest": 2048, "compiled": True}
    return job_like(qwen(size), **usual | settings | changes)


@pytest.mark.parametrize(("size", "parameters"), [("1.5b", 1_543_714_304), ("7b", 7_615_616_512)])
@pytest.mark.parametrize("shards", [1, 4])
def test_what_rests_is_sixteen_bytes_a_parameter_less_the_gradients_over_the_shards(size, parameters, shards):
    parts = predict(on_h200(size, shards, reference=True))["rest"]
    assert parts["weights"] == pytest.approx(4 * parameters / shards, rel=1e-4)
    assert parts["optimizer"] == 2 * parts["weights"]
    assert parts["reference"] == parts["weights"] / 2


@pytest.mark.parametrize(
    ("compiled", "reshard", "measured"), [(False, True, 69.5), (True, True, 51.4), (True, False, 53.8)]
)
def test_an_update_of_the_smaller_one_on_one_h200_took_what_is_predicted(compiled, reshard, measured):
    # python -m benchmarks.update: 16 sequences of 1024 tokens in one micro-batch.
    job = on_h200("1.5b", actor={"reshard": reshard}, compiled=compiled, samples=16, longest=1024)
    assert sum(predict(job)["update"].values()) / GIB == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(("release", "left"), [("auto", 0), ("kv", 3_087_428_608), ("none", H200 // 2)])
def test_the_engine_is_there_as_far_as_it_is_not_released(release, left, monkeypatch):
    monkeypatch.setattr(plan, "BUCKET_BYTES", 100 * 2**20)
    one, two = (predict(on_h200("1.5b", shards, rollout={"release": release})) for shards in (1, 2))
    assert one["rest"]["SGLang"] == one["update"]["SGLang"] == left
    assert one["sync"]["SGLang"] == max(left, 3_087_428_608)
    assert one["rollout"]["SGLang"] == H200 // 2
    assert one["sync"]["buckets"] == 2 * 151936 * 1536  # the embeddings are larger than a bucket
    assert two["sync"]["buckets"] == 2 * 2 * 151936 * 1536


@pytest.mark.parametrize(("fraction", "rows"), [(0.9, 4), (0.5, 2), (0.05, 0)])
def test_the_embedded_engine_takes_what_its_samples_at_work_do_within_its_share(fraction, rows, models):
    engine = TorchEngine(ModelConfig(path=str(models / "llama")), torch.device("cpu"))
    weights, row = sum(w.nbytes for w in engine.weights.values()), 128 * engine.batch.cell_bytes + 6 * 4 * 118
    rollout, total = RolloutConfig(concurrent_samples=4, memory_fraction=fraction), 2 * (weights + 2 * row)
    job = job_like(engine.model.config, compute=torch.float32, rollout=rollout, rows=8, total=total)
    held = [parts["engine"] for parts in predict(job).values()]
    assert held == [weights, weights, weights + rows * row, weights]  # at rest, in the sync, the rollout, an update


def test_what_is_offloaded_is_not_there_while_the_engine_serves():
    offload = ["optimizer", "parameters", "reference"]
    phases = predict(on_h200("1.5b", actor={"offload": offload}, reference=True))
    assert set(phases["sync"]) == {"weights", "buckets", "SGLang"}
    assert phases["sync"]["weights"] == phases["rest"]["weights"]
    assert sum(phases["rollout"].values()) == phases["rollout"]["SGLang"]
    assert phases["update"]["optimizer"] == phases["rest"]["optimizer"] > 0
    assert phases["update"]["reference"] == 0 < phases["ref"]["reference"]


@pytest.mark.parametrize("offload", [[], ["reference"]])
def test_a_teacher_takes_its_own_size_and_is_gone_after_its_pass_where_it_is_offloaded(offload):
    """A policy of 1.5B parameters on four shards, taught by one of 7B."""
    layer = 2 * 3584 * 3584 + 3584 + 2 * (512 * 3584 + 512) + 3 * 3584 * 18944 + 2 * 3584
    root = 2 * 152064 * 3584 + 3584
    job = on_h200("1.5b", 4, {"offload": offload}, reference=True, teacher=qwen("7b"), off_policy=True)
    plain, phases = predict(dataclasses.replace(job, teacher=None)), predict(job)
    assert list(phases) == ["rest", "sync", "rollout", "ref", "teacher", "old_logprobs", "update"]
    for name in ("rest", "ref", "teacher"):
        assert phases[name]["teacher"] == pytest.approx(2 * (28 * layer + root) / 4, rel=1e-6)
    for name in ("sync", "rollout", "old_logprobs", "update"):
        held = 0 if offload else phases["rest"]["teacher"]
        assert {"teacher": 0} | phases[name] == plain[name] | {"teacher": held}
    assert phases["teacher"]["reference"] == (0 if offload else phases["rest"]["reference"])
    # Two layers are gathered, and 16,384 tokens are inside a layer.
    assert phases["teacher"]["gathered"] == 2 * (root + 2 * layer)
    assert phases["teacher"]["activations"] == 16384 * 2 * 3 * (18944 + 3584)


def test_a_teacher_that_leaves_no_room_is_told_with_what_helps():
    job = on_h200("1.5b", 1, {"reshard": True}, {"memory_fraction": 0.8}, teacher=qwen("7b"))
    (rollout,) = advise(job)
    assert rollout.startswith("rollout is predicted to need ")
    assert "actor.offload=[reference]" in rollout.partition("enough alone: ")[2]
    (fits,) = advise(dataclasses.replace(job, teacher=None))
    assert fits.startswith("It fits.")


def test_on_a_cpu_nothing_is_offloaded_and_the_head_makes_no_copies_of_its_logits():
    job = on_h200("1.5b", compiled=False, on_cpu=True)
    assert predict(job.having("actor", offload=["optimizer", "parameters"])) == predict(job)
    copies = 5 * 4 * 2048 * 151936 - 2 * 151936 * 1536  # what they take beyond the gradient's cast
    head, on_a_gpu = (predict(other)["update"]["head"] for other in (job, dataclasses.replace(job, on_cpu=False)))
    assert on_a_gpu - head == copies


# what fits


def largest(job: Job) -> int:
    return max(sum(parts.values()) for parts in predict(job).values())


def advise(job: Job) -> list[str]:
    return advice(job, job.weights())


@pytest.mark.parametrize(("size", "shards"), [("1.5b", 1), ("1.5b", 4), ("7b", 4)])
def test_the_largest_settings_fit_and_larger_ones_do_not(size, shards):
    job, room = on_h200(size, shards), H200 * (1 - plan.MARGIN)
    tokens, fraction = most_tokens(job, job.weights()), most_memory_fraction(job, job.weights())
    assert tokens % 1024 == 0
    fitting = job.having("actor", max_tokens_per_microbatch=tokens).having("rollout", memory_fraction=fraction)
    assert largest(fitting) <= room
    assert largest(job.having("actor", max_tokens_per_microbatch=tokens + 1024)) > room or tokens == job.learned
    assert largest(job.having("rollout", memory_fraction=fraction + 0.05)) > room
    (sentence,) = advise(job.having("actor", max_tokens_per_microbatch=2048))
    limits = f"actor.max_tokens_per_microbatch={tokens}, rollout.memory_fraction={fraction:g}"
    assert sentence == f"It fits. The largest that would, each alone: {limits}."


def test_no_more_tokens_are_suggested_than_an_update_has():
    job = on_h200("1.5b", samples=3, longest=1000)
    assert most_tokens(job, job.weights()) == 3072


def test_a_phase_that_does_not_fit_is_named_with_what_is_enough():
    (update,) = advise(on_h200("7b", 4, {"max_tokens_per_microbatch": 32768}))
    assert update.startswith("update is predicted to need 19")
    assert " of 124.8 GiB; enough alone: actor.max_tokens_per_microbatch=" in update
    assert "actor.recompute=full" in update
    assert "offload" not in update  # it is all there in an update
    (rollout,) = advise(on_h200("7b", 4, {"recompute": "full"}, {"memory_fraction": 0.9}))
    assert rollout.startswith("rollout ")
    assert "rollout.memory_fraction=0.75, actor.offload=[optimizer,parameters]." in rollout
    assert "recompute" not in rollout


def test_where_nothing_is_enough_what_helps_is_named():
    sentences = {sentence.split()[0]: sentence for sentence in advise(on_h200("7b", 1, reference=True))}
    assert sentences.keys() == {"rollout", "update"}
    less = "actor.reshard=true, actor.recompute=selective, actor.recompute=full, actor.offload=[reference]"
    less += ", twice as many GPUs."
    assert sentences["update"].endswith(f"not enough alone, but less: {less}")


# measured


class Allocator:
    """What torch counts of a device's memory, in `allocated` and `reserved`."""

    def __init__(self, monkeypatch):
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: self.most_allocated)
        monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda: self.most_reserved)
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda: self.reserved)
        monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: self.use(self.allocated, self.reserved, True))

    def use(self, allocated: int, reserved: int, anew: bool = False) -> None:
        self.allocated, self.reserved = allocated, reserved
        self.most_allocated = allocated if anew else max(self.most_allocated, allocated)
        self.most_reserved = reserved if anew else max(self.most_reserved, reserved)


def test_each_phase_has_its_own_peak_and_nested_ones_count_for_both(monkeypatch):
    allocator, peaks = Allocator(monkeypatch), Peaks(cuda=True)
    allocator.use(9 * GIB, 10 * GIB)  # before any phase
    allocator.use(1 * GIB, 10 * GIB)
    with peaks("update"):
        allocator.use(3 * GIB, 10 * GIB)
        allocator.use(2 * GIB, 4 * GIB)
        with peaks("sync"):
            allocator.use(5 * GIB, 6 * GIB)
            allocator.use(2 * GIB, 6 * GIB)
    with peaks("sync"):
        allocator.use(4 * GIB, 6 * GIB)
    with peaks("rewards"):
        allocator.use(8 * GIB, 8 * GIB)
    assert peaks.metrics() == {"memory/update_peak_gib": 5, "memory/sync_peak_gib": 5}
    assert peaks.metrics() == {}
    assert peaks.most_reserved() == 10 * GIB
    allocator.use(8 * GIB, 12 * GIB)
    assert peaks.most_reserved() == 12 * GIB


def test_on_a_cpu_nothing_is_measured():
    with (peaks := Peaks(cuda=False))("update"):
        pass
    assert peaks.metrics() == {}


@pytest.mark.parametrize(("fullest", "release"), [(70, "none"), (100, "kv"), (125, "kv+weights")])
def test_what_the_engine_keeps_is_decided_by_the_fullest_moment_also_after_a_look(fullest, release, monkeypatch):
    allocator, peaks = Allocator(monkeypatch), Peaks(cuda=True)
    with peaks("update"):
        allocator.use(0, fullest * GIB)
        allocator.use(0, 20 * GIB)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (110 * GIB, 131 * GIB))
    memory = object.__new__(SharedMemory)
    memory.actor, memory.peaks, memory.device = SimpleNamespace(version=1), peaks, torch.device("cuda")
    memory.chosen, memory.first_version, memory.release = "auto", 0, "kv+weights"
    memory.kv_bytes, memory.weight_bytes = 40 * GIB, 3 * GIB
    memory.choose_release()
    assert memory.release == release
