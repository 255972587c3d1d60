"""On a CUDA device: torch's varlen attention in bfloat16, float32 beside it, and the engine against the trainer.

bash tests/run.sh -m gpu
"""

import pytest
import torch
import torch.distributed as dist
import transformers

from examples.countdown import make_model
from grpo.algorithm import AlgorithmConfig
from grpo.batch import jagged, make_batch
from tests.workers.conftest import prompts_of
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.engines.config import RolloutConfig
from workers.engines.torch_engine import TorchEngine
from workers.microbatch import MicroBatch
from workers.parallel import logprobs as logprobs_module
from workers.parallel.attention import PackedSequences, packed_attention
from workers.parallel.attention_backend import why_not
from workers.parallel.logprobs import Head, head_logprobs, head_loss
from workers.parallel.mesh import join, make_inference_layout, make_training_layout, pick_device
from workers.parallel.policy import load_policy
from workers.rollout import RolloutWorker
from workers.sharding import ShardingManager, expect_current

pytestmark = pytest.mark.gpu
KINDS = {"qwen2": True, "qwen3": True, "llama": False}
LENGTHS = [5, 300, 1, 77, 128, 31]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind, tied in KINDS.items():
        # Heads of 64 as real models have them; 4 query heads to 2 KV heads.
        model = make_model(kind, tied=tied, hidden=256, heads=4, kv_heads=2, head_dim=64, feed_forward=512, seed=3)
        model.save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def layouts():
    """The one process as a layout on the GPU and one on the CPU."""
    device = pick_device("cuda")
    if dist.is_initialized():  # by the CPU tests of the same session, over gloo alone
        dist.destroy_process_group()
    join(device, 120.0)
    yield {"cuda": make_training_layout(device), "cpu": make_training_layout(torch.device("cpu"))}
    dist.destroy_process_group()


def random_tokens(lengths: list[int]) -> torch.Tensor:
    return torch.randint(2, 100, (sum(lengths),), generator=torch.Generator().manual_seed(0))


def responses(lengths: list[int]) -> torch.Tensor:
    """All tokens but the first of each sequence."""
    return torch.cat([torch.arange(n) >= 1 for n in lengths])


def micro_batch(device, tokens, lengths):
    fields = {"tokens": tokens, "response_mask": responses(lengths)}
    return MicroBatch.of(fields, lengths, torch.device(device), list(range(len(lengths))))


def logprobs(policy, device, tokens, lengths):
    micro = micro_batch(device, tokens, lengths)
    with torch.no_grad():
        return torch.stack([torch.cat(list(micro.unpack(values).values())) for values in policy(micro, 0.9)])


@pytest.mark.parametrize("kind", KINDS)
def test_float32_on_the_gpu_equals_the_cpu(kind, models, layouts):
    config, tokens = ModelConfig(path=str(models / kind), dtype="float32"), random_tokens(LENGTHS)
    policies = {name: load_policy(config, layouts[name], trains=False) for name in ("cuda", "cpu")}
    ours, reference = (logprobs(policy, name, tokens, LENGTHS) for name, policy in policies.items())
    torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=["torch", "flash4"])
