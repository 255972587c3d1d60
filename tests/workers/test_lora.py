"""Adapters: the step they take is that of W + scale B A written out, on every layout, and all else stands still."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.func import functional_call

from examples.countdown import make_model
from grpo.config import ConfigError
from tests.workers.layout_probe import TEMPERATURE, ragged_batch
from tests.workers.lora_probe import LORA, make_workers, step, whole
from workers import config as workers_config
from workers.config import TARGETS, ActorConfig, LoraConfig, ModelConfig
from workers.parallel import policy as policy_module
from workers.parallel.lora import adapters_of


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "llama"])
def hf_model(request):
    # With biases and without, tied and not.
    tied = request.param == "qwen3"
    return make_model(request.param, tied=tied, hidden=32, heads=4, kv_heads=2, feed_forward=48, vocab=120, seed=5)


@pytest.fixture(scope="module")
def model_config(hf_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "model"
    hf_model.save_pretrained(folder)
    return ModelConfig(path=str(folder))


@pytest.fixture(scope="module", autouse=True)
def layers_gathered_one_by_one():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy_module, "SMALLEST_UNIT", 0)
        yield


@pytest.fixture(scope="module")
def one_process(model_config, layout):
    return step(model_config, layout)


def merged(weights, adapters, scale=LORA.scale):
    """The weights with what the adapters add, written out."""
    return {n: w + scale * adapters[n]["B"] @ adapters[n]["A"] if n in adapters else w for n, w in weights.items()}


def logprobs_of(model, weights, batch):
    """Those of the response tokens by transformers' own forward pass with `weights`."""
    found = []
    for tokens, mask in zip(batch["tokens"].unbind(), batch["response_mask"].unbind(), strict=True):
        logits = functional_call(model, weights, (tokens[None],)).logits[0, :-1]
        logp = (logits / TEMPERATURE).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        found.append(logp[mask[1:]])
    return torch.cat(found)


def field(jagged_rows, batch):
    return jagged_rows.values()[batch["response_mask"].values()]


def test_at_the_start_the_policy_is_the_base_model(one_process, hf_model, model_config, layout):
    weights, adapters = one_process["start"]
    assert weights.keys() == dict(hf_model.named_parameters()).keys()
    assert all(torch.equal(weights[name], weight) for name, weight in hf_model.named_parameters())
    assert len(adapters) == 2 * len(TARGETS)
    for pair in adapters.values():
        assert not pair["B"].any()
        # kaiming_uniform_ with a = sqrt(5), as nn.Linear's
        bound = pair["A"].shape[1] ** -0.5
        assert 0.8 * bound < pair["A"].abs().max() <= bound
    assert len({pair["A"].sum().item() for pair in adapters.values()}) == len(adapters)
    plain, _ = make_workers(model_config, layout, LoraConfig())
    expected = plain.compute_logprobs(ragged_batch()[0])["old_logprobs"].values()
    assert torch.equal(one_process["logprobs"], expected)


def test_an_update_is_that_of_the_product_written_out(hf_model, model_config, layout):
    actor, reference = make_workers(model_config, layout, minibatches=1, max_grad_norm=1e9, weight_decay=0.1)
    random = torch.Generator().manual_seed(1)
    for adapter in adapters_of(actor.policy).values():
        adapter.B.data.to_local().normal_(0, 0.1, generator=random)
    weights, adapters = whole(actor)
    leaves = {name: {k: m.clone().requires_grad_() for k, m in pair.items()} for name, pair in adapters.items()}
    optimizer = torch.optim.AdamW(
        [m for pair in leaves.values() for m in pair.values()], lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1
    )
    batch, noise = ragged_batch()
    logp = logprobs_of(hf_model, merged(weights, leaves), batch)
    ref = logprobs_of(hf_model, weights, batch).detach()
    old = logp.detach() + field(noise, batch)
    advantages = field(batch["advantages"], batch)
    ratio = (logp - old).exp()
    kl = (ref - logp).exp() - (ref - logp) - 1
    loss = (-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.1 * kl).mean()
    loss.backward()
    gradients = {(n, k): m.grad.clone() for n, pair in leaves.items() for k, m in pair.items()}
    optimizer.step()

    own = actor.compute_logprobs(batch)["old_logprobs"]
    torch.testing.assert_close(field(own, batch), logp, rtol=1e-5, atol=1e-5)
    batch["rollout_logprobs"] = own
    batch["old_logprobs"] = torch.nested.nested_tensor_from_jagged(own.values() + noise.values(), noise.offsets())
    batch.update(reference.compute_logprobs(batch))
    torch.testing.assert_close(field(batch["ref_logprobs"], batch), ref, rtol=1e-5, atol=1e-5)
    metrics = actor.update(batch)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    after, trained = whole(actor)
    assert all(torch.equal(after[name], weight) for name, weight in weights.items())
    found = adapters_of(actor.policy.causal_lm)
    assert len(actor.optimizer.state) == 2 * len(found)
    for (name, which), gradient in gradients.items():
        mean = actor.optimizer.state[getattr(found[name], which)]["exp_avg"].full_tensor()
        torch.testing.assert_close(mean / 0.1, gradient, rtol=0, atol=1e-5 * float(gradient.abs().max()))
        assert not torch.equal(trained[name][which], adapters[name][which])
        torch.testing.assert_close(trained[name][which], leaves[name][which].detach(), rtol=0, atol=1e-5)


