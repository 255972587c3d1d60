"""Every preset, and every choice that no preset makes, against its paper's formula (reference.py), with gradients."""

import itertools
from dataclasses import dataclass

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

LONGEST = 10  # tokens of a response
SEEDS = range(3)
REFERENCES = {
    "grpo": reference.grpo,
    "dr_grpo": lambda samples, beta: reference.dr_grpo(samples, constant=LONGEST, beta=beta),
    "dapo": lambda samples, beta: reference.dapo(samples, LONGEST, buffer=2, beta=beta),
    "gspo": reference.gspo,
    "cispo": reference.cispo,
    "rloo": reference.rloo,
    "reinforce++": reference.reinforce_plus_plus,
    "reinforce": reference.reinforce,
}
ON_POLICY_GRADIENTS = {"rloo": reference.rloo_gradient, "reinforce": reference.reinforce_gradient}
TWICE = {"minibatches_per_step": 2}  # makes the old log-probabilities count


@dataclass
class Problem:
    """A random batch as the trainer has it, and the same for the reference."""

    batch: TensorDict
    logprobs: torch.Tensor  # [N] float32, of the response tokens in the batch's order, with gradient
    entropy: torch.Tensor
    owner: torch.Tensor  # [N] int64
    samples: list[reference.Sample]
    logprobs_64: torch.Tensor  # [N] the leaf of the samples' log-probabilities
    entropy_64: torch.Tensor


