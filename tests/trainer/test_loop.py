"""The loop on a tiny model: what a run records, what it does off policy and with a reference, what ends nothing."""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from examples.countdown import make_tokenizer
from tests.trainer.conftest import assert_rows_close, deterministic, rows_of
from trainer.controller import Controller
from trainer.trainer import Trainer
from workers.actor import ActorWorker

EVERY_STEP = {
    "reward/mean",
    "reward/std",
    "reward/digits/mean",
    "reward/countdown/mean",
    "reward/failed",
    "groups/no_signal",
    "response_length/mean",
    "response_length/max",
    "response_length/truncated",
    "loss",
    "entropy",
    "grad_norm",
    "learning_rate",
    "rollout/logprob_gap",
    "time/rollout",
    "time/rewards",
    "time/update",
    "time/sync",
    "time/step",
    "throughput/tokens_per_second_per_gpu",
}


def samples_of(run) -> list[dict]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.fixture
def updates(monkeypatch) -> list[dict[str, float]]:
    """The metrics of each optimizer update of the runs to come."""
    seen, update = [], ActorWorker._policy_update

    def watched(self, batch):
        metrics = update(self, batch)
        seen.append({name: metric.value for name, metric in metrics.items()})
        return metrics

    monkeypatch.setattr(ActorWorker, "_policy_update", watched)
    return seen


@pytest.fixture
def pairs(monkeypatch) -> list[tuple[list[int], str]]:
    """The prompt as it stands in the tokens, beside the one whose row graded the response, of the runs to come."""
    seen, show = [], Controller.show

    def watched(self, step, trajectories, *failures):
        seen.extend((t.tokens[~t.mask].tolist(), t.info["prompt"]) for t in trajectories)
        show(self, step, trajectories, *failures)

    monkeypatch.setattr(Controller, "show", watched)
    return seen


def test_a_run_records_every_step_and_samples_that_can_be_graded_again(start, countdown, pairs, capsys):
    run = start(
        "train",
        "run",
        "steps=3",
        "evaluation.every=2",
        "evaluation.samples_per_prompt=4",
        "tracking.samples_every=1",
        "tracking.samples_kept=100",
    )
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row.keys() >= EVERY_STEP
        assert 0 <= row["rollout/logprob_gap"] < 1e-5
        assert row["grad_norm"] > 0
        assert row["learning_rate"] == 0.003
        assert row["time/rollout"] + row["time/update"] <= row["time/step"]
    assert ["eval/accuracy" in row for row in rows] == [True, False, True, True]

    tokenizer = make_tokenizer()
    assert len(pairs) == 3 * 16 + 3 * 32
    assert all(tokenizer(prompt).input_ids == tokens for tokens, prompt in pairs)
    examples = {row["prompt"]: row for row in map(json.loads, (countdown / "train.jsonl").open())}
    held_out = {row["prompt"]: row for row in map(json.loads, (countdown / "heldout.jsonl").open())}
    kept = samples_of(run)
    for step, row in enumerate(rows):
        # 4 prompts x 4 samples of a step, 8 x 4 of an evaluation.
        mine = [sample for sample in kept if sample["step"] == step]
        trained = [sample for sample in mine if not sample["held_out"]]
        evaluated = [sample for sample in mine if sample["held_out"]]
        assert {sample["prompt"] for sample in trained} <= examples.keys()
        assert {sample["prompt"] for sample in evaluated} <= held_out.keys()
        assert (len(trained), len(evaluated)) == (16 * (step > 0), 32 * ("eval/accuracy" in row))
        for sample in mine:
            words = sample["response"].split()
            share = sum(word.isdigit() for word in words) / max(len(words), 1)
            assert sample["row"] == (examples | held_out)[sample["prompt"]]
            assert sample["rewards/digits"] == pytest.approx(share)
            assert sample["reward"] == pytest.approx(share + 0.5 * sample["rewards/countdown"])
            assert len(words) <= 12
            assert sample["finish_reason"] == "length" or len(words) < 12
        for prefix, group in (("", trained), ("eval/", evaluated)):
            if group:
                mean = sum(sample["reward"] for sample in group) / len(group)
                assert row[f"{prefix}reward/mean"] == pytest.approx(mean)
        if evaluated:
            right = sum(sample["rewards/digits"] == 1 for sample in evaluated)
            assert row["eval/accuracy"] == pytest.approx(right / 32)
    assert 0 < rows[0]["eval/accuracy"] < 1
    assert "before training" in capsys.readouterr().out


