"""python -m trainer eval: its estimators against enumeration, and its numbers against those of training."""

import json
import math
import os
import statistics
import subprocess
import sys
from itertools import combinations, permutations
from pathlib import Path

import pytest
import torch

from grpo.batch import make_batch
from tests.trainer.conftest import rows_of
from trainer.scores import answer_of, correct, majority_at_k, mean_and_error, pass_at_k, powers, score

FOUR = "evaluation.samples_per_prompt=4"


def scores_of(path: Path) -> dict[str, dict]:
    return json.loads(path.read_text())["scores"]


@pytest.fixture
def run(start) -> Path:
    """A run of two steps, evaluated with four samples a prompt."""
    return start("train", "run", FOUR)


@pytest.mark.parametrize("samples", [1, 2, 3, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(samples):
    for right in range(samples + 1):
        for k in range(1, samples + 1):
            subsets = list(combinations([1] * right + [0] * (samples - right), k))
            assert pass_at_k(right, samples, k) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-12)


def plainly(right, answers):
    """How right the most frequent of all answers is, where one is: the definition."""
    votes = [a for a in answers if a is not None] or answers
    most = max(map(votes.count, votes))
    return statistics.fmean(r for r, a in zip(right, answers, strict=True) if a in votes and votes.count(a) == most)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_majority_at_k_is_on_average_that_of_any_k_samples(k):
    """Over all orders of the samples, as all are equally likely, it is the mean over all subsets of k."""
    right, answers = [1.0, 1.0, 0.0, 0.0, 0.0], ["6", "6", "7", None, "8"]
    pairs = list(zip(right, answers, strict=True))
    estimates = [majority_at_k(*map(list, zip(*order, strict=True)), k) for order in permutations(pairs)]
    subsets = [plainly(*map(list, zip(*subset, strict=True))) for subset in combinations(pairs, k)]
    assert statistics.fmean(estimates) == pytest.approx(statistics.fmean(subsets), abs=1e-12)


@pytest.mark.parametrize(
    ("right", "answers", "k", "expected"),
    [
        ([1, 0, 0, 0], "abbb", 4, 0.0),
        ([1, 1, 0, 0], "aabc", 4, 1.0),
        ([1, 1, 0, 0], "aabb", 4, 0.5),  # a tie
        ([1, 0, 0, 0], ["a", None, None, None], 4, 1.0),  # who says nothing does not vote
        ([1, 0], [None, None], 2, 0.5),
        ([1, 1, 0, 0, 0, 1], "aabbba", 3, 0.5),  # two runs of three
        ([1, 1, 0, 0, 0], "aabbb", 2, 0.5),  # the fifth is in no run
    ],
)
def test_majorities_known_beforehand(right, answers, k, expected):
    assert majority_at_k(right, list(answers), k) == expected


def test_standard_errors_are_over_prompts_not_samples():
    right = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1]], dtype=torch.double)
    scores = score(right, [1, 2], answers=["x"] * 12)
    values = [1.0, 0.0, 0.5]
    assert scores["accuracy"] == scores["pass@1"] == scores["majority@2"] == pytest.approx(0.5)
    assert scores["accuracy/error"] == pytest.approx(statistics.stdev(values) / math.sqrt(3))
    assert scores["pass@2"] == pytest.approx((1 + 0 + 5 / 6) / 3)
    assert scores["pass@2/error"] == pytest.approx(statistics.stdev([1, 0, 5 / 6]) / math.sqrt(3))
    mean, error = mean_and_error([0.5])
    assert mean == 0.5
    assert math.isnan(error)


def test_prompts_to_which_the_reward_does_not_apply_are_left_out():
    values = torch.tensor([1.0, 1.0, math.nan, math.nan, 0.0, 1.0])
    right = correct(make_batch({"rewards/x": values}), "x")
    assert right.isnan().tolist() == [False, False, True, True, False, False]
    scores = score(right.view(3, 2), powers(2), answers=list("aabbcd"))
    assert (scores["accuracy"], scores["pass@2"], scores["majority@2"]) == (0.75, 1.0, 0.75)


@pytest.mark.parametrize(
    ("response", "pattern", "answer"),
    [
        ("<answer>1</answer> no, <answer> 2 +\n 3 </answer> 9", None, "2 + 3"),
        (r"\boxed{1}, so \boxed{\frac{1}{\sqrt{2}}} and 4", None, r"\frac{1}{\sqrt{2}}"),
        ("first 12, then 1,234.5 of them.", None, "1234.5"),
        ("it is -3", None, "-3"),
        ("none", None, None),
        ("A, then B", r"\b([A-D])\b", "B"),
        ("x=1 x=2", r"x=\d", "x=2"),
        ("7", r"\b([A-D])\b", None),
    ],
)
def test_what_the_answer_of_a_response_is(response, pattern, answer):
    assert answer_of(response, pattern) == answer