def problem(seed, on_policy=False):
    """16 responses of 1 to LONGEST tokens to 4 prompts, shuffled; the rewards of the first prompt are all equal.

    Some tokens of a row are not the policy's: the prompt's, and a few in the response. How far the policy has gone
    from the old one differs from sample to sample, so that narrow and wide clips both let some through and stop some.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random)

    def whole(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=random)

    groups = torch.tensor([40, 2, 7, 3000]).repeat_interleave(4)
    ties = torch.tensor([1.0, 0.0, 1.0, 0.0])
    rewards = torch.cat([torch.full((4,), 0.3), ties, normal(4), whole(0, 2, 4) / 2 - torch.tensor([0, 0, 0, 0.25])])
    order = torch.randperm(16, generator=random)
    groups, rewards = groups[order], rewards[order]
    lengths = whole(1, LONGEST, 16)
    lengths[:3] = torch.tensor([1, LONGEST, LONGEST - 1])
    truncated = (lengths >= LONGEST - 1) | (whole(0, 5, 16) == 0)
    step = torch.tensor([1e-4, 5e-4, 0.15, 1.0])[whole(0, 3, 16)]
    step[:4] = torch.tensor([1.0, 1.0, 5e-4, 1e-4])

    masks, owner, logprobs, old, ref, rollout = [], [], [], [], [], []
    for row, length in enumerate(lengths.tolist()):
        mask = torch.ones(length, dtype=torch.bool)
        if length > 4:  # what a tool said stands in between
            mask = torch.cat([mask[:2], torch.zeros(2, dtype=torch.bool), mask[2:]])
        masks.append(torch.cat([torch.zeros(int(whole(0, 3)), dtype=torch.bool), mask]))
        owner += [row] * length
        logprobs.append(-3 * torch.rand(length, generator=random))
        old.append(logprobs[-1] if on_policy else logprobs[-1] + step[row] * normal(length))
        ref.append(logprobs[-1] + 0.4 * normal(length))
        rollout.append(old[-1] + 0.4 * normal(length))
    response_mask = jagged(masks)
    picked = response_mask.values()

    def field(rows):
        values = torch.zeros(len(picked)).masked_scatter_(picked, torch.cat(rows))
        return torch.nested.nested_tensor_from_jagged(values, response_mask.offsets())

    batch = make_batch(
        {
            "response_mask": response_mask,
            "old_logprobs": field(old),
            "ref_logprobs": field(ref),
            "rollout_logprobs": field(rollout),
            "group": groups,
            "rewards": rewards,
            "truncated": truncated,
        }
    )
    flat = torch.cat(logprobs)
    entropy = 2 * torch.rand(len(flat), generator=random)
    flat_64, entropy_64 = flat.double().requires_grad_(), entropy.double().requires_grad_()
    ends = lengths.cumsum(0).tolist()
    samples = [
        reference.Sample(
            prompt=int(groups[row]),
            reward=float(rewards[row]),
            truncated=bool(truncated[row]),
            logprobs=flat_64[end - length : end],
            entropy=entropy_64[end - length : end],
            old=old[row].double().tolist(),
            ref=ref[row].double().tolist(),
            rollout=rollout[row].double().tolist(),
        )
        for row, (end, length) in enumerate(zip(ends, lengths.tolist(), strict=True))
    ]
    flat, entropy = flat.requires_grad_(), entropy.requires_grad_()
    return Problem(batch, flat, entropy, torch.tensor(owner), samples, flat_64, entropy_64)


def fields_of(case, config):
    """What a loss is given of the response tokens, each [N]."""
    batch = case.batch.copy()
    if config.overlong_share:
        lengths = torch.bincount(case.owner)
        batch["rewards"] = batch["rewards"] + overlong_penalty(lengths, LONGEST, config.overlong_share)
    batch = weigh_tokens(compute_advantages(batch, config), config)
    names = ["advantages", "weights", "rollout_logprobs"]
    names += ["old_logprobs"] if config.needs_old_logprobs else []
    names += ["ref_logprobs"] if config.kl_coefficient else []
    picked = batch["response_mask"].values()
    return {name: batch[name].values()[picked] for name in names} | {"owner": case.owner}


def gradients(loss, *leaves):
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def assert_follows(case, config, expected):
    """The loss of `config` on the problem and its gradients are those of the reference's loss `expected`."""
    loss, _ = policy_loss(case.logprobs, case.entropy, fields_of(case, config), config)
    ours = gradients(loss, case.logprobs, case.entropy)
    theirs = gradients(expected, case.logprobs_64, case.entropy_64)
    assert theirs[0].abs().max() > 1e-3
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=2e-5, atol=2e-6)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our.double(), their, rtol=2e-5, atol=1e-6 * float(theirs[0].abs().max()))


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
def test_off_policy_a_preset_is_its_papers_formula(preset, beta, seed):
    case, config = problem(seed), preset_config(preset, kl_coefficient=beta, **TWICE)
    assert_follows(case, config, REFERENCES[preset](case.samples, beta))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("preset", PRESETS)
def test_on_policy_a_preset_is_its_papers_formula(preset, beta, seed):
    case, config = problem(seed, on_policy=True), preset_config(preset, kl_coefficient=beta)
    in_reward = preset in ("rloo", "reinforce++", "reinforce")
    assert config.needs_old_logprobs == (in_reward and beta > 0)
    assert_follows(case, config, REFERENCES[preset](case.samples, beta))
    if preset in ON_POLICY_GRADIENTS:  # where the paper has only a gradient, the loss's value is its own
        loss, _ = policy_loss(case.logprobs, case.entropy, fields_of(case, config), config)
        [ours] = gradients(loss, case.logprobs)
        [theirs] = gradients(ON_POLICY_GRADIENTS[preset](case.samples, beta), case.logprobs_64)
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name not in ("rloo", "reinforce")])
def test_the_problems_reach_both_sides_of_a_presets_clips(preset):
    config = preset_config(preset, **TWICE)
    reached = {"clip/low": 0, "clip/high": 0}
    for case in map(problem, SEEDS):
        _, sums = policy_loss(case.logprobs, case.entropy, fields_of(case, config), config)
        reached = {name: count + int(sums[name]) for name, count in reached.items()}
        assert sum(int(sums[name]) for name in reached) < len(case.logprobs) / 2
    assert reached["clip/high"] > 0
    assert (reached["clip/low"] > 0) == (preset != "cispo")  # which is bounded above alone


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_has_a_bound_below_too(seed):
    case, config = problem(seed), preset_config("cispo", clip_low=0.1, clip_high=0.5, **TWICE)
    assert_follows(case, config, reference.cispo(case.samples, 0.0, 0.1, 0.5))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bound", [1.3, 3.0])
