"""Data in whole runs: the report on it, held-out sets by name, epochs, prompts on both sides, a hub that is silent."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from tests.trainer.conftest import rows_of

ALL_SAMPLES = ["tracking.samples_every=1", "tracking.samples_kept=1000"]


def samples_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def test_held_out_sets_have_metrics_and_samples_of_their_own(start, countdown, tmp_path):
    rows = (countdown / "heldout.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(rows[:3]))
    sets = f"data.eval={{all: {countdown / 'heldout.jsonl'}, few: {tmp_path / 'few.jsonl'}}}"
    run = start("train", "run", sets, "steps=1", "evaluation.samples_per_prompt=4", *ALL_SAMPLES)
    row, kept = rows_of(run)[0], [sample for sample in samples_of(run) if sample["step"] == 0]
    assert collections.Counter(sample["set"] for sample in kept) == {"all": 32, "few": 12}
    assert all("set" not in sample for sample in samples_of(run) if not sample["held_out"])
    for name, mine in [(f"{name}/", [s for s in kept if s["set"] == name]) for name in ("all", "few")] + [("", kept)]:
        right = [sample["rewards/digits"] == 1 for sample in mine]
        assert row[f"eval/{name}accuracy"] == pytest.approx(sum(right) / len(mine))
        assert row[f"eval/{name}reward/mean"] == pytest.approx(sum(s["reward"] for s in mine) / len(mine))
    assert row["eval/all/accuracy"] != row["eval/few/accuracy"]
    assert 0 < row["eval/few/response_length/mean"] <= 12
    assert "eval/all/accuracy" not in rows_of(start("train", "one", "steps=1"))[0]


@pytest.mark.parametrize("processes", [1, 2])
def test_two_epochs_give_every_prompt_twice(processes, start, settings, countdown, tmp_path):
    given = ["steps=null", "epochs=2", "data.eval=null", "actor.schedule=linear", *ALL_SAMPLES]
    if processes == 1:
        run = start("train", "run", *given)
    else:
        run = tmp_path / "run"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "trainer"]
        command += ["train", *settings["train"], f"tracking.folder={tmp_path}", "tracking.name=run", *given]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, timeout=200, env=environment, cwd=Path(__file__).parents[2])
    prompts = [json.loads(line)["prompt"] for line in (countdown / "train.jsonl").read_text().splitlines()]
    given_out = collections.Counter(sample["prompt"] for sample in samples_of(run))
    assert given_out == {prompt: 2 * 4 * count for prompt, count in collections.Counter(prompts).items()}
    assert [row["step"] for row in rows_of(run)] == list(range(1, 9))
    assert rows_of(run)[4]["learning_rate"] < rows_of(run)[0]["learning_rate"] == 0.003
    assert "steps: 8\nepochs: null" in (run / "config.yaml").read_text()


def test_epochs_of_supervised_training_and_the_end_of_a_run(start, run_main, settings, tmp_path, capsys):
    run = start("sft", "run", "steps=null", "epochs=0.5", "samples_per_step=10")
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3, 4]  # 64 demonstrations: 3.2 steps
    again = ["steps=null", "epochs=0.5", "samples_per_step=10", "checkpoint.resume=true"]
    capsys.readouterr()
    assert run_main("sft", *settings["sft"], f"tracking.folder={tmp_path}", "tracking.name=run", *again) == 2
    assert "run is finished: its newest checkpoint is of step 4 and steps=4" in capsys.readouterr().err
    assert run_main("sft", *settings["sft"], "epochs=1") == 2
    assert "steps=6 and epochs=1.0 are both set: unset one, as by steps=null." in capsys.readouterr().err


def test_a_run_says_which_held_out_prompts_it_trains_on(start, countdown, tmp_path, capsys):
    lines = [(countdown / name).read_text().splitlines(keepends=True) for name in ("train.jsonl", "heldout.jsonl")]
    (tmp_path / "mixed.jsonl").write_text("".join([*lines[0][:2], *lines[1][:3]]))
    capsys.readouterr()
    start("train", "run", "steps=1", f"data.eval={tmp_path / 'mixed.jsonl'}")
    said = " ".join(capsys.readouterr().out.split())
    example = json.loads(lines[0][0])["prompt"]
    assert f"2 of 5 held-out prompts stand in data.train as well, such as '{example}'" in said
    assert "take them out of one of the two" in said
    start("train", "clean", "steps=1")
    assert "held-out prompts stand in" not in capsys.readouterr().out


@pytest.fixture
def report(run_main, settings, countdown, tmp_path, monkeypatch, capsys):
    """report(command, *overrides) is what `data` prints for the settings of a command, without loading weights."""

    def run(command: str, *overrides: str) -> str:
        monkeypatch.setattr("workers.actor.load_policy", lambda *_, **__: pytest.fail("weights were loaded"))
        capsys.readouterr()
        assert run_main("data", *settings[command], *overrides) == 0
        return capsys.readouterr().out

    return run


def test_the_report_shows_prompts_lengths_and_what_is_wrong(report, countdown, tmp_path):
    rows = [json.loads(line) for line in (countdown / "train.jsonl").read_text().splitlines()]
    rows += [rows[0] | {"prompt": "1 2 3 to " + "4 " * 40}, rows[1]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "held.jsonl").write_text(json.dumps(rows[2]) + "\n")
    given = [f"data.train={tmp_path}/rows.jsonl", f"data.eval={tmp_path}/held.jsonl"]
    shown = report("train", *given, "data.opening=<eos>")
    words = [line.split() for line in shown.splitlines()]
    assert len([line for line in words if line[:1] == ["row"]]) == 5
    assert f"{rows[4]['prompt']} <eos>" in shown
    assert rows[5]["prompt"] not in shown.split("tokens  ")[0]
    assert f"target: '{rows[4]['target']}'" in shown
    lengths = sorted(len(row["prompt"].split()) + 1 for row in rows)
    expected = ["data.train", len(rows), lengths[0], lengths[8], lengths[15], lengths[-1], 1, 1]
    assert list(map(str, expected)) in words
    assert "longer than data.max_prompt_tokens=16 end a run with an error (data.too_long=error)" in shown
    assert "1 of 1 held-out prompts stand in data.train as well" in shown
    dropped = report("train", given[0], "data.eval=null", "data.too_long=drop")
    assert "are left out (data.too_long=drop)" in dropped


def test_the_report_of_demonstrations_has_their_lengths(report):
    shown = report("sft")
    assert "response and eos" in shown
    assert "response: " in shown
    assert "longer than data.max_prompt" not in shown


def test_a_silent_hub_is_said_before_transformers_asks_it(run_main, settings, monkeypatch, capsys):
    asked = Mock(side_effect=httpx.ConnectTimeout("timed out"))
    monkeypatch.setattr("workers.models.hub.HfApi.model_info", asked)
    monkeypatch.setattr("workers.models.hub.constants.HF_HUB_OFFLINE", False)
    again = Mock(side_effect=AssertionError("the hub was asked again"))
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", again)
    for command in ("train", "data"):
        assert run_main(command, *settings["train"], "model.path=nobody/no-such-model") == 2
        error = capsys.readouterr().err
        assert "model.path=nobody/no-such-model is no folder here and the Hugging Face hub cannot be reached" in error
        assert error.count("\n") == 1
    assert all(call.kwargs["timeout"] <= 5 for call in asked.call_args_list)
