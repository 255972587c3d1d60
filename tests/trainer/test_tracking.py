"""The record of a run and its live view: rows, resuming, dashboards, what the terminal shows."""

import io
import json
import logging
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import wandb
from rich.console import Console

from grpo.config import ConfigError, describe, load
from trainer.report import read_metrics
from trainer.tracking import (
    Screen,
    Stopwatch,
    Tracker,
    TrackingConfig,
    read_rows,
    remaining_seconds,
    run_folder,
    sparkline,
)


def track(folder, start_step=0, total_steps=10, console=None, **config):
    return Tracker(TrackingConfig(**config), folder, total_steps, {"seed": 1}, start_step, console)


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})


def test_rows_round_trip_and_nan_stays_valid_json(tmp_path):
    with track(tmp_path / "run") as tracker:
        tracker.log(0, {"eval/accuracy": 0.25})
        tracker.log(1, {"reward/mean": np.float32(0.5), "entropy": math.nan, "grad_norm": torch.tensor(math.inf)})
        # Before close: a kill must not cost a row that was logged.
        lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()

    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    assert [json.loads(line, parse_constant=refuse) for line in lines] == [
        {"step": 0, "eval/accuracy": 0.25},
        {"step": 1, "reward/mean": 0.5, "entropy": None, "grad_norm": None},
    ]
    assert next(iter(json.loads(lines[1]))) == "step"
    assert math.isnan(read_metrics(tmp_path / "run")[1]["entropy"])


def test_resume_has_each_step_exactly_once(tmp_path):
    with track(tmp_path, samples_every=1) as tracker:
        for step in range(6):
            tracker.log(step, {"reward/mean": 0.1 * step})
            tracker.samples(step, [{"prompt": "p"}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rewa')

    with track(tmp_path, start_step=3, samples_every=1) as tracker:
        assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
        for step in range(4, 8):
            tracker.log(step, {"reward/mean": 9.0})
            tracker.samples(step, [{"prompt": "q"}])

    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(8))
    assert rows[3]["reward/mean"] == pytest.approx(0.3)
    assert rows[4]["reward/mean"] == 9.0
    assert [row["prompt"] for row in read_rows(tmp_path / "samples.jsonl")] == ["p"] * 4 + ["q"] * 4


def test_a_half_row_of_the_resumed_step_does_not_glue_to_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    with track(tmp_path, start_step=2) as tracker:
        tracker.log(3, {})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_fresh_start_keeps_the_earlier_record_aside(tmp_path):
    for reward in (1.0, 2.0):
        with track(tmp_path) as tracker:
            tracker.log(0, {"reward/mean": reward})
    assert [row["reward/mean"] for row in read_rows(tmp_path / "metrics.jsonl")] == [2.0]
    assert [row["reward/mean"] for row in read_rows(tmp_path / "metrics.previous.jsonl")] == [1.0]


def test_a_step_logged_twice_is_refused(tmp_path):
    with track(tmp_path) as tracker:
        tracker.log(1, {})
        with pytest.raises(AssertionError, match="step 1 was logged after step 1"):
            tracker.log(1, {})


def test_a_broken_line_inside_the_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"Line 2 of .*metrics\.jsonl"):
        read_rows(tmp_path / "metrics.jsonl")


