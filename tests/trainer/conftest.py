"""What the tests of whole runs share: a tiny example on disk, and the command line run in this process."""

import dataclasses
import io
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from rich.console import Console

import trainer.__main__
from examples.countdown import make_model, make_tokenizer, presets, write

# What an untrained model is right about now and then, so that there is something to learn from the first step on.
GRADERS = """
from rewards import register

@register("digits")
def digits(completion: str, row: dict) -> float:
    words = completion.split()
    return sum(word.isdigit() for word in words) / max(len(words), 1)
"""

# Answers with numbers of the text, pays for even ones, ends by chance of the text, and does not bear a 9.
CHATTER = """
from environments import register

@register("chatter")
class Chatter:
    def step(self, text: str):
        numbers = [int(word) for word in text.split() if word.isdigit()]
        if 9 in numbers:
            raise ValueError("nine")
        return f"{sum(numbers) % 100} +", sum(n % 2 == 0 for n in numbers) / 10, sum(numbers) % 4 == 3
"""


@pytest.fixture(scope="session")
def countdown(tmp_path_factory) -> Path:
    """The direct preset with a small model: model/, untied/, 16 training rows, 8 held-out rows, 64 demonstrations."""
    folder = tmp_path_factory.mktemp("countdown")
    write(folder, dataclasses.replace(presets()["direct"], held_out=8, demonstrations=64), seed=0)
    rows = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(rows[:16]))
    for name, tied in (("model", True), ("untied", False)):
        make_model("qwen3", hidden=32, layers=2, feed_forward=64, tied=tied).save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    (folder / "graders.py").write_text(GRADERS)
    (folder / "chatter.py").write_text(CHATTER)
    return folder


@pytest.fixture(scope="session")
def chatter(countdown) -> list[str]:
    """Overrides that make conversations of up to 4 turns of the shortest run."""
    limits = ["environments.max_turns=4", "environments.max_turn_tokens=5", "environments.processes=1"]
    file = f"environments.files=[{countdown / 'chatter.py'}]"
    return ["environment=chatter", file, *limits, "rewards.weights={environment: 1.0, digits: 0.5}",
            "rollout.max_response_tokens=32"]  # fmt: skip


@pytest.fixture(scope="session")
def settings(countdown) -> dict[str, list[str]]:
    """Overrides by command, which make the shortest run that works; tracking.folder and tracking.name are missing."""
    both = [f"model.path={countdown / 'model'}", "device=cpu", "data.max_prompt_tokens=16", "checkpoint.every=0"]
    both += ["actor.learning_rate=0.003", "actor.max_tokens_per_microbatch=512"]
    sft = [*both, "steps=6", f"data.train={countdown / 'demonstrations.jsonl'}", "samples_per_step=8"]
    train = [*both, "steps=2", f"data.train={countdown / 'train.jsonl'}", f"data.eval={countdown / 'heldout.jsonl'}"]
    train += [f"rewards.files=[{countdown / 'graders.py'}]", "rewards.weights={digits: 1.0, countdown: 0.5}"]
    train += ["rewards.processes=1", "rollout.max_response_tokens=12"]
    train += ["batch.prompts_per_step=4", "batch.samples_per_prompt=4"]
    return {"sft": sft, "train": train, "prove": train}


@pytest.fixture
def run_main(monkeypatch) -> Callable[..., int]:
    """`python -m trainer ARGUMENTS` in this process; returns its exit code."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr("sys.argv", ["trainer", *map(str, arguments)])
        try:
            trainer.__main__.main()
        except SystemExit as stop:
            return stop.code
        finally:
            if dist.is_initialized():  # an error leaves that to the end of the process
                dist.destroy_process_group()
        return 0

    return run


@pytest.fixture
def start(run_main, settings, tmp_path) -> Callable[..., Path]:
    """start("train" or "sft", name, *overrides) runs the command to its end and returns the run's folder."""

    def run(command: str, name: str, *overrides: str) -> Path:
        where = [f"tracking.folder={tmp_path}", f"tracking.name={name}"]
        assert run_main(command, *settings[command], *where, *overrides) == 0
        return tmp_path / name

    return run


def shown(renderable) -> str:
    """What 100 columns show of it."""
    console = Console(file=io.StringIO(), width=100)
    console.print(renderable)
    return console.file.getvalue()


def rows_of(run: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def deterministic(rows: list[dict]) -> list[dict]:
    """`rows` without what depends on the clock, and without the bytes synced: a new process always syncs first."""
    left_out = ("time/", "throughput/", "eval/time/", "sync/", "perf/")
    return [{name: value for name, value in row.items() if not name.startswith(left_out)} for row in rows]


def assert_rows_close(rows: list[dict], expected: list[dict], relative: float) -> None:
    """The same steps with the same metrics, each but for rounding."""
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    for row, other in zip(rows, expected, strict=True):
        far = {k: (row[k], v) for k, v in other.items() if not math.isclose(row[k], v, rel_tol=relative, abs_tol=1e-7)}
        assert not far, f"step {row['step']}"
