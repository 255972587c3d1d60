"""python -m benchmarks.NAME: the help of each one, what it refuses, and a tiny run of one that needs no engine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py"))


def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-X", "importtime", "-m", f"benchmarks.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("name", NAMES)
def test_the_help_tells_what_is_measured_and_every_setting_before_anything_heavy_is_imported(name):
    done = run(name, "--help")
    assert done.returncode == 0
    assert not re.search(r"\| +(torch|transformers|tensordict)$", done.stderr, re.MULTILINE)
    text = (ROOT / "benchmarks" / f"{name}.py").read_text()
    assert done.stdout.startswith(text.split('"""')[1].rstrip())
    assert name == "shapes" or f"python -m benchmarks.{name}" in done.stdout
    own = re.findall(r"^    (\w+): .* = option\(", text.split("def ")[0].split("class EngineSettings")[0], re.MULTILINE)
    inherited = ["shape", "device", "folder"] * ("shapes." in text) + ["options"] * ("shapes.EngineSettings" in text)
    assert own
    for setting in own + inherited:
        assert re.search(rf"^  {setting}(=\S*|\.\*) +\w.+", done.stdout, re.MULTILINE), setting


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("cpu", [], "is no folder of a model"),
        ("head", ["token=1"], "tokens"),
        ("update", ["shape=huge"], "use one of qwen2.5-0.5b"),
    ],
)
def test_what_does_not_fit_is_one_sentence(name, arguments, words):
    done = run(name, *arguments)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode
    assert len(said) == 1
    assert said[0].startswith("error: ")
    assert words in said[0]


def test_the_head_is_measured_at_a_tiny_size():
    done = run("head", "tokens=64", "vocabulary=100", "hidden=16", "rounds=1", "device=cpu")
    assert done.returncode == 0, done.stderr[-500:]
    assert re.search(r"with the loss inside +[\d.]+ ms", done.stdout)


def test_conversations_are_measured_at_a_tiny_size(tmp_path):
    few = ["prompts=2", "samples=2", "prompt=8", "turn=4", "milliseconds=1", "processes=1", "rounds=1"]
    done = run("conversations", "engine=torch", "shape=tiny", "device=cpu", f"folder={tmp_path}", *few)
    assert done.returncode == 0, done.stderr[-500:]
    assert re.search(r"throughput of conversations over single answers: [\d.]+$", done.stdout, re.MULTILINE)
