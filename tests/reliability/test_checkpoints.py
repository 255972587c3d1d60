"""Checkpoints that are damaged, a disk that is full, the best one, and what is on the disk when a name stands there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.reliability.conftest import ENVIRONMENT, ROOT, rows_of
from tests.trainer.conftest import deterministic
from trainer.checkpoint import complete_checkpoints, read_progress
from workers.parallel.policy import PREFIX
from workers.rollout import RolloutWorker

pytestmark = pytest.mark.reliability

EACH = ["steps=3", "checkpoint.every=1", "checkpoint.keep=3"]


def cut(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return f"its {path.name} has {size // 2} bytes of {size}"


def remove(path: Path) -> str:
    path.unlink()
    return f"its {path.name} is missing"


def scribble(path: Path) -> str:
    path.write_text(path.read_text()[:20])
    return f"its {path.name} cannot be read"


def flip(path: Path) -> str:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    return f"its {path.name} is not what was written"


HARMS = [("__0_0.distcp", cut), ("__0_0.distcp", flip), (".metadata", flip), ("random-0.pt", remove)]
HARMS += [("progress.json", scribble)]


@pytest.mark.parametrize(("file", "harm"), HARMS)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(file, harm, start, run_main, tmp_path, capsys):
    run = start("sft", "run", *EACH, "checkpoint.keep=1")
    start("sft", "run", "steps=4", "checkpoint.resume=true")
    shutil.copytree(run, tmp_path / "whole")
    checkpoints = complete_checkpoints(run)
    what = harm(checkpoints[4] / file)
    capsys.readouterr()
    assert run_main("export", run, tmp_path / "out") == 0
    assert f"{checkpoints[4]} is damaged ({what}) and is passed over.\n" in capsys.readouterr().err
    assert run_main("export", run, tmp_path / "out", "--step", 4) == 2
    assert "choose another --step" in capsys.readouterr().err
    start("sft", "run", "steps=4", "checkpoint.resume=true", "checkpoint.keep=1")
    said = capsys.readouterr().out
    assert f"{checkpoints[4]} is damaged ({what}) and is passed over.\nGoing on after step 3 from" in said
    assert deterministic(rows_of(run)) == deterministic(rows_of(tmp_path / "whole"))
    # The whole one took the place of the damaged one, and pushed out the older.
    assert list(complete_checkpoints(run)) == [4]
    assert not list(run.glob("checkpoints/*.partial"))
    model = "model/model.safetensors"
    assert (run / model).read_bytes() == (tmp_path / "whole" / model).read_bytes()


def test_where_no_checkpoint_is_whole_the_run_is_refused(start, run_main, settings, tmp_path, capsys):
    run = start("sft", "run", "steps=1")
    cut(next(run.glob("checkpoints/*/*.distcp")))
    place = [f"tracking.folder={tmp_path}", "tracking.name=run", "checkpoint.resume=true"]
    assert run_main("sft", *settings["sft"], *place) == 2
    error = capsys.readouterr().err
    assert "is passed over. checkpoint.resume=true, but" in error
    assert "begin anew by checkpoint.overwrite=true" in error
    assert run_main("export", run, tmp_path / "out") == 2


def test_everything_is_on_the_disk_before_a_checkpoint_has_its_name(start, monkeypatch):
    flushed, fsync, rename = set(), os.fsync, Path.rename
    named = []

    def watched_fsync(descriptor):
        fsync(descriptor)
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))

    def watched_rename(path, target):
        if target.name == "step-00000002":
            wanted = {str(file) for file in path.iterdir()} | {str(path)}
            wanted.add(str(path.parents[1] / "metrics.jsonl"))
            named.append(wanted - {name.replace(".metadata.tmp", ".metadata") for name in flushed})
            flushed.clear()
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    run = start("train", "run", "data.eval=null")
    assert named == [set()]
    assert str(run / "checkpoints") in flushed


# python -c FULL COMMAND ARGUMENTS: the command line in a run folder on a disk of its own with so many bytes.
FULL = """
import ctypes, os, shutil, subprocess, sys
from pathlib import Path
folder, size, lie = sys.argv.pop(1), sys.argv.pop(1), sys.argv.pop(1)
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
if lie == "lie":  # a disk that others fill while the checkpoint is written
    shutil.disk_usage = lambda _: shutil._ntuple_diskusage(2**40, 0, 2**40)
from trainer.__main__ import main
try:
    main()
finally:
    # What the disk holds goes with it: keep it.
    shutil.copytree(folder, folder + "-kept", symlinks=True)
"""


@pytest.fixture
def on_small_disk(settings, tmp_path):
    """on_small_disk(bytes, lie, *overrides) runs `train` on a disk with so much room: its process, its run's folder."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here: user namespaces are switched off")

    def run(size: int, lie: str, *overrides: str):
        disk = tmp_path / "disk"
        disk.mkdir()
        command = ["unshare", "-rm", sys.executable, "-c", FULL, disk, size, lie, "train", *settings["train"]]
        command += [f"tracking.folder={disk}", "tracking.name=run", "data.eval=null", *overrides]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=ROOT, check=False
        )
        return done, tmp_path / "disk-kept/run"

    return run


@pytest.mark.parametrize("lie", ["lie", "truth"])
def test_a_full_disk_ends_the_run_with_a_sentence(lie, on_small_disk):
    done, run = on_small_disk(1_900_000, lie, "steps=6", "checkpoint.every=1", "checkpoint.keep=9")
    assert done.returncode == 2, done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: The disk is full: the checkpoint of step 3 needs 681.2 kB, and ")
    assert error.endswith("Earlier checkpoints are whole: make room, and go on with checkpoint.resume=true.")
    assert "Traceback" not in done.stderr
    assert list(complete_checkpoints(run)) == [1, 2]
    assert all(read_progress(path)["files"] for path in complete_checkpoints(run).values())
    assert not list(run.glob("checkpoints/*.partial"))
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3]


