"""The actor: the same update however it is cut, as many updates as were asked for, with the gradient it says."""

import functools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from grpo.advantages import weigh_tokens
from grpo.algorithm import AlgorithmConfig
from grpo.batch import jagged, lengths_of, make_batch
from grpo.config import ConfigError
from grpo.packing import pack
from workers import actor as actor_module
from workers import microbatch as microbatch_module
from workers.actor import ActorWorker, split_by_groups
from workers.config import ActorConfig
from workers.dispatch import WorkerGroup
from workers.microbatch import microbatches
from workers.optimizer import clip_gradients, learning_rate
from workers.parallel import policy

FIELDS = ("tokens", "response_mask", "rollout_logprobs", "advantages")


@pytest.fixture
def make_actor(layout, model_config):
    def make(algorithm=None, minibatches=1, epochs=1, **settings):
        config = ActorConfig(**{"learning_rate": 1e-2, "max_tokens_per_microbatch": 64} | settings)
        algorithm = algorithm or AlgorithmConfig()
        worker = ActorWorker(model_config, config, algorithm, layout, 0.8, 10, minibatches, epochs)
        # With Adam's usual epsilon the rounding of a gradient near 0 decides the sign of a whole step.
        for group in worker.optimizer.param_groups:
            group["eps"] = 1e-3
        return worker

    return make


