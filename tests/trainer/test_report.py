"""What a run came to: reading it back, the closing table, the learning-curve picture."""

import json
import math
import re

import pytest
from PIL import Image

from grpo.config import ConfigError
from tests.trainer.conftest import shown
from trainer import report
from trainer.record import read_metrics
from trainer.report import closing_table, plot


def rows():
    accuracies = {0: 0.111, 2: 0.444, 4: 0.888, 6: 0.777}
    for step in range(7):
        row = {"step": step}
        if step:
            row |= {"reward/mean": step / 10, "response_length/mean": 50.0 + step}
        if step in accuracies:
            row |= {"eval/accuracy": accuracies[step], "eval/response_length/mean": 200.5 + step}
        yield row


def write(folder, rows, tail=""):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def test_metrics_are_read_without_a_half_last_line(tmp_path):
    run = write(tmp_path / "run", rows(), tail='{"step": 7, "reward')
    assert read_metrics(run) == list(rows())


def test_null_is_read_as_nan(tmp_path):
    (row,) = read_metrics(write(tmp_path / "run", [{"step": 1, "entropy": None}]))
    assert math.isnan(row["entropy"])


@pytest.mark.parametrize("content", [None, "", '{"step": 0'])
def test_a_folder_without_metrics_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path))}.* holds no metrics"):
        read_metrics(tmp_path)


def test_closing_table_shows_before_during_and_after(tmp_path):
    text = shown(closing_table(list(rows()), tmp_path / "seed0", seconds=3725.4))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert lines["step"].split() == ["step", "accuracy", "change", "response", "length", "reward"]
    assert lines["0"].split() == ["0", "0.111", "200.5", "-", "before", "training"]
    assert lines["2"].split() == ["2", "0.444", "+0.333", "202.5", "0.200"]
    assert lines["4"].split() == ["4", "0.888", "+0.777", "204.5", "0.400", "best"]
    assert lines["6"].split() == ["6", "0.777", "+0.666", "206.5", "0.600", "last"]
    assert "1" not in lines
    assert "seed0" in re.sub(r"\s", "", text)
    assert "total time: 1:02:05" in text
    assert max(map(len, text.splitlines())) <= 100


def test_closing_table_without_evaluations_shows_the_ends():
    trained = [{"step": s, "reward/mean": 0.25, "response_length/mean": 10.0 * s} for s in (1, 2, 3)]
    text = shown(closing_table(trained, "run", 1.0))
    assert "No evaluation ran" in text
    assert [line.split()[0] for line in text.splitlines() if "0.250" in line] == ["1", "3"]


def test_closing_table_of_a_single_evaluation_that_is_nan():
    assert "before training" in shown(closing_table([{"step": 0, "eval/accuracy": math.nan}], "run", 1.0))


@pytest.mark.parametrize("count", [1, 3])
def test_plot_is_a_moderate_picture_with_both_curves(tmp_path, count):
    runs = [write(tmp_path / f"run{i}", rows()) for i in range(count)]
    out = tmp_path / "new" / "curve.png"
    plot(runs, out)
    assert out.stat().st_size < 150_000
    with Image.open(out) as picture:
        assert picture.size == (1080, 408)
        pixels = picture.convert("RGB")
        assert pixels.getpixel((1, 1)) == (255, 255, 255)
        for left, curve in ((0, (0x1F, 0x5F, 0xBF)), (540, (0xB8, 0x50, 0x0F))):
            panel = pixels.crop((left, 0, left + 540, 408))
            assert curve in {colour for _, colour in panel.getcolors(1 << 20)}


def test_the_bold_line_is_the_mean_where_all_runs_were_evaluated(tmp_path):
    pytest.importorskip("matplotlib")
    short = [row for row in rows() if row["step"] < 4]
    high = [row | ({"eval/accuracy": 1.0} if "eval/accuracy" in row else {}) for row in short]
    out = tmp_path / "curve.svg"
    plot([write(tmp_path / "a", rows()), write(tmp_path / "b", high)], out)
    assert out.read_text().startswith("<?xml")
    curves = [report._curve(run, "eval/accuracy", 100.0, tmp_path) for run in (list(rows()), high)]
    shared, mean = report._mean_curve(curves)
    assert shared == [0, 2]
    assert mean == pytest.approx([55.55, 72.2])


def test_plot_refuses_what_it_cannot_draw(tmp_path):
    run = write(tmp_path / "run", rows())
    blind = write(tmp_path / "blind", [{"step": 1, "reward/mean": 0.5}])
    for runs, out, says in (
        ([run], "curve.jpgg", r"ends in \.png"),
        ([run, blind], "curve.png", "blind has no eval/accuracy"),
        ([], "curve.png", "no run to plot"),
    ):
        with pytest.raises(ConfigError, match=says):
            plot(runs, tmp_path / out)