def test_samples_are_few_spread_and_hold_anything(tmp_path):
    rows = [
        {"prompt": f"p{i}", "reward": torch.tensor(math.nan), "parts": {"format": 1.0}, "example": {"x": object}}
        for i in range(8)
    ]
    with track(tmp_path, samples_every=2, samples_kept=4) as tracker:
        assert [step for step in range(5) if tracker.wants_samples(step)] == [0, 2, 4]
        tracker.samples(1, rows)
        tracker.samples(2, rows)
    kept = read_rows(tmp_path / "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in kept] == [(2, "p0"), (2, "p2"), (2, "p4"), (2, "p6")]
    assert kept[0]["reward"] is None
    assert kept[0]["parts"] == {"format": 1.0}
    with track(tmp_path / "none", samples_every=0) as tracker:
        tracker.samples(0, rows)
    assert read_rows(tmp_path / "none/samples.jsonl") == []


def test_settings_are_loadable_documented_and_checked(tmp_path):
    assert all(doc for *_, doc in describe(TrackingConfig))
    config = load(TrackingConfig, overrides=["name=seed0", "folder=out"])
    assert str(run_folder(config)) == "out/seed0"
    assert run_folder(TrackingConfig()).parent.name == "runs"
    with pytest.raises(ConfigError, match="samples_every=-1"):
        track(tmp_path, samples_every=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"choose another tracking\.folder"):
        track(tmp_path / "file" / "run")


@pytest.fixture
def no_wandb_login(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    # wandb keeps its settings and its login for the process.
    wandb.teardown()
    yield
    wandb.teardown()


def test_wandb_without_a_login_runs_offline_even_on_a_terminal(tmp_path, no_wandb_login):
    pty = pytest.importorskip("pty")
    program = """
import sys
from pathlib import Path
from trainer.tracking import Tracker, TrackingConfig
with Tracker(TrackingConfig(wandb=True), Path(sys.argv[1]), 2, {"seed": 1}) as tracker:
    tracker.log(0, {"eval/accuracy": 0.5})
    tracker.log(1, {"reward/mean": 0.1234, "response_length/mean": 12.5})
"""
    ours, theirs = pty.openpty()
    # Only a process with a terminal of its own would be asked for a key.
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        cwd=Path(__file__).parents[2],
    )
    os.close(theirs)
    screen = b""
    try:
        while chunk := os.read(ours, 65536):
            screen += chunk
    except OSError:  # How Linux says that the other end was closed.
        pass
    os.close(ours)
    assert process.wait(timeout=60) == 0, screen.decode()
    (record,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
    assert b"eval/accuracy" in record.read_bytes()
    assert b"0.1234" in record.read_bytes()
    text = screen.decode()
    assert "Enter your choice" not in text
    assert "wandb sync" in text
    assert "held-out accuracy" in text
    assert "response length, tokens" in text
    assert "warning" not in text


def test_a_failing_wandb_warns_once_and_the_run_goes_on(tmp_path, no_wandb_login, monkeypatch, capsys):
    class Broken:
        dir = "somewhere/files"

        def define_metric(self, *_, **__):
            pass

        def log(self, _):
            raise ConnectionError("service is gone")

        def finish(self, **_):
            raise ConnectionError("service is gone")

    monkeypatch.setattr("wandb.init", lambda **_: Broken())
    with track(tmp_path, wandb=True) as tracker:
        for step in range(3):
            tracker.log(step, {"reward/mean": 0.5})
    assert capsys.readouterr().out.count("service is gone") == 1
    assert len(read_metrics(tmp_path)) == 3


@pytest.mark.parametrize(
    ("mode", "tried"),
    [(None, ["online", "offline"]), ("offline", ["offline"]), ("disabled", ["disabled"])],
)
def test_wandb_goes_offline_when_the_mode_asked_for_fails(tmp_path, no_wandb_login, monkeypatch, capsys, mode, tried):
    given = []

    def init(**arguments):
        given.append(arguments)
        if arguments["mode"] == "online":
            raise ConnectionError("no network\nand much more")
        return SimpleNamespace(dir="kept/files", define_metric=lambda *_, **__: None, finish=lambda **_: None)

    monkeypatch.setattr("wandb.init", init)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    track(tmp_path, wandb=True).close()
    assert [arguments["mode"] for arguments in given] == tried
    assert ("wandb: no network This run is kept offline" in capsys.readouterr().out) == (mode is None)
    # wandb refuses to start again under the id of an attempt that failed.
    assert len({arguments["id"] for arguments in given}) == len(given)
    assert given[-1]["dir"] == str(tmp_path)
    assert 0 < given[-1]["settings"].init_timeout <= 60
    assert 0 < given[-1]["settings"].finish_timeout <= 60


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path, no_wandb_login, monkeypatch):
    ids = []

    def init(**arguments):
        ids.append(arguments["id"])
        return SimpleNamespace(dir="kept/files", define_metric=lambda *_, **__: None, finish=lambda **_: None)

    monkeypatch.setattr("wandb.init", init)
    for start_step in (0, 4, 0):
        track(tmp_path / "run", start_step, wandb=True).close()
    assert ids[0] == ids[1] != ids[2]


def test_tensorboard_events_are_written_and_a_resume_replaces_them(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with track(tmp_path, tensorboard=True) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": 0.5})
    with track(tmp_path, start_step=2, tensorboard=True) as tracker:
        tracker.log(3, {"reward/mean": 0.75})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.5), (3, 0.75)]


