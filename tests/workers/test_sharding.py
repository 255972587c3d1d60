"""Who owns the memory, and that nothing is ever sampled or learned from other weights than it says."""

import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from grpo.algorithm import AlgorithmConfig
from grpo.batch import Trajectory, batch_of, jagged, lengths_of, make_batch
from grpo.config import ConfigError
from tests.workers.conftest import prompts_of
from workers.actor import ActorWorker
from workers.config import ActorConfig
from workers.engines.config import RolloutConfig
from workers.engines.torch_engine import TorchEngine
from workers.memory import bytes_of
from workers.parallel.gather import Gatherer
from workers.ref import RefWorker
from workers.rollout import RolloutWorker
from workers.sharding import ShardingManager, expect_current, judge_gap


class WatchedEngine(TorchEngine):
    """Counts the transfers, and breaks one off after `fails_after` weights where that is set."""

    transfers = 0
    fails_after: int | None = None

    def update_weights(self, buckets):
        self.transfers += 1

        def until_it_fails():
            for count, bucket in enumerate(buckets):
                if count == self.fails_after:
                    raise ConnectionError("lost on the way")
                yield bucket

        super().update_weights(until_it_fails())


@pytest.fixture
def sharding(layout, engines, model_config):
    actor = ActorWorker(model_config, ActorConfig(learning_rate=1e-2), AlgorithmConfig(), layout, 1.0, 10)
    engine = WatchedEngine(model_config, layout.device)
    rollout = RolloutWorker(RolloutConfig(max_response_tokens=5), engine, engines, (1,), seed=3)
    manager = ShardingManager(actor, rollout)
    # Small enough for the tiny model to need several.
    manager.gatherer = Gatherer(manager.gatherer.parameters, layout, engine.dtype, 8192)
    assert len(manager.gatherer.plan) > 4
    return manager


@pytest.fixture
def prompts():
    return prompts_of([5, 6, 7], [8])


def rollout(sharding, prompts):
    with sharding.serving():
        return sharding.rollout.generate(prompts, 2)


def sent_by(sharding):
    """The weights that the manager sends, by name."""
    return {name: tensor.clone() for bucket in sharding.weights() for name, tensor in bucket.items()}


