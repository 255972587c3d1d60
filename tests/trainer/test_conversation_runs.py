"""Whole runs of conversations: engine and trainer agree, a resume is exact, proofs hold, eval takes them."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.conftest import deterministic, rows_of
from tests.trainer.test_algorithms_runs import run_prove
from trainer.trainer import start_engine
from workers.engines.config import RolloutConfig
from workers.engines.sglang_process import make_arguments


def samples_of(run):
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def assert_conversations(run, gap):
    """What a run of conversations must have, whichever engine it had."""
    rows = rows_of(run)
    for row in rows[1:]:
        assert row["rollout/logprob_gap_max"] < gap
        assert 1 < row["environment/turns"] <= 4
        assert 0 < row["environment/observed_share"] < 1
        ended = sum(value for name, value in row.items() if name.startswith("environment/ended/"))
        assert ended == pytest.approx(1)
    assert "eval/environment/turns" in rows[0]
    for sample in samples_of(run):
        said = [turn for turn in sample["turns"] if turn["role"] == "assistant"]
        assert sample["response"] == said[-1]["content"]
        assert [turn["role"] for turn in sample["turns"]] == (["assistant", "user"] * 4)[: len(sample["turns"])]
        assert all(0 < turn["tokens"] <= 5 for turn in said)
        told = [turn["content"] for turn in sample["turns"] if turn["role"] == "user"]
        for before, answer in zip(said, told, strict=False):
            numbers = [int(word) for word in before["content"].split() if word.isdigit()]
            assert answer == f"{sum(numbers) % 100} +"
        # The tokenizer has no word for what the policy would be told of an error, which ends the conversation.
        if any("9" in turn["content"].split() for turn in said):
            assert sample["finish_reason"] == "error"


def test_a_resume_amid_a_run_of_conversations_is_exact(start, chatter):
    choices = [*chatter, "batch.minibatches_per_step=2", "algorithm.kl_coefficient=0.1", "tracking.samples_every=1"]
    whole = start("train", "whole", *choices, "steps=6", "checkpoint.every=3", "evaluation.every=3")
    start("train", "half", *choices, "steps=3", "checkpoint.every=3", "evaluation.every=3")
    half = start(
        "train", "half", *choices, "steps=6", "checkpoint.every=3", "evaluation.every=3", "checkpoint.resume=true"
    )
    # When environments answer decides which samples share a pass of the engine, and so how its numbers are rounded.
    rounded = [
        [{name: value for name, value in row.items() if not name.startswith("rollout/")} for row in rows]
        for rows in (deterministic(rows_of(half)), deterministic(rows_of(whole)))
    ]
    assert rounded[0] == rounded[1]
    assert (half / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert_conversations(whole, 1e-4)


def test_the_engine_of_conversations_alone_has_graphs_for_prefills(monkeypatch):
    made = []
    monkeypatch.setattr("trainer.trainer.make_engine", lambda *arguments: made.append(arguments[-1]))
    for converses in (True, False):
        config = SimpleNamespace(rollout=RolloutConfig(engine="torch"), converses=converses, model=None, seed=0)
        start_engine(config, SimpleNamespace(device=torch.device("cpu"), dp_rank=0))
    assert made == [True, False]
    layout = SimpleNamespace(device=torch.device("cuda", 0), tp_size=1)
    off = {"disable_prefill_cuda_graph": True}
    for turns, own, disabled in [(True, {}, False), (False, {}, True), (True, off, True)]:
        config = RolloutConfig(engine="sglang", concurrent_samples=8, sglang=own)
        arguments = make_arguments(config, layout, "model", torch.bfloat16, turns)
        assert arguments["disable_prefill_cuda_graph"] is disabled


def test_both_proofs_hold_for_conversations(start, chatter, capsys):
    start("prove", "run", *chatter)
    assert "All of it holds." in capsys.readouterr().out


def test_several_engines_converse_and_learn_as_one_does(start, settings, chatter, tmp_path):
    alone = start("train", "alone", *chatter, "tracking.samples_every=1", "tracking.samples_kept=64")
    given = [
        *settings["train"],
        *chatter,
        f"tracking.folder={tmp_path}",
        "tracking.name=two",
        "tracking.samples_every=1",
    ]
    ran = run_prove(2, "-m", "trainer", "train", *given, "tracking.samples_kept=64")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    first, second = ([sample for sample in samples_of(run) if sample["step"] <= 1] for run in (alone, tmp_path / "two"))
    assert first == second  # before anything was learned
    ours, theirs = (deterministic(rows_of(run)) for run in (alone, tmp_path / "two"))
    assert ours[1]["reward/mean"] == theirs[1]["reward/mean"]
    assert ours[1]["grad_norm"] == pytest.approx(theirs[1]["grad_norm"], rel=1e-4)
    assert_conversations(tmp_path / "two", 1e-4)


def test_eval_holds_conversations(start, run_main, chatter, tmp_path, capsys):
    run = start("train", "run", *chatter, "checkpoint.every=2")
    kept = tmp_path / "samples.jsonl"
    assert run_main("eval", run, "--samples", kept, "evaluation.samples_per_prompt=2") == 0
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert len(rows) == 16
    assert all(row["turns"][0]["role"] == "assistant" for row in rows)
    assert "environment" in capsys.readouterr().out


@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_sglang_converses_as_the_embedded_engine_does(start, chatter):
    run = start("train", "run", *chatter, "rollout.engine=sglang", "rollout.concurrent_samples=16")
    assert_conversations(run, 1e-4)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["environment=chattr"], "There is no environment 'chattr', the nearest is 'chatter'"),
        (["environments.max_turn_tokens=64"], "environments.max_turn_tokens=64 is more than a whole conversation may"),
        (["environments.max_turns=0"], "environments.max_turns is 0: it must be a positive number"),
        (["environments.on_error=say"], "environments.on_error is 'say': it must be tell or end"),
        (["environments.column=kind"], "environment=chatter and environments.column=kind are both set"),
        (["environment=null", "environments.column=kind"], "environments.column=kind is not a column of the data"),
        (["environment=null"], "rewards.weights has 'environment', and there is no environment"),
        (["environments.options={chatter: {a: 1}}"], "Environment 'chatter' has no option 'a': it takes none"),
        (["environments.files=[nothing.py]"], "environments.files lists"),
    ],
)
def test_a_setting_that_cannot_work_is_one_sentence_before_a_model_is_loaded(
    run_main, settings, chatter, overrides, says, capsys, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, "workers.engines.torch_engine", None)
    place = [f"tracking.folder={tmp_path}", "tracking.name=run"]
    assert run_main("train", *settings["train"], *place, *chatter, *overrides) == 2
    [said] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert says in said