def test_dual_clip(bound, seed):
    case, config = problem(seed), preset_config("grpo", dual_clip=bound, **TWICE)
    assert_follows(case, config, reference.dual_clip(case.samples, bound))


def test_dual_clip_stops_the_gradient_of_a_bad_token_alone():
    logprobs = torch.tensor([4.0, 4.0, 2.9]).log().requires_grad_()
    fields = {
        "advantages": torch.tensor([-1.0, 1.0, -1.0]),
        "weights": torch.ones(3),
        "owner": torch.zeros(3, dtype=torch.int64),
        "old_logprobs": torch.zeros(3),
    }
    config = AlgorithmConfig(dual_clip=3.0, clip_high=0.2, **TWICE)
    loss, _ = policy_loss(logprobs, torch.zeros(3), fields, config)
    assert loss.item() == pytest.approx(3.0 - 1.2 + 2.9)
    assert gradients(loss, logprobs)[0].tolist() == pytest.approx([0, 0, 2.9])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("with_ratio", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss(estimator, with_ratio, updates, seed):
    case = problem(seed, on_policy=updates == 1)
    config = AlgorithmConfig(
        kl_coefficient=0.3, kl_estimator=estimator, kl_ratio=with_ratio, minibatches_per_step=updates
    )
    expected = reference.grpo(case.samples) + 0.3 * reference.kl_term(case.samples, estimator, with_ratio)
    assert_follows(case, config, expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_correction(kind, level, updates, seed):
    case = problem(seed, on_policy=updates == 1)
    config = AlgorithmConfig(
        correction=kind,
        correction_level=level,
        correction_low=0.7,
        correction_high=1.6,
        minibatches_per_step=updates,
        kl_coefficient=0.3,
        entropy_coefficient=0.2,
    )
    config.check()

    def bounded(weight):
        if kind == "truncate":
            return min(weight, 1.6)
        return weight if 0.7 <= weight <= 1.6 else 0.0

    # Neither the KL term nor the bonus is weighted: they are the policy's own.
    others = 0.3 * reference.kl_term(case.samples, "k3", False) - 0.2 * reference.entropy_term(case.samples)
    assert_follows(case, config, reference.corrected(case.samples, bounded, level) + others)
    _, sums = policy_loss(case.logprobs, case.entropy, fields_of(case, config), config)
    weights = [
        sum(gaps) if level == "sequence" else gap
        for sample in case.samples
        for gaps in [[a - b for a, b in zip(sample.old, sample.rollout, strict=True)]]
        for gap in gaps
    ]
    weights = torch.tensor(weights, dtype=torch.float64).exp().tolist()
    assert float(sums["correction/mean"]) == pytest.approx(sum(map(bounded, weights)), rel=1e-4)
    assert 0 < int(sums["correction/bounded"]) == sum(bounded(weight) != weight for weight in weights) < len(weights)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("masks", [("truncated",), ("no_signal",), ("truncated", "no_signal")])
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_masked_samples_count_nowhere_in_the_loss(aggregate, masks, seed):
    case = problem(seed)
    chosen = {f"mask_{name}": True for name in masks}
    config = AlgorithmConfig(aggregate=aggregate, constant_length=7, **chosen, **TWICE)
    by_hand = {name: name in masks for name in ("truncated", "no_signal")}
    assert_follows(case, config, reference.masked(case.samples, aggregate=aggregate, constant=7, **by_hand))


@pytest.mark.parametrize("seed", SEEDS)
def test_entropy_bonus(seed):
    case, config = problem(seed), AlgorithmConfig(entropy_coefficient=0.4, **TWICE)
    assert_follows(case, config, reference.grpo(case.samples) - 0.4 * reference.entropy_term(case.samples))


PAIRS = [
    (baseline, scale)
    for baseline, scale in itertools.product(
        ("group_mean", "leave_one_out", "batch_mean", "none"), ("group_std", "batch_std", "none")
    )
    if scale != "group_std" or baseline in ("group_mean", "leave_one_out")
]


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
    case, config = problem(3), preset_config("reinforce++", **TWICE)
    step = compute_advantages(case.batch, config)
    rows = [row for row in range(16) if int(step["group"][row]) in (2, 7)]
    minibatch = weigh_tokens(select(step, rows), config)
    for place, row in enumerate(rows):
        assert minibatch["advantages"].unbind()[place].equal(step["advantages"].unbind()[row])
        length = len(case.samples[row].old)
        mask = minibatch["response_mask"].unbind()[place]
        assert minibatch["weights"].unbind()[place][mask].tolist() == pytest.approx([1 / len(rows) / length] * length)


# cutting a batch

CUTS = {preset: preset_config(preset, **TWICE) for preset in PRESETS}
CUTS |= {f"{preset}, kl": preset_config(preset, kl_coefficient=0.1, **TWICE) for preset in PRESETS}
CUTS |= {f"{preset}, one update": preset_config(preset) for preset in PRESETS}
CUTS |= {
    "dual clip": AlgorithmConfig(dual_clip=3.0, entropy_coefficient=0.1, **TWICE),
    "kl with ratio": AlgorithmConfig(kl_coefficient=0.1, kl_estimator="k1", kl_ratio=True, **TWICE),
    "masks": AlgorithmConfig(mask_truncated=True, mask_no_signal=True, **TWICE),
    "truncate": AlgorithmConfig(correction="truncate"),
    "mask": AlgorithmConfig(correction="mask", correction_low=0.5, **TWICE),
    "truncate sequences": AlgorithmConfig(correction="truncate", correction_level="sequence"),
    "mask sequences": AlgorithmConfig(correction="mask", correction_level="sequence", correction_low=0.5, **TWICE),
    "gspo truncate": preset_config("gspo", correction="truncate", **TWICE),
}


def test_only_what_is_of_a_sequence_needs_whole_responses():
    whole = {name for name, config in CUTS.items() if config.sees_whole_responses}
    assert whole == {"gspo", "gspo, kl", "truncate sequences", "mask sequences", "gspo truncate"}


@pytest.mark.parametrize("name", CUTS)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_of_a_batch_sum_to_the_whole(name, data):
    config = CUTS[name]
    case = problem(data.draw(st.integers(0, 50)))
    fields = fields_of(case, config)
    logprobs, entropy, owner = case.logprobs, case.entropy, case.owner
    whole, sums = policy_loss(logprobs, entropy, fields, config)
    count = 16 if config.sees_whole_responses else len(logprobs)
    every_one = st.just(list(range(count)))
    piece_of = torch.tensor(data.draw(every_one | st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    piece_of_N = piece_of[owner] if config.sees_whole_responses else piece_of
    total, parts = torch.zeros(()), []
    for piece in piece_of_N.unique():
        rows = (piece_of_N == piece).nonzero()[:, 0]
        part = {key: field[rows] for key, field in fields.items()}
        loss, part_sums = policy_loss(logprobs[rows], entropy[rows], part, config)
        total = total + loss
        parts.append(part_sums)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(gradients(total, logprobs, entropy), gradients(whole, logprobs, entropy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    for key, value in sums.items():
        merge = max if key.endswith("max") else sum
        assert merge(float(part[key]) for part in parts) == pytest.approx(float(value), rel=1e-4, abs=1e-5), key
