"""What a start says: trainer/pulse.py."""

import subprocess
import sys
import time

import pytest

from trainer import pulse as pulse_module
from trainer.pulse import Pulse


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(pulse_module, "SILENCE", 0.2)


def said_by(lines):
    return [line.split("s  ", 1)[1] for line in lines]


def test_each_thing_is_said_at_once_and_again_after_silence(quick):
    lines = []
    with Pulse("importing", lines.append) as pulse:
        assert said_by(lines) == ["importing"]
        pulse("importing")
        assert len(lines) == 1
        pulse("starting the engine")
        assert said_by(lines) == ["importing", "starting the engine"]
        deadline = time.monotonic() + 10
        while len(lines) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert said_by(lines)[2:4] == ["still starting the engine"] * 2


def test_after_its_end_nothing_is_said(quick):
    lines = []
    pulse = Pulse("importing", lines.append)
    pulse.end()
    pulse.end()
    pulse("loading")
    time.sleep(0.5)
    assert said_by(lines) == ["importing"]


def test_only_rank_0_speaks(quick, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    lines = []
    with Pulse("importing", lines.append) as pulse:
        pulse("loading")
        time.sleep(0.5)
    assert not lines


@pytest.mark.parametrize("arguments", [["train", "stpes=1"], ["train", "--help"], ["algorithms"], ["sft", "seed=x"]])
def test_help_and_typing_errors_are_answered_before_torch_is_imported(arguments):
    program = (
        "import runpy, sys\n"
        f"sys.argv = ['trainer', *{arguments}]\n"
        "try:\n    runpy.run_module('trainer', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code in (0, 2), end.code\n"
        "heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