def test_a_run_is_evaluated_as_its_training_did(run, run_main, tmp_path, capsys):
    capsys.readouterr()
    assert run_main("eval", run, "--by", "target", "--samples", tmp_path / "samples.jsonl") == 0
    shown = capsys.readouterr().out
    report = json.loads((run / "eval.json").read_text())
    whole, last = report["scores"]["all"], rows_of(run)[-1]
    for name, value in last.items():
        if name.startswith("eval/") and "time/" not in name:
            assert whole[name.removeprefix("eval/")] == pytest.approx(value, abs=1e-6), name
    assert {"eval/pass@1", "eval/pass@2", "eval/pass@4"} <= last.keys()
    assert last["eval/pass@1"] == last["eval/accuracy"] <= last["eval/pass@2"] <= last["eval/pass@4"]

    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 32
    assert whole["accuracy"] == sum(sample["correct"] for sample in samples) / 32
    targets = {sample["row"]["target"] for sample in samples}
    assert report["scores"].keys() == {"all", *(f"target={target}" for target in targets)}
    for target in targets:
        part = report["scores"][f"target={target}"]
        mine = [sample for sample in samples if sample["row"]["target"] == target]
        assert (part["samples"], part["prompts"]) == (len(mine), len(mine) / 4)
        assert part["accuracy"] == sum(sample["correct"] for sample in mine) / len(mine)
        assert part["reward/mean"] == pytest.approx(sum(sample["reward"] for sample in mine) / len(mine))
        runs = [mine[i : i + 4] for i in range(0, len(mine), 4)]
        votes = [plainly([s["correct"] for s in some], [s["answer"] for s in some]) for some in runs]
        assert part["majority@4"] == pytest.approx(statistics.fmean(votes))
    by_prompt = [samples[i : i + 4] for i in range(0, 32, 4)]
    majority = [plainly([s["correct"] for s in some], [s["answer"] for s in some]) for some in by_prompt]
    assert whole["majority@4"] == pytest.approx(statistics.fmean(majority))
    assert whole["majority@4/error"] == pytest.approx(statistics.stdev(majority) / 8**0.5)
    rewards = [statistics.fmean(s["reward"] for s in some) for some in by_prompt]
    assert whole["reward/mean/error"] == pytest.approx(statistics.stdev(rewards) / 8**0.5, rel=1e-5)

    assert (report["model"], report["step"], report["seed"], report["engines"]) == (str(run), 2, 0, 1)
    assert report["versions"]["torch"] == torch.__version__
    assert report["evaluation"]["samples_per_prompt"] == 4
    assert report["correct"] == "reward digits = 1"
    assert f"{whole['accuracy']:.3f} ± {whole['accuracy/error']:.3f}" in shown
    assert {path.name for path in run.iterdir()} == {
        "checkpoints", "config.yaml", "eval.json", "metrics.jsonl", "samples.jsonl"
    }  # fmt: skip


def test_a_model_and_each_checkpoint_are_evaluated_as_training_did(start, run_main, countdown, tmp_path, monkeypatch):
    """Before the first step and after the first of two, on two named sets, of which one has half the rows."""
    held_out = countdown / "heldout.jsonl"
    sets = f"data.eval={{whole: {held_out}, half: {{source: {held_out}, limit: 4}}}}"
    run = start("train", "run", FOUR, sets, "checkpoint.every=1", "evaluation.every=1")
    monkeypatch.chdir(tmp_path)
    assert run_main("eval", countdown / "model", run / "config.yaml") == 0
    assert run_main("eval", run, "--step", 1) == 0
    for row, path in zip(rows_of(run), (tmp_path / "eval.json", run / "eval.json"), strict=False):
        scores = scores_of(path)
        assert list(scores) == ["all", "data.eval.whole", "data.eval.half"]
        assert [part["prompts"] for part in scores.values()] == [12, 8, 4]
        assert scores["all"]["pass@4"] == pytest.approx(row["eval/pass@4"])
        for name in ("whole", "half"):
            for key in ("accuracy", "pass@2", "reward/mean", "response_length/mean"):
                assert scores[f"data.eval.{name}"][key] == pytest.approx(row[f"eval/{name}/{key}"], abs=1e-6)
    assert json.loads((tmp_path / "eval.json").read_text())["step"] is None


def test_two_engines_say_what_one_does(run, run_main, tmp_path):
    assert run_main("eval", run, "--samples", tmp_path / "one.jsonl") == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer"]
    command += ["eval", str(run), "--out", str(tmp_path / "two.json"), "--samples", str(tmp_path / "two.jsonl")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=120, env=environment, cwd=Path(__file__).parents[2])
    assert (tmp_path / "two.jsonl").read_text() == (tmp_path / "one.jsonl").read_text()
    assert scores_of(tmp_path / "two.json") == scores_of(run / "eval.json")
    assert json.loads((tmp_path / "two.json").read_text())["engines"] == 2


def test_settings_and_options_may_stand_in_any_order(run, run_main, tmp_path):
    out = tmp_path / "out.json"
    given = ["evaluation.samples_per_prompt=3", "--k", 3, "evaluation.accuracy=countdown", "--out", out, "seed=5"]
    assert run_main("eval", run, *given) == 0
    report = json.loads(out.read_text())
    assert (report["correct"], report["seed"]) == ("reward countdown = 1", 5)
    assert {name for name in report["scores"]["all"] if "@" in name and "error" not in name} == {"pass@3", "majority@3"}


@pytest.mark.sglang
def test_sglang_evaluates_the_weights_of_the_run(run, run_main, tmp_path):
    """Greedily it says what the embedded engine says; its weights are compared with the files' on the way."""
    for engine in ("torch", "sglang"):
        given = [f"rollout.engine={engine}", "rollout.concurrent_samples=8", "evaluation.samples_per_prompt=1"]
        files = ["--out", tmp_path / f"{engine}.json", "--samples", tmp_path / f"{engine}.jsonl"]
        assert run_main("eval", run, *given, "evaluation.temperature=0", *files) == 0
    assert (tmp_path / "sglang.jsonl").read_text() == (tmp_path / "torch.jsonl").read_text()
    assert scores_of(tmp_path / "sglang.json") == scores_of(tmp_path / "torch.json")