def learn(sharding, batch):
    """One step with advantages that change the weights."""
    batch["group"] = torch.arange(len(batch)) // 2
    mask = batch["response_mask"]
    signs = torch.tensor([1.0, -1.0]).repeat(len(batch) // 2).repeat_interleave(torch.tensor(lengths_of(mask)))
    batch["advantages"] = torch.nested.nested_tensor_from_jagged(signs * mask.values(), mask.offsets())
    return sharding.actor.update(batch)


def assert_engine_has_the_actors_weights(sharding):
    sent = sent_by(sharding)
    assert sent.keys() == sharding.rollout.engine.weights.keys()
    assert all(torch.equal(sharding.rollout.engine.weights[name], tensor) for name, tensor in sent.items())


def test_inside_the_block_the_engine_serves_the_actors_weights_and_after_it_sleeps(sharding, hf_model):
    engine = sharding.rollout.engine
    assert not sharding.is_serving
    with sharding.serving():
        assert sharding.is_serving
        assert engine.serving
        assert_engine_has_the_actors_weights(sharding)
    assert not sharding.is_serving
    assert not engine.serving
    assert all(torch.equal(engine.weights[name], tensor) for name, tensor in hf_model.named_parameters())


def test_serving_inside_serving_is_refused_and_the_outer_block_goes_on(sharding, prompts):
    with sharding.serving():
        with pytest.raises(RuntimeError, match="entered twice"), sharding.serving():
            pass
        assert len(sharding.rollout.generate(prompts, 1)) == 2
    assert not sharding.is_serving


def test_the_engine_sleeps_after_a_block_that_raises(sharding, prompts):
    with pytest.raises(KeyError, match="inside"), sharding.serving():
        raise KeyError("inside")
    assert not sharding.is_serving
    assert not sharding.rollout.engine.serving
    assert len(rollout(sharding, prompts)) == 4


def test_outside_the_block_nothing_is_generated(sharding, prompts):
    with pytest.raises(RuntimeError, match="asleep"):
        sharding.rollout.generate(prompts, 1)
    rollout(sharding, prompts)
    with pytest.raises(RuntimeError, match="asleep"):
        sharding.rollout.generate(prompts, 1)


def test_weights_travel_once_a_version(sharding, prompts):
    engine = sharding.rollout.engine
    batch = rollout(sharding, prompts)
    whole = sum(4 * weight.numel() for weight in engine.weights.values())
    assert (engine.transfers, sharding.metrics["sync/bytes"]) == (1, whole)
    rollout(sharding, prompts)
    assert (engine.transfers, sharding.metrics["sync/bytes"]) == (1, 0)
    before = {name: weight.clone() for name, weight in engine.weights.items()}
    learn(sharding, batch)
    rollout(sharding, prompts)
    assert (engine.transfers, sharding.metrics["sync/bytes"]) == (2, whole)
    assert_engine_has_the_actors_weights(sharding)
    assert any(not torch.equal(before[name], weight) for name, weight in engine.weights.items())


def test_samples_carry_the_version_of_their_weights(sharding, prompts):
    first = rollout(sharding, prompts)
    learn(sharding, first)
    second = rollout(sharding, prompts)
    for version, batch in enumerate((first, second)):
        expected = torch.where(batch["response_mask"].values(), version, -1)
        assert torch.equal(batch["versions"].values(), expected)


def test_a_stale_batch_is_refused_and_both_versions_are_named(sharding, prompts):
    batch = rollout(sharding, prompts)
    expect_current(batch, sharding.actor.version)
    expect_current(None, sharding.actor.version)
    learn(sharding, batch)
    with pytest.raises(RuntimeError, match=r"version \[0\], and the actor is at 1: .* stale"):
        expect_current(batch, sharding.actor.version)
    expect_current(rollout(sharding, prompts), sharding.actor.version)


@pytest.mark.parametrize("versions", [[-1, 0], [0, 1]])
def test_a_batch_of_two_versions_is_refused(sharding, versions):
    trajectory = Trajectory([3])
    for version in versions:
        trajectory.add_sampled([5], [-0.5], version)
    batch = batch_of([trajectory])
    with pytest.raises(RuntimeError, match=rf"version \[{versions[0]}, {versions[1]}\], and the actor is at 0"):
        expect_current(batch, sharding.actor.version)


@pytest.mark.parametrize("before", [0, 1])
def test_what_a_half_updated_engine_samples_is_refused(sharding, prompts, before):
    engine = sharding.rollout.engine
    for _ in range(before):
        learn(sharding, rollout(sharding, prompts))
    engine.fails_after = 3
    with pytest.raises(ConnectionError), sharding.serving():
        pytest.fail("the block was entered with half of the weights")
    assert sharding.rollout.version == -1
    with pytest.raises(RuntimeError, match="asleep"):
        sharding.rollout.generate(prompts, 1)
    engine.wake()
    batch = sharding.rollout.generate(prompts, 1)
    assert set(batch["versions"].values().tolist()) == {-1}
    with pytest.raises(RuntimeError, match=rf"version \[-1\], and the actor is at {before}"):
        expect_current(batch, sharding.actor.version)


def test_reading_logprobs_leaves_the_master_weights_in_place(layout, engines, hf_model, model_config, prompts):
    # In bfloat16 the copies gathered for computing differ from the masters.
    model_config = type(model_config)(path=model_config.path, dtype="bfloat16")
    actor = ActorWorker(model_config, ActorConfig(), AlgorithmConfig(), layout, 1.0, 10)
    rollout = RolloutWorker(RolloutConfig(), TorchEngine(model_config, layout.device), engines, (1,), seed=3)
    tokens = jagged([torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10])])
    mask = jagged([torch.tensor([False, False, True, True]), torch.tensor([False, True])])
    actor.compute_logprobs(make_batch({"tokens": tokens, "response_mask": mask}))
    assert all(isinstance(parameter, DTensor) for parameter in actor.policy.parameters())
    sent = sent_by(ShardingManager(actor, rollout))
    for name, tensor in hf_model.named_parameters():
        assert torch.equal(sent[name], tensor.to(torch.bfloat16)), name


