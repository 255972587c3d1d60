"""A name that was used before: the run is refused, goes on or begins anew, and nothing of the earlier one is lost."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.trainer.conftest import deterministic, rows_of
from trainer.config import TrackingConfig
from trainer.runs import run_folder

SHORT = ["steps=2", "checkpoint.every=1"]


@pytest.fixture
def refusal(run_main, settings, tmp_path, monkeypatch, capsys):
    """refusal(name, *overrides) is the sentence that `sft` ends with; it may neither load weights nor change a file."""

    def run(name: str, *overrides: str) -> str:
        before = files_below(tmp_path)
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr("workers.actor.load_policy", lambda *_, **__: pytest.fail("weights were loaded"))
            place = [f"tracking.folder={tmp_path}", f"tracking.name={name}"]
            assert run_main("sft", *settings["sft"], *place, *overrides) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert files_below(tmp_path) == before
        return error.replace(f"{tmp_path}/", "")

    return run


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def leave_run(folder: Path, *steps: int) -> None:
    """What counts as an earlier run: a row of its record, and checkpoints of `steps`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text('{"step": 0}\n')
    for step in steps:
        checkpoint = folder / f"checkpoints/step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "progress.json").write_text(json.dumps({"step": step, "data": None}))


def test_a_name_that_has_checkpoints_is_refused(refusal, tmp_path):
    leave_run(tmp_path / "run", 2, 4)
    assert refusal("run") == (
        "error: run has checkpoints of an earlier run (steps 2, 4): go on with it by checkpoint.resume=true, choose "
        "another tracking.name, or begin anew by checkpoint.overwrite=true, which moves it to run.previous-1.\n"
    )


def test_beginning_anew_twice_keeps_both_earlier_runs_whole(start, tmp_path, capsys):
    run, kept = start("sft", "run", *SHORT), []
    for seed in (1, 2):
        kept.append(files_below(run))
        capsys.readouterr()
        start("sft", "run", *SHORT, f"seed={seed}", "checkpoint.overwrite=true")
        said = f"The run is in {run}, and the earlier one of that name in {run}.previous-{seed} now."
        assert said in capsys.readouterr().out
        assert [row["step"] for row in rows_of(run)] == [1, 2]
    assert [files_below(tmp_path / f"run.previous-{i}") for i in (1, 2)] == kept
    assert kept[0] != kept[1]
    fresh = start("sft", "fresh", *SHORT, "seed=2")
    assert deterministic(rows_of(run)) == deterministic(rows_of(fresh))
    assert (run / "model/model.safetensors").read_bytes() == (fresh / "model/model.safetensors").read_bytes()


def test_a_resume_forgotten_in_between_costs_nothing(start, refusal):
    whole, run = start("sft", "whole", "steps=3"), start("sft", "run", "steps=1")
    for steps in (2, 3):
        assert "checkpoint.resume=true" in refusal("run", f"steps={steps}")
        start("sft", "run", f"steps={steps}", "checkpoint.resume=true")
    assert deterministic(rows_of(run)) == deterministic(rows_of(whole))


def test_a_run_that_left_no_checkpoint_is_moved_aside_too(start, tmp_path):
    leave_run(tmp_path / "run")
    (tmp_path / "run.previous-1").mkdir()
    earlier = files_below(tmp_path / "run")
    run = start("sft", "run", *SHORT)
    assert files_below(tmp_path / "run.previous-2") == earlier
    assert [row["step"] for row in rows_of(run)] == [1, 2]


def test_a_folder_in_which_no_run_began_stays(start, tmp_path):
    (tmp_path / "run/data").mkdir(parents=True)
    (tmp_path / "run/metrics.jsonl").touch()  # of a run that ended before its first step
    leave_run(tmp_path / "run/other", 3)
    start("sft", "run", *SHORT)
    assert (tmp_path / "run/other/checkpoints/step-00000003").is_dir()
    assert not list(tmp_path.glob("*.previous-*"))


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("seed-O", "did you mean tracking.name=seed-0?"),
        ("deep/sed-2", "did you mean tracking.name=deep/seed-2?"),
        ("other", "correct tracking.name (deep/seed-2, seed-0), or set checkpoint.resume=false to begin it."),
        ("seed-1", "set checkpoint.resume=false to begin it."),
    ],
)
def test_nothing_to_resume_names_what_is_there(refusal, tmp_path, name, way_out):
    leave_run(tmp_path / "seed-0", 3)
    leave_run(tmp_path / "seed-1")
    (tmp_path / "seed-1/checkpoints/step-00000001.partial").mkdir(parents=True)
    leave_run(tmp_path / "deep/seed-2", 3)
    sentence = refusal(name, "checkpoint.resume=true")
    assert sentence == f"error: checkpoint.resume=true, but {name} has no checkpoint: {way_out}\n"


def test_nothing_to_resume_where_no_run_is(refusal):
    assert "run has no checkpoint: set checkpoint.resume=false" in refusal("run", "checkpoint.resume=true")


def test_a_finished_run_is_not_resumed(refusal, tmp_path):
    leave_run(tmp_path / "run", 2, 6)
    sentence = refusal("run", "checkpoint.resume=true")
    assert "run is finished: its newest checkpoint is of step 6 and steps=6; raise steps" in sentence


def test_going_on_and_beginning_anew_contradict_each_other(refusal, tmp_path):
    leave_run(tmp_path / "run", 2)
    assert "set one of them" in refusal("run", "checkpoint.resume=true", "checkpoint.overwrite=true")


def test_the_earlier_run_stays_where_the_new_one_cannot_begin(refusal, tmp_path, monkeypatch):
    leave_run(tmp_path / "run", 2)
    anew = ["checkpoint.overwrite=true"]
    assert "there is no file" in refusal("run", *anew, "data.train=./none.jsonl")
    assert "samples_per_step=65" in refusal("run", *anew, "samples_per_step=65")
    (tmp_path / "run/rows.jsonl").write_text('{"prompt": "1", "response": "1"}\n' * 9)
    inside = refusal("run", *anew, f"data.train={tmp_path / 'run/rows.jsonl'}")
    assert "run/rows.jsonl is in run, which holds an earlier run and would be moved to run.previous-1" in inside
    monkeypatch.setattr(Path, "rename", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert "Cannot move run to run.previous-1 (Permission denied)" in refusal("run", *anew)


def test_folders_of_runs():
    assert run_folder(TrackingConfig(folder="out", name="seed0")) == Path("out/seed0")
    assert run_folder(TrackingConfig()).parent == Path("runs")
