"""Every preset, and every choice that no preset makes, against its paper's formula (reference.py), with gradients."""

import functools
import itertools
import math
from dataclasses import dataclass, replace

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from grpo.advantages import compute_advantages, overlong_penalty, weigh_tokens
from grpo.algorithm import PRESETS, AlgorithmConfig
from grpo.batch import jagged, make_batch, select
from grpo.losses import policy_loss
from grpo.metrics import merge

LONGEST = 10  # tokens of a response
SEEDS = range(3)
WEIGHTS = {"a": 1.0, "b": 0.5, "c": -2.0}
REFERENCES = {
    "grpo": reference.grpo,
    "dr_grpo": lambda samples, beta: reference.dr_grpo(samples, constant=LONGEST, beta=beta),
    "dapo": lambda samples, beta: reference.dapo(samples, LONGEST, buffer=2, beta=beta),
    "gspo": reference.gspo,
    "cispo": reference.cispo,
    "sapo": reference.sapo,
    "dppo": reference.dppo,
    "maxrl": reference.maxrl,
    "gdpo": lambda samples, beta=0.0: reference.gdpo(samples, WEIGHTS.values(), beta),
    "rloo": reference.rloo,
    "reinforce++": reference.reinforce_plus_plus,
    "reinforce++-baseline": reference.reinforce_plus_plus_baseline,
    "reinforce": reference.reinforce,
}
ON_POLICY_GRADIENTS = {"rloo": reference.rloo_gradient, "reinforce": reference.reinforce_gradient}


@dataclass
class Problem:
    """A random batch, as the reference has it and as the trainer does. N response tokens."""

    samples: list[reference.Sample]
    batch: TensorDict
    on_policy: bool
    seq_id: torch.Tensor  # [N] int64
    logprobs: torch.Tensor  # [N] float32, with gradient: those of the samples, one after the other
    entropy: torch.Tensor  # [N] float32, with gradient


def mask_of(length, prompt):
    """Of a response of `length` tokens after `prompt` others; in a long one stands what a tool said."""
    tool = [False, False] if length > 4 else []
    return torch.tensor([False] * prompt + [True] * min(length, 2) + tool + [True] * (length - 2))


