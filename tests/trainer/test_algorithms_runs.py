"""Algorithms in whole runs: each preset learns, groups without signal are replaced, length is punished, proofs hold."""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import workers.actor
from examples.countdown import make_model, make_tokenizer
from grpo.advantages import join_rounds, keep_groups
from grpo.algorithm import PRESETS, AlgorithmConfig
from grpo.batch import jagged, make_batch, with_values
from grpo.config import ConfigError
from tests.trainer.conftest import rows_of
from trainer import prove
from trainer.algorithms import describe_algorithm, list_algorithms
from workers.actor import ActorWorker
from workers.parallel import attention_backend
from workers.rollout import RolloutWorker

DOCS = Path(__file__).parents[2] / "docs"

GRADERS = """
from rewards import register

@register("even")
def even(completion: str, row: dict) -> float:
    # Groups of odd targets have no signal.
    return float(len(completion) % 2) if row["target"] % 2 == 0 else 1.0

@register("balance")
def balance(completion: str, row: dict) -> float:
    return 2 * share(completion, row) - 1

@register("share")
def share(completion: str, row: dict) -> float:
    words = completion.split()
    return sum(word.isdigit() and int(word) % 2 == 0 for word in words) / max(len(words), 1)

@register("faulty")
def faulty(completion: str, row: dict) -> float:
    if len(completion) % 2:
        raise ValueError("odd")
    return share(completion, row)
"""


@pytest.fixture(scope="module")
def graders(countdown, tmp_path_factory) -> str:
    """The setting that adds the rewards above to those of the tiny example."""
    path = tmp_path_factory.mktemp("algorithms") / "graders.py"
    path.write_text(GRADERS)
    return f"rewards.files=[{countdown / 'graders.py'}, {path}]"


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_learns_what_is_rewarded(preset, start, graders):
    reward = "share" if preset == "maxrl" else "balance"  # which divides by the mean of what is never negative
    weights = f"rewards.weights={{{reward}: 1.0, digits: 0.0, countdown: 0.0}}"
    settings = [f"algorithm.preset={preset}", "batch.minibatches_per_step=2", "batch.prompts_per_step=8"]
    if preset == "reinforce":
        settings.append("batch.samples_per_prompt=8")
    if preset == "gspo":  # whose clips stop an untrained model's steps at once
        settings += ["algorithm.clip_low=0.2", "algorithm.clip_high=0.2"]
    run = start("train", preset, "steps=10", "data.eval=null", graders, weights, *settings)
    rewards = [row["reward/mean"] for row in rows_of(run)]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + (0.1 if preset == "maxrl" else 0.2)
    assert f"preset: {preset}" in (run / "config.yaml").read_text()


def test_a_run_says_what_was_changed_of_its_preset(start, capsys):
    run = start("train", "run", "steps=1", "data.eval=null", "algorithm.preset=dapo", "algorithm.clip_high=0.25")
    says = "dapo but for clip_high=0.25 (dapo: 0.28)"
    assert says in " ".join(capsys.readouterr().out.split())
    assert (run / "config.yaml").read_text().startswith(f"# algorithm: {says}\n")


def watched(monkeypatch, worker: type, method: str) -> list:
    """What `method` will be given in the runs to come."""
    seen, work = [], getattr(worker, method)
    monkeypatch.setattr(worker, method, lambda self, given, *a, **b: seen.append(given) or work(self, given, *a, **b))
    return seen


@pytest.fixture
def sampled(monkeypatch) -> list:
    """The prompts of the rollouts to come."""
    return watched(monkeypatch, RolloutWorker, "generate")


@pytest.fixture
def learned(monkeypatch) -> list:
    """The batches of the updates to come."""
    return watched(monkeypatch, ActorWorker, "update")