@pytest.fixture
def traced_alone(monkeypatch):
    """torch.compile without its slow last stage, which makes kernels of what was traced."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def batch_of(groups=6, size=2, seed=0):
    """`size` samples of each group, of 5 to 20 tokens, whose rows tell them apart."""
    random = torch.Generator().manual_seed(seed)
    row = torch.arange(groups * size)
    lengths = torch.randint(5, 21, (len(row),), generator=random).tolist()
    mask = [torch.arange(n) >= 3 for n in lengths]
    fields = {
        "tokens": [torch.randint(2, 117, (n,), generator=random) for n in lengths],
        "response_mask": mask,
        "rollout_logprobs": [-torch.rand(len(m), generator=random) * m for m in mask],
        "advantages": [torch.randn(1, generator=random) * m for m in mask],
    }
    fields = {name: jagged(rows) for name, rows in fields.items()}
    return make_batch(fields | {"group": row % groups * 10 + 3, "row": row})


def weighed(batch):
    return weigh_tokens(batch, AlgorithmConfig(aggregate="token_mean"))


def everything_of(worker):
    """Weights and optimizer state of this rank, which no later update changes."""
    states = [state for held in worker.optimizer.state.values() for state in held.values()]
    return [(t.to_local() if isinstance(t, DTensor) else t).detach().clone() for t in (*worker.parameters, *states)]


def assert_same(ours, others):
    assert len(ours) == len(others)
    assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


def weights_of(worker):
    return torch.cat([p.detach().full_tensor().flatten() for p in worker.policy.parameters()])


def learned(worker, updates):
    """The metrics of the last of some updates, and the change of the weights over all of them."""
    before = weights_of(worker)
    metrics = [worker.update(batch_of(seed=seed)) for seed in range(updates)]
    return metrics[-1], weights_of(worker) - before


def assert_same_change(ours, other):
    torch.testing.assert_close(ours, other, rtol=0, atol=1e-3 * float(other.abs().max()))


# learning rate


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, *(0.1 + 0.45 * (1 + math.cos(math.pi * x / 4)) for x in (1, 2, 3, 4))]),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_schedule(schedule, expected):
    config = ActorConfig(learning_rate=2e-3, warmup_updates=3, schedule=schedule, final_learning_rate_ratio=0.1)
    rates = [learning_rate(config, update, 7) for update in range(8)]
    assert rates == pytest.approx([2e-3 * share for share in expected])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_begins_at_its_highest_without_warm_up_and_stays_at_its_end(schedule):
    config = ActorConfig(learning_rate=1.0, schedule=schedule, final_learning_rate_ratio=0.2)
    assert learning_rate(config, 0, 10) == 1.0
    assert learning_rate(config, 10, 10) == pytest.approx(1.0 if schedule == "constant" else 0.2)
    assert learning_rate(config, 25, 10) == learning_rate(config, 10, 10)


def test_a_run_no_longer_than_its_warm_up_has_a_rate():
    config = ActorConfig(learning_rate=1.0, warmup_updates=5, schedule="cosine")
    assert [learning_rate(config, update, 5) for update in (0, 4)] == pytest.approx([1 / 6, 5 / 6])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"recompute": "some"}, "none, selective, full"),
        ({"schedule": "cosin"}, "actor.schedule='cosin'.*constant, linear, cosine"),
        ({"learning_rate": 0.0}, "actor.learning_rate=0.0 must be above 0"),
        ({"tensor_parallel": 0}, "actor.tensor_parallel=0"),
        ({"betas": [0.9]}, "actor.betas"),
        ({"betas": [0.9, 1.0]}, "actor.betas"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings, says):
    ActorConfig().check()
    with pytest.raises(ConfigError, match=says):
        ActorConfig(**settings).check()


# micro-batches and minibatches


@pytest.mark.parametrize("budget", [20, 50, 1000])
def test_microbatches_hold_every_sample_once_within_the_budget(layout, budget):
    batch = batch_of()
    micros = list(microbatches(batch, budget, WorkerGroup(layout, float)))
    assert sorted(row for micro in micros for row in micro.rows) == list(range(12))
    assert len(micros) == len(pack(lengths_of(batch["tokens"]), budget))
    assert [micro.last for micro in micros] == [False] * (len(micros) - 1) + [True]
    for micro in micros:
        assert sum(micro.lengths) <= budget
        rows = {name: torch.cat([batch[name].unbind()[row] for row in micro.rows]) for name in FIELDS}
        mask = rows["response_mask"]
        assert torch.equal(micro.tokens, rows["tokens"])
        assert torch.equal(micro.response_mask, mask)
        assert torch.equal(micro.targets, rows["tokens"][mask])
        assert torch.equal(micro.predictors + 1, mask.nonzero()[:, 0])
        assert set(micro.fields) == {"rollout_logprobs", "advantages", "seq_id", "group", "row"}
        own = [int(batch["response_mask"].unbind()[row].sum()) for row in micro.rows]
        for name in ("group", "row"):  # what all tokens of a sample have in common
            assert torch.equal(micro.fields[name], batch[name][micro.rows].repeat_interleave(torch.tensor(own)))
        for name in ("rollout_logprobs", "advantages"):
            assert torch.equal(micro.fields[name], rows[name][mask]), name
        seq_id = torch.arange(len(micro.rows)).repeat_interleave(torch.tensor(micro.lengths))
        assert torch.equal(micro.fields["seq_id"], seq_id[mask])


def test_a_rank_with_less_work_makes_as_many_passes_and_the_surplus_ones_learn_nothing(layout, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda count, **_: count.fill_(15))
    batch = batch_of()
    micros = list(microbatches(batch, 1000, WorkerGroup(layout, float)))
    assert len(micros) == 15
    assert sorted(row for micro in micros for row in micro.rows) == list(range(12))
    for micro in micros:
        assert len(micro.lengths) == 1
        assert bool(len(micro.targets)) == bool(micro.rows)
    assert batch["response_mask"].unbind()[0].any()


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_minibatches_are_whole_groups_and_cover_each_sample_once(count):
    batch = batch_of()
    rows = [minibatch["row"].tolist() for minibatch in split_by_groups(batch, count, seed=0)]
    assert len(rows) == count
    assert sorted(row for minibatch in rows for row in minibatch) == list(range(12))
    for minibatch in rows:
        assert len(minibatch) == 12 // count
        assert {row % 6 for row in minibatch} == {row % 6 for row in minibatch if row >= 6}
    # Every process must make the same number of updates.
    assert list(split_by_groups(None, count, seed=0)) == [None] * count


def test_minibatches_depend_on_the_version_and_the_epoch_alone(make_actor, monkeypatch):
    seen = []
    monkeypatch.setattr(ActorWorker, "_policy_update", lambda _, batch: seen.append(batch["row"].tolist()) or {})
    for salt in range(2):
        worker = make_actor(minibatches=3, epochs=5)
        for version in range(2):
            torch.manual_seed(salt)
            worker.update(batch_of(seed=salt + version))
    assert len(seen) == 60
    assert seen[:30] == seen[30:]
    assert len({str(seen[first : first + 3]) for first in range(0, 30, 3)}) > 6


# updates


@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_a_step_makes_minibatches_times_epochs_updates_and_one_version(make_actor, minibatches, epochs):
    worker, steps = make_actor(minibatches=minibatches, epochs=epochs, schedule="linear"), []
    worker.optimizer.register_step_post_hook(lambda *_: steps.append(worker.optimizer.param_groups[0]["lr"]))
    batch = worker.compute_logprobs(batch_of())
    metrics = worker.update(batch)
    count = minibatches * epochs
    assert steps == pytest.approx([1e-2 * (1 - update / 10) for update in range(count)])
    assert metrics["learning_rate"] == pytest.approx(sum(steps) / count)
    assert (worker.updates, worker.version) == (count, 1)
    assert metrics["tokens/response"] == pytest.approx(float(batch["response_mask"].values().sum()) / minibatches)


def test_the_update_does_not_depend_on_how_the_batch_was_cut(make_actor, monkeypatch):
    results = []
    for budget, surplus in ((1000, 0), (45, 0), (20, 0), (1000, 14)):
        with monkeypatch.context() as patch:
            if surplus:
                patch.setattr(microbatch_module, "pack", lambda lengths, most, **_: pack(lengths, most, at_least=14))
            algorithm = AlgorithmConfig(entropy_coefficient=0.1)
            metrics, change = learned(make_actor(algorithm, max_tokens_per_microbatch=budget), updates=1)
            results.append(({n: value for n, value in metrics.items() if not n.startswith("perf/")}, change))
    metrics, change = results[0]
    assert change.abs().max() > 1e-3
    for other_metrics, other_change in results[1:]:
        assert_same_change(other_change, change)
        assert other_metrics == pytest.approx(metrics, rel=1e-4)


ALL_THREE = {"compile": True, "recompute": "full", "reshard": True}


@pytest.mark.parametrize(
    "settings",
    [{"recompute": "selective"}, {"recompute": "full"}, {"reshard": True}, {"compile": True}, ALL_THREE],
)
def test_how_it_is_computed_does_not_change_the_update(make_actor, settings, traced_alone):
    algorithm = AlgorithmConfig(entropy_coefficient=0.1)
    metrics, change = learned(make_actor(algorithm), updates=2)
    other_metrics, other_change = learned(make_actor(algorithm, **settings), updates=2)
    assert_same_change(other_change, change)
    for name in ("loss", "grad_norm", "entropy"):
        assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-4)


def seen_between_micro_batches(worker, look):
    """What `look()` finds before each forward pass of an update in more than two micro-batches, and before its step."""
    found = []
    worker.policy.register_forward_pre_hook(lambda *_: found.append(look()))
    worker.optimizer.register_step_pre_hook(lambda *_: found.append(look()))
    worker.update_minibatch(weighed(batch_of()))
    assert len(found) > 3
    return found


def test_gradients_are_reduced_after_the_last_micro_batch_alone(make_actor):
    worker = make_actor(max_tokens_per_microbatch=40)
    # FSDP gives a shard its gradient when it has reduced it.
    reduced = seen_between_micro_batches(worker, lambda: sum(shard.grad is not None for shard in worker.parameters))
    assert reduced == [0] * (len(reduced) - 1) + [len(worker.parameters)]


@pytest.mark.parametrize(("settings", "kept"), [({}, True), ({"reshard": True}, False)])
def test_between_micro_batches_one_shard_keeps_gathered_weights_or_frees_them(make_actor, settings, kept, monkeypatch):
    monkeypatch.setattr(policy, "SMALLEST_UNIT", 0)
    worker = make_actor(max_tokens_per_microbatch=40, **settings)
    layer = worker.policy.causal_lm.model.layers[0]
    gathered = seen_between_micro_batches(worker, lambda: not isinstance(next(layer.parameters()), DTensor))
    assert gathered == [False] + [kept] * (len(gathered) - 2) + [False]


def test_compiled_layers_take_batches_of_any_lengths_without_being_compiled_again(make_actor, traced_alone):
    worker = make_actor(compile=True)
    for seed in range(2):  # what differs the second time is expected to differ from then on
        worker.update(batch_of(seed=seed))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(2, 6):
            worker.update(batch_of(groups=4 + seed, seed=seed))


@pytest.mark.parametrize(("recompute", "layers"), [("none", 0), ("selective", 1), ("full", 2)])
def test_recomputed_layers_keep_nothing_but_their_input(make_actor, recompute, layers):
    worker = make_actor(recompute=recompute)
    calls = []
    for layer in worker.policy.causal_lm.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_, layer=layer: calls.append(layer))
    worker.update_minibatch(weighed(batch_of(groups=1)))
    assert len(calls) == 2 + layers


def test_an_update_says_how_fast_and_how_evenly_it_worked(make_actor, monkeypatch):
    worker, batch = make_actor(max_tokens_per_microbatch=45), batch_of()
    worker.peak = 1e12
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(actor_module.time, "perf_counter", lambda: next(clock))
    metrics = worker.update_minibatch(weighed(batch))
    lengths, predicted = lengths_of(batch["tokens"]), int(batch["response_mask"].values().sum())
    config = worker.policy.causal_lm.config
    weights = {name: p.numel() for name, p in worker.policy.named_parameters() if p.ndim == 2}
    head = config.vocab_size * config.hidden_size
    linear = sum(n for name, n in weights.items() if "embed" not in name and "lm_head" not in name)
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    width = config.num_attention_heads * config.head_dim
    forward = 2 * linear * sum(lengths) + 2 * head * predicted + 4 * config.num_hidden_layers * width * pairs
    assert metrics["perf/update_tflops_per_device"] == pytest.approx(3 * forward / 2 / 1e12)
    assert metrics["perf/update_mfu"] == pytest.approx(3 * forward / 2 / 1e12)
    assert (metrics["perf/update_balance"], metrics["perf/update_bubble"]) == (1, 0)
    fill = [sum(lengths[i] for i in rows) for rows in pack(lengths, 45)]
    assert metrics["perf/packing"] == pytest.approx(sum(fill[:-1]) / (len(fill) - 1) / 45)


def test_weight_decay_leaves_norms_and_biases_as_they_are(make_actor):
    worker, batch = make_actor(learning_rate=0.1, weight_decay=0.5), batch_of()
    batch["advantages"].values().zero_()
    before = {name: parameter.detach().full_tensor().clone() for name, parameter in worker.policy.named_parameters()}
    worker.update(batch)
    kinds = set()
    for name, parameter in worker.policy.named_parameters():
        decay = 0.95 if parameter.ndim == 2 else 1.0
        kinds.add(name.rpartition(".")[2] + str(parameter.ndim))
        torch.testing.assert_close(parameter.detach().full_tensor(), decay * before[name], msg=name)
    assert kinds == {"weight1", "weight2"}  # Qwen3 has norms and no biases


def test_an_update_learns_from_the_sign_of_the_advantage(make_actor):
    worker, batch = make_actor(learning_rate=1e-3), batch_of()
    before = worker.compute_logprobs(batch)["old_logprobs"].values()
    worker.update(batch)
    change = worker.compute_logprobs(batch)["old_logprobs"].values() - before
    assert (change * batch["advantages"].values()).sum() > 0


def test_an_update_has_no_gradient_left_from_the_one_before(make_actor):
    worker = make_actor(learning_rate=1e-12)
    first, second = (worker.update(batch_of())["grad_norm"] for _ in range(2))
    assert first > 0
    assert second == pytest.approx(first, rel=1e-5)


def test_without_advantages_nothing_changes(make_actor):
    worker, batch = make_actor(), batch_of()
    batch["advantages"].values().zero_()
    before = weights_of(worker)
    assert worker.update(batch)["grad_norm"] == 0
    assert torch.equal(weights_of(worker), before)


@pytest.mark.parametrize("method", ["update", "sft_update"])
def test_a_batch_without_response_tokens_is_refused(make_actor, method):
    worker, batch = make_actor(), batch_of()
    batch["response_mask"].values().zero_()
    before = weights_of(worker)
    with pytest.raises(ValueError, match="no response tokens"):
        getattr(worker, method)(weighed(batch))
    assert torch.equal(weights_of(worker), before)
    assert worker.updates == 0


def test_supervised_updates_make_the_responses_more_likely(make_actor):
    worker, batch = make_actor(), weighed(batch_of())
    losses = [worker.sft_update(batch)["loss"] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    logprobs = worker.compute_logprobs(batch)["old_logprobs"].values()
    expected = -float(logprobs.sum() / batch["response_mask"].values().sum())
    assert worker.sft_update(batch)["loss"] == pytest.approx(expected)


def test_logprobs_are_added_to_the_batch_in_the_order_of_its_rows(make_actor):
    batch = batch_of()
    names = set(batch.keys())
    whole = make_actor(max_tokens_per_microbatch=1000).compute_logprobs(batch)
    assert set(whole.keys()) == names | {"old_logprobs"}
    assert set(batch.keys()) == names
    cut = make_actor(max_tokens_per_microbatch=20).compute_logprobs(batch)
    assert lengths_of(cut["old_logprobs"]) == lengths_of(batch["tokens"])
    torch.testing.assert_close(cut["old_logprobs"].values(), whole["old_logprobs"].values(), rtol=1e-5, atol=1e-5)
    assert not (whole["old_logprobs"].values() * ~batch["response_mask"].values()).any()


# what is not finite


def spoiled(field, value):
    """A batch with one number that is not finite, at the last token of a row."""
    batch = batch_of()
    batch[field].values()[int(batch[field].offsets()[5]) - 1] = value
    return batch


@pytest.mark.parametrize("before", [0, 1], ids=["first update", "second update"])
@pytest.mark.parametrize(
    ("field", "value"),
    [("advantages", math.nan), ("advantages", math.inf), ("rollout_logprobs", math.nan), ("loss alone", math.inf)],
)
def test_an_update_that_is_not_finite_leaves_weights_and_optimizer_as_they_are(
    make_actor, field, value, before, monkeypatch
):
    algorithm = AlgorithmConfig(correction="truncate")
    worker, twin = make_actor(algorithm), make_actor(algorithm)
    good = [batch_of(seed=seed) for seed in range(3)]
    for batch in good[:before]:
        assert worker.update(batch)["update/skipped"] == 0
    kept = everything_of(worker)
    with monkeypatch.context() as patch:
        if field == "loss alone":  # its gradient is finite
            batch = batch_of()
            patch.setattr(actor_module, "policy_loss", lambda logprobs, *_: (logprobs.sum() + value, {}))
        else:
            batch = spoiled(field, value)
        metrics = worker.update(batch)
    assert metrics["update/skipped"] == 1
    assert not math.isfinite(metrics["grad_norm"])
    assert_same(everything_of(worker), kept)
    assert (worker.updates, worker.version) == (before + 1, before + 1)
    for batch in good[before:]:
        assert worker.update(batch)["update/skipped"] == 0
    for batch in good:
        twin.update(batch)
    assert_same(everything_of(worker), everything_of(twin))


def test_the_skipped_updates_of_a_step_are_added_up(make_actor):
    worker = make_actor(minibatches=3, epochs=2)
    assert worker.update(spoiled("advantages", math.nan))["update/skipped"] == 2
    assert worker.updates == 6


TWO_PROCESSES = """
import sys
import torch.distributed as dist
from grpo.algorithm import AlgorithmConfig
from tests.workers.test_actor import assert_same, everything_of, spoiled
from workers.actor import ActorWorker
from workers.config import ActorConfig
from workers.config import ModelConfig
from workers.parallel.mesh import join, leave, make_training_layout, pick_device