def problem(seed, on_policy=False, positive=False, ungraded=False):
    """16 responses of 1 to LONGEST tokens to 4 prompts, shuffled; the rewards of the first prompt are all equal.

    Off-policy, how far the policy has gone from the old one differs from sample to sample, so that narrow and wide
    clips both let some through and stop some. positive: no reward is negative. ungraded: some samples could not be
    graded, of one prompt none.
    """
    random = torch.Generator().manual_seed(seed)
    normal, uniform = (functools.partial(draw, generator=random) for draw in (torch.randn, torch.rand))

    def whole(low, high, count):
        return torch.randint(low, high + 1, (count,), generator=random)

    # A value for each of the 16 samples.
    order = torch.randperm(16, generator=random)
    prompts = torch.tensor([40, 2, 7, 3000]).repeat_interleave(4)[order]
    rewards = [torch.full((4,), 0.3), torch.tensor([1.0, 0.0, 1.0, 0.0]), normal(4), whole(0, 2, 4) / 2]
    rewards[3][3] -= 0.25
    rewards = torch.cat(rewards)[order]
    lengths = torch.cat([torch.tensor([1, LONGEST, LONGEST - 1]), whole(1, LONGEST, 13)])
    truncated = (lengths >= LONGEST - 1) | (whole(0, 5, 16) == 0)
    moves = torch.cat([torch.tensor([1.0, 1.0, 5e-4, 1e-4]), torch.tensor([1e-4, 5e-4, 0.15, 1.0])[whole(0, 3, 12)]])
    masks = [mask_of(length, prompt) for length, prompt in zip(lengths.tolist(), whole(0, 3, 16).tolist(), strict=True)]

    # A value for each of the N tokens.
    seq_id = torch.arange(16).repeat_interleave(lengths)
    count = len(seq_id)
    logprobs = -3 * uniform(count)
    old = logprobs if on_policy else logprobs + moves[seq_id] * normal(count)
    ref, rollout = logprobs + 0.4 * normal(count), old + 0.4 * normal(count)
    entropy = 2 * uniform(count)
    teacher = logprobs + normal(count)

    # Three rewards, some of which do not apply: one is equal throughout a group, one applies to none of another.
    parts_BK = torch.stack([whole(0, 2, 16) / 2, whole(-3, 3, 16), whole(0, 40, 16)], dim=1)
    parts_BK[uniform(16, 3) < 0.2] = torch.nan
    parts_BK[prompts == 2, 0], parts_BK[prompts == 7, 1] = 0.5, torch.nan
    failed = ((whole(0, 3, 16) == 0) | (prompts == 3000)) & ungraded
    rewards = (rewards - rewards.min() if positive else rewards).masked_fill(failed, 0.0)

    def rows(values_N):
        return values_N.split(lengths.tolist())

    def field(values_N):
        return jagged([torch.zeros(len(m)).masked_scatter(m, v) for m, v in zip(masks, rows(values_N), strict=True)])

    fields = {"old_logprobs": old, "ref_logprobs": ref, "rollout_logprobs": rollout, "teacher_logprobs": teacher}
    fields = {"response_mask": jagged(masks)} | {name: field(values_N) for name, values_N in fields.items()}
    fields |= {f"rewards/{name}": column for name, column in zip(WEIGHTS, parts_BK.T, strict=True)}
    fields |= {"group": prompts, "rewards": rewards, "truncated": truncated, "failures": failed.long()}
    batch = make_batch(fields)
    columns = [values_B.tolist() for values_B in (prompts, rewards, truncated)]
    columns += [[row.double().requires_grad_() for row in rows(values_N)] for values_N in (logprobs, entropy)]
    columns += [[row.tolist() for row in rows(values_N)] for values_N in (old, ref, rollout, teacher)]
    columns += [[[None if math.isnan(x) else x for x in row] for row in parts_BK.tolist()], failed.tolist()]
    samples = [reference.Sample(*values) for values in zip(*columns, strict=True)]
    return Problem(samples, batch, on_policy, seq_id, logprobs.clone().requires_grad_(), entropy.requires_grad_())


def leaves_of(samples):
    """The log-probabilities of every sample, and the entropies; float64."""
    return [sample.logprobs for sample in samples], [sample.entropy for sample in samples]


def fields_of(case, config):
    """What a loss is given of the response tokens, each [N]."""
    batch = case.batch.copy()
    if config.overlong_share:
        batch["penalties"] = overlong_penalty(torch.bincount(case.seq_id), LONGEST, config.overlong_share)
    if config.teacher is None:
        del batch["teacher_logprobs"]
    batch = weigh_tokens(compute_advantages(batch, config, WEIGHTS), config)
    names = ["advantages", "loss_weights", "rollout_logprobs"]
    names += ["old_logprobs"] if config.needs_policy_logprobs or not case.on_policy else []
    names += ["ref_logprobs"] if config.kl_coefficient else []
    picked = batch["response_mask"].values()
    return {name: batch[name].values()[picked] for name in names} | {"seq_id": case.seq_id}


def loss_of(case, config):
    """The loss of `config` on the problem, and its metrics."""
    return policy_loss(case.logprobs, case.entropy, fields_of(case, config), config)


def gradients(loss, *leaves):
    found = torch.autograd.grad(loss, leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def assert_follows(case, config, expected):
    """The loss of `config` on the problem and its gradients are those of the reference's loss `expected`."""
    loss, _ = loss_of(case, config)
    ours = gradients(loss, case.logprobs, case.entropy)
    theirs = [torch.cat(gradients(expected, *leaves)) for leaves in leaves_of(case.samples)]
    assert theirs[0].abs().max() > 1e-3
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-5, atol=2e-6)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.double(), their, rtol=2e-5, atol=1e-6 * float(theirs[0].abs().max()))


def problem_for(config, seed, on_policy=False, **more):
    return problem(seed, on_policy, positive=config.scale == "group_mean", **more)


def preset_config(preset, **changes):
    length = {"constant_length": LONGEST} if preset == "dr_grpo" else {}
    config = AlgorithmConfig.of(preset, **length, **changes)
    config.check()
    return config