def test_the_masters_are_sent_also_while_their_gathered_copies_stand_in_the_model(sharding, hf_model):
    sharding.actor.policy.unshard()
    for name, parameter in sharding.actor.policy.named_parameters():
        parameter.data.fill_(7)
        assert not isinstance(parameter, DTensor), name
    sent = sent_by(sharding)
    sharding.actor.policy.reshard()
    assert all(torch.equal(sent[name], tensor) for name, tensor in hf_model.named_parameters())


def test_weights_other_than_the_actors_are_found_at_the_first_comparison(sharding, prompts):
    engine, received = sharding.rollout.engine, TorchEngine.update_weights

    def loses_one(buckets):
        received(engine, buckets)
        engine.weights["model.norm.weight"].data[0] += 1

    engine.update_weights = loses_one
    with pytest.raises(RuntimeError, match=r"not the actor's: 'model.norm.weight' differs"):
        rollout(sharding, prompts)
    assert sharding.rollout.version == -1


def test_weights_are_compared_from_the_first_update_on_every_so_many(sharding, prompts):
    compared, verify = [], sharding.rollout.engine.verify
    sharding.rollout.engine.verify = lambda buckets: (compared.append(sharding.actor.version), verify(buckets))
    sharding.rollout.config.verify_every = 2
    for _ in range(5):
        learn(sharding, rollout(sharding, prompts))
    assert compared == [0, 2, 4]
    assert sharding.verified == 4
    assert "time/sync/verify" in sharding.metrics


def test_rows_that_the_shards_do_not_divide_are_gathered_whole_on_every_rank(four_processes):
    for results in four_processes["gathered"]:
        assert len(results) == 12
        for name, (ours, reference) in results.items():
            assert torch.equal(ours, reference), name


def test_what_is_offloaded_comes_back_unchanged_and_is_gone_meanwhile(sharding, prompts):
    actor = sharding.actor
    learn(sharding, rollout(sharding, prompts))  # so that the optimizer has a state
    states = [state for held in actor.optimizer.state.values() for state in held.values() if state.ndim]
    tensors = [tensor.to_local() for tensor in [*actor.parameters, *states]]
    before = [tensor.clone() for tensor in tensors]
    actor.config.offload = ["optimizer", "parameters"]
    with sharding.serving():
        assert_same = sharding.rollout.generate(prompts, 2)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(tensors, before, strict=True))
    expect_current(assert_same, sharding.actor.version)
    learn(sharding, assert_same)
    assert not torch.equal(tensors[0], before[0])


def test_an_offloaded_reference_is_there_for_its_own_pass_alone(model_config, layout, prompts, sharding):
    samples = rollout(sharding, prompts)
    expected = RefWorker(model_config, ActorConfig(), layout, 1.0).compute_logprobs(samples)["ref_logprobs"]
    ref = RefWorker(model_config, ActorConfig(offload=["reference"]), layout, 1.0)

    def held():
        return sum(p.to_local().untyped_storage().nbytes() for p in ref.policy.parameters())

    assert held() == 0
    sharding.refs = [ref]
    for _ in range(2):
        with sharding.serving():
            assert held() == 0
        assert held() > 0
        assert torch.equal(ref.compute_logprobs(samples)["ref_logprobs"].values(), expected.values())
        assert held() == 0


