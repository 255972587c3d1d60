"""What a loss says of single tokens, by hand, and the metrics beside it. The formulas: test_algorithms.py."""

import math

import pytest
import torch

from grpo.algorithm import AlgorithmConfig
from grpo.losses import policy_loss, sft_loss

PLAIN = {"clip_low": 0.1, "clip_high": 0.3}


def problem(seed=0, count=60):
    """Tokens whose ratios fall below, between and above the clips, with advantages of both signs and 0."""
    random = torch.Generator().manual_seed(seed)
    logprobs = -3 * torch.rand(count, generator=random)
    advantages = torch.randn(count, generator=random)
    advantages[::7] = 0
    fields = {
        "advantages": advantages,
        "loss_weights": torch.rand(count, generator=random),
        "seq_id": torch.arange(count) // 10,
        "old_logprobs": logprobs + 0.3 * torch.randn(count, generator=random),
        "ref_logprobs": logprobs + 0.5 * torch.randn(count, generator=random),
    }
    return logprobs.requires_grad_(), 2 * torch.rand(count, generator=random), fields


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
    logprob, zero = torch.tensor([ratio]).log().requires_grad_(), torch.zeros(1)
    fields = {"loss_weights": torch.ones(1), "seq_id": zero.long(), "old_logprobs": zero}
    fields["advantages"] = torch.tensor([advantage])
    total, metrics = policy_loss(logprob, zero, fields, AlgorithmConfig(**PLAIN))
    total.backward()
    assert total.item() == pytest.approx(loss)
    assert logprob.grad.item() == pytest.approx(gradient)
    assert (metrics["clip/low"].value, metrics["clip/high"].value) == clips


@pytest.mark.parametrize(
    ("probability", "before", "advantage", "loss", "gradient", "clips"),
    [
        (0.6, 0.4, 2.0, 0.0, 0.0, (0, 1)),  # 0.2 more, a ratio of 1.5
        (0.6, 0.4, -2.0, 3.0, 3.0, (0, 0)),
        (0.4, 0.6, -2.0, 0.0, 0.0, (1, 0)),
        (0.4, 0.6, 2.0, -4 / 3, -4 / 3, (0, 0)),
        (0.02, 0.001, 2.0, -40.0, -40.0, (0, 0)),  # 20 times as likely, and still rare
        (0.001, 0.02, -2.0, 0.1, 0.1, (0, 0)),
        (0.54, 0.4, 2.0, -2.7, -2.7, (0, 0)),
        (0.56, 0.4, 2.0, 0.0, 0.0, (0, 1)),
        (0.4, 0.47, -2.0, 0.0, 0.0, (1, 0)),  # its own bound below
    ],
)
def test_a_change_of_probability_stops_a_token_where_it_would_go_on(
    probability, before, advantage, loss, gradient, clips
):
    logprob, zero = torch.tensor([probability]).log().requires_grad_(), torch.zeros(1)
    fields = {"loss_weights": torch.ones(1), "seq_id": zero.long(), "advantages": torch.tensor([advantage])}
    fields["rollout_logprobs"] = torch.tensor([before]).log()
    fields["old_logprobs"] = logprob.detach() + 1  # of no account
    config = AlgorithmConfig.of("dppo", clip_low=0.05, drift_coefficient=0.0)
    total, metrics = policy_loss(logprob, zero, fields, config)
    total.backward()
    assert total.item() == pytest.approx(loss, rel=1e-5)
    assert logprob.grad.item() == pytest.approx(gradient, rel=1e-5)
    assert (metrics["clip/low"].value, metrics["clip/high"].value) == clips


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_soft_gate_is_steepest_on_policy_and_fades_both_ways_sooner_for_bad_tokens(advantage):
    ratios, zeros = torch.tensor([0.1, 0.5, 1.0, 1.5, 4.0]), torch.zeros(5)
    logprobs = ratios.log().requires_grad_()
    fields = {"loss_weights": torch.ones(5), "seq_id": zeros.long(), "old_logprobs": zeros}
    fields["advantages"] = torch.full((5,), advantage)
    total, _ = policy_loss(logprobs, zeros, fields, AlgorithmConfig.of("sapo"))
    total.backward()
    heat = 1.0 if advantage > 0 else 1.05
    gate = (heat * (ratios - 1)).sigmoid()
    torch.testing.assert_close(logprobs.grad, -advantage * 4 * gate * (1 - gate) * ratios)
    assert logprobs.grad[2].abs() == 1