def test_only_adapters_change_and_the_reference_stays_the_start(one_process):
    result = one_process
    (weights, adapters), (weights_after, adapters_after) = result["start"], result["end"]
    assert all(torch.equal(weights_after[name], weight) for name, weight in weights.items())
    for name, pair in adapters.items():
        assert not any(torch.equal(adapters_after[name][which], pair[which]) for which in ("A", "B")), name
    assert torch.equal(result["ref"], result["logprobs"])
    assert torch.equal(result["ref_later"], result["ref"])
    assert (result["later"] - result["ref"]).abs().max() > 0.01


def check_the_engine(result, dtype):
    expected = merged(*result["end"])
    assert result["engine"].keys() == expected.keys()
    for name, weight in result["engine"].items():
        assert weight.dtype == dtype
        if name in result["end"][1]:
            # The products are rounded apart, and their sum may then fall to the other side of a rounding.
            torch.testing.assert_close(weight, expected[name].to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-7)
            assert not torch.equal(weight, result["start"][0][name].to(dtype))
        else:
            assert torch.equal(weight, expected[name].to(dtype)), name
    for before, after in zip(result["end"], result["synced"], strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_the_engine_gets_the_merged_weights_and_the_actor_keeps_its_own(one_process):
    check_the_engine(one_process, torch.float32)
    assert one_process["rollout_gap"] <= 1e-5


def test_merged_weights_are_rounded_once_to_the_engines_type(model_config, layout):
    check_the_engine(step(model_config, layout, "bfloat16"), torch.bfloat16)


@pytest.fixture(scope="module")
def two_processes(model_config, tmp_path_factory):
    """Results by the number of replicas: two shards, or two copies."""
    out = tmp_path_factory.mktemp("two")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.workers.lora_probe", model_config.path, str(out), "1", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=200, env=environment, cwd=Path(__file__).parents[2])
    return {replicas: torch.load(out / f"{replicas}.pt", weights_only=False) for replicas in (1, 2)}


@pytest.mark.parametrize("replicas", [1, 2])
def test_two_processes_take_the_same_step(replicas, one_process, two_processes):
    one, two = one_process, two_processes[replicas]
    torch.testing.assert_close(two["start"], one["start"], rtol=0, atol=0)
    for name in ("logprobs", "ref", "ref_later", "later"):
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-5)
    for name in ("loss", "grad_norm", "kl", "clip/low"):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-5), name
    torch.testing.assert_close(two["end"], one["end"], rtol=0, atol=1e-5)
    for mean, expected in zip(two["means"], one["means"], strict=True):
        torch.testing.assert_close(mean, expected, rtol=0, atol=1e-5 * float(expected.abs().max()) + 1e-9)
    assert two["engines_agree"]
    assert two["rollout_gap"] <= 1e-5
    check_the_engine(two, torch.float32)


def test_in_bfloat16_the_frozen_weights_are_kept_so_and_the_adapters_in_float32(model_config, layout):
    # In one pass, whose gradients FSDP reduces as they come, in the type that it noted at its first pass of all.
    in_bfloat16 = ModelConfig(path=model_config.path, dtype="bfloat16")
    actor, reference = make_workers(in_bfloat16, layout, max_tokens_per_microbatch=4096)
    before, _ = whole(actor)
    batch, _ = ragged_batch()
    batch.update(reference.compute_logprobs(batch))
    batch.update(actor.compute_logprobs(batch))
    batch["rollout_logprobs"] = batch["old_logprobs"]
    reduced = []
    for adapter in adapters_of(actor.policy).values():
        adapter.B.register_post_accumulate_grad_hook(lambda parameter: reduced.append(parameter.grad.dtype))
    actor.update(batch)
    after, adapters = whole(actor)
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}
    assert {m.dtype for pair in adapters.values() for m in pair.values()} == {torch.float32}
    assert {state.dtype for held in actor.optimizer.state.values() for state in held.values()} == {torch.float32}
    assert set(reduced) == {torch.float32}
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(pair["B"].any() for pair in adapters.values())


def test_targets_are_the_layers_with_adapters(model_config, layout):
    actor, _ = make_workers(model_config, layout, LoraConfig(rank=2, targets=["v_proj", "down_proj"]))
    assert {name.split(".")[-2] for name in whole(actor)[1]} == {"v_proj", "down_proj"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora": LoraConfig(rank=-1)}, "actor.lora.rank=-1 must be at least 0"),
        ({"lora": LoraConfig(rank=4, alpha=0.0)}, "actor.lora.alpha=0.0 must be above 0"),
        ({"lora": LoraConfig(targets=["query"])}, "actor.lora.targets='query'.*q_proj, k_proj"),
        ({"lora": LoraConfig(rank=4, targets=[])}, "actor.lora.targets is empty"),
        ({"lora": LoraConfig(rank=4), "tensor_parallel": 2}, "does not go with actor.tensor_parallel=2"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, says):
    ActorConfig(lora=LoraConfig(rank=4)).check()
    with pytest.raises(ConfigError, match=says):
        ActorConfig(**settings).check()


def test_without_peft_the_way_to_install_it_is_named(monkeypatch):
    monkeypatch.setattr(workers_config, "find_spec", lambda name: None)
    ActorConfig().check()
    with pytest.raises(ConfigError, match="rank=4 needs the package peft: pip install peft"):
        ActorConfig(lora=LoraConfig(rank=4)).check()