@pytest.mark.parametrize("rounds", [0, 1, 10])
def test_groups_without_signal_are_replaced_within_the_bound(rounds, start, graders, sampled, learned):
    weights = "rewards.weights={even: 1.0, digits: 0.0, countdown: 0.0}"
    sizes = ["batch.samples_per_prompt=6", "batch.prompts_per_step=6", f"algorithm.resample_rounds={rounds}"]
    rows = rows_of(start("train", "run", "steps=2", "data.eval=null", graders, weights, *sizes))
    assert [len(batch) for batch in learned] == [36, 36]
    for row, batch in zip(rows, learned, strict=True):
        groups = batch["group"].unique()
        assert len(groups) == 6
        silent = sum(len(batch["rewards"][batch["group"] == group].unique()) == 1 for group in groups)
        if rounds:
            assert row["resampling/rounds"] <= rounds
            assert row["resampling/filled"] == pytest.approx(silent / 6)
            assert silent == 0 or row["resampling/rounds"] == rounds
        else:
            assert "resampling/rounds" not in row
        assert 0 < row["groups/no_signal"] < 1
    assert len(sampled) == 2 + sum(row.get("resampling/rounds", 0) for row in rows)
    assert sum(map(len, sampled)) == (sum(row["resampling/groups"] for row in rows) if rounds else 12)
    if rounds == 10:
        assert all(row["resampling/filled"] == 0 for row in rows)
        assert any(row["resampling/rounds"] for row in rows)