def attention(request):
    """A choice of model.attention."""
    if request.param == "flash4" and (reason := why_not(torch.device("cuda", 0))):
        pytest.skip(f"no FlashAttention 4: {reason}")
    return request.param


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("lengths", [LENGTHS, [1, 1, 2], [1024] * 3, [2000]])
def test_attention_and_its_gradients_are_as_near_to_float64_as_bfloat16_is(attention, width, lengths):
    random = torch.Generator().manual_seed(width)
    heads = [torch.randn(sum(lengths), n, width, generator=random).bfloat16() for n in (6, 2, 2)]
    direction = torch.randn(sum(lengths), 6, width, generator=random).bfloat16()
    results = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        inputs = [x.to(device, dtype).requires_grad_() for x in heads]
        sequences = PackedSequences.of(lengths, torch.device(device))
        out = packed_attention(*inputs, width**-0.5, sequences, by_flash4=attention == "flash4")
        grads = torch.autograd.grad(out, inputs, direction.to(device, dtype))
        results.append([x.detach().double().cpu() for x in (out, *grads)])
    for ours, expected in zip(*results, strict=True):
        assert (ours - expected).norm() <= 1e-2 * expected.norm() + 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_varlen_bfloat16_is_as_near_to_float32_as_transformers_is_and_respects_borders(
    kind, attention, models, layouts
):
    tokens, mask, one_by_one = random_tokens(LENGTHS), responses(LENGTHS), {}
    config = ModelConfig(path=str(models / kind), dtype="bfloat16", attention=attention)
    policy = load_policy(config, layouts["cuda"], trains=False)
    half, _ = logprobs(policy, "cuda", tokens, LENGTHS)
    for dtype in (torch.bfloat16, torch.float32):
        model = transformers.AutoModelForCausalLM.from_pretrained(models / kind, dtype=dtype).to("cuda")
        rows = []
        for row in tokens.cuda().split(LENGTHS):
            with torch.no_grad():
                logp = (model(row[None]).logits[0, :-1].float() / 0.9).log_softmax(-1)
            rows += [torch.zeros(1), logp.gather(1, row[1:, None])[:, 0].cpu()]
        one_by_one[dtype] = torch.cat(rows)
    theirs = (one_by_one[torch.bfloat16] - one_by_one[torch.float32])[mask].abs().mean()
    ours = (half - one_by_one[torch.float32])[mask].abs().mean()
    assert ours <= 1.3 * theirs, (ours, theirs)
    changed = tokens.clone()
    changed[5:305] = 7  # the second sequence alone
    other, _ = logprobs(policy, "cuda", changed, LENGTHS)
    assert torch.equal(other[305:], half[305:])
    assert torch.equal(other[:5], half[:5])
    assert not torch.equal(other[5:305], half[5:305])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_after_an_update_the_engine_samples_from_the_actors_weights(dtype, models, layouts):
    model, layout = ModelConfig(path=str(models / "qwen2"), dtype=dtype), layouts["cuda"]
    # Eager as the engine is: compiled layers round less often, and the gap would be between the two ways.
    actor = ActorWorker(model, ActorConfig(learning_rate=1e-2, compile=False), AlgorithmConfig(), layout, 1.0, 10)
    before = {name: p.detach().full_tensor().clone() for name, p in actor.policy.named_parameters()}
    assert actor.update(batch_of(6, seed=0))["grad_norm"] > 0
    engine, engines = TorchEngine(model, layout.device), make_inference_layout(layout.device)
    rollout = RolloutWorker(RolloutConfig(max_response_tokens=64), engine, engines, (1,), seed=0)
    with ShardingManager(actor, rollout).serving():
        samples = rollout.generate(prompts_of(range(2, 9), range(40, 43)), 16)
    expect_current(samples, actor.version)
    for name, parameter in actor.policy.named_parameters():
        master = parameter.detach().full_tensor()
        assert not torch.equal(master, before[name]) or name.endswith("k_proj.bias")
        sent = engine.weights[name.removeprefix("causal_lm.")]
        assert torch.equal(sent, master.to(sent.dtype)), name
    ours = actor.compute_logprobs(samples)["old_logprobs"].values()
    gap = (ours - samples["rollout_logprobs"].values())[samples["response_mask"].values()].abs()
    assert gap.mean() < (0.02 if dtype == "bfloat16" else 1e-5)


def batch_of(count: int, seed: int):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(20, 400, (count,), generator=random).tolist()
    fields = {
        "tokens": jagged([torch.randint(2, 100, (n,), generator=random) for n in lengths]),
        "response_mask": jagged([torch.arange(n) >= 3 for n in lengths]),
        "rollout_logprobs": jagged([-torch.rand(n, generator=random) for n in lengths]),
        "advantages": jagged([torch.randn(n, generator=random) for n in lengths]),
    }
    return make_batch({**fields, "group": torch.arange(count)})


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_or_recomputed_an_update_is_the_same(kind, attention, models, layouts):
    norms, model = [], ModelConfig(path=str(models / kind), dtype="bfloat16", attention=attention)
    for settings in ({"compile": False}, {}, {"recompute": "full"}, {"recompute": "selective", "reshard": False}):
        config = ActorConfig(learning_rate=1e-3, max_tokens_per_microbatch=1024, **settings)
        actor = ActorWorker(model, config, AlgorithmConfig(), layouts["cuda"], 1.0, 10)
        metrics = [actor.update(batch_of(16, seed)) for seed in range(2)]
        norms.append([m[name] for m in metrics for name in ("grad_norm", "entropy")])
    for other in norms[1:]:
        assert other == pytest.approx(norms[0], rel=0.02)