def test_every_preset_has_its_reference():
    assert list(REFERENCES) == list(PRESETS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("on_policy", [False, True])
def test_a_preset_is_its_papers_formula(on_policy, preset, beta, seed):
    config = preset_config(preset, kl_coefficient=beta)
    case = problem_for(config, seed, on_policy)
    in_reward = preset in ("rloo", "reinforce++", "reinforce")
    assert config.kl_in_reward == (in_reward and beta > 0)
    assert_follows(case, config, REFERENCES[preset](case.samples, beta))
    if on_policy and preset in ON_POLICY_GRADIENTS:  # where the paper has only a gradient, the loss's value is its own
        loss, _ = loss_of(case, config)
        [ours] = gradients(loss, case.logprobs)
        theirs = torch.cat(gradients(ON_POLICY_GRADIENTS[preset](case.samples, beta), *leaves_of(case.samples)[0]))
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_sample_that_could_not_be_graded_counts_as_if_it_had_not_been_sampled(preset, seed):
    config = preset_config(preset, kl_coefficient=0.1)
    case = problem_for(config, seed, ungraded=True)
    graded = [sample for sample in case.samples if not sample.ungraded]
    assert len({sample.prompt for sample in graded}) == 3
    assert_follows(case, config, REFERENCES[preset](graded, 0.1))
    if preset != "gdpo":  # each reward of its own says what it is worth
        assert_follows(case, replace(config, ungraded="zero"), REFERENCES[preset](case.samples, 0.1))


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("rloo", "reinforce", "sapo")])
def test_the_problems_reach_both_sides_of_a_presets_clips(preset):
    config = preset_config(preset)
    reached = {"clip/low": 0, "clip/high": 0}
    for seed in SEEDS:
        case = problem_for(config, seed)
        _, metrics = loss_of(case, config)
        reached = {name: count + int(metrics[name].value) for name, count in reached.items()}
        assert sum(int(metrics[name].value) for name in reached) < len(case.logprobs) / 2
    assert reached["clip/high"] > 0
    assert (reached["clip/low"] > 0) == (preset != "cispo")  # which is bounded above alone


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (preset_config("cispo", clip_low=0.1, clip_high=0.5), lambda samples: reference.cispo(samples, 0.0, 0.1, 0.5)),
        (preset_config("grpo", dual_clip=1.3), lambda samples: reference.dual_clip(samples, 1.3)),
        (preset_config("grpo", dual_clip=3.0), lambda samples: reference.dual_clip(samples, 3.0)),
        (
            AlgorithmConfig(entropy_coefficient=0.4),
            lambda samples: reference.grpo(samples) - 0.4 * reference.entropy_term(samples),
        ),
    ],
    ids=["cispo's bound below", "dual clip 1.3", "dual clip 3", "entropy bonus"],
)
def test_what_no_preset_has(config, expected, seed):
    case = problem(seed)
    assert_follows(case, config, expected(case.samples))


