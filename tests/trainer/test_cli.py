"""The command line: what cannot work is refused in one sentence, with exit code 2, before any weights are loaded.

The table of wrong input is in tests/reliability/bad_input.py; here is what needs more than a line of it.
"""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.countdown import make_model
from grpo.config import describe
from trainer.__main__ import settings_page
from trainer.config import SftConfig, TrainConfig
from trainer.tracking import Stopwatch
from workers.engines.sglang_process import EngineProcess

PLACE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""What torchrun tells the first of two processes."""


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Loading weights fails the test."""

    def refuse(*_, **__):
        raise AssertionError("weights were loaded")

    for name in ("workers.actor.load_policy", "workers.ref.load_policy", "trainer.trainer.make_engine"):
        monkeypatch.setattr(name, refuse)


@pytest.fixture
def refusal(run_main, settings, tmp_path, monkeypatch, capsys):
    """refusal(*overrides) is the one sentence that these settings are refused with."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, command: str = "train", base: bool = True) -> str:
        capsys.readouterr()
        given = [*settings[command], f"tracking.folder={tmp_path}", "tracking.name=run"] if base else []
        assert run_main(command, *given, *arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1, error
        assert error.rstrip().endswith((".", "?"))
        return error

    return run


def assert_names(sentence: str, *words: str) -> None:
    assert [word for word in words if word not in sentence] == [], sentence


@pytest.mark.parametrize("installed", ["0.5.16", "0.5.22", "0.4.9.post2"])
def test_an_sglang_that_was_not_tried_is_refused_with_the_range_and_the_way_out(refusal, monkeypatch, installed):
    monkeypatch.setattr("workers.engines.config.version", lambda _: installed)
    said = refusal("rollout.engine=sglang")
    assert_names(said, f"SGLang {installed}", "0.5.17 up to, but not, 0.5.22", "pip install -e '.[sglang]'")


def test_a_missing_sglang_is_told_with_the_line_that_installs_it_or_the_python_it_is_for(refusal, monkeypatch):
    monkeypatch.setattr("workers.engines.config.version", lambda _: version("no-such-package"))
    for python, words in (((3, 12), "use pip install -e '.[sglang]'"), ((3, 13), "nothing for a Python past 3.12")):
        monkeypatch.setattr("workers.engines.config.sys", SimpleNamespace(version_info=python))
        assert_names(refusal("rollout.engine=sglang"), "which is not installed", words)


@pytest.mark.parametrize("command", ["train", "sft"])
def test_what_can_work_gets_as_far_as_loading_weights(command, run_main, settings, tmp_path):
    with pytest.raises(AssertionError, match="weights were loaded"):
        run_main(command, *settings[command], f"tracking.folder={tmp_path}")


def test_tensor_parallelism_that_does_not_divide_the_vocabulary(refusal, tmp_path, monkeypatch):
    make_model(vocab=117).save_pretrained(tmp_path / "odd")
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    assert_names(refusal("model.path=./odd", "actor.tensor_parallel=2"), "tensor_parallel=2", "vocab_size=117")


@pytest.mark.parametrize(
    ("phase", "helps"),
    [
        ("engine_start", "lower rollout.concurrent_samples, rollout.memory_fraction"),
        ("update", "lower actor.max_tokens_per_microbatch"),
        (None, "start more processes"),
    ],
)
@pytest.mark.parametrize("cuda", [False, True])
def test_a_lack_of_memory_ends_with_what_would_help(
    phase, helps, cuda, run_main, settings, tmp_path, monkeypatch, capsys
):
    def lacking(*_: object) -> None:
        with Stopwatch()(phase) if phase else nullcontext():
            if cuda:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.")
            torch.empty(2**57)

    monkeypatch.setattr("trainer.trainer.Trainer.__init__", lacking)
    code = run_main("train", *settings["train"])
    assert code.startswith("error: There is not enough memory ")  # what Python prints last, and exits with 1
    assert_names(code, phase or "before the first step", "2.00 GiB" if cuda else f"{2**59} bytes", helps)
    assert "Traceback" in capsys.readouterr().err


def test_an_engine_that_lacks_memory_says_which_setting_helps(tmp_path):
    (tmp_path / "log").write_text("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.")
    said = str(EngineProcess(1.0, tmp_path / "log").failure("start", "failed"))
    assert_names(said.splitlines()[-1], "rollout.memory_fraction", "raise it where")


def test_devices_that_are_not_there(refusal, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_names(refusal("device=cuda"), "device=cuda", "device=cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {**PLACE, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert_names(refusal("device=cuda"), "2 processes", "1 CUDA device", "--nproc-per-node")


@pytest.mark.parametrize("command", ["train", "sft"])
def test_going_on_with_other_data_is_refused(command, refusal, tmp_path, capsys):
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    checkpoint.mkdir(parents=True)
    position = {"given": 12, "size": 15, "seed": 0, "shuffle": True}
    (checkpoint / "progress.json").write_text(json.dumps({"step": 3, "updates": 3, "version": 3, "data": position}))
    sentence = refusal("checkpoint.resume=true", "steps=9", command=command)
    assert_names(sentence, "cannot be resumed", "it was 15", "set it back or start a new run")


def test_a_refusal_under_torchrun_is_printed_once(settings):
    """All processes refuse; the sentence comes from the first, with nothing of ours but it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer"]
    done = subprocess.run(
        [*command, "train", *settings["train"], "actor.tensor_parallel=2", "batch.prompts_per_step=20"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode != 0
    ours = done.stderr.partition("torch/distributed/elastic")[0]
    assert ours.startswith("error: batch.prompts_per_step=20")
    assert "Traceback" not in ours
    assert ours.count("error: ") == 1
    assert "exitcode  : 2" in done.stderr


@pytest.mark.parametrize(("command", "schema"), [([], TrainConfig), (["train"], TrainConfig), (["sft"], SftConfig)])
def test_help_has_every_setting_with_its_meaning(command, schema, run_main, capsys):
    assert run_main(*command, "--help") == 0
    shown = capsys.readouterr().out.splitlines()
    for key, _, _, doc in describe(schema):
        assert len(doc) > 10, f"{key} has no doc"
        line = next((i for i, text in enumerate(shown) if text.startswith(f"  {key} (")), None)
        assert line is not None, key
        assert shown[line + 1].strip() == doc


def test_the_settings_page_in_the_docs_is_what_the_command_prints():
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == settings_page() + "\n", "run python -m trainer settings > docs/config.md"