def test_kept_groups_are_whole_and_those_with_signal_come_first():
    def batch(rewards, group):
        tokens = jagged([torch.full((2,), i) for i in range(len(rewards))])
        return make_batch({"tokens": tokens, "rewards": torch.tensor(rewards), "group": torch.tensor(group)})

    joined = join_rounds([batch([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1]), batch([0.0, 0.0, 1.0, 0.0], [0, 0, 1, 1])])
    assert joined["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    config = AlgorithmConfig()
    assert keep_groups(joined, 2, config)["group"].tolist() == [1, 1, 3, 3]
    assert keep_groups(joined, 3, config)["group"].tolist() == [0, 0, 1, 1, 3, 3]
    assert keep_groups(joined, 3, config)["rewards"].tolist() == [1, 1, 0, 1, 1, 0]


def test_what_comes_near_the_longest_length_is_punished_in_training_alone(start, learned):
    run = start("train", "run", "steps=1", "algorithm.overlong_share=0.5", "rewards.weights.countdown=0")
    before, row = rows_of(run)
    (batch,) = learned
    lengths = torch.tensor([int(mask.sum()) for mask in batch["response_mask"].unbind()])
    torch.testing.assert_close(batch["penalties"], -((lengths - 6).clamp(min=0) / 6))
    torch.testing.assert_close(batch["rewards"], batch["rewards/digits"])
    assert row["reward/overlong/mean"] == pytest.approx(float(batch["penalties"].mean()))
    assert row["reward/mean"] == pytest.approx(float(batch["rewards/digits"].mean()))
    assert "eval/reward/overlong/mean" not in before


def test_groups_are_judged_by_the_reward_that_is_named(start, graders, learned):
    weights = "rewards.weights={even: 1.0, digits: 1.0, countdown: 0.0}"
    named = ["algorithm.mask_no_signal=true", "algorithm.signal_reward=even"]
    (row,) = rows_of(start("train", "run", "steps=1", "data.eval=null", graders, weights, *named))
    (batch,) = learned
    silent = [len(batch["rewards/even"][batch["group"] == group].unique()) == 1 for group in range(4)]
    equal = [len(batch["rewards"][batch["group"] == group].unique()) == 1 for group in range(4)]
    assert row["groups/no_signal"] == sum(silent) / 4 > sum(equal) / 4


@pytest.mark.parametrize("ungraded", ["left_out", "zero"])
def test_what_could_not_be_graded_is_left_out_unless_it_is_to_count_as_zero(ungraded, start, graders, learned):
    weights = "rewards.weights={faulty: 1.0, digits: 0.0, countdown: 0.0}"
    (row,) = rows_of(
        start("train", "run", "steps=1", "data.eval=null", graders, weights, f"algorithm.ungraded={ungraded}")
    )
    (batch,) = learned
    worth = torch.tensor([float(each.abs().max()) for each in batch["advantages"].unbind()])
    failed = batch["failures"] > 0
    assert 0 < row["reward/failed"] == int(failed.sum()) < 16
    assert bool(worth[failed].any()) == (ungraded == "zero")
    assert worth[~failed].any()


@pytest.mark.parametrize("ratio_to", ["rollout", "old"])
def test_a_steps_gap_to_the_rollout_is_that_before_its_first_update(ratio_to, start, monkeypatch):
    passes = watched(monkeypatch, ActorWorker, "compute_logprobs")
    sizes = ["steps=2", "data.eval=null", "batch.minibatches_per_step=2", "batch.epochs_per_step=2"]
    rows = rows_of(start("train", "run", *sizes, f"algorithm.ratio_to={ratio_to}", "actor.learning_rate=0.01"))
    assert len(passes) == (2 if ratio_to == "old" else 0)
    for row in rows:
        assert row["ratio/max"] > 1.01  # the later updates find another policy
        assert row["rollout/logprob_gap_max"] < 1e-4


def test_every_metric_of_a_run_is_explained_and_every_name_explained_exists(start, countdown, chatter):
    page, evaluations, _ = (DOCS / "metrics.md").read_text().partition("## Evaluations")
    assert evaluations
    named = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    names = [name for cell in named for name in re.findall(r"`([^`]*)`", cell)]
    choices = ["algorithm.preset=dapo", "algorithm.kl_coefficient=0.1", "algorithm.correction=truncate"]
    choices += ["algorithm.reject_high=2", "algorithm.off_policy_mask=0.1", f"algorithm.teacher={countdown / 'model'}"]
    choices += ["batch.minibatches_per_step=2", "actor.max_tokens_per_microbatch=64"]
    runs = start("train", "run", *choices), start("train", "conversations", *chatter)
    found = set().union(*(row.keys() for run in runs for row in rows_of(run)))
    found = {name.removeprefix("eval/") for name in found} - {"step", "accuracy", "pass@1"}
    patterns = {name: re.compile(re.sub("NAME|PHASE|PART", "[a-z_]+", name)) for name in names}
    assert [name for name in found if not any(pattern.fullmatch(name) for pattern in patterns.values())] == []
    elsewhere = {"memory/PHASE_peak_gib", "perf/update_mfu", "environment/calls_fit"}  # on GPUs, and where calls are
    unseen = {name for name, pattern in patterns.items() if not any(map(pattern.fullmatch, found))}
    assert unseen == elsewhere


# the command that lists them


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_is_told_with_its_paper_and_stands_in_the_docs(name):
    told = describe_algorithm(name)
    assert PRESETS[name].paper in told
    for choice, value in PRESETS[name].choices.items():
        assert re.search(rf"  {choice} = {value}   grpo: ", told)
    assert PRESETS[name].paper in list_algorithms()
    assert told.partition("choices (")[0].strip() in (DOCS / "algorithms.md").read_text()


def test_formulas_are_those_of_the_choices():
    told = {name: " ".join(describe_algorithm(name).partition("choices (")[0].split()) for name in PRESETS}
    assert "weight_t = 1 / (B |o_i|)" in told["grpo"]
    assert "std(R of the group)" in told["grpo"]
    assert "std(R" not in told["dr_grpo"]
    assert "weight_t = 1 / (B constant_length)" in told["dr_grpo"]
    assert "^(1 / |o_i|)" in told["gspo"]
    assert "sg[clip(r" in told["cispo"]
    assert "group's others" in told["rloo"]
    assert "sum over s >= t" in told["reinforce++"]
    assert "std(A0 of the batch's tokens)" in told["reinforce++-baseline"]
    assert "sigmoid(h (r - 1))" in told["sapo"]
    assert "pi - pi_rollout > clip_high" in told["dppo"]
    assert "d_t = log(pi(o_t) / pi_rollout(o_t))^2" in told["dppo"]
    assert "A = A0 / mean(R of the group)" in told["maxrl"]
    assert "R = R_t = sum over k of weight_k (R_k - mean(R_k of the group))" in told["gdpo"]
    with pytest.raises(ConfigError, match="did you mean dapo"):
        describe_algorithm("dapos")


# prove


def run_prove(processes, *command):
    """The command on so many processes, to its end."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    whole = [sys.executable, *(several if processes > 1 else []), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONPATH": str(DOCS.parent)}
    return subprocess.run(whole, capture_output=True, text=True, timeout=200, env=environment, cwd=DOCS.parent)


@pytest.mark.parametrize(("preset", "numbers"), [("grpo", (1, 2, 4)), ("gspo", (2,)), ("reinforce++", (2,))])
def test_an_update_is_the_same_on_every_layout_as_the_command_says(preset, numbers, settings, tmp_path):
    kl = "algorithm.kl_coefficient=0.1"
    given = [*settings["train"], f"algorithm.preset={preset}", kl, f"tracking.folder={tmp_path}", "tracking.name=run"]
    # The model has 2 key heads.
    wanted = {1: [(1, 1, 1)], 2: [(1, 2, 1), (2, 1, 1), (1, 1, 2)]}
    wanted[4] = [(1, 4, 1), (2, 2, 1), (4, 1, 1), (1, 2, 2), (2, 1, 2)]
    for count, processes in enumerate(numbers):
        ran = run_prove(processes, "-m", "trainer", "prove", *given)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "All of it holds." in ran.stdout
        layouts = re.findall(r"(\d+) x (\d+) x (\d+)  +one", ran.stdout)
        assert [tuple(map(int, layout)) for layout in layouts] == wanted[processes]
        # What fewer processes found is held against what more find.
        assert ran.stdout.count("process(es), before") == count
    record = json.loads((tmp_path / "run" / "proof.json").read_text())
    assert record.keys() == {"of", *map(str, numbers)}


def test_the_cuts_are_in_float32_whatever_attention_is_asked_for(start, monkeypatch, capsys):
    monkeypatch.setattr(attention_backend, "why_not", lambda device: "")  # as on a Hopper GPU
    monkeypatch.setattr(attention_backend, "flash4_failure", lambda *_: "")
    wide_heads = SimpleNamespace(head_dim=64, heads=4, kv_heads=2)
    monkeypatch.setattr(attention_backend, "family_of", lambda config: wide_heads)
    start("prove", "run", "model.attention=flash4", "model.dtype=bfloat16")
    assert "All of it holds." in capsys.readouterr().out


@pytest.mark.parametrize("preset", PRESETS)
def test_both_proofs_hold_for_every_preset(preset, start, capsys):
    start("prove", "run", f"algorithm.preset={preset}")
    assert "All of it holds." in capsys.readouterr().out


def test_a_ratio_to_the_rollout_may_be_as_far_from_one_as_the_gap(start, capsys, monkeypatch):
    generate, dppo = RolloutWorker.generate, "algorithm.preset=dppo"

    def apart(self, *given, **how):  # as an engine of another precision
        batch = generate(self, *given, **how)
        mask = batch["response_mask"].values()
        batch["rollout_logprobs"] = with_values(batch["response_mask"], batch["rollout_logprobs"].values() - 0.1 * mask)
        return batch

    monkeypatch.setattr(RolloutWorker, "generate", apart)
    start("prove", "run", dppo)
    assert re.search(r"furthest from 1 +1\.05e-01 +0\.105\d* ", capsys.readouterr().out)
    monkeypatch.setattr(workers.actor, "learning_rate", lambda config, update, total: config.learning_rate + 1e-3)
    assert re.search(r"furthest from 1 .*too far", proven(start, capsys, dppo))


def proven(start, capsys, *more) -> str:
    """What `prove` prints on one process, where it finds something."""
    capsys.readouterr()
    with pytest.raises(AssertionError):  # start() wants exit code 0
        start("prove", "run", *more)
    return capsys.readouterr().out


@pytest.fixture
def cuts(run_main, settings, tmp_path, monkeypatch, capsys) -> Callable[..., tuple[int, dict[str, float]]]:
    """cuts(*overrides): the exit code of `prove` without the stillness, and by cut how far its row is apart."""
    monkeypatch.setattr(prove, "prove_stillness", lambda *_: True)

    def run(*more: str) -> tuple[int, dict[str, float]]:
        capsys.readouterr()
        code = run_main("prove", *settings["prove"], f"tracking.folder={tmp_path}", "tracking.name=run", *more)
        said = capsys.readouterr().out
        assert "4 updates of up to 64 short samples" in said
        assert re.search(r"the others take about [\d.]+ minutes", said)
        rows = re.findall(r"1 x 1 x 1 +(in float32|\w+) .*?(\d\.\de[-+]\d+)", said)
        return code, {cut: float(apart) for cut, apart in rows}

    return run


@pytest.fixture
def rough(tmp_path) -> str:
    """A model that float32 rounds by more than 1e-4."""
    model = make_model("llama", hidden=32, layers=4, feed_forward=64)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (parameter for parameter in layer.parameters() if parameter.ndim > 1):
                weight.mul_(15)
    model.save_pretrained(tmp_path / "rough")
    make_tokenizer().save_pretrained(tmp_path / "rough")
    return f"model.path={tmp_path / 'rough'}"


def test_rounding_is_shown_and_not_taken_for_a_mistake(cuts, rough):
    code, apart = cuts(rough)
    assert code == 0
    assert max(apart["many"], apart["shuffled"]) < 1e-6 < 1e-4 < apart["in float32"] < 1e-2


def weigh(micro_batch: int, by: float) -> Callable:
    """policy_loss, whose call number `micro_batch` of an update that makes several is multiplied `by`."""
    policy_loss, calls = workers.actor.policy_loss, itertools.count()

    def weighed(logprobs, *rest):
        loss, sums = policy_loss(logprobs, *rest)
        number = next(calls)  # the first update has one
        return loss * (by if number and micro_batch in (None, number) else 1), sums

    return weighed


@pytest.mark.parametrize("mistake", ["denominator", "micro-batch", "gradient"])
def test_a_mistake_of_a_ten_thousandth_is_found_behind_any_rounding(mistake, cuts, rough, monkeypatch):
    if mistake == "denominator":  # as soon as there are several micro-batches
        monkeypatch.setattr(workers.actor, "policy_loss", weigh(None, 1 + 1e-4))
    elif mistake == "micro-batch":
        monkeypatch.setattr(workers.actor, "policy_loss", weigh(3, 1 + 2e-3))
    else:
        clip_gradients, calls = workers.actor.clip_gradients, itertools.count()

        def off(parameters, *rest):
            norm = clip_gradients(parameters, *rest)
            if next(calls):
                grad = parameters[-1].grad.to_local()
                size = sum(each.grad.to_local().square().sum() for each in parameters).sqrt()
                grad += 1e-4 * size / grad.numel() ** 0.5
            return norm

        monkeypatch.setattr(workers.actor, "clip_gradients", off)
    code, apart = cuts(rough)
    assert code == 1
    assert 2e-5 < apart["many"] < 1e-3  # no larger than it was made


def test_a_wrong_denominator_is_found(start, monkeypatch, capsys):
    # Each micro-batch divided by its own tokens.
    def by_micro_batch(logprobs, entropy, fields, config):
        loss, sums = policy_loss(logprobs, entropy, fields, config)
        return loss / fields["loss_weights"].sum(), sums

    policy_loss = workers.actor.policy_loss
    monkeypatch.setattr(workers.actor, "policy_loss", by_micro_batch)
    said = proven(start, capsys)
    assert re.search(r"many +.*too far", said)
    assert "Not all of it holds" in said


def test_a_run_that_moves_is_found(start, monkeypatch, capsys):
    monkeypatch.setattr(workers.actor, "learning_rate", lambda config, update, total: config.learning_rate + 1e-3)
    said = proven(start, capsys)
    assert re.search(r"weights that moved +\d+ +0 +too far", said)
    assert "These moved: causal_lm.model.embed_tokens.weight" in said
    assert re.search(r"KL to the reference +.*too far", said)


def test_what_moves_on_one_rank_alone_is_found(settings, tmp_path):
    script = tmp_path / "moving.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "import workers.actor\n"
        "from trainer.__main__ import main\n"
        "workers.actor.learning_rate = lambda config, *_: config.learning_rate or 1e-3 * dist.get_rank()\n"
        "main()\n"
    )
    given = [*settings["train"], f"tracking.folder={tmp_path}", "tracking.name=run"]
    ran = run_prove(2, script, "prove", *given)
    assert ran.returncode != 0
    assert re.search(r"weights that moved +\d+ +0 +too far", ran.stdout), ran.stdout + ran.stderr
