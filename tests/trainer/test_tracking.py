"""The record of a run and its live view: rows, resuming, dashboards, what the terminal shows."""

import io
import logging
import math
import os
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import wandb
from rich.console import Console

from grpo.config import ConfigError, describe, load
from tests.trainer.conftest import shown
from trainer.config import TrackingConfig
from trainer.record import read_metrics, read_rows
from trainer.screen import Screen, sparkline
from trainer.tracking import Stopwatch, Tracker


def track(folder, start_step=0, total_steps=10, **config):
    return Tracker(TrackingConfig(**config), folder, total_steps, {"seed": 1}, start_step)


@pytest.fixture
def terminal(monkeypatch):
    """The console of every Tracker, a terminal."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, _environ={"TERM": "xterm"})
    monkeypatch.setattr("trainer.tracking.Console", lambda **_: console)
    return console


def steps_in(folder) -> list[int]:
    return [row["step"] for row in read_rows(folder / "metrics.jsonl")]


def test_rows_round_trip_and_nan_stays_valid_json(tmp_path):
    with track(tmp_path / "run") as tracker:
        tracker.log(0, {"eval/accuracy": 0.25})
        tracker.log(1, {"reward/mean": np.float32(0.5), "entropy": math.nan, "grad_norm": torch.tensor(math.inf)})
        # Before close: a kill must not cost a row that was logged.
        first, second = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    # As text: json.loads would read NaN, which is not JSON.
    assert first == '{"step": 0, "eval/accuracy": 0.25}'
    assert second == '{"step": 1, "reward/mean": 0.5, "entropy": null, "grad_norm": null}'
    assert math.isnan(read_metrics(tmp_path / "run")[1]["entropy"])


def test_resume_has_each_step_exactly_once(tmp_path):
    with track(tmp_path, samples_every=1) as tracker:
        for step in range(6):
            tracker.log(step, {"reward/mean": float(step)})
            tracker.samples(step, [{"prompt": "p"}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rewa')
    with track(tmp_path, start_step=3, samples_every=1) as tracker:
        assert steps_in(tmp_path) == [0, 1, 2, 3]
        for step in range(4, 8):
            tracker.log(step, {"reward/mean": 9.0})
            tracker.samples(step, [{"prompt": "q"}])
    rewards = [(row["step"], row["reward/mean"]) for row in read_rows(tmp_path / "metrics.jsonl")]
    assert rewards == list(enumerate([0, 1, 2, 3, 9, 9, 9, 9]))
    assert [row["prompt"] for row in read_rows(tmp_path / "samples.jsonl")] == ["p"] * 4 + ["q"] * 4


def test_a_half_row_of_the_resumed_step_does_not_glue_to_the_next(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    with track(tmp_path, start_step=2) as tracker:
        tracker.log(3, {})
    assert steps_in(tmp_path) == [1, 2, 3]


def test_an_earlier_record_is_never_written_over_and_no_step_twice(tmp_path):
    with track(tmp_path) as tracker:
        tracker.log(1, {})
        with pytest.raises(AssertionError, match="step 1 was logged after step 1"):
            tracker.log(1, {})
    with pytest.raises(AssertionError, match="record of an earlier run"):
        track(tmp_path)
    assert steps_in(tmp_path) == [1]


def test_a_broken_line_inside_the_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"Line 2 of .*metrics\.jsonl"):
        read_rows(tmp_path / "metrics.jsonl")


def test_samples_are_few_spread_and_hold_anything(tmp_path):
    rows = [{"prompt": f"p{i}", "reward": torch.tensor(math.nan), "row": {"x": object}} for i in range(8)]
    with track(tmp_path, samples_every=2, samples_kept=4) as tracker:
        assert [step for step in range(5) if tracker.wants_samples(step)] == [0, 2, 4]
        tracker.samples(1, rows)
        tracker.samples(2, rows)
    kept = read_rows(tmp_path / "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in kept] == [(2, "p0"), (2, "p2"), (2, "p4"), (2, "p6")]
    assert (kept[0]["reward"], kept[0]["row"]) == (None, {"x": str(object)})
    with track(tmp_path / "none", samples_every=0) as tracker:
        tracker.samples(0, rows)
    assert read_rows(tmp_path / "none/samples.jsonl") == []


def test_settings_are_loadable_documented_and_checked(tmp_path):
    assert all(doc for *_, doc in describe(TrackingConfig))
    load(TrackingConfig, overrides=["name=seed0", "folder=out"]).check()
    with pytest.raises(ConfigError, match="samples_every=-1"):
        TrackingConfig(samples_every=-1).check()
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


@pytest.fixture
def wandb_inits(no_wandb_login, monkeypatch) -> list[dict]:
    """The arguments of every wandb.init, which fails online."""

    def init(**arguments):
        inits.append(arguments)
        if arguments["mode"] == "online":
            raise ConnectionError("no network\nand much more")
        return Mock(dir="kept/files")

    inits: list[dict] = []
    monkeypatch.setattr("wandb.init", init)
    return inits


def test_wandb_without_a_login_runs_offline_even_on_a_terminal(tmp_path, no_wandb_login):
    pty = pytest.importorskip("pty")
    program = """