def test_off_policy_steps_make_several_updates_with_ratios_of_their_own(start, updates):
    once = start("train", "once", "steps=1", "data.eval=null")
    assert rows_of(once)[-1]["ratio/max"] == 1
    assert len(updates) == 1
    updates.clear()
    several = ["batch.minibatches_per_step=2", "batch.epochs_per_step=2"]
    rows = rows_of(start("train", "several", "steps=2", "data.eval=null", *several))
    assert len(updates) == 8
    # The first update of a step is on policy, the later ones are not.
    assert [update["ratio/max"] > 1.01 for update in updates] == [False, True, True, True] * 2
    assert rows[-1]["ratio/max"] == max(update["ratio/max"] for update in updates[4:])
    assert rows[-1]["entropy"] == pytest.approx(sum(update["entropy"] for update in updates[4:]) / 4)


def test_the_kl_is_measured_from_where_the_run_began(start, updates):
    rows = rows_of(start("train", "run", "data.eval=null", "algorithm.kl_coefficient=0.1", "steps=3"))
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-9)
    assert 1e-5 < rows[1]["kl"] < rows[2]["kl"]
    still = ["algorithm.kl_coefficient=0.1", "actor.learning_rate=1e-9", "steps=3"]
    assert all(row["kl"] < 1e-9 for row in rows_of(start("train", "still", "data.eval=null", *still)))


FAULTY = """
import time
from pathlib import Path
from rewards import register

@register("faulty")
def faulty(completion: str, row: dict) -> float:
    if not completion[:1].isdigit():
        raise ValueError("no number")
    return 2.0

@register("slow")
def slow(completion: str, row: dict) -> float:
    try:
        Path(MARK).touch(exist_ok=False)
    except FileExistsError:
        return 0.0
    time.sleep(60)
"""


def test_rewards_that_fail_are_counted_and_shown_and_end_nothing(start, countdown, tmp_path, capsys):
    (tmp_path / "faulty.py").write_text(FAULTY.replace("MARK", repr(str(tmp_path / "mark"))))
    run = start(
        "train",
        "run",
        f"rewards.files=[{countdown / 'graders.py'}, {tmp_path / 'faulty.py'}]",
        "rewards.weights={faulty: 1.0, slow: 1.0}",
        "rewards.timeout_seconds=1",
        "data.eval=null",
        "tracking.samples_every=1",
        "tracking.samples_kept=100",
    )
    assert [row["step"] for row in rows_of(run)] == [1, 2]
    for row in rows_of(run):
        samples = [sample for sample in samples_of(run) if sample["step"] == row["step"]]
        bad = [sample for sample in samples if not sample["response"][:1].isdigit()]
        assert 0 < len(bad) < 16
        assert [sample["rewards/faulty"] for sample in samples] == [2.0 * (sample not in bad) for sample in samples]
        # The first completion to be graded by `slow` takes too long.
        assert row["reward/failed"] == len(bad) + (row["step"] == 1)
    shown = capsys.readouterr().out
    assert "1 of 16 completions could not be graded by slow (timeout: took longer than 1 seconds), such as '" in shown
    assert "could not be graded by faulty (exception: ValueError" in shown


def test_supervised_training_lowers_the_loss_and_teaches_the_format(start):
    run = start("sft", "run", "steps=40", "samples_per_step=16", "actor.learning_rate=0.01")
    losses = [row["loss"] for row in rows_of(run)]
    assert losses[0] > 4.5  # log 118 is 4.8
    assert losses[-1] < 2
    rows = rows_of(start("train", "after", f"model.path={run / 'model'}", "steps=1", "rollout.max_response_tokens=30"))
    assert rows[0]["eval/response_length/truncated"] < 0.5


def test_the_loop_in_the_readme_is_the_loop_in_the_code():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = re.search(r"```python\n(while .*?)```", readme, re.DOTALL)[1]
    source = textwrap.dedent(inspect.getsource(Trainer.train))
    assert textwrap.indent(shown, "    ") in source


@pytest.mark.parametrize("tensor", [1, 2])
def test_two_processes_that_hand_tokens_to_each_other_learn_as_one_does(tensor, start, settings, tmp_path):
    several = ["batch.minibatches_per_step=2", "batch.epochs_per_step=2", "algorithm.kl_coefficient=0.1", "steps=3"]
    several += ["algorithm.resample_rounds=2", "evaluation.every=1", "batch.samples_per_prompt=2"]
    several += ["rollout.max_response_tokens=3"]  # so that some groups are alike and are replaced
    one = start("train", "one", *several)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer"]
    command += ["train", *settings["train"], *several, f"actor.tensor_parallel={tensor}"]
    command += [f"tracking.folder={tmp_path}", "tracking.name=two"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=180, env=environment, cwd=Path(__file__).parents[2])
    alone, both = (deterministic(rows_of(run)) for run in (one, tmp_path / "two"))
    assert sum(row.get("resampling/rounds", 0) for row in alone) > 1
    for row in (*alone, *both):  # how rounding follows the log-probabilities is rounding
        for name in [name for name in row if name.startswith("rollout/")]:
            del row[name]
    assert_rows_close(both, alone, relative=1e-4)