def test_compiled_layers_are_not_compiled_again_for_other_lengths(attention, models, layouts):
    config = ActorConfig(max_tokens_per_microbatch=32768)
    model = ModelConfig(path=str(models / "qwen3"), dtype="bfloat16", attention=attention)
    actor = ActorWorker(model, config, AlgorithmConfig(), layouts["cuda"], 1.0, 10)
    # 23,425 tokens: from 20,480 on Inductor would fuse the gradients of norms of this width, and not below.
    actor.update(batch_of(120, seed=0))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for count in (1, 2, 14, 30, 90, 120):
            actor.update(batch_of(count, seed=count))


@pytest.mark.parametrize("lengths", [[5], [300, 21, 77], [400] * 60])
def test_compiled_layers_have_the_gradients_of_eager_ones(lengths, models, layouts):
    micro, grads = micro_batch("cuda", random_tokens(lengths), lengths), []
    for compiled in (True, False):
        config = ModelConfig(path=str(models / "qwen3"), dtype="float32")
        policy = load_policy(config, layouts["cuda"], compiled=compiled)
        logprobs, entropy = policy(micro, 0.9)
        (logprobs.sum() + entropy.square().sum()).backward()
        grads.append({name: parameter.grad.full_tensor() for name, parameter in policy.weights().items()})
    for name, grad in grads[0].items():
        assert (grad - grads[1][name]).norm() <= 1e-4 * grads[1][name].norm(), name


def test_what_is_offloaded_comes_back_while_the_device_computes(models, layouts):
    # Eager and with torch's attention an update is the same each time: FlashAttention 4 adds up in any order, and the
    # first compiled updates of a process round otherwise than later ones. A bias of keys shows that: its gradient is
    # nothing but rounding.
    model = ModelConfig(path=str(models / "qwen2"), dtype="bfloat16", attention="torch")
    layout, ends = layouts["cuda"], []
    for offload in ([], ["optimizer", "parameters"]):
        config = ActorConfig(learning_rate=1e-3, offload=offload, compile=False)
        actor = ActorWorker(model, config, AlgorithmConfig(), layout, 1.0, 10)
        for seed in range(3):
            actor.offload_optimizer()
            actor.offload_parameters()
            held = [p.to_local().untyped_storage().nbytes() for p in actor.parameters]
            assert (sum(held) == 0) == bool(offload)
            actor.reload()
            actor.update(batch_of(8, seed))
        ends.append(torch.cat([p.detach().full_tensor().flatten() for p in actor.parameters]))
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("count", "vocabulary"), [(5, 130), (3, 9001), (257, 4096), (2, 151936)])
@pytest.mark.parametrize("entropy", [True, False])
def test_the_kernels_of_the_head_compute_what_its_functions_do(count, vocabulary, entropy):
    from workers.parallel import head_kernels

    random = torch.Generator().manual_seed(count)
    logits = 5 * torch.randn(count, vocabulary, generator=random)
    targets = torch.randint(vocabulary, (count,), generator=random)
    targets[1] = -1  # of another slice of the vocabulary
    sums = logprobs_module._softmax_sums(logits, targets, 1.25, entropy)
    found = head_kernels.softmax_sums(logits.cuda(), targets.cuda(), 1.25, entropy)
    torch.testing.assert_close(found.cpu(), sums, rtol=1e-4, atol=1e-5)
    per_token = torch.stack([sums[0] + sums[1].log(), *torch.randn(3, count, generator=random)])
    grads, found = logits.clone(), logits.cuda()
    logprobs_module._logits_to_grads(grads, targets, per_token, 1.25, entropy)
    head_kernels.logits_to_grads(found, targets.cuda(), per_token.cuda(), 1.25, entropy)
    torch.testing.assert_close(found.cpu(), grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inside", [True, False])
def test_the_head_of_many_tokens_takes_at_most_two_gib(inside):
    count, vocab, width = 32768, 151936, 1536
    hidden = torch.randn(count, width, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocab, width, device="cuda") * 0.05).bfloat16().requires_grad_()
    head = Head(weight, torch.randint(0, vocab, (count,), device="cuda"), 1.0, compiled=True)
    for _ in range(2):
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        if inside:
            head_loss(hidden, head, lambda logprobs, entropy, chunk: logprobs.sum()).backward()
        else:
            head_logprobs(hidden, head)[0].sum().backward()
        gradients = hidden.grad.nbytes + weight.grad.nbytes
        assert torch.cuda.max_memory_allocated() - before - gradients <= 2 * 2**30
