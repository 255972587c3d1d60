"""What a run came to, read back from its folder: the closing table on the terminal and the learning-curve picture."""

import math
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich import box
from rich.table import Column, Table

from grpo.config import ConfigError
from trainer.record import read_metrics


def closing_table(rows: Sequence[dict], run_folder: Path, seconds: float) -> Table:
    """A row for each evaluation, or else for the first and the last step, with the total time, `seconds`, below."""
    evaluated = [row for row in rows if "eval/accuracy" in row]
    shown = evaluated or [*rows[:1], *rows[1:][-1:]]
    scored = [row for row in evaluated if math.isfinite(row["eval/accuracy"])]
    best = max(scored, key=lambda row: row["eval/accuracy"], default=None)
    headings = ("step", "accuracy", "change", "response length", "reward")
    columns = [*(Column(heading, justify="right", no_wrap=True) for heading in headings), Column(no_wrap=True)]
    table = Table(*columns, title="Evaluations" if evaluated else "No evaluation ran", box=box.SIMPLE_HEAD)
    table.caption = f"record: {run_folder}\ntotal time: {timedelta(seconds=int(seconds))}"
    table.caption_justify = "left"
    for row in shown:
        marks = ["before training" if row["step"] == 0 else "first"] if row is shown[0] else []
        marks += ["best"] if row is best else []
        marks += ["last"] if row is shown[-1] and len(shown) > 1 else []
        accuracy, first = row.get("eval/accuracy", math.nan), shown[0].get("eval/accuracy", math.nan)
        change = "" if row is shown[0] else _cell(accuracy - first, "+.3f")
        length = _cell(row.get("eval/response_length/mean", row.get("response_length/mean", math.nan)), ".1f")
        cells = (_cell(accuracy, ".3f"), change, length, _cell(row.get("reward/mean", math.nan), ".3f"))
        table.add_row(str(row["step"]), *cells, ", ".join(marks), style="bold" if marks else "dim")
    return table


def plot(run_folders: Sequence[Path], out: Path) -> None:
    """Draw held-out accuracy and response length over training steps to `out` (.png, .svg or .pdf).

    Several runs, such as seeds, share the picture: a thin line each, and a bold mean over the steps at which all
    of them were evaluated. Raises ConfigError for a run without evaluations and for another suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("The plot needs matplotlib: pip install matplotlib.") from error
    if out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"Cannot draw to {out}: give a name that ends in .png, .svg or .pdf.")
    if not run_folders:
        raise ConfigError("There is no run to plot: give one or more run folders.")
    runs, several = [read_metrics(folder) for folder in run_folders], len(run_folders) > 1
    panels = (
        ("eval/accuracy", 100.0, "Held-out accuracy", "% of answers right", "#1f5fbf"),
        ("eval/response_length/mean", 1.0, "Held-out response length", "tokens, mean", "#b8500f"),
    )
    # A white ground of its own, so that dark pages show it too.
    figure = Figure(figsize=(9.0, 3.4), dpi=120, layout="constrained", facecolor="white")
    for axes, (key, scale, title, unit, colour) in zip(figure.subplots(1, 2), panels, strict=True):
        curves = [_curve(run, key, scale, folder) for run, folder in zip(runs, run_folders, strict=True)]
        shared, mean = _mean_curve(curves)
        for number, curve in enumerate(curves if several else ()):
            label = f"{len(runs)} runs" if number == 0 else None
            axes.plot(list(curve), list(curve.values()), color=colour, alpha=0.35, lw=1, label=label)
        if shared:
            axes.plot(shared, mean, color=colour, lw=2.5, marker="o", ms=3.5, label="mean" if several else None)
            # Beside the ends, where no curve runs through them.
            look = {"textcoords": "offset points", "va": "center", "color": colour, "weight": "bold"}
            for index, offset, side in ((0, -7, "right"), (-1, 7, "left")):
                value = f"{mean[index]:.0f}" if mean[index] >= 10 else f"{mean[index]:.1f}"
                axes.annotate(value, (shared[index], mean[index]), xytext=(offset, 0), ha=side, **look)
        axes.set_title(title, loc="left", weight="bold")
        axes.margins(x=0.12, y=0.1)
        axes.set(xlabel="training step", ylabel=unit, ylim=(0, None), axisbelow=True)
        axes.grid(axis="y", color="#dddddd", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        if several:
            axes.legend(frameon=False, loc="best")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


def _curve(rows: Sequence[dict], key: str, scale: float, folder: Path) -> dict[int, float]:
    curve = {row["step"]: row[key] * scale for row in rows if math.isfinite(row.get(key, math.nan))}
    if not curve:
        raise ConfigError(f"{folder} has no {key} in its metrics.jsonl: plot a run that was evaluated.")
    return curve


def _mean_curve(curves: Sequence[dict[int, float]]) -> tuple[list[int], list[float]]:
    """The steps that all curves have, and the mean there: a mean over fewer runs would jump where one ends."""
    shared = sorted(set.intersection(*map(set, curves)))
    return shared, [sum(curve[step] for curve in curves) / len(curves) for step in shared]


def _cell(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"
