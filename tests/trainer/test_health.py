"""Runs that cannot learn: each says so once, with what to do; those that can never recover end, with exit code 2."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open

from examples.countdown import make_tokenizer
from grpo.batch import Trajectory, batch_of
from grpo.config import ConfigError
from rewards.pool import Failure
from tests.trainer.conftest import rows_of
from trainer.controller import describe_failures
from trainer.health import Health, keep_batch
from workers.rollout import count_failures

ROOT = Path(__file__).parents[2]
HUGE = ["algorithm.preset=dr_grpo", "rewards.weights={digits: 1e30}"]
"""Advantages that are finite, with a gradient that is not."""

BAD = """
from rewards import register

@register("fails")
def fails(completion: str, row: dict) -> float:
    raise ValueError("no number")

@register("zero")
def zero(completion: str, row: dict) -> float:
    return 0.0

@register("asks", needs=("answer",))
def asks(completion: str, row: dict) -> float:
    return 0.0
"""


@pytest.fixture(scope="session")
def bad(tmp_path_factory, countdown) -> list[str]:
    """Settings that make the rewards of BAD known, without an evaluation."""
    file = tmp_path_factory.mktemp("rewards") / "bad.py"
    file.write_text(BAD)
    return [f"rewards.files=[{countdown / 'graders.py'}, {file}]", "data.eval=null"]


@pytest.fixture
def ended(run_main, settings, tmp_path, capsys):
    """ended(*overrides) is the one sentence that a run ends with, at exit code 2, and what it printed before."""

    def run(*overrides: str) -> tuple[str, str]:
        place = [f"tracking.folder={tmp_path}", "tracking.name=run"]
        assert run_main("train", *settings["train"], *place, *overrides) == 2
        out, error = capsys.readouterr()
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert error.endswith(".\n")
        return error, out

    return run


@pytest.mark.reliability
@pytest.mark.parametrize("rate", ["1e20", "1e39"], ids=["weights beyond all bounds", "weights that are no numbers"])
def test_a_learning_rate_that_ruins_the_weights_ends_the_run_and_is_named(ended, tmp_path, rate):
    error, _ = ended(f"actor.learning_rate={rate}", "data.eval=null", "checkpoint.every=1")
    assert f"The update at the learning rate {float(rate):g} made weights" in error
    assert "Lower actor.learning_rate" in error
    assert not list(tmp_path.glob("run/checkpoints/*"))  # what is lost is not saved


@pytest.mark.reliability
def test_skipped_updates_are_told_kept_and_end_the_run_after_the_limit(ended, tmp_path):
    error, out = ended(*HUGE, "actor.skipped_limit=4", "steps=9", "data.eval=null")
    assert error.startswith("error: Updates were skipped in 4 steps in a row")
    assert "Lower actor.learning_rate" in error
    rows = rows_of(tmp_path / "run")
    assert [(row["update/skipped"], row["grad_norm"]) for row in rows] == [(1, None)] * 4
    assert out.count("warning: An update was skipped") == 1
    assert re.search(r"^step 1/9 .*\(update skipped\)$", out, re.MULTILINE)
    folder = tmp_path / "run/skipped"
    assert f"{folder}." in error
    assert [path.name for path in sorted(folder.iterdir())] == [f"step-0000000{n}.safetensors" for n in (2, 3, 4)]
    with safe_open(folder / "step-00000004.safetensors", "pt") as kept:
        assert json.loads(kept.metadata()["metrics"])["reward/mean"] == pytest.approx(rows[-1]["reward/mean"])
        assert float(kept.get_tensor("rewards").mean()) == pytest.approx(rows[-1]["reward/mean"])
        assert float(kept.get_tensor("advantages").abs().max()) > 1e28


def test_supervised_training_ends_after_skipped_updates_too(run_main, settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("workers.actor.sft_loss", lambda logprobs, weights: logprobs.sum() * math.inf)
    place = [f"tracking.folder={tmp_path}", "tracking.name=run", "actor.skipped_limit=2"]
    assert run_main("sft", *settings["sft"], *place) == 2
    assert "Updates were skipped in 2 steps in a row" in capsys.readouterr().err
    assert len(list((tmp_path / "run/skipped").iterdir())) == len(rows_of(tmp_path / "run")) == 2


@pytest.mark.reliability
def test_a_reward_that_fails_on_everything_ends_the_run_and_is_told_once(ended, bad, tmp_path):
    error, out = ended(*bad, "rewards.weights={fails: 1.0}", "steps=9")
    assert "No completion could be graded for 3 steps" in error
    assert "python -m trainer rewards test" in error
    assert [row["reward/ungraded"] for row in rows_of(tmp_path / "run")] == [1, 1, 1]
    assert out.count("could not be graded") == 1
    assert "16 of 16 completions could not be graded by fails (exception: ValueError at " in out
    assert re.search(r"^step 1/9 .*\(not graded", out, re.MULTILINE)


@pytest.mark.reliability
def test_rewards_that_are_always_equal_are_told_once_and_the_run_goes_on(start, bad, capsys):
    run = start("train", "run", *bad, "rewards.weights={zero: 1.0}", "steps=24")
    out = capsys.readouterr().out
    assert out.count("warning: The rewards of every group were all equal for 10 steps (their mean is 0)") == 1
    assert re.search(r"^step 24/24 .*no signal\)$", out, re.MULTILINE)
    assert len(rows_of(run)) == 24


@pytest.fixture
def told(tmp_path):
    """told(*rows of metrics) is what Health says of these steps, behind each of which stand its labels."""

    def run(*rows: dict[str, float]) -> tuple[list[str], list[list[str]]]:
        tracker = Mock()
        health = Health(tracker, tmp_path, skipped_limit=5)
        for step, row in enumerate(rows):
            health.record(step, row)
        return [call.args[0] for call in tracker.say.call_args_list], [c.args[2] for c in tracker.log.call_args_list]

    return run


@pytest.mark.parametrize(
    ("row", "steps", "label", "words"),
    [
        ({"response_length/truncated": 1.0}, 3, "all cut", "rollout.max_response_tokens"),
        ({"groups/no_signal": 1.0, "reward/mean": 0.25}, 10, "no signal", "(their mean is 0.25)"),
        ({"entropy": 0.009}, 10, "entropy gone", "algorithm.clip_high"),
    ],
)
def test_a_sign_is_told_once_after_so_many_steps_in_a_row(told, row, steps, label, words):
    good = dict.fromkeys(row, 0.5)
    assert told(*[row] * (steps - 1), good, *[row] * (steps - 1))[0] == []
    (sentence,), labels = told(*[row] * steps, good, *[row] * 3 * steps)
    assert sentence.startswith("warning: ")
    assert words in sentence
    assert f"for {steps} steps" in sentence
    assert labels == [[label]] * steps + [[]] + [[label]] * 3 * steps


def test_what_a_teacher_or_another_reward_teaches_needs_no_signal_of_the_failed_one(told):
    failed = {"reward/ungraded": 1.0, "groups/no_signal": 1.0, "reward/mean": 0.0}
    with pytest.raises(ConfigError, match="No completion could be graded"):
        told(*[failed] * 3)
    assert told(*[failed | {"teacher/kl": 0.1}] * 20)[0] == []
    assert told(*[failed | {"groups/no_signal": 0.5}] * 20)[0] == []  # algorithm.ungraded=zero


def test_a_gap_past_its_bound_is_shown_in_the_line(told):
    rows = [{"rollout/logprob_gap": gap, "rollout/gap_bound": 0.05} for gap in (0.04, 0.06)]
    assert told(*rows, {"rollout/logprob_gap": math.nan, "rollout/gap_bound": 0.05}) == ([], [[], ["gap"], []])


def test_a_kept_batch_can_be_put_together_again(tmp_path):
    trajectories = [Trajectory(range(n), group=n) for n in (3, 1, 2)]
    for trajectory in trajectories:
        trajectory.add_sampled([7, 8], [-0.5, -0.25], 4)
    batch = batch_of(trajectories)
    keep_batch(tmp_path / "kept", 12, batch, {"loss": math.nan})
    with safe_open(tmp_path / "kept/step-00000012.safetensors", "pt") as kept:
        fields = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
        assert (kept.metadata()["step"], json.loads(kept.metadata()["metrics"])) == ("12", {"loss": None})
    offsets = fields.pop("offsets")
    assert fields.keys() == set(batch.keys())
    for name, field in batch.items():
        if field.is_nested:
            again = torch.nested.nested_tensor_from_jagged(fields[name], offsets)
            assert all(map(torch.equal, again.unbind(), field.unbind()))
        else:
            assert torch.equal(fields[name], field)


def test_failures_are_told_by_reward_and_kind_and_again_when_they_doubled_or_after_50_steps():
    def step(number: int, **kinds: int) -> list[str]:
        trajectories = [Trajectory([1]) for _ in range(20)]
        for kind, count in kinds.items():
            for trajectory in trajectories[:count]:
                trajectory.failures.append(Failure("mine", kind, "it broke", "x" * 300))
        return describe_failures(count_failures(trajectories), 20, False, number, told)

    told = {}
    said = step(1, timeout=2, crash=1)
    sentence = f"2 of 20 completions could not be graded by mine (timeout: it broke), such as '{'x' * 200}'."
    assert said == [sentence, sentence.replace("2", "1", 1).replace("timeout", "crash")]
    assert step(2, timeout=3, crash=1) == []
    assert [said[:8] for said in step(3, timeout=4)] == ["4 of 20 "]
    assert step(52, timeout=7) == []
    assert [said[:8] for said in step(53, timeout=1, crash=1)] == ["1 of 20 ", "1 of 20 "]
    nine = [Trajectory([1], failures=[Failure("mine", "crash", "it broke", "x")])] * 9
    assert len(describe_failures(count_failures(nine), 9, False)) == 1


def test_a_column_of_nulls_that_a_reward_needs_is_refused(start, ended, bad, countdown, tmp_path):
    rows = [json.loads(line) | {"answer": None} for line in (countdown / "train.jsonl").read_text().splitlines()]
    weights = [*bad, "rewards.weights={asks: 1.0}", f"data.train={tmp_path / 'train.jsonl'}"]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Reward 'asks' needs the column 'answer', which holds nothing but nulls in data.train" in ended(*weights)[0]
    rows[-1]["answer"] = "1"
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    start("train", "run", *weights, "steps=1")


def test_a_chat_template_that_is_not_used_is_told(start, settings, countdown, tmp_path, capsys):
    model, advice = tmp_path / "chatty", "for one that was trained to chat set data.chat=true."
    model.mkdir()
    for file in (countdown / "model").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(model)
    once = ["steps=1", "data.eval=null"]
    for name, overrides, count in (
        ("plain", [f"model.path={model}"], 1),
        ("chat", [f"model.path={model}", "data.chat=true"], 0),
        ("none", [], 0),
    ):
        start("train", name, *once, *overrides)
        assert capsys.readouterr().out.count(advice) == count


def test_a_resume_with_another_model_is_refused_and_other_changes_are_told(start, ended, countdown, tmp_path, capsys):
    first = ["steps=1", "data.eval=null"]
    run, begun = start("train", "run", *first), countdown / "model"
    error, _ = ended(*first[1:], "steps=2", "checkpoint.resume=true", f"model.path={countdown / 'untied'}")
    assert f"{run}, a run of model.path={begun}, not of {countdown / 'untied'}: " in error
    resume = ["checkpoint.resume=true", f"model.path={begun}/../model", "data.eval=null"]
    start("train", "run", *resume, "steps=2", "actor.learning_rate=0.001", "actor.betas=[0.9,0.99]")
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Going on after step 1 from "))
    changed = said.split(" Changed since: ")[1]
    assert "steps=2 (was 1), " in changed
    assert "actor.learning_rate=0.001 (was 0.003), actor.betas=[0.9, 0.99] (was [0.9, 0.95])" in changed
    assert not re.search("checkpoint|tracking|rewards|epochs", changed)
    (run / "config.yaml").unlink()
    start("train", "run", *resume, "steps=3")
    assert " Changed since" not in capsys.readouterr().out


@pytest.mark.reliability
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["actor.learning_rat=1"], "did you mean actor.learning_rate?"),
        (["data.train=nowhere.jsonl"], "nowhere.jsonl"),
        (["rewards.weights={fails: 1.0}"], "No completion could be graded for 3 steps"),
        ([*HUGE, "actor.skipped_limit=2"], "Updates were skipped in 2 steps in a row"),
    ],
    ids=["a typing error", "a missing file", "a sign that ends the run", "updates that are skipped"],
)
def test_torchrun_ends_its_report_with_the_sentence(settings, bad, tmp_path, overrides, sentence):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer"]
    command += ["train", *settings["train"], *bad, "steps=9", f"tracking.folder={tmp_path}", "tracking.name=run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    run = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
    assert run.returncode != 0
    *before, last, border = run.stderr.rstrip().splitlines()
    assert last.startswith("  traceback : error: ")
    assert sentence in last
    assert set(border) == {"="}
    ours = [line for line in before if line.startswith("error: ")]
    assert ours == [last.removeprefix("  traceback : ")]  # said by one rank, without a traceback of its own
    assert "[rank" not in run.stderr
    kept = [safe_open(path, "pt") for path in sorted(tmp_path.glob("run/skipped/*.safetensors"))]
    assert len(kept) == 2 * ("skipped" in sentence)
    for batch in kept:  # with the tokens, which were on both ranks
        assert batch.get_tensor("offsets").diff().tolist() == batch.get_tensor("length").tolist()
        assert len(batch.get_tensor("tokens")) == len(batch.get_tensor("rollout_logprobs"))
        assert len(batch.get_tensor("tokens")) == batch.get_tensor("offsets")[-1]
