"""What the user of a running run sees: the live view for terminals, and the one line of a step for everything else."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


class Screen:
    """The state of the run, which rich can render.

    `history`: rows of an earlier part of this run, with which curves and first values go on after a resume.
    `clock`: seconds from any origin.
    """

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

    def __init__(
        self,
        name: str,
        total_steps: int,
        start_step: int = 0,
        history: Sequence[dict] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.phase = "starting"
        self.rollout: tuple[int, int, float] | None = None  # samples done, samples in all, tokens a second
        self._name, self._total, self._start, self._step = name, total_steps, start_step, start_step
        self._clock = clock
        self._began = clock()
        self._logged_at: float | None = None
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._curves: dict[str, list[float]] = {key: [] for key, _ in self.curves}
        self._latest: dict[str, float] = {}
        for row in history:
            self._remember(row)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in one step's metrics. The first step of a process is not timed: it pays for warming up."""
        now = self._clock()
        if step > self._start:
            if self._logged_at is not None:
                self._step_seconds.append((now - self._logged_at) / max(step - self._step, 1))
            self._logged_at = now
        self._step = step
        self._remember(metrics)

    @property
    def elapsed(self) -> float:
        """Seconds since this process began."""
        return self._clock() - self._began

    def line(self, metrics: Mapping[str, float]) -> str:
        """One step in plain ASCII, for logs."""
        shown = [f"{label} {_short(metrics[key])}" for key, label in self.in_line if key in metrics]
        times = [f"elapsed {_hms(self.elapsed)}", f"remaining {self._remaining()}"]
        return "  ".join([f"step {self._step}/{self._total}", *shown, *times])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width, times = options.max_width, (f"{_hms(self.elapsed)} elapsed", f"{self._remaining()} left")
        steps = ProgressBar(total=max(self._total, 1), completed=self._step), f"[bold]{self._step}[/]/{self._total}"
        yield _line(Text(self._name[: width // 4], style="bold"), *steps, *times, Text(self.phase, style="cyan"))
        if self.rollout is not None:
            done, total, rate = self.rollout
            samples = ProgressBar(total=total, completed=done), f"{done}/{total} samples, {rate:,.0f} tokens/s"
            yield _line("[dim]rollout[/]", *samples)

        curves = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "right", "left"):
            curves.add_column(justify=justify, no_wrap=True)
        curves.add_row("", "[dim]first[/]", "[dim]now[/]", "[dim]over the run[/]")
        for key, label in self.curves:
            if values := list(self._curves[key]):
                line = sparkline(values, max(width - 50, 8))
                curves.add_row(label, _short(values[0]), f"[bold]{_short(values[-1])}[/]", f"[green]{line}[/]")
            else:
                curves.add_row(f"[dim]{label}[/]", "[dim]-[/]", "[dim]-[/]", "")
        yield curves

        latest = self._latest
        shown = [f"[dim]{label}[/] {_short(latest[key])}{unit}" for key, label, unit in self.numbers if key in latest]
        yield Text.from_markup("   ".join(shown))

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        values = {key: math.nan if value is None else value for key, value in metrics.items()}
        # A fresh dict, because the display's thread may be reading the last one.
        self._latest = self._latest | {key: values[key] for key, *_ in self.numbers if key in values}
        for key, curve in self._curves.items():
            if key in values:
                curve.append(values[key])

    def _remaining(self) -> str:
        seconds = remaining_seconds(self._step_seconds, self._total - self._step)
        since_step = self._clock() - self._logged_at if self._logged_at else 0.0
        return "-:--:--" if seconds is None else _hms(max(seconds - since_step, 0.0))


def _line(*cells: RenderableType) -> Table:
    """The cells in one line, of which the second gets all room that is left."""
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for number in range(len(cells)):
        grid.add_column(ratio=1 if number == 1 else None, no_wrap=number != 1)
    grid.add_row(*cells)
    return grid


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as `width` block characters from their least to their greatest; NaN and inf are gaps.

    The line always spans all values, so that lines of one width stand under each other: more values than `width`
    are averaged in even buckets, fewer are repeated.
    """
    blocks, count, means = "▁▂▃▄▅▆▇█", len(values), []
    for i in range(width if values else 0):
        start, end = i * count // width, (i + 1) * count // width
        bucket = [value for value in values[start : max(end, start + 1)] if math.isfinite(value)]
        means.append(sum(bucket) / len(bucket) if bucket else None)
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    return "".join(" " if mean is None else blocks[round((mean - low) / span * 7) if span else 3] for mean in means)


def remaining_seconds(step_seconds: Sequence[float], steps_left: int) -> float | None:
    """Seconds until the end at the mean pace of `step_seconds`; None before any step was timed."""
    if steps_left <= 0:
        return 0.0
    return sum(step_seconds) / len(step_seconds) * steps_left if step_seconds else None


def _short(value: float) -> str:
    if value != 0 and math.isfinite(value) and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _hms(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