def test_dual_clip_stops_the_gradient_of_a_bad_token_alone():
    logprobs, zeros = torch.tensor([4.0, 4.0, 2.9]).log().requires_grad_(), torch.zeros(3)
    fields = {"loss_weights": torch.ones(3), "seq_id": zeros.long(), "old_logprobs": zeros}
    fields["advantages"] = torch.tensor([-1.0, 1.0, -1.0])
    loss, _ = policy_loss(logprobs, zeros, fields, AlgorithmConfig(dual_clip=3.0, clip_high=0.2))
    assert loss.item() == pytest.approx(3.0 - 1.2 + 2.9)
    assert gradients(loss, logprobs)[0].tolist() == pytest.approx([0, 0, 2.9])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("with_ratio", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss(estimator, with_ratio, on_policy, seed):
    case = problem(seed, on_policy)
    config = AlgorithmConfig(kl_coefficient=0.3, kl_estimator=estimator, kl_ratio=with_ratio)
    expected = reference.grpo(case.samples) + 0.3 * reference.kl_term(case.samples, estimator, with_ratio)
    assert_follows(case, config, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_correction(kind, level, on_policy, seed):
    case = problem(seed, on_policy)
    low, high = (0.95, 1.1) if level == "geometric" else (0.7, 1.6)
    others = {"kl_coefficient": 0.3, "entropy_coefficient": 0.2}
    bounds = {"correction_low": low, "correction_high": high}
    config = AlgorithmConfig(correction=kind, correction_level=level, **bounds, **others)
    config.check()

    def bounded(weight):
        if kind == "truncate":
            return max(low, min(weight, high))
        return weight if low <= weight <= high else 0.0

    def weight(sample, t, advantage):
        return bounded(reference.unlike(sample, t, level))

    # Neither the KL term nor the bonus is weighted: they are the policy's own.
    others = 0.3 * reference.kl_term(case.samples, "k3", False) - 0.2 * reference.entropy_term(case.samples)
    assert_follows(case, config, reference.weighted(case.samples, weight) + others)
    _, metrics = loss_of(case, config)
    weights = [reference.unlike(sample, t, level) for sample in case.samples for t in range(len(sample.old))]
    assert float(metrics["correction/mean"].value) == pytest.approx(sum(map(bounded, weights)), rel=1e-4)
    assert min(weights) < low < high < max(weights)
    outside = sum(bounded(weight) != weight for weight in weights)
    assert 0 < int(metrics["correction/bounded"].value) == outside < len(weights)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("correction", ["none", "truncate"])
def test_whole_responses_are_rejected_beside_the_weights_of_tokens(correction, on_policy, seed):
    case = problem(seed, on_policy)
    config = AlgorithmConfig(reject_low=0.85, reject_high=1.15, correction=correction, kl_coefficient=0.3)
    config.check()

    def weight(sample, t, advantage):
        token = min(reference.unlike(sample, t, "token"), 2.0) if correction == "truncate" else 1.0
        return token * (0.85 <= reference.unlike(sample, t, "geometric") <= 1.15)

    expected = reference.weighted(case.samples, weight) + 0.3 * reference.kl_term(case.samples, "k3", False)
    assert_follows(case, config, expected)
    means = [reference.unlike(sample, 0, "geometric") for sample in case.samples for _ in sample.old]
    assert min(means) < 0.85 < 1.15 < max(means)
    rejected = sum(not 0.85 <= mean <= 1.15 for mean in means)
    assert int(loss_of(case, config)[1]["correction/rejected"].value) == rejected < len(means)
    for one in ({"reject_low": 0.85}, {"reject_high": 1.15}):  # each bound by itself
        alone = int(loss_of(case, AlgorithmConfig(**one))[1]["correction/rejected"].value)
        assert 0 < alone < rejected


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("most", [0.0, 0.1])
def test_bad_responses_that_the_policy_has_left_are_masked(most, on_policy, seed):
    case, config = problem(seed, on_policy), AlgorithmConfig(off_policy_mask=most, kl_coefficient=0.3)
    config.check()

    def weight(sample, t, advantage):
        return float(not reference.too_far_off(sample, advantage, most))

    expected = reference.weighted(case.samples, weight) + 0.3 * reference.kl_term(case.samples, "k3", False)
    assert_follows(case, config, expected)
    judged = [(reference.too_far_off(s, a, most), a < 0) for s, _, a, _ in reference.each_token(case.samples)]
    masked = int(loss_of(case, config)[1]["correction/off_policy"].value)
    assert 0 < masked == sum(far for far, _ in judged) < sum(bad for _, bad in judged)
    good = [sample for sample, advantage, _ in reference.compared(case.samples) if advantage > 0]
    assert most or any(reference.too_far_off(sample, -1.0, most) for sample in good)  # which are left as they are


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("preset", ["grpo", "cispo", "gspo", "sapo", "reinforce"])
def test_any_clips_ratio_may_be_to_what_the_engine_sampled_from(preset, seed):
    case, config = problem(seed), preset_config(preset, ratio_to="rollout")
    to_rollout = [replace(sample, old=sample.rollout) for sample in case.samples]
    assert_follows(case, config, REFERENCES[preset](to_rollout, 0.0))
    on_policy = problem(seed, on_policy=True)  # no old log-probabilities: the ratio is still to the rollout's
    to_rollout = [replace(sample, old=sample.rollout) for sample in on_policy.samples]
    assert_follows(on_policy, config, REFERENCES[preset](to_rollout, 0.0))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on_policy", [True, False])
def test_drift_from_the_old_policy(on_policy, seed):
    case = problem(seed, on_policy)
    drift = 2 * reference.kl_term([replace(s, ref=s.old) for s in case.samples], "k2", False)
    assert_follows(case, AlgorithmConfig(drift_coefficient=0.3), reference.grpo(case.samples) + 0.3 * drift)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("aggregate", ["token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant"])
def test_a_sequences_ratio_with_any_aggregate(aggregate, on_policy, seed):
    case, bounds = problem(seed, on_policy), (2e-3, 2.5e-3)
    config = preset_config("gspo", aggregate=aggregate, constant_length=7, clip_low=bounds[0], clip_high=bounds[1])
    assert_follows(case, config, reference.sequence_ratio(case.samples, aggregate, 7, *bounds))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("coefficient", [0.5, 2.0])
def test_a_teacher_takes_its_log_ratio_from_each_tokens_advantage(coefficient, on_policy, seed):
    case, config = problem(seed, on_policy), AlgorithmConfig(teacher="t", teacher_coefficient=coefficient)
    config.check()
    assert_follows(case, config, reference.taught(case.samples, coefficient))
    case = problem(seed, on_policy, ungraded=True)  # whom the teacher alone judges, and nothing else changes
    graded = [sample for sample in case.samples if not sample.ungraded]
    worth, expected = {id(sample): advantage for sample, advantage, _ in reference.compared(graded)}, []
    for sample in case.samples:
        gaps = [old - teacher for old, teacher in zip(sample.old, sample.teacher, strict=True)]
        expected += [worth.get(id(sample), 0.0) - coefficient * gap for gap in gaps]
    fields = fields_of(case, config)
    assert fields["advantages"].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert fields["loss_weights"].min() > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("masks", [(), ("truncated",), ("no_signal",), ("truncated", "no_signal")])
@pytest.mark.parametrize("aggregate", ["token_mean", "prompt_mean", "sequence_mean", "sequence_sum", "constant"])
def test_masked_samples_count_nowhere_in_the_loss(aggregate, masks, seed):
    case = problem(seed)
    by_hand = {name: name in masks for name in ("truncated", "no_signal")}
    chosen = {f"mask_{name}": value for name, value in by_hand.items()}
    config = AlgorithmConfig(aggregate=aggregate, constant_length=7, **chosen)
    assert_follows(case, config, reference.masked(case.samples, aggregate=aggregate, constant=7, **by_hand))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_groups_signal_is_that_of_the_reward_that_is_named(seed):
    case, config = problem(seed), AlgorithmConfig(mask_no_signal=True, signal_reward="a")

    def judged(sample):  # of prompt 2 this reward is the same wherever it applies
        return sample.reward if sample.parts[0] is None else sample.parts[0]

    case.batch["rewards/a"] = case.batch["rewards/a"].where(case.batch["group"] != 2, 0.5)
    samples = [replace(s, parts=[0.5]) if s.prompt == 2 else s for s in case.samples]
    rest = {"truncated": False, "no_signal": True, "aggregate": "sequence_mean", "constant": 1}
    assert_follows(case, config, reference.masked(samples, judged=judged, **rest))


PAIRS = [(baseline, "group_std") for baseline in ("group_mean", "leave_one_out")]
PAIRS += itertools.product(("group_mean", "leave_one_out", "batch_mean", "none"), ("sample_std", "token_std", "none"))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_advantages_over_the_mean_of_the_group(baseline, seed):
    case, config = problem(seed, positive=True), AlgorithmConfig(baseline=baseline, scale="group_mean")
    expected = [value for row in reference.advantages(case.samples, baseline, "group_mean") for value in row]
    assert fields_of(case, config)["advantages"].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kl", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize(("baseline", "scale"), PAIRS)
def test_advantages_of_any_baseline_and_scale(baseline, scale, kl, seed):
    case = problem(seed)
    reward = {"kl_in": "reward", "kl_coefficient": 0.2, "kl_estimator": kl} if kl else {}
    config = AlgorithmConfig(baseline=baseline, scale=scale, **reward)
    config.check()
    expected = reference.advantages(case.samples, baseline, scale, 0.2 if kl else 0.0, kl or "k1")
    expected = torch.tensor([value for row in expected for value in row], dtype=torch.float64)
    ours = fields_of(case, config)["advantages"].double()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)  # a KL term's deviation is near the 1e-6 added


def test_a_minibatch_has_the_steps_advantages_and_its_own_denominators():
    case, config = problem(3), preset_config("reinforce++")
    del case.batch["teacher_logprobs"]
    step = compute_advantages(case.batch, config)
    rows = [row for row in range(16) if int(step["group"][row]) in (2, 7)]
    minibatch = weigh_tokens(select(step, rows), config)
    for place, row in enumerate(rows):
        assert minibatch["advantages"].unbind()[place].equal(step["advantages"].unbind()[row])
        length, mask = len(case.samples[row].old), minibatch["response_mask"].unbind()[place]
        expected = [1 / len(rows) / length] * length
        assert minibatch["loss_weights"].unbind()[place][mask].tolist() == pytest.approx(expected)


# cutting a batch

CUTS = {preset: preset_config(preset) for preset in PRESETS}
CUTS |= {f"{preset}, kl": preset_config(preset, kl_coefficient=0.1) for preset in PRESETS}
CUTS |= {f"{preset}, on-policy": preset_config(preset) for preset in PRESETS}
CUTS |= {
    "dual clip": AlgorithmConfig(dual_clip=3.0, entropy_coefficient=0.1),
    "kl with ratio": AlgorithmConfig(kl_coefficient=0.1, kl_estimator="k1", kl_ratio=True),
    "masks": AlgorithmConfig(mask_truncated=True, mask_no_signal=True),
    "truncate, on-policy": AlgorithmConfig(correction="truncate"),
    "mask": AlgorithmConfig(correction="mask", correction_low=0.5),
    "truncate sequences, on-policy": AlgorithmConfig(correction="truncate", correction_level="sequence"),
    "mask sequences": AlgorithmConfig(correction="mask", correction_level="sequence", correction_low=0.5),
    "gspo truncate": preset_config("gspo", correction="truncate"),
    "truncate geometric means": AlgorithmConfig(correction="truncate", correction_level="geometric"),
    "reject, on-policy": AlgorithmConfig(reject_low=0.85, reject_high=1.15, correction="truncate"),
    "off-policy mask, on-policy": AlgorithmConfig(off_policy_mask=0.05),
    "gspo to the rollout, on-policy": preset_config("gspo", ratio_to="rollout", aggregate="sequence_sum"),
    "teacher": AlgorithmConfig(teacher="t", aggregate="prompt_mean"),
}
WHOLE = {name for name, config in CUTS.items() if config.sees_whole_responses("on-policy" not in name)}


def test_only_what_is_of_a_sequence_needs_whole_responses():
    weights = {"truncate sequences, on-policy", "mask sequences", "truncate geometric means", "gspo truncate"}
    masks = {"reject, on-policy", "off-policy mask, on-policy"}
    assert {"gspo", "gspo, kl", "gspo to the rollout, on-policy"} | weights | masks == WHOLE


@pytest.mark.parametrize("name", CUTS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_of_a_batch_sum_to_the_whole(name, data):
    config = CUTS[name]
    case = problem_for(config, data.draw(st.integers(0, 50)), on_policy="on-policy" in name)
    fields, leaves = fields_of(case, config), (case.logprobs, case.entropy)
    whole, expected = policy_loss(*leaves, fields, config)
    count = 16 if name in WHOLE else len(case.logprobs)
    every_one = st.just(list(range(count)))
    piece_of = torch.tensor(data.draw(every_one | st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    piece_of_N = piece_of[case.seq_id] if name in WHOLE else piece_of
    total, metrics = torch.zeros(()), {}
    for piece in piece_of_N.unique():
        rows = (piece_of_N == piece).nonzero()[:, 0]
        part = {key: field[rows] for key, field in fields.items()}
        loss, more = policy_loss(*(leaf[rows] for leaf in leaves), part, config)
        total = total + loss
        merge(metrics, more)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients(total, *leaves), gradients(whole, *leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert metrics.keys() == expected.keys()
    for key, metric in expected.items():
        assert type(metrics[key]) is type(metric)
        assert float(metrics[key].value) == pytest.approx(float(metric.value), rel=1e-4, abs=1e-5), key