@pytest.mark.parametrize(("module", "setting"), [("torch.utils.tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_missing_dashboard_is_named_with_its_way_out(tmp_path, monkeypatch, module, setting):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"pip install {setting}"):
        track(tmp_path, **{setting: True})


def test_plain_lines_are_few_and_never_miss_an_evaluation(tmp_path, capsys):
    step_metrics = {"reward/mean": 0.5, "response_length/mean": 311.5}
    with track(tmp_path / "run", total_steps=100) as tracker:
        tracker.log(0, {"eval/accuracy": 0.125, "eval/response_length/mean": 99.5})
        for step in range(1, 101):
            tracker.log(step, step_metrics | ({"eval/accuracy": 0.25} if step == 50 else {}))
        tracker.say("[all] done")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("step 0/100  accuracy 0.125  eval length 99.5")
    assert lines[1].startswith("step 50/100  reward 0.500  accuracy 0.250  length 311.5")
    assert lines[2].startswith("step 100/100  ")
    assert lines[2].endswith("remaining 0:00:00")
    assert lines[3] == "[all] done"


def test_remaining_time_is_the_recent_pace_without_the_first_step():
    clock = iter([0.0, 5.0, 100.0, 110.0, 120.0]).__next__
    now = [0.0]
    screen = Screen("run", total_steps=12, clock=lambda: now[0])
    for step in range(4):
        now[0] = clock()
        screen.record(step, {})
        if step == 1:
            assert screen.line({}).endswith("remaining -:--:--")
    # Steps 2 and 3 took 95 and 10 seconds; 9 steps are left.
    assert screen.line({}).endswith("remaining 0:07:52")
    assert remaining_seconds([], 5) is None
    assert remaining_seconds([2.0, 4.0], 5) == 15.0
    assert remaining_seconds([2.0], 0) == 0.0


def test_live_view_shows_length_and_accuracy():
    screen = Screen("seed0", total_steps=40, history=[{"step": 0, "eval/accuracy": 0.0512}])
    for step in range(1, 21):
        metrics = {"reward/mean": step / 20, "response_length/mean": 100.0 + step, "entropy": 0.321}
        screen.record(step, metrics | ({"eval/accuracy": 0.789} if step == 20 else {}))
    screen.phase = "rollout"
    console = Console(record=True, force_terminal=True, width=100, file=io.StringIO())
    console.print(screen)
    text = console.export_text()
    assert all(len(line.rstrip()) <= 100 for line in text.splitlines())
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "20/40" in rows["seed0"]
    assert "rollout" in rows["seed0"]
    assert rows["held-out accuracy"].split()[2:4] == ["0.051", "0.789"]
    assert rows["response length, tokens"].split()[3:5] == ["101.0", "120.0"]
    assert "▁" in rows["response length, tokens"]
    assert rows["response length, tokens"].rstrip().endswith("█")
    assert "entropy 0.321" in text


def test_live_display_keeps_other_output_whole(tmp_path, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    early = logging.getLogger("made-before-the-display")
    handler = logging.StreamHandler()
    early.addHandler(handler)
    console = terminal()
    with track(tmp_path, console=console) as tracker:
        with tracker.phase("update"):
            tracker.log(1, {"reward/mean": 0.5})
        print("a library warns", file=sys.stderr)
        early.warning("a logger warns")
        tracker.say("a [bold]message")
        inside = console.file.getvalue()
    early.removeHandler(handler)
    assert stream.getvalue() == ""
    for text in ("a library warns", "a logger warns", "a [bold]message"):
        assert text in inside
    assert handler.stream is stream
    assert "[dim]" not in console.file.getvalue()
    assert "response length, tokens" in console.file.getvalue()
    assert "step 1/10" not in console.file.getvalue()


def test_phase_returns_to_the_one_around_it(tmp_path):
    with track(tmp_path, console=terminal()) as tracker, tracker.phase("evaluation"):
        with tracker.phase("rollout"):
            assert tracker._screen.phase == "rollout"
        assert tracker._screen.phase == "evaluation"


def test_a_rollout_shows_how_far_it_is_and_how_fast_until_its_phase_ends(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("trainer.tracking.time.monotonic", lambda: now[0])

    def shown(tracker) -> str:
        console = Console(record=True, force_terminal=True, width=100, file=io.StringIO())
        console.print(tracker._screen)
        return console.export_text()

    with track(tmp_path, console=terminal()) as tracker:
        with tracker.phase("rollout"):
            assert "samples" not in shown(tracker)
            now[0] += 4
            tracker.progress(128, 512, 10_000)
            assert "128/512 samples, 2,500 tokens/s" in shown(tracker)
        assert "samples" not in shown(tracker)


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([0, 7], 6) == "▁▁▁███"
    assert sparkline([1.0, math.nan, 2.0], 3) == "▁ █"
    assert sparkline([3.0, 3.0], 2) == "▄▄"
    assert sparkline([math.nan], 1) == " "
    assert sparkline([], 5) == ""
    assert len(sparkline(list(range(1000)), 37)) == 37


def test_stopwatch_adds_up_nests_and_starts_again():
    entered = []

    class Phase:
        def __init__(self, name):
            entered.append(name)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    watch = Stopwatch(phase=Phase)
    with watch("step"):
        for _ in range(2):
            with watch("rollout"):
                time.sleep(0.01)
        with pytest.raises(RuntimeError), watch("update"):
            raise RuntimeError
    seconds = watch.metrics()
    assert list(seconds) == ["time/rollout", "time/update", "time/step"]
    assert 0.02 <= seconds["time/rollout"] <= seconds["time/step"]
    assert entered == ["step", "rollout", "rollout", "update"]
    assert watch.metrics() == {}
