"""What the user of a running run sees: the live view for terminals, and the one line of a step for everything else."""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text


class Screen:
    """The state of the run, which rich can render; curves go on from `history`, the rows of before a resume."""

    curves = (
        ("eval/accuracy", "held-out accuracy"),
        ("eval/response_length/mean", "held-out length, tokens"),
        ("reward/mean", "reward"),
        ("response_length/mean", "response length, tokens"),
    )
    numbers = (
        ("entropy", "entropy", ""),
        ("grad_norm", "grad norm", ""),
        ("time/step", "step", " s"),
        ("throughput/tokens_per_second_per_gpu", "speed", " tokens/s/GPU"),
    )
    in_line = (
        ("reward/mean", "reward"),
        ("eval/accuracy", "accuracy"),
        ("response_length/mean", "length"),
        ("eval/response_length/mean", "eval length"),
    )

    def __init__(self, name: str, total_steps: int, start_step: int = 0, history: Sequence[dict] = ()) -> None:
        self.phase = "starting"
        self.rollout: tuple[int, int, float] | None = None  # samples done, samples in all, tokens a second
        self._name, self._total, self._start, self._step = name, total_steps, start_step, start_step
        self._began = time.monotonic()
        self._logged_at: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._curves: dict[str, list[float]] = {key: [] for key, _ in self.curves}
        self._latest: dict[str, float] = {}
        self._bad: Sequence[str] = ()
        for row in history:
            self._remember(row)

    def record(self, step: int, metrics: Mapping[str, float], bad: Sequence[str] = ()) -> None:
        """Take in one step's metrics, and what is `bad` in them. A process's first step, a warm-up, is not timed."""
        now = time.monotonic()
        if step > self._start:
            if self._logged_at is not None:
                self._step_seconds.append((now - self._logged_at) / (step - self._step))
            self._logged_at = now
        self._step, self._bad = step, bad
        self._remember(metrics)

    @property
    def elapsed(self) -> float:
        """Seconds since this process began."""
        return time.monotonic() - self._began

    def line(self, metrics: Mapping[str, float]) -> str:
        """One step in plain ASCII, for logs."""
        shown = [f"{label} {_short(metrics[key])}" for key, label in self.in_line if key in metrics]
        times = f"elapsed {_hms(self.elapsed)}", f"remaining {self._remaining()}"
        bad = [f"({', '.join(self._bad)})"] if self._bad else []
        return "  ".join([f"step {self._step}/{self._total}", *shown, *times, *bad])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, times = options.max_width, (f"{_hms(self.elapsed)} elapsed", f"{self._remaining()} left")
        steps = ProgressBar(total=max(self._total, 1), completed=self._step), f"[bold]{self._step}[/]/{self._total}"
        yield _line(Text(self._name[: width // 4], style="bold"), *steps, *times, Text(self.phase, style="cyan"))
        if self.rollout is not None:
            done, total, rate = self.rollout
            share = ProgressBar(total=total, completed=done), f"{done}/{total} samples, {rate:,.0f} tokens/s"
            yield _line("[dim]rollout[/]", *share)
        columns = (Column(justify=justify, no_wrap=True) for justify in ("left", "right", "right", "left"))
        curves = Table.grid(*columns, padding=(0, 2))
        curves.add_row("", "[dim]first[/]", "[dim]now[/]", "[dim]over the run[/]")
        for key, label in self.curves:
            if values := list(self._curves[key]):
                line = sparkline(values, max(width - 50, 8))
                curves.add_row(label, _short(values[0]), f"[bold]{_short(values[-1])}[/]", f"[green]{line}[/]")
            else:
                curves.add_row(f"[dim]{label}[/]", "[dim]-[/]", "[dim]-[/]", "")
        yield curves
        numbers = [(label, self._latest[key], unit) for key, label, unit in self.numbers if key in self._latest]
        yield Text.from_markup("   ".join(f"[dim]{label}[/] {_short(value)}{unit}" for label, value, unit in numbers))
        if self._bad:
            yield Text(", ".join(self._bad), style="red")

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        values = {key: math.nan if value is None else value for key, value in metrics.items()}
        # A fresh dict, because the display's thread may be reading the last one.
        self._latest = self._latest | {key: values[key] for key, *_ in self.numbers if key in values}
        for key, curve in self._curves.items():
            if key in values:
                curve.append(values[key])

    def _remaining(self) -> str:
        """The time until the end at the mean pace of the last steps."""
        if self._step >= self._total:
            return _hms(0.0)
        if not self._step_seconds:
            return "-:--:--"
        pace = sum(self._step_seconds) / len(self._step_seconds)
        return _hms(max(pace * (self._total - self._step) - (time.monotonic() - self._logged_at), 0.0))


class SftScreen(Screen):
    """The same of supervised training, which has losses and no rewards."""

    curves = (("eval/loss", "held-out loss"), ("loss", "loss"))
    in_line = (("loss", "loss"), ("eval/loss", "held-out loss"), ("grad_norm", "grad norm"))


def _line(*cells: RenderableType) -> Table:
    """The cells in one line, of which the second gets all room that is left."""
    columns = [Column(no_wrap=True), Column(ratio=1), *(Column(no_wrap=True) for _ in cells[2:])]
    grid = Table.grid(*columns, padding=(0, 2, 0, 0), expand=True)
    grid.add_row(*cells)
    return grid


def sparkline(values: Sequence[float], width: int) -> str:
    """`values`, averaged or repeated, as `width` block characters from least to greatest; NaN and inf are gaps."""
    blocks, count, means = "▁▂▃▄▅▆▇█", len(values), []
    for i in range(width if values else 0):
        start, end = i * count // width, (i + 1) * count // width
        bucket = [value for value in values[start : max(end, start + 1)] if math.isfinite(value)]
        means.append(sum(bucket) / len(bucket) if bucket else None)
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    return "".join(" " if mean is None else blocks[round((mean - low) / span * 7) if span else 3] for mean in means)


def _short(value: float) -> str:
    if 0 < abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _hms(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