device = pick_device("cpu")
join(device, 60.0)
for replicate in (1, 2):
    layout = make_training_layout(device, replicate)
    worker = ActorWorker(ModelConfig(path=sys.argv[1]), ActorConfig(), AlgorithmConfig(), layout, 1.0, 10)
    kept = everything_of(worker)
    batch = spoiled("advantages", float("nan")) if dist.get_rank() == 0 else None
    assert worker.update(batch)["update/skipped"] == 1
    assert_same(everything_of(worker), kept)
leave()
"""


def test_all_ranks_skip_an_update_of_which_one_has_a_gradient_that_is_not_finite(model_config):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command, root = [*launch, sys.executable, "-c", TWO_PROCESSES, model_config.path], Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    subprocess.run(command, check=True, timeout=120, env=environment, cwd=root)


# gradient clipping


@pytest.mark.parametrize("longest", [1e-3, 0.5, 1e6])
def test_clipping_is_that_of_torch_on_one_process(make_actor, layout, longest):
    worker, random = make_actor(), torch.Generator().manual_seed(4)
    plain = [torch.nn.Parameter(torch.zeros(parameter.shape)) for parameter in worker.parameters[:-1]]
    for parameter, twin in zip(worker.parameters[:-1], plain, strict=True):
        twin.grad = torch.randn(parameter.shape, generator=random)
        parameter.grad = DTensor.from_local(twin.grad.clone(), parameter.device_mesh, parameter.placements)
    expected = torch.nn.utils.clip_grad_norm_(plain, longest)
    norm = clip_gradients(worker.parameters, longest, layout, torch.tensor(3.0))
    assert float(norm) == pytest.approx(float(expected))
    for parameter, reference in zip(worker.parameters[:-1], plain, strict=True):
        torch.testing.assert_close(parameter.grad.to_local(), reference.grad, rtol=1e-5, atol=0)
    assert worker.parameters[-1].grad is None


def test_an_update_is_clipped_but_reports_the_whole_norm(make_actor):
    norms, means = [], []
    for longest in (1e6, 1e-3):
        worker = make_actor(max_grad_norm=longest)
        norms.append(worker.update(batch_of())["grad_norm"])
        states = [worker.optimizer.state[p]["exp_avg"].full_tensor().flatten() for p in worker.parameters]
        means.append(float(torch.cat(states).norm()))
    assert norms[0] == pytest.approx(norms[1])
    assert means == pytest.approx([0.1 * norms[0], 0.1 * 1e-3], rel=1e-4)