import sys
from pathlib import Path
from trainer.tracking import Tracker
from trainer.config import TrackingConfig
with Tracker(TrackingConfig(wandb=True), Path(sys.argv[1]), 2, {"seed": 1}, 0) as tracker:
    tracker.log(0, {"eval/accuracy": 0.5})
    tracker.log(1, {"reward/mean": 0.1234, "response_length/mean": 12.5})
"""
    ours, theirs = pty.openpty()
    # Only a process with a terminal of its own would be asked for a key.
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
        cwd=Path(__file__).parents[2],
    )
    os.close(theirs)
    screen = b""
    with suppress(OSError):  # how Linux says that the other end was closed
        while chunk := os.read(ours, 65536):
            screen += chunk
    os.close(ours)
    text = screen.decode()
    assert process.wait(timeout=60) == 0, text
    (record,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
    assert all(logged in record.read_bytes() for logged in (b"eval/accuracy", b"0.1234"))
    assert all(part in text for part in ("wandb sync", "held-out accuracy", "response length, tokens"))
    assert not [part for part in ("Enter your choice", "warning") if part in text]


def test_a_failing_wandb_warns_once_and_the_run_goes_on(tmp_path, no_wandb_login, monkeypatch, capsys):
    broken = Mock(dir="somewhere/files")
    broken.log.side_effect = broken.finish.side_effect = ConnectionError("service is gone")
    monkeypatch.setattr("wandb.init", lambda **_: broken)
    with track(tmp_path, wandb=True) as tracker:
        for step in range(3):
            tracker.log(step, {"reward/mean": 0.5})
    assert capsys.readouterr().out.count("service is gone") == 1
    assert len(read_metrics(tmp_path)) == 3


@pytest.mark.parametrize(
    ("mode", "tried"), [(None, ["online", "offline"]), ("offline", ["offline"]), ("disabled", ["disabled"])]
)
def test_wandb_goes_offline_when_the_mode_asked_for_fails(tmp_path, wandb_inits, monkeypatch, capsys, mode, tried):
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    track(tmp_path, wandb=True).close()
    assert [arguments["mode"] for arguments in wandb_inits] == tried
    assert ("wandb: no network. This run is kept offline" in capsys.readouterr().out) == (mode is None)
    # wandb refuses to start again under the id of an attempt that failed.
    assert len({arguments["id"] for arguments in wandb_inits}) == len(wandb_inits)
    assert wandb_inits[-1]["dir"] == str(tmp_path)
    settings = wandb_inits[-1]["settings"]
    assert all(0 < seconds <= 60 for seconds in (settings.init_timeout, settings.finish_timeout))


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path, wandb_inits, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for start_step in (0, 4, 0):
        track(tmp_path / "run", start_step, wandb=True).close()
    first, resumed, anew = (arguments["id"] for arguments in wandb_inits)
    assert first == resumed != anew


def test_tensorboard_events_are_written_and_a_resume_replaces_them(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with track(tmp_path, tensorboard=True) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"reward/mean": 0.5})
    with track(tmp_path, start_step=2, tensorboard=True) as tracker:
        tracker.log(3, {"reward/mean": 0.75})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.5), (2, 0.5), (3, 0.75)]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_dashboard_is_named_with_its_way_out(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        TrackingConfig(**{name: True}).check()


def test_plain_lines_are_few_and_never_miss_an_evaluation(tmp_path, capsys):
    with track(tmp_path / "run", total_steps=100) as tracker:
        tracker.log(0, {"eval/accuracy": 0.125, "eval/response_length/mean": 99.5})
        for step in range(1, 101):
            accuracy = {"eval/accuracy": 0.25} if step == 50 else {}
            tracker.log(step, {"reward/mean": 0.5, "response_length/mean": 311.5, **accuracy})
        tracker.say("[all] done")
    before, middle, last, said = capsys.readouterr().out.splitlines()
    assert before.startswith("step 0/100  accuracy 0.125  eval length 99.5")
    assert middle.startswith("step 50/100  reward 0.500  accuracy 0.250  length 311.5")
    assert (last[:14], last[-17:]) == ("step 100/100  ", "remaining 0:00:00")
    assert said == "[all] done"


def test_remaining_time_is_the_recent_pace_without_the_first_step(monkeypatch):
    now, remaining = [0.0], []
    monkeypatch.setattr("trainer.screen.time.monotonic", lambda: now[0])
    screen = Screen("run", total_steps=5)
    # Steps 2 and 3 take 95 and 10 seconds, and 10 s of step 4 are over when it is asked again.
    for step, seconds in ((0, 0.0), (1, 5.0), (2, 100.0), (3, 110.0), (None, 120.0), (5, 130.0)):
        now[0] = seconds
        if step is not None:
            screen.record(step, {})
        remaining.append(screen.line({}).rpartition(" ")[2])
    assert remaining == ["-:--:--", "-:--:--", "0:04:45", "0:01:45", "0:01:35", "0:00:00"]


def test_live_view_shows_length_and_accuracy():
    screen = Screen("seed0", total_steps=40, history=[{"step": 0, "eval/accuracy": 0.0512}])
    for step in range(1, 21):
        metrics = {"reward/mean": step / 20, "response_length/mean": 100.0 + step, "entropy": 0.321}
        screen.record(step, metrics | ({"eval/accuracy": 0.789} if step == 20 else {}))
    screen.phase = "rollout"
    lines = shown(screen).splitlines()
    assert all(len(line.rstrip()) <= 100 for line in lines)
    rows = {line.split("  ")[0]: line for line in lines}
    assert all(part in rows["seed0"] for part in ("20/40", "rollout"))
    assert rows["held-out accuracy"].split()[2:4] == ["0.051", "0.789"]
    *_, first, now, curve = rows["response length, tokens"].split()
    assert (first, now, curve[0], curve[-1]) == ("101.0", "120.0", "▁", "█")
    assert "entropy 0.321" in lines[-1]


def test_live_display_keeps_other_output_whole(tmp_path, monkeypatch, terminal):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    early, handler = logging.getLogger("made-before-the-display"), logging.StreamHandler()
    early.addHandler(handler)
    with track(tmp_path) as tracker:
        with tracker.phase("update"):
            tracker.log(1, {"reward/mean": 0.5})
        print("a library warns", file=sys.stderr)
        early.warning("a logger warns")
        tracker.say("a [bold]message")
        inside = terminal.file.getvalue()
    early.removeHandler(handler)
    assert stream.getvalue() == ""
    assert all(text in inside for text in ("a library warns", "a logger warns", "a [bold]message"))
    assert handler.stream is stream
    assert "response length, tokens" in terminal.file.getvalue()
    assert not [text for text in ("[dim]", "step 1/10") if text in terminal.file.getvalue()]


def test_a_rollout_shows_how_far_it_is_and_how_fast_until_its_phase_ends(tmp_path, monkeypatch, terminal):
    now = [100.0]
    monkeypatch.setattr("trainer.tracking.time.monotonic", lambda: now[0])
    with track(tmp_path) as tracker, tracker.phase("evaluation"):
        with tracker.phase("rollout"):
            assert tracker._screen.phase == "rollout"
            assert "samples" not in shown(tracker._screen)
            now[0] += 4
            tracker.progress(128, 512, 10_000)
            assert "128/512 samples, 2,500 tokens/s" in shown(tracker._screen)
        assert tracker._screen.phase == "evaluation"
        assert "samples" not in shown(tracker._screen)


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([0, 7], 6, "▁▁▁███"),
        ([1.0, math.nan, 2.0], 3, "▁ █"),
        ([3.0, 3.0], 2, "▄▄"),
        ([math.nan], 1, " "),
        ([], 5, ""),
        (range(1000), 8, "▁▂▃▄▅▆▇█"),
    ],
)
def test_sparkline(values, width, line):
    assert sparkline(values, width) == line


def test_stopwatch_adds_up_nests_and_starts_again():
    phase = Mock(side_effect=lambda _: nullcontext())
    watch = Stopwatch(phase=phase)
    with watch("step"):
        for _ in range(2):
            with watch("rollout"):
                time.sleep(0.01)
        with pytest.raises(RuntimeError), watch("update"):
            raise RuntimeError
    seconds = watch.metrics()
    assert list(seconds) == ["time/rollout", "time/update", "time/step"]
    assert 0.02 <= seconds["time/rollout"] <= seconds["time/step"]
    assert [call.args for call in phase.call_args_list] == [("step",), ("rollout",), ("rollout",), ("update",)]
    assert watch.metrics() == {}