@pytest.mark.parametrize("choice", ["ppo", "cispo"])
def test_metrics_count_tokens_whatever_they_weigh(choice):
    logprobs, entropy, fields = problem()
    config = AlgorithmConfig(clip=choice, kl_coefficient=0.7, entropy_coefficient=0.4, **PLAIN)
    _, metrics = policy_loss(logprobs, entropy, fields, config)
    assert not any(metric.value.requires_grad for metric in metrics.values())
    advantages, old, ref = (fields[n].double().tolist() for n in ("advantages", "old_logprobs", "ref_logprobs"))
    low, high, kl, largest = 0, 0, 0.0, 0.0
    for t, logprob in enumerate(logprobs.double().tolist()):
        ratio, gap = math.exp(logprob - old[t]), ref[t] - logprob
        # PPO's bound stops a token where it would go on; CISPO's stops what it weighs.
        low += ratio < 0.9 and (advantages[t] < 0 or choice == "cispo")
        high += ratio > 1.3 and (advantages[t] > 0 or choice == "cispo")
        kl, largest = kl + math.exp(gap) - gap - 1, max(largest, ratio)
    assert 0 < low < 60
    assert 0 < high < 60
    expected = {"clip/low": low, "clip/high": high, "kl": kl, "ratio/max": largest, "entropy": float(entropy.sum())}
    assert {name: float(metric.value) for name, metric in metrics.items()} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_on_policy_the_gradient_is_minus_the_advantage(ratio):
    logprobs, entropy, fields = problem()
    del fields["old_logprobs"], fields["ref_logprobs"]
    loss, metrics = policy_loss(logprobs, entropy, fields, AlgorithmConfig(ratio=ratio, **PLAIN))
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -fields["advantages"] * fields["loss_weights"], rtol=1e-6, atol=0)
    assert metrics["ratio/max"].value == 1
    assert metrics["clip/low"].value == metrics["clip/high"].value == 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_at_the_reference_the_kl_term_is_zero(estimator):
    logprobs, entropy, fields = problem()
    fields |= {"advantages": torch.zeros(60), "ref_logprobs": logprobs.detach().clone()}
    loss, metrics = policy_loss(logprobs, entropy, fields, AlgorithmConfig(kl_coefficient=0.7, kl_estimator=estimator))
    loss.backward()
    assert loss == metrics["kl"].value == 0
    if estimator != "k1":  # whose gradient vanishes only in the mean
        assert logprobs.grad.abs().max() == 0


def test_a_kl_term_in_the_reward_is_none_in_the_loss():
    logprobs, entropy, fields = problem()
    loss, metrics = policy_loss(logprobs, entropy, fields, AlgorithmConfig.of("rloo", kl_coefficient=0.7))
    assert loss == policy_loss(logprobs, entropy, fields, AlgorithmConfig.of("rloo"))[0]
    expected = float((logprobs.detach() - fields["ref_logprobs"]).sum())
    assert float(metrics["kl"].value) == pytest.approx(expected, rel=1e-5)


def test_a_small_kl_keeps_its_digits():
    # exp(x) - x - 1 in float32 is 0 or 6e-8 here.
    logprobs, entropy, fields = problem()
    fields["ref_logprobs"] = logprobs.detach() + 1e-3
    gaps = fields["ref_logprobs"].double() - logprobs.detach().double()
    _, metrics = policy_loss(logprobs, entropy, fields, AlgorithmConfig(kl_coefficient=0.7))
    assert metrics["kl"].value.item() == pytest.approx((gaps.exp() - gaps - 1).sum().item(), rel=1e-3)


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"ratio": "sequence"},
        {"correction": "mask", "correction_level": "sequence"},
        {"reject_low": 0.5, "off_policy_mask": 0.0, "drift_coefficient": 1.0},
        {"clip": "dppo"},
        {"clip": "sapo"},
    ],
)
def test_no_tokens_add_zero(choices):
    logprobs, entropy, fields = problem()
    fields = {name: field[:0] for name, field in fields.items()} | {"rollout_logprobs": torch.zeros(0)}
    config = AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.1, **choices)
    loss, metrics = policy_loss(logprobs[:0], entropy[:0], fields, config)
    assert loss == 0
    assert {float(metric.value) for metric in metrics.values()} == {0.0}


def test_supervised_loss_is_the_weighted_negative_log_likelihood():
    logprobs, _, fields = problem()
    loss = sft_loss(logprobs, fields["loss_weights"])
    loss.backward()
    expected = -sum(a * b for a, b in zip(logprobs.tolist(), fields["loss_weights"].tolist(), strict=True))
    assert loss.item() == pytest.approx(expected)
    assert torch.equal(logprobs.grad, -fields["loss_weights"])
