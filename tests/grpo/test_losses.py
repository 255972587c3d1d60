"""The losses against plain loops over their formulas, in float64, with autograd for the gradients."""

import dataclasses

import pytest
import torch

from grpo.config import ConfigError
from grpo.losses import AlgorithmConfig, grpo_loss, imitation_loss

CONFIGS = {
    "plain": AlgorithmConfig(clip_low=0.1, clip_high=0.3),
    "kl": AlgorithmConfig(clip_low=0.1, clip_high=0.3, kl_coefficient=0.7),
    "entropy": AlgorithmConfig(clip_low=0.1, clip_high=0.3, entropy_coefficient=0.4),
    "both": AlgorithmConfig(clip_low=0.3, clip_high=0.05, kl_coefficient=0.2, entropy_coefficient=0.1),
}


def problem(seed=0, count=60):
    """Tokens whose ratios fall below, between and above the clips, with advantages of both signs and 0."""
    random = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(count, generator=random)
    advantages = torch.randn(count, generator=random)
    advantages[::7] = 0
    return {
        "logprobs_N": logprobs.requires_grad_(),
        "entropy_N": (2 * torch.rand(count, generator=random)).requires_grad_(),
        "advantages_N": advantages,
        "old_logprobs_N": logprobs.detach() + 0.3 * torch.randn(count, generator=random),
        "ref_logprobs_N": logprobs.detach() + 0.5 * torch.randn(count, generator=random),
    }


def by_hand(given, config):
    """The formula token by token on float64 leaves: (loss, logprobs, entropy, counts)."""
    logprobs = given["logprobs_N"].detach().double().requires_grad_()
    entropy = given["entropy_N"].detach().double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    sums = dict.fromkeys(("entropy", "clip/low", "clip/high", "kl", "ratio/max"), 0.0)
    for t in range(len(logprobs)):
        advantage = float(given["advantages_N"][t])
        if given["old_logprobs_N"] is None:
            ratio = torch.exp(logprobs[t] - logprobs[t].item())
        else:
            ratio = torch.exp(logprobs[t] - float(given["old_logprobs_N"][t]))
        sums["ratio/max"] = max(sums["ratio/max"], ratio.item())
        if ratio.item() < 1 - config.clip_low:
            clipped = (1 - config.clip_low) * advantage
            sums["clip/low"] += advantage < 0
        elif ratio.item() > 1 + config.clip_high:
            clipped = (1 + config.clip_high) * advantage
            sums["clip/high"] += advantage > 0
        else:
            clipped = ratio * advantage
        unclipped = ratio * advantage
        loss = loss - (unclipped if unclipped <= clipped else clipped)
        if given["ref_logprobs_N"] is not None:
            gap = float(given["ref_logprobs_N"][t]) - logprobs[t]
            k3 = torch.exp(gap) - gap - 1
            sums["kl"] += k3.item()
            loss = loss + config.kl_coefficient * k3
        sums["entropy"] += entropy[t].item()
        loss = loss - config.entropy_coefficient * entropy[t]
    return loss, logprobs, entropy, sums


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("absent", [(), ("old_logprobs_N",), ("ref_logprobs_N",), ("old_logprobs_N", "ref_logprobs_N")])
def test_loss_and_gradients_follow_the_formula(name, absent):
    given, config = problem() | dict.fromkeys(absent), CONFIGS[name]
    loss, sums = grpo_loss(**given, config=config)
    expected, logprobs, entropy, expected_sums = by_hand(given, config)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(given["logprobs_N"].grad.double(), logprobs.grad, rtol=1e-5, atol=1e-6)
    if config.entropy_coefficient:
        torch.testing.assert_close(given["entropy_N"].grad.double(), entropy.grad, rtol=1e-6, atol=0)
    assert ("kl" in sums) == ("ref_logprobs_N" not in absent)
    for key, value in sums.items():
        assert float(value) == pytest.approx(expected_sums[key], rel=1e-5), key
        assert not value.requires_grad
    if not absent:
        assert 0 < sums["clip/low"] < 60
        assert 0 < sums["clip/high"] < 60


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clips"),
    [
        (0.5, 2.0, -1.0, -1.0, (0, 0)),  # too unlikely a good token is pulled back
        (0.5, -2.0, 1.8, 0.0, (1, 0)),
        (1.1, 2.0, -2.2, -2.2, (0, 0)),
        (1.1, -2.0, 2.2, 2.2, (0, 0)),
        (1.5, 2.0, -2.6, 0.0, (0, 1)),
        (1.5, -2.0, 3.0, 3.0, (0, 0)),  # too likely a bad token is pushed down
    ],
)
def test_each_side_is_clipped_at_its_own_bound(ratio, advantage, loss, gradient, clips):
    logprob = torch.tensor([ratio]).log().requires_grad_()
    total, sums = grpo_loss(logprob, torch.zeros(1), torch.tensor([advantage]), torch.zeros(1), None, CONFIGS["plain"])
    total.backward()
    assert total.item() == pytest.approx(loss)
    assert logprob.grad.item() == pytest.approx(gradient)
    assert (sums["clip/low"], sums["clip/high"]) == clips


