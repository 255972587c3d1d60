"""Wrong input: each ends in one sentence that names the field and the way out, before a model is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.reliability.bad_input import TABLE, Refusal, Row, make_inputs, refused

pytestmark = pytest.mark.reliability


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, settings, countdown) -> Path:
    """The folder of all wrong files."""
    folder = tmp_path_factory.mktemp("inputs")
    names = {str(countdown / "model"): "model"}
    names |= {
        str(countdown / name): name for name in ("train.jsonl", "heldout.jsonl", "graders.py", "demonstrations.jsonl")
    }
    works = {}
    for command, given in settings.items():
        works[command] = [*given, "tracking.folder=runs", "tracking.name=new"]
        for path, name in names.items():
            works[command] = [setting.replace(path, name) for setting in works[command]]
    make_inputs(folder, works | {"data": works["train"]}, countdown)
    return folder


def assert_refused(row: Row, found: Refusal) -> None:
    assert found.code == 2, found
    assert found.said.startswith("error: "), found
    assert found.said.count("\n") == 1, found.said
    assert found.said.endswith((".\n", "?\n")), found.said
    assert [word for word in row.words if word not in found.said] == [], found.said
    assert found.report == found.said.strip()
    assert found.seconds < 20


def test_the_table_has_as_many_rows_as_it_is_to_have():
    assert len({row.name for row in TABLE}) == len(TABLE) >= 100


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name[:80])
def test_wrong_input_gets_one_sentence(row, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(inputs)
    before = sorted(path for path in inputs.rglob("*"))
    assert_refused(row, refused(row, tmp_path / "report.json"))
    assert not [path for path in inputs.rglob("*") if path not in before and "__pycache__" not in str(path)]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_same_under_torchrun_from_rank_0_alone(inputs, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.reliability.bad_input", str(inputs), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=560, env=environment, cwd=Path(__file__).parents[2])
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    rows = [row for row in TABLE if not row.environment]
    assert [*first] == [*second] == [row.name for row in rows]
    for row in rows:
        assert_refused(row, Refusal(*first[row.name]))
        assert second[row.name][:2] == [2, ""], row.name