def gap(size, entropy=0.3):
    sizes = {"rollout/logprob_gap": size, "rollout/kl": size / 2, "entropy": entropy}
    return sizes | {"rollout/gap_correlation": 0.1, "rollout/gap_slope": 1.0}


def test_a_gap_is_told_once_past_one_threshold_and_ends_the_run_past_another(sharding):
    sharding.verified = sharding.rollout.version
    assert judge_gap(gap(0.05), sharding) is None
    assert "by 0.06 on average (KL 0.03), more than rollout.gap_warning=0.05" in judge_gap(gap(0.06), sharding)
    assert judge_gap(gap(0.07), sharding) is None
    with pytest.raises(ConfigError, match=r"by 0.51 .* more than rollout.gap_error=0.5"):
        judge_gap(gap(0.51), sharding)
    assert judge_gap(gap(float("nan")), sharding) is None
    sharding.verified = None
    assert "cause is stale weights" in judge_gap(gap(0.07), sharding)


def test_a_small_gap_in_bfloat16_is_rounding_and_another_is_not(sharding):
    sharding.verified = sharding.rollout.version
    assert "cause is the engine's numbers" in judge_gap(gap(0.06), sharding)
    sharding.engine.dtype, sharding.gaps_told = torch.bfloat16, set()
    assert "cause is rounding: both sides compute in bfloat16" in judge_gap(gap(0.06), sharding)
    assert "cause is the engine's numbers" in judge_gap(gap(0.3), sharding)


def test_what_rounding_explains_of_a_gap_grows_with_the_entropy_in_bfloat16_alone(sharding):
    for dtype, entropy, bound in [
        (torch.float32, 2.2, 0.05),
        (torch.float32, 11.0, 0.05),
        (torch.bfloat16, 0.0, 0.05),
        (torch.bfloat16, 2.2, 0.0889),
        (torch.bfloat16, 11.0, 0.1),
    ]:
        sharding.engine.dtype, sharding.gaps_told = dtype, set()
        assert judge_gap(gap(bound - 0.001, entropy), sharding) is None
        assert sharding.metrics["rollout/gap_bound"] == pytest.approx(bound, abs=1e-4)
        assert "differ by" in judge_gap(gap(bound + 0.001, entropy), sharding)


@pytest.mark.parametrize("temperature", [0.7, 1.4])
def test_another_temperature_in_sampling_is_named(sharding, temperature):
    sharding.rollout.config.max_response_tokens = 60
    prompts = prompts_of(*([i] for i in range(5, 37)))
    with sharding.serving():
        batch = sharding.rollout.generate(prompts, 2, temperature)  # the actor computes at 1
    said = judge_gap(learn(sharding, batch), sharding)
    sampled_at = float(re.search("the engine seems to sample at ([0-9.]+), and the trainer computes at 1", said)[1])
    assert sampled_at == pytest.approx(temperature, rel=0.15)


def test_stale_weights_in_sampling_are_named(sharding, prompts):
    learn(sharding, rollout(sharding, prompts))
    engine = sharding.rollout.engine
    engine.update_weights = lambda buckets: [None for _ in buckets]
    sharding.rollout.config.verify_every = 0
    for weight in engine.weights.values():
        weight.data += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    said = judge_gap(learn(sharding, rollout(sharding, prompts)), sharding)
    assert "cause is stale weights: " in said
    assert "last compared at version 0" in said


def test_the_memory_table_counts_what_the_actor_holds(sharding, prompts):
    learn(sharding, rollout(sharding, prompts))
    rows = dict(line.strip().rsplit(None, 2)[:2] for line in sharding.memory.table().splitlines()[1:])
    assert {"actor: parameters (this rank's shards)", "actor: optimizer", "free", "in total"} <= set(rows)
    weights = sum(parameter.numel() * 4 for parameter in sharding.actor.parameters)
    states = [state for held in sharding.actor.optimizer.state.values() for state in held.values() if state.ndim]
    assert bytes_of(sharding.actor.parameters) == weights
    assert bytes_of(states) == 2 * weights
