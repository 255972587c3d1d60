"""examples/experiments/: what is read from a response, the shares of a step, the gradient's noise, and the table."""

import itertools
import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from examples.experiments import lessons
from examples.experiments.lessons import Reading, halfway, read_response, shares, shares_by_step, smooth, spread
from grpo.config import ConfigError, load
from trainer.config import TrainConfig

SCRIPT = Path(__file__).parents[2] / "examples" / "experiments" / "run.sh"
ROW = {"numbers": [3, 7, 2], "target": 12}
RIGHT = "7 + 3 = 10 + 2 = 12 to 12 yes"
WRONG = "7 - 2 = 5 + 3 = 8 to 12 no"
HIT = "</think> <answer> ( 7 + 3 ) + 2 </answer>"
MISS = "</think> <answer> ( 7 - 2 ) + 3 </answer>"


def reading(response: str) -> dict:
    return vars(read_response(response, ROW))


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (f"{RIGHT} {HIT}", Reading(True, True, True, 1, True, True)),
        (f"{WRONG} {MISS}", Reading(True, False, False, 1, True, True)),
        (f"{WRONG} {RIGHT} {HIT}", Reading(True, True, False, 2, True, True)),
        (f"{WRONG} {WRONG} {WRONG} {MISS}", Reading(True, False, False, 3, True, True)),
        # Nothing stated: the answer is the first try, and nothing is true or checked.
        (HIT, Reading(True, True, True, 0, False, False)),
        (MISS, Reading(True, False, False, 0, False, False)),
        ("", Reading(False, False, False, 0, False, False)),
    ],
)
def test_a_response_is_read(response, expected):
    assert read_response(response, ROW) == expected


def test_an_answer_is_well_formed_with_exactly_the_numbers_whatever_it_makes():
    formed = ["( 7 - 2 ) + 3", "( 7 + 3 ) + 2"]
    for answer in [*formed, "( 7 + 7 ) - 2", "( 7 + 3", "7 3 2", ""]:  # other numbers, not closed, no sign, nothing
        response = f"{WRONG} </think> <answer> {answer} </answer>"
        assert reading(response)["well_formed"] == (answer in formed)
        assert lessons.well_formed(response, ROW) == float(answer in formed)
        assert not reading(f"{WRONG} </think> <answer> {answer}")["well_formed"]  # not closed


def test_the_first_try_is_right_by_what_it_computes_and_not_by_what_it_says():
    assert reading(f"7 + 3 = 11 + 2 = 13 to 12 no {MISS}")["first_right"]
    assert not reading(f"7 - 2 = 5 + 3 = 12 to 12 yes {HIT}")["first_right"]
    assert not reading(f"7 + 7 = 14 - 2 = 12 to 12 yes {HIT}")["first_right"]  # not the numbers
    assert not reading(f"{WRONG} {RIGHT} {HIT}")["first_right"]


def test_stated_results_are_true_only_if_all_are():
    for thinking in ("7 + 3 = 10 + 2 = 12", "7 + 3 + 2 = 12", "7 + 3 = 10"):
        assert reading(f"{thinking} {MISS}")["true"], thinking
    second = f"{WRONG} 7 - 3 = 5 + 2 = 7 to 12 no"  # of two tries
    nothing = "7 to 12 yes"
    for thinking in ("7 + 3 = 11 + 2 = 13", "7 + 3 = 10 + 2 = 13", "7 - 3 - 2 = 6", second, "7 + 3 = 1", nothing):
        assert not reading(f"{thinking} {MISS}")["true"], thinking


def test_checks_are_true_only_if_all_are():
    for thinking in (RIGHT, WRONG):
        assert reading(f"{thinking} {MISS}")["checks"], thinking
    silent, other_target = "7 + 3 = 10 + 2 = 12", "7 - 2 = 5 + 3 = 8 to 8 yes"
    no, yes = f"{silent} to 12 no", "7 - 2 = 5 + 3 = 8 to 12 yes"
    for thinking in (no, yes, other_target, f"{WRONG} {yes}", silent):
        assert not reading(f"{thinking} {MISS}")["checks"], thinking


def test_shares_are_of_all_responses_but_for_those_that_try_on():
    responses = [f"{RIGHT} {HIT}", f"{WRONG} {MISS}", f"{WRONG} {RIGHT} {HIT}", f"{WRONG} {WRONG} </think>", HIT]
    readings = [read_response(response, ROW) for response in responses]
    found = shares(readings)
    assert found == {"well_formed": 0.8, "first_right": 0.4, "goes_on": 2 / 3, "true": 0.8, "checks": 0.8}
    assert set(found) == set(lessons.SHARES)
    assert math.isnan(shares(readings[:1])["goes_on"])
    rows = [{"step": 2 - i % 2, "response": r, "row": ROW, "held_out": False} for i, r in enumerate(responses)]
    rows.append({"step": 1, "response": MISS, "row": ROW, "held_out": True})
    by_step = shares_by_step(rows)
    assert list(by_step) == [1, 2]
    assert by_step[1] == shares(readings[1::2])
    assert by_step[2] == shares(readings[::2])


def test_halfway_is_the_step_from_which_a_curve_stays_past_its_middle():
    steps = list(range(1, 13))
    assert halfway(steps, [0.0] * 6 + [1.0] * 6) == 7
    assert halfway(steps, [1.0] * 6 + [0.0] * 6) == 7
    assert halfway(steps, [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]) == 10
    assert math.isnan(halfway(steps, [0.5, 0.5, 0.9] + [0.52] * 9))
    assert smooth([0.0, 3.0, math.nan, 1.0]) == [1.5, 1.5, 2.0, 1.0]