def test_on_policy_the_gradient_is_minus_the_advantage():
    given = problem() | {"old_logprobs_N": None, "ref_logprobs_N": None}
    loss, sums = grpo_loss(**given, config=CONFIGS["plain"])
    loss.backward()
    assert torch.equal(given["logprobs_N"].grad, -given["advantages_N"])
    assert sums["ratio/max"] == 1
    assert sums["clip/low"] == sums["clip/high"] == 0


@pytest.mark.parametrize("old", [True, False])
def test_advantages_of_zero_teach_nothing(old):
    given = problem() | {"ref_logprobs_N": None, "advantages_N": torch.zeros(60)}
    if not old:
        given["old_logprobs_N"] = None
    loss, _ = grpo_loss(**given, config=CONFIGS["plain"])
    loss.backward()
    assert loss == 0
    assert given["logprobs_N"].grad.tolist() == [0.0] * 60


def test_at_the_reference_the_kl_term_and_its_gradient_are_zero():
    given = problem() | {"advantages_N": torch.zeros(60)}
    given["ref_logprobs_N"] = given["logprobs_N"].detach().clone()
    loss, sums = grpo_loss(**given, config=CONFIGS["kl"])
    loss.backward()
    assert loss == sums["kl"] == 0
    assert given["logprobs_N"].grad.abs().max() == 0


def test_a_small_kl_keeps_its_digits():
    # exp(x) - x - 1 in float32 is 0 or 6e-8 here.
    given = problem()
    given["ref_logprobs_N"] = given["logprobs_N"].detach() + 1e-3
    gaps = given["ref_logprobs_N"].double() - given["logprobs_N"].detach().double()
    _, sums = grpo_loss(**given, config=CONFIGS["kl"])
    assert sums["kl"].item() == pytest.approx((gaps.exp() - gaps - 1).sum().item(), rel=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
def test_micro_batches_sum_to_the_whole(name):
    given = problem()
    whole, sums = grpo_loss(**given, config=CONFIGS[name])
    whole.backward()
    expected = given["logprobs_N"].grad.clone()
    given["logprobs_N"].grad = None
    total, parts = 0.0, []
    for piece in ([0, 5], [5, 6], [6, 41], [41, 60]):
        loss, part = grpo_loss(**{key: value[slice(*piece)] for key, value in given.items()}, config=CONFIGS[name])
        loss.backward()
        total += loss.item()
        parts.append(part)
    assert total == pytest.approx(whole.item(), rel=1e-5)
    torch.testing.assert_close(given["logprobs_N"].grad, expected)
    for key, value in sums.items():
        merge = max if key.endswith("max") else sum
        assert merge(float(part[key]) for part in parts) == pytest.approx(float(value), rel=1e-5), key


def test_no_tokens_add_zero():
    given = {key: value[:0] for key, value in problem().items()}
    loss, sums = grpo_loss(**given, config=CONFIGS["both"])
    assert loss == 0
    assert {float(value) for value in sums.values()} == {0.0}


def test_imitation_is_the_negative_log_likelihood():
    logprobs = problem()["logprobs_N"]
    loss = imitation_loss(logprobs)
    loss.backward()
    assert loss.item() == pytest.approx(-sum(logprobs.tolist()))
    assert torch.equal(logprobs.grad, -torch.ones(60))


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("prompts_per_step", 0, "at least 1"),
        ("epochs_per_step", 0, "at least 1"),
        ("samples_per_prompt", 1, "use 2 or more"),
        ("minibatches_per_step", 5, "use a divisor"),
        ("clip_high", -0.1, "must not be negative"),
        ("kl_coefficient", -1.0, "must not be negative"),
        ("clip_low", 1.0, "must be below 1"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(setting, value, says):
    AlgorithmConfig().check()
    config = dataclasses.replace(AlgorithmConfig(), **{setting: value})
    with pytest.raises(ConfigError, match=f"algorithm.{setting}={value}.*{says}"):
        config.check()
    if says == "use a divisor":
        dataclasses.replace(config, minibatches_per_step=4).check()


def test_only_a_single_update_a_step_is_on_policy():
    assert AlgorithmConfig().on_policy
    assert not AlgorithmConfig(minibatches_per_step=2).on_policy
    assert not AlgorithmConfig(epochs_per_step=2).on_policy