@pytest.mark.parametrize(("lie", "background"), [("truth", "true"), ("lie", "false")])
def test_a_full_disk_skips_the_checkpoint_where_that_is_wished(lie, background, on_small_disk):
    wish = ["checkpoint.on_full_disk=skip", f"checkpoint.background={background}"]
    done, run = on_small_disk(1_900_000, lie, "steps=4", "checkpoint.every=1", "checkpoint.keep=9", *wish)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3, 4]
    assert done.stdout.count("warning: The disk is full") == 2
    assert list(complete_checkpoints(run)) == [1, 2]


def test_a_run_without_room_for_a_checkpoint_is_refused_at_its_start(on_small_disk):
    done, _ = on_small_disk(400_000, "truth")
    assert done.returncode == 2
    assert "error: Checkpoints need 681.2 kB of disk each, 2.0 MB for 3 at once; " in done.stderr
    assert "too little for the first: make room" in done.stderr
    assert "sampling and grading" not in done.stdout


def test_what_checkpoints_need_is_said_at_the_start_and_is_true(start, capsys):
    run = start("train", "run", "data.eval=null")
    assert "Checkpoints need 681.2 kB of disk each, 2.0 MB for 3 at once; " in capsys.readouterr().out
    taken = sum(path.stat().st_size for path in run.glob("checkpoints/step-00000002/*"))
    assert 600_000 < taken < 681_200


def test_the_best_by_evaluation_is_kept_beside_the_newest(start, run_main, tmp_path, monkeypatch):
    accuracies = iter([0.9, 0.25, 0.5, 0.5, 0.125, 0.5, 0.0])  # before the first step, and after each of 6
    judge = "trainer.controller.Controller.judge"
    monkeypatch.setattr(judge, lambda *_: {"accuracy": next(accuracies)})
    best = ["evaluation.every=1", "checkpoint.every=3", "checkpoint.keep=1", "checkpoint.keep_best=true"]
    run = start("train", "run", "steps=4", *best)
    start("train", "run", "steps=6", *best, "checkpoint.resume=true")
    assert list(complete_checkpoints(run)) == [2, 6]
    assert (run / "checkpoints/best").resolve().name == "step-00000002"
    assert read_progress(run / "checkpoints/best")["score"] == 0.5
    assert run_main("export", run, tmp_path / "best", "--step", "best") == 0
    assert "run, step 2 of 6" in (tmp_path / "best/README.md").read_text()


def test_training_goes_on_while_a_checkpoint_is_written(start, monkeypatch):
    """The same run with and without: what is written is what there was when the step ended."""
    run = start("train", "run", "steps=4", "checkpoint.every=1", "checkpoint.keep=4", "data.eval=null")
    held, save = [], dcp.save

    def slow(state, **kwargs):
        # Until the next step is over, whose update must not reach what is written.
        rows = Path(kwargs["checkpoint_id"]).parents[1] / "metrics.jsonl"
        step = int(Path(kwargs["checkpoint_id"]).stem[5:])
        while step < 4 and len(rows.read_text().splitlines()) <= step:
            pass
        held.append(len(rows.read_text().splitlines()) - step)
        return save(state, **kwargs)

    monkeypatch.setattr(dcp, "save", slow)
    other = start(
        "train",
        "other",
        "steps=4",
        "checkpoint.every=1",
        "checkpoint.keep=4",
        "data.eval=null",
        "checkpoint.background=true",
    )
    assert held == [1, 1, 1, 0]
    assert deterministic(rows_of(run)) == deterministic(rows_of(other))
    for step, path in complete_checkpoints(run).items():
        there, mine = complete_checkpoints(other)[step], read_progress(path)
        assert read_progress(there) | {"files": None, "sums": None} == mine | {"files": None, "sums": None}
        weights = [tensors_of(path), tensors_of(there)]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(checkpoint)
    sizes = {
        name: entry.size for name, entry in reader.read_metadata().state_dict_metadata.items() if hasattr(entry, "size")
    }
    tensors = {name: torch.empty(size) for name, size in sizes.items()}
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def test_after_a_resume_the_engine_samples_from_the_restored_weights(start, monkeypatch):
    run = start("train", "run", "data.eval=null", "steps=2")
    checkpoint, seen, generate = complete_checkpoints(run)[2], [], RolloutWorker.generate

    def watched(self, *args, **kwargs):
        held = dict(self.engine.model.named_parameters())
        saved = {f"model.{PREFIX}{name}": torch.empty_like(tensor) for name, tensor in held.items()}
        dcp.load(saved, checkpoint_id=checkpoint, no_dist=True)
        seen.append(all(torch.equal(tensor, saved[f"model.{PREFIX}{name}"]) for name, tensor in held.items()))
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(RolloutWorker, "generate", watched)
    start("train", "run", "data.eval=null", "steps=4", "checkpoint.resume=true")
    assert seen == [True, False]


def test_resuming_by_itself_begins_goes_on_and_ends(start, tmp_path, capsys):
    auto = ["checkpoint.resume=auto", "data.eval=null"]
    run = start("train", "run", "steps=2", *auto)
    assert "The run is in" in capsys.readouterr().out
    start("train", "run", "steps=3", *auto)
    assert "Going on after step 2" in capsys.readouterr().out
    before = (run / "metrics.jsonl").read_text()
    start("train", "run", "steps=3", *auto)  # finished: there is nothing to do, which is no error
    assert (run / "metrics.jsonl").read_text() == before
    assert [json.loads(line)["step"] for line in before.splitlines()] == [1, 2, 3]