def test_the_noise_of_gradients_is_estimated_without_bias():
    mean, deviation, size, count = 0.5, 2.0, 50, 4
    gradients = np.random.default_rng(0).normal(mean, deviation, (2000, count, size))
    squares, of_means = (gradients**2).sum(2).tolist(), (gradients.mean(1) ** 2).sum(1).tolist()
    found = [spread(*each) for each in zip(squares, of_means, strict=True)]
    average = {name: sum(one[name] for one in found) / len(found) for name in found[0]}
    assert average["variance"] == pytest.approx(size * deviation**2, rel=0.01)
    assert average["signal"] == pytest.approx(size * mean**2, rel=0.05)


def runs_of_the_script() -> dict[str, list[str]]:
    """The name of each run and its settings, from the table in run.sh."""
    table = re.search(r'^runs="\n(.*?)^"', SCRIPT.read_text(), re.M | re.S)[1]
    return {name: settings for name, _, _, *settings in map(str.split, table.splitlines())}


def test_every_run_of_the_script_is_read_and_can_be_configured(monkeypatch):
    monkeypatch.chdir(SCRIPT.parents[2])
    runs = runs_of_the_script()
    assert runs.keys() == {*lessons.BATCHES, *lessons.ENTROPIES, *lessons.FORMATS}
    for settings in runs.values():
        config = load(TrainConfig, lessons.CONFIG, ["rewards.weights.well_formed=0", *settings])
        config.algorithm.check()
        assert next(iter(config.rewards.weights)) == "countdown"
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_figures_are_drawn_from_the_runs_and_a_missing_one_is_named(tmp_path):
    held_out = {key for key in lessons.KEPT.values() if key.startswith("eval/")}
    trained = set(lessons.KEPT.values()) - held_out
    sample = {"response": f"{WRONG} {RIGHT} {HIT}", "row": ROW, "held_out": False}
    for name, seed in itertools.product(runs_of_the_script(), lessons.SEEDS):
        rows = [{"step": 0}, *({"step": step} | dict.fromkeys(trained, 0.5 + seed) for step in range(1, 5))]
        for row in rows[::2]:
            row |= dict.fromkeys(held_out, 0.25 * row["step"])
        folder = tmp_path / f"{name}-{seed}"
        folder.mkdir()
        write_lines(folder / "metrics.jsonl", rows)
        write_lines(folder / "samples.jsonl", [{"step": step, **sample} for step in range(1, 5)])
    shared = {"signal": 2.0, "norms": [1, 3]}
    sizes = [{"prompts": 2**i, "batches": 8 >> i, "variance": 8 / 2**i, **shared} for i in range(3)]
    gradient = {"prompts": 8, "samples_per_prompt": 8, "policy": {"reward/mean": 0.3}, "sizes": sizes}
    (tmp_path / "gradient.json").write_text(json.dumps(gradient))
    data = lessons.collect(tmp_path)
    assert lessons.mean_curve(data["runs"]["plain"], "entropy") == ([1, 2, 3, 4], [1.0] * 4)
    assert lessons.mean_curve(data["runs"]["plain"], "accuracy") == ([0, 2, 4], [0.0, 0.5, 1.0])
    assert lessons.mean_curve(data["runs"]["sparse"], "samples/goes_on") == ([1, 2, 3, 4], [1.0] * 4)
    assert data["gradient"]["sizes"][0]["norm_std"] == pytest.approx(2**0.5)
    written = lessons.draw(data, tmp_path)
    assert len(written) == 5
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    text = lessons.tables(data)
    assert "| 4 | 2 | 1 | 4 | 2 | 1.41 | 71% |" in text
    assert "| 0.000, 0.500, 1.000 | 1.000, 1.000 |" in text
    (tmp_path / "clip-0.4-1" / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"clip-0\.4-1"):
        lessons.collect(tmp_path)


def test_lesson_6_is_drawn_from_its_own_runs(tmp_path):
    assert subprocess.run(["bash", "-n", str(SCRIPT.with_name("distillation.sh"))]).returncode == 0
    for name, height in (("teacher-2", 0.9), ("rewarded-0", 0.25), ("rewarded-1", 0.75), ("taught-0", 0.5)):
        rows = [{"step": step, "eval/accuracy": step * height / 4} for step in range(5)]
        for row in rows[1:]:
            row |= {"response_length/mean": 30, "entropy": 0.2}
            row |= {"teacher/kl": 0.5 / row["step"]} if name == "taught-0" else {}
        others = ["taught-1", "both-0", "both-1", "few-taught-0", "few-taught-1", "few-rewarded-0", "few-rewarded-1"]
        for folder in [name, *(others if name == "taught-0" else [])]:
            (tmp_path / folder).mkdir()
            write_lines(tmp_path / folder / "metrics.jsonl", rows)
    data = lessons.collect_taught(tmp_path)
    (picture,) = lessons.draw(data, tmp_path)
    assert picture.name == "lesson_6_distillation.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = lessons.taught_table(data)
    assert "the teacher: 0.900" in text
    assert "| from rewards | 0.000 | 0.375 | 0.500 | 0.250, 0.750 | - |" in text
    assert "| from a teacher | 0.000 | 0.375 | 0.500 | 0.500, 0.500 | 0.500, 0.125 |" in text
