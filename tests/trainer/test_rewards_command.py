"""`python -m trainer rewards`, the refusal of a reward that fails its examples, and a reward's None on record."""

import json
import math

import pytest
import torch

from grpo.batch import Trajectory, batch_of
from tests.trainer.conftest import rows_of
from trainer.controller import batch_metrics, sample_row
from trainer.transcript import render

SOURCE = """
from rewards import register

@register("fine", examples=[("4", {}, 1.0), ("", {}, None)])
async def fine(completions, rows):
    return [float(completion == "4") if completion else None for completion in completions]

@register("wrong", examples=[("[red]4", {}, 1.0), ("5", {}, 0.5, {"scale": 2.0})])
def wrong(completion, row, *, scale=1.0):
    return 1.0 * (completion == "[red]4")

@register("absent", imports=("no_such_module",), examples=[("4", {}, 1.0)])
def absent(completion, row):
    import no_such_module

@register("bare")
def bare(completions, **columns):
    return [1.0] * len(completions)

@register("digit")
def digit(completion, row):
    return float(completion[0].isdigit()) if completion[:1].strip() else None

@register("in_prompt")
def in_prompt(prompts, completions, numbers, **columns):
    return [float(all(str(n) in prompt for n in given)) for prompt, given in zip(prompts, numbers, strict=True)]

@register("never")
def never(completion, row):
    return None
"""
GROUP = """
@register("place", sees="group")
def place(completions, rows):
    assert all(row == rows[0] for row in rows)
    return [sorted(completions).index(completion) / 10 for completion in completions]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "own.py").write_text(SOURCE)
    return tmp_path / "own.py"


@pytest.fixture(autouse=True)
def registered():
    """The registry, put back afterwards as it was."""
    import rewards
    from rewards import registry

    rewards.names()
    before = dict(registry.REGISTRY)
    yield
    registry.REGISTRY.clear()
    registry.REGISTRY.update(before)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")


def lines_of(capsys) -> dict[str, str]:
    """Of the table, name -> the rest of the row with single spaces."""
    out = capsys.readouterr().out
    return {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}


def test_the_rewards_are_listed_with_their_form_and_place(run_main, file, capsys):
    assert run_main("rewards") == 0
    assert lines_of(capsys)["countdown"].startswith("plain ")
    assert run_main("rewards", "--file", file) == 0
    said = lines_of(capsys)
    assert {"countdown", "math", "fine", "absent"} <= said.keys()
    assert "own.py:4 " in said["fine"]


def test_examples_that_pass_end_with_0_and_one_that_fails_with_1(run_main, file, capsys):
    assert run_main("rewards", "test", "fine", "bare", "absent", "--file", file) == 0
    said = lines_of(capsys)
    assert said.keys() == {"reward", "fine", "bare", "absent"}
    assert said["fine"].startswith("async batched ")
    assert "2 of 2" in said["fine"]
    assert said["bare"].endswith(" none")
    assert said["bare"].startswith("TRL ")
    assert said["absent"].endswith(" 1, needs no_such_module")
    assert run_main("rewards", "test", "countdown", "wrong", "--file", file) == 1
    said = lines_of(capsys)
    assert "1 of 2" in said["wrong"]
    assert "5 of 5" in said["countdown"]
    assert said["wrong:"] == "'5' with {'scale': 2.0} must give 0.5 and gave 0.0"


@pytest.mark.parametrize(
    ("source", "arguments", "sentence"),
    [
        ("", ["fien", "--file"], "no reward 'fien', the nearest is 'fine'"),
        ("import no_such_module\n", ["--file"], "fails to import with ModuleNotFoundError"),
        ("@register('odd', examples=[3])\ndef odd(completion, row): ...\n", ["--file"], "'odd' has the example 3"),
    ],
)
def test_what_cannot_be_tested_is_one_sentence(run_main, file, capsys, source, arguments, sentence):
    file.write_text(SOURCE + source)
    assert run_main("rewards", "test", *arguments, file) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert sentence in error


def test_a_run_refuses_a_reward_that_fails_its_own_example_before_anything_is_loaded(
    run_main, settings, file, tmp_path, monkeypatch, capsys
):
    def refuse(*_, **__):
        raise AssertionError("the engine was started")

    monkeypatch.setattr("trainer.trainer.make_engine", refuse)
    own = [f"tracking.folder={tmp_path}", "tracking.name=run", f"rewards.files=[{file}]"]
    assert run_main("train", *settings["train"], *own, "rewards.weights={fine: 1, wrong: 1}") == 2
    error = capsys.readouterr().err
    assert "error: Reward 'wrong' (" in error
    assert "fails its own example: '5' with {'scale': 2.0} must give 0.5 and gave 0.0;" in error


def test_a_reward_that_does_not_apply_is_left_out_of_means_and_shown_as_null(start, countdown, file):
    files = f"rewards.files=[{countdown / 'graders.py'}, {file}]"
    keep = ["tracking.samples_every=1", "tracking.samples_kept=100", "evaluation.samples_per_prompt=2"]
    weights = "rewards.weights={digit: 1.0, digits: 0.5, never: 1.0, in_prompt: 0.0}"
    run = start("train", "run", files, weights, *keep, "evaluation.accuracy=digit", "evaluation.every=1")
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    rows = rows_of(run)
    assert [sample["rewards/in_prompt"] for sample in samples] == [1.0] * len(samples)
    assert {sample["rewards/digit"] for sample in samples} == {None, 0.0, 1.0}
    for row in rows:
        for prefix, held_out in (("", False), ("eval/", True)):
            mine = [s for s in samples if s["step"] == row["step"] and s["held_out"] == held_out]
            applies = [s["rewards/digit"] for s in mine if s["rewards/digit"] is not None]
            if not mine:
                continue
            assert all(s["rewards/never"] is None for s in mine)
            assert f"{prefix}reward/never/mean" not in row
            assert row[f"{prefix}reward/failed"] == 0
            assert row[f"{prefix}reward/digit/mean"] == pytest.approx(sum(applies) / len(applies))
            for s in mine:
                assert s["reward"] == pytest.approx((s["rewards/digit"] or 0.0) + 0.5 * s["rewards/digits"])


def test_a_reward_sees_the_whole_group_that_a_run_samples(start, countdown, file):
    file.write_text(file.read_text() + GROUP)
    keep = ["tracking.samples_every=1", "tracking.samples_kept=100", "evaluation.samples_per_prompt=2"]
    weights = "rewards.weights={digits: 1.0, place: 1.0, distinct: 0.1}"
    run = start("train", "run", f"rewards.files=[{countdown / 'graders.py'}, {file}]", weights, *keep)
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    groups = {}
    for sample in samples:
        groups.setdefault((sample["step"], sample["held_out"], sample["prompt"]), []).append(sample)
    assert {(held_out, len(group)) for (_, held_out, _), group in groups.items()} == {(False, 4), (True, 2)}
    for group in groups.values():
        texts = [sample["response"] for sample in group]
        assert [sample["rewards/place"] for sample in group] == [sorted(texts).index(text) / 10 for text in texts]
        assert [sample["rewards/distinct"] for sample in group] == pytest.approx(
            [
                sum(text.split() != other.split() for other in texts) / (len(texts) - 1) if text.split() else 0.0
                for text in texts
            ]
        )
    assert [row["reward/failed"] for row in rows_of(run) if "reward/failed" in row] == [0, 0]


def test_components_that_do_not_apply_are_nan_in_a_batch_and_no_metric_where_none_does():
    values = [(1.0, None), (None, None), (0.0, None)]
    samples = [Trajectory([1], n, reward=a or 0.0, components={"a": a, "b": b}) for n, (a, b) in enumerate(values)]
    for sample in samples:
        sample.add_sampled([2], [-0.5], 0)
    batch = batch_of(samples)
    assert batch["rewards/a"].isnan().tolist() == [False, True, False]
    assert batch["rewards/b"].isnan().all()
    metrics = batch_metrics(batch)
    assert metrics["reward/a/mean"] == 0.5
    assert metrics["reward/a/std"] == pytest.approx(math.sqrt(0.5))
    assert not [name for name in metrics if name.startswith("reward/b/")]
    assert "reward/a/std" not in batch_metrics(batch_of(samples[:2]))
    assert not any(math.isnan(value) for value in metrics.values())
    assert torch.isfinite(batch["rewards"]).all()
    assert sample_row(samples[1])["rewards/a"] is None
    assert "reward 0.000 (a none, b none)" in render(0, samples[1:2])
