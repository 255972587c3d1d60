"""Signals: the first one ends the step and saves, the second ends at once, and none leaves a traceback or a process."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.reliability.conftest import rows_of, steps_of
from tests.trainer.conftest import deterministic
from trainer.checkpoint import complete_checkpoints, damage

pytestmark = pytest.mark.reliability

LONG = ["steps=30", "actor.schedule=cosine", "evaluation.every=3", "tracking.samples_every=1", "checkpoint.every=0"]


@pytest.mark.parametrize(("command", "number"), [("train", signal.SIGTERM), ("sft", signal.SIGINT)])
def test_a_signal_ends_the_step_and_saves_and_the_run_goes_on_as_if_nothing_was(
    command, number, begin, start, tmp_path
):
    run, long = tmp_path / "run", LONG if command == "train" else LONG[:2]
    first = begin(command, "run", *long)
    first.until(lambda: steps_of(run) >= 4)
    os.killpg(first.popen.pid, number)  # also what a scheduler does, and a terminal
    assert first.wait() == 3, first.said
    assert "Traceback" not in first.said
    step, checkpoint = complete_checkpoints(run).popitem()
    assert f"A signal ended the run after step {step} of 30: go on from {checkpoint} by checkpoint.resume=true." in (
        first.said
    )
    assert step == rows_of(run)[-1]["step"] < 30
    start(command, "run", *long, "checkpoint.resume=true")
    whole = start(command, "whole", *long)
    assert deterministic(rows_of(run)) == deterministic(rows_of(whole))
    if command == "train":
        assert (run / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


SLOW = """
import time
from rewards import register

@register("slow")
def slow(completion: str, row: dict) -> float:
    time.sleep(1)
    return 1.0
"""


@pytest.fixture
def slow(tmp_path) -> list[str]:
    """Overrides with which the rollout of a step takes 16 s."""
    (tmp_path / "slow.py").write_text(SLOW)
    return [f"rewards.files=[{tmp_path / 'slow.py'}]", "rewards.weights={slow: 1.0}", "data.eval=null"]


def assert_all_gone(family: list[int]) -> None:
    """Within 5 s no process of `family` is there."""
    deadline = time.monotonic() + 5
    while left := [pid for pid in family if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_second_ctrl_c_ends_at_once(ranks, begin, slow, tmp_path):
    run = begin("train", "run", *slow, ranks=ranks)
    run.until(lambda: "sampling and grading" in run.said)
    family = run.family()
    assert len(family) >= 2 + ranks
    for count in (1, 2):
        run.interrupt()
        run.until(lambda: "SIGINT: the run ends after this step" in run.said) if count == 1 else None
    begun = time.monotonic()
    assert run.wait(10) == (1 if ranks else 130), run.said  # torchrun has a code and a report of its own
    assert time.monotonic() - begun < 5
    assert run.said.count("A second Ctrl-C: the run ends at once, and nothing more is saved.") == 1
    assert ranks or "Traceback" not in run.said
    assert_all_gone(family)


@pytest.mark.parametrize(
    ("phase", "number"), [("importing torch", signal.SIGINT), ("loading the weights", signal.SIGTERM)]
)
def test_before_the_first_step_a_signal_ends_at_once(phase, number, begin):
    run = begin("train", "run")
    run.until(lambda: phase in run.said)
    family = run.family()
    os.killpg(run.popen.pid, number)
    assert run.wait(5) == 128 + number
    assert run.said.splitlines()[-1].startswith(f"{number.name} before the first step: the run ends at once")
    assert "Traceback" not in run.said
    assert_all_gone(family)


def test_a_step_longer_than_the_grace_is_given_up(begin, slow):
    run = begin("train", "run", *slow, "checkpoint.grace_seconds=1")
    run.until(lambda: "sampling and grading" in run.said)
    run.popen.terminate()
    assert run.wait(5) == 128 + signal.SIGTERM
    assert "The step and its checkpoint took longer than 1 s: the run ends at once" in run.said


def test_a_signal_to_any_rank_ends_all_of_them_after_the_same_step(begin, tmp_path):
    run = begin("train", "run", *LONG, ranks=2)
    run.until(lambda: steps_of(tmp_path / "run") >= 3)
    ranks = [pid for pid in run.family() if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    family = run.family()
    os.kill(min(ranks), signal.SIGTERM)
    assert run.wait() == 1
    assert "exitcode  : 3" in run.said
    step, checkpoint = complete_checkpoints(tmp_path / "run").popitem()
    assert damage(checkpoint) is None
    assert f"A signal ended the run after step {step} of 30" in run.said
    assert step == rows_of(tmp_path / "run")[-1]["step"] < 30
    assert "Traceback" not in run.said.partition("A signal ended")[0]
    assert_all_gone(family)


def test_the_ranks_end_where_torchrun_is_killed(begin, tmp_path):
    run = begin("train", "run", *LONG, "steps=1000", ranks=2)
    run.until(lambda: steps_of(tmp_path / "run") >= 2)
    family = run.family()
    run.popen.kill()
    run.wait()
    deadline = time.monotonic() + 30
    while any(map(is_running, family)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert_all_gone(family)
    assert "by checkpoint.resume=true" in run.said


@pytest.mark.sglang
def test_sglang_lives_through_ctrl_c_and_leaves_nothing(begin, tmp_path):
    shared = set(os.listdir("/dev/shm"))
    run = begin("train", "run", *LONG, "steps=500", "rollout.engine=sglang", "rollout.concurrent_samples=16")
    run.until(lambda: steps_of(tmp_path / "run") >= 2, 300)
    family = run.family()
    os.killpg(run.popen.pid, signal.SIGINT)
    assert run.wait() == 3, run.said
    assert "Traceback" not in run.said
    assert_all_gone(family)
    again = begin(
        "train",
        "run",
        *LONG,
        "steps=500",
        "rollout.engine=sglang",
        "rollout.concurrent_samples=16",
        "rollout.max_response_tokens=400",  # so that the step outlasts both
        "checkpoint.resume=true",
    )
    again.until(lambda: "sampling and grading" in again.said, 300)
    family = again.family()
    for _ in range(2):
        again.interrupt()
        time.sleep(0.5)
    assert again.wait(10) == 130, again.said
    assert_all_gone(family)
    assert set(os.listdir("/dev/shm")) <= shared
