"""What a run leaves behind and what its user watches: metrics.jsonl, samples.jsonl, dashboards, the live view.

`Tracker` lives on the controller only; `Stopwatch` is for every rank. The jsonl files are the record that
`trainer.report` reads back; wandb and TensorBoard are copies of it.
"""

import json
import logging
import math
import os
import secrets
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo.config import ConfigError, option


@dataclass
class TrackingConfig:
    """Where a run's record goes and how much of it is kept."""

    folder: str = option("runs", "Folder that holds one folder a run.")
    name: str | None = option(None, "Name of the run's folder; null makes one from the date and time.")
    wandb: bool = option(False, "Copy metrics to Weights & Biases (offline where there is no API key).")
    wandb_project: str = option("grpo", "Weights & Biases project.")
    tensorboard: bool = option(False, "Copy metrics to TensorBoard event files.")
    samples_every: int = option(10, "Steps between the steps whose samples are kept in samples.jsonl; 0: none.")
    samples_kept: int = option(4, "Samples kept at each such step.")


def run_folder(config: TrackingConfig) -> Path:
    """The folder this run writes to; not created yet. Unnamed runs get a new one each second."""
    return Path(config.folder) / (config.name or datetime.now().strftime("%Y%m%d-%H%M%S"))


def read_rows(path: Path) -> list[dict]:
    """All rows of a jsonl file, leaving out a last line that a kill cut in half.

    Raises ConfigError when a line before the last is not JSON: then the file was edited, not cut.
    """
    rows, lines = [], path.read_text(errors="replace").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(f"Line {number} of {path} is not JSON: repair or delete the line.") from error
    return rows


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as `width` block characters from their least to their greatest; NaN and inf are gaps.

    The line always spans all values, so that lines of one width stand under each other: more values than `width`
    are averaged in even buckets, fewer are repeated.
    """
    blocks, count = "▁▂▃▄▅▆▇█", width if values else 0
    starts = [i * len(values) // count for i in range(count)]
    ends = [max((i + 1) * len(values) // count, start + 1) for i, start in enumerate(starts)]
    buckets = [values[start:end] for start, end in zip(starts, ends, strict=True)]
    finite = [[value for value in bucket if math.isfinite(value)] for bucket in buckets]
    means = [sum(bucket) / len(bucket) if bucket else None for bucket in finite]
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)
    return "".join(" " if mean is None else blocks[round((mean - low) / span * 7) if span else 3] for mean in means)


def remaining_seconds(step_seconds: Sequence[float], steps_left: int) -> float | None:
    """Seconds until the end at the mean pace of `step_seconds`; None before any step was timed."""
    if steps_left <= 0:
        return 0.0
    return sum(step_seconds) / len(step_seconds) * steps_left if step_seconds else None


class Stopwatch:
    """Adds up the seconds each part of a step takes.

        with watch("rollout"):
            ...
        metrics = watch.metrics()  # {"time/rollout": 12.3}, and the watch starts again from nothing

    `cuda`: wait for the device at both ends, so that queued kernels are billed to the part that queued them.
    `phase`: also entered for each part, such as `Tracker.phase`, which shows it to the user.
    """

    def __init__(self, cuda: bool = False, phase: Callable[[str], AbstractContextManager] | None = None) -> None:
        self._cuda = cuda
        self._phase = phase or nullcontext
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as `name`; parts may nest, and the same name adds up."""
        with self._phase(name):
            started = self._now()
            try:
                yield
            finally:
                self._seconds[name] += self._now() - started

    def metrics(self) -> dict[str, float]:
        """Seconds by "time/NAME" since the last call."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return {f"time/{name}": value for name, value in seconds.items()}

    def _now(self) -> float:
        if self._cuda:
            import torch

            torch.cuda.synchronize()
        return time.perf_counter()


class Screen:
    """The state of the run as the user sees it: a rich renderable for terminals, one line for everything else.

    `history`: rows of an earlier part of this run, so that its curves and first values go on after a resume.
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

    def __init__(
        self,
        name: str,
        total_steps: int,
        start_step: int = 0,
        history: Sequence[Mapping[str, Any]] = (),
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
        parts = [f"step {self._step}/{self._total}"]
        if "reward/mean" in metrics:
            parts.append(f"reward {_short(metrics['reward/mean'])}")
        if "eval/accuracy" in metrics:
            parts.append(f"accuracy {_short(metrics['eval/accuracy'])}")
        for key, label in (("response_length/mean", "length"), ("eval/response_length/mean", "eval length")):
            if key in metrics:
                parts.append(f"{label} {_short(metrics[key])}")
        return "  ".join([*parts, f"elapsed {_hms(self.elapsed)}", f"remaining {self._remaining()}"])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        width = options.max_width
        head = Table.grid(padding=(0, 2, 0, 0), expand=True)
        head.add_column(no_wrap=True, max_width=width // 4)
        head.add_column(ratio=1)
        for _ in range(4):
            head.add_column(no_wrap=True)
        head.add_row(
            Text(self._name, style="bold"),
            ProgressBar(total=max(self._total, 1), completed=self._step),
            f"[bold]{self._step}[/]/{self._total}",
            f"{_hms(self.elapsed)} elapsed",
            f"{self._remaining()} left",
            Text(self.phase, style="cyan"),
        )
        yield head
        if self.rollout is not None:
            done, total, rate = self.rollout
            bar = Table.grid(padding=(0, 2, 0, 0), expand=True)
            bar.add_column(no_wrap=True)
            bar.add_column(ratio=1)
            bar.add_column(no_wrap=True)
            bar.add_row(
                "[dim]rollout[/]",
                ProgressBar(total=total, completed=done),
                f"{done}/{total} samples, {rate:,.0f} tokens/s",
            )
            yield bar

        curves = Table.grid(padding=(0, 2))
        for justify in ("left", "right", "right", "left"):
            curves.add_column(justify=justify, no_wrap=True)
        curves.add_row("", "[dim]first[/]", "[dim]now[/]", "[dim]over the run[/]")
        for key, label in self.curves:
            values = list(self._curves[key])
            if values:
                first, now = _short(values[0]), _short(values[-1])
                line = sparkline(values, max(width - 50, 8))
                curves.add_row(label, first, f"[bold]{now}[/]", f"[green]{line}[/]")
            else:
                curves.add_row(f"[dim]{label}[/]", "[dim]-[/]", "[dim]-[/]", "")
        yield curves

        latest = self._latest
        shown = [f"[dim]{label}[/] {_short(latest[key])}{unit}" for key, label, unit in self.numbers if key in latest]
        if shown:
            yield Text.from_markup("   ".join(shown))

    def _remember(self, metrics: Mapping[str, Any]) -> None:
        # A fresh dict, because the display's thread may be reading the last one.
        self._latest = self._latest | {key: _number(metrics[key]) for key, *_ in self.numbers if key in metrics}
        for key, curve in self._curves.items():
            if key in metrics:
                curve.append(_number(metrics[key]))

    def _remaining(self) -> str:
        seconds = remaining_seconds(self._step_seconds, self._total - self._step)
        if seconds is None:
            return "-:--:--"
        return _hms(max(seconds - (self._clock() - self._logged_at if self._logged_at else 0.0), 0.0))


class Tracker:
    """Writes a run's record and shows it. For the controller process only; use it as a context manager.

    Args:
        config: where copies go and how many samples are kept.
        run_folder: made if missing; receives metrics.jsonl, samples.jsonl, wandb/ and tensorboard/.
        total_steps: the last step of the run.
        resolved: the resolved configuration, shown beside the curves in wandb and TensorBoard.
        start_step: the step of the checkpoint this process goes on from. Rows of later steps are cut off the
            record, so that each step is there once. 0 starts the record anew; an earlier record in the folder
            is kept as *.previous.jsonl.
        console: where to show the run; None is stdout, with a live display if that is a terminal.

    Raises ConfigError where the folder cannot be written, a count is negative or a dashboard is not installed.
    """

    def __init__(
        self,
        config: TrackingConfig,
        run_folder: Path,
        total_steps: int,
        resolved: Mapping[str, Any],
        start_step: int = 0,
        console: Console | None = None,
    ) -> None:
        for key in ("samples_every", "samples_kept"):
            if getattr(config, key) < 0:
                raise ConfigError(f"tracking.{key}={getattr(config, key)} must be 0 (none) or more.")
        self._config, self._folder, self._total = config, run_folder, total_steps
        self._console = console or _stdout_console()
        self._borrowed_handlers: list[tuple[logging.StreamHandler, Any]] = []
        self._closed = False
        try:
            run_folder.mkdir(parents=True, exist_ok=True)
            history = _cut(run_folder / "metrics.jsonl", start_step)
            _cut(run_folder / "samples.jsonl", start_step)
            # Line buffered: a row is in the file when `log` returns.
            self._metrics = (run_folder / "metrics.jsonl").open("a", buffering=1)
            self._samples = (run_folder / "samples.jsonl").open("a", buffering=1)
        except OSError as error:
            raise ConfigError(
                f"Cannot write the run to {run_folder} ({error.strerror}): choose another tracking.folder."
            ) from error
        self._last_step = start_step or -1
        self._screen = Screen(run_folder.name, total_steps, start_step, history)
        self._live = Live(get_renderable=lambda: self._screen, console=self._console, refresh_per_second=2)
        self._line_printed_at = -math.inf
        self._tensorboard = _open_tensorboard(run_folder, start_step, resolved) if config.tensorboard else None
        self._wandb = self._open_wandb(start_step, resolved) if config.wandb else None

    def __enter__(self) -> "Tracker":
        if self._console.is_interactive:
            # Loggers made before the display hold the real stderr and would write across it.
            streams = {id(sys.stdout): "stdout", id(sys.stderr): "stderr"}
            self._borrowed_handlers = [(h, h.stream) for h in _stream_handlers() if id(h.stream) in streams]
            self._live.start(refresh=True)
            for handler, stream in self._borrowed_handlers:
                handler.setStream(getattr(sys, streams[id(stream)]))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    @property
    def elapsed(self) -> float:
        """Seconds since this process began."""
        return self._screen.elapsed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one step's metrics as one row, everywhere. Steps must ascend; NaN and inf are null in the row."""
        assert step > self._last_step, f"step {step} was logged after step {self._last_step}"
        self._last_step = step
        metrics = {key: float(value) for key, value in metrics.items()}
        self._metrics.write(json.dumps({"step": step} | _valid_json(metrics)) + "\n")
        self._screen.record(step, metrics)
        if self._tensorboard is not None:
            for key, value in metrics.items():
                self._tensorboard.add_scalar(key, value, step)
        if self._wandb is not None:
            try:
                self._wandb.log(metrics | {"step": step})
            except Exception as error:  # noqa: BLE001 - a dashboard must not end a training run
                self._lose_wandb(error)
        if not self._console.is_interactive:
            now = time.monotonic()
            if "eval/accuracy" in metrics or step == self._total or now - self._line_printed_at >= 1.0:
                self.say(self._screen.line(metrics))
                self._line_printed_at = now

    def wants_samples(self, step: int) -> bool:
        """Whether `samples` would keep anything at this step, so that the caller can skip decoding them."""
        every, kept = self._config.samples_every, self._config.samples_kept
        return every > 0 and kept > 0 and step % every == 0

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append a few of `rows`, spread evenly over them, to samples.jsonl if this step's samples are kept.

        A row may hold anything (prompt, response, reward, parts, finish_reason, fields of the example); what
        JSON has no form for is written as its text.
        """
        if not self.wants_samples(step):
            return
        count = min(self._config.samples_kept, len(rows))
        for row in [rows[i * len(rows) // count] for i in range(count)]:
            self._samples.write(json.dumps({"step": step} | _valid_json(row)) + "\n")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` as what the run is doing now."""
        before, self._screen.phase = self._screen.phase, name
        self._phase_began = time.monotonic()
        try:
            yield
        finally:
            self._screen.phase = before
            self._screen.rollout = None

    def progress(self, done: int, total: int, tokens: int) -> None:
        """Show how far the rollout of this phase is: samples done and in all, and tokens sampled."""
        self._screen.rollout = (done, total, tokens / max(time.monotonic() - self._phase_began, 1e-3))

    def say(self, what: RenderableType) -> None:
        """Print text or anything rich can render, above the live display where there is one."""
        # As Text, because print's own markup and wrapping options would also govern how the display is redrawn.
        text = isinstance(what, str)
        self._console.print(Text(what) if text else what, soft_wrap=text and not self._console.is_interactive)

    def close(self, failed: bool = False) -> None:
        """End the display and finish the files and dashboards; again does nothing.

        `failed` marks the wandb run as crashed.
        """
        if self._closed:
            return
        self._closed = True
        self._screen.phase = "failed" if failed else "done"
        self._live.stop()
        for handler, stream in self._borrowed_handlers:
            handler.setStream(stream)
        self._metrics.close()
        self._samples.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            try:
                self._wandb.finish(exit_code=int(failed))
            except Exception as error:  # noqa: BLE001 - the run is over and its record is on disk
                self._lose_wandb(error)

    def _open_wandb(self, start_step: int, resolved: Mapping[str, Any]) -> Any:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "tracking.wandb=true needs wandb: pip install wandb, or set tracking.wandb=false."
            ) from error
        id_file = self._folder / "wandb" / "id"
        try:
            id_file.parent.mkdir(exist_ok=True)
            if start_step == 0 or not id_file.exists():
                id_file.write_text(secrets.token_hex(4))
            # Silent before init: only then does a missing login raise rather than ask for a key on the terminal.
            # No viewer query: its retries outlive init_timeout and hold up the exit where the network is dead.
            settings = wandb.setup(wandb.Settings(silent=True, x_disable_viewer=True)).settings
            asked = os.environ.get("WANDB_MODE") or settings.mode
            start = partial(
                wandb.init,
                project=self._config.wandb_project,
                name=self._folder.name,
                dir=str(self._folder),
                resume="allow",
                config=_valid_json(resolved),
                # console: wandb would wrap the streams that the live display wraps. The timeouts, in seconds,
                # bound what a bad network can cost.
                settings=wandb.Settings(silent=True, console="off", init_timeout=30, finish_timeout=60),
            )
            try:
                run = start(mode=asked, id=id_file.read_text())
            except Exception as error:  # noqa: BLE001 - no login, no network, a bad key: offline works without
                # Another id, because wandb holds the one of the attempt that failed.
                id_file.write_text(secrets.token_hex(4))
                run = start(mode="offline", id=id_file.read_text())
                self.say(
                    f"wandb: {_first_line(error)} This run is kept offline; upload it later with: "
                    f"wandb sync {Path(run.dir).parent}"
                )
            # A step of our own, because wandb's drops the steps that a resumed run does again.
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
        except Exception as error:  # noqa: BLE001 - a dashboard must not end a training run
            self._lose_wandb(error)
            return None
        return run

    def _lose_wandb(self, error: Exception) -> None:
        self._wandb = None
        self.say(f"warning: wandb stopped ({_first_line(error)}); the run goes on and metrics.jsonl has every step.")


def _stdout_console() -> Console:
    # Decided here, because rich also takes FORCE_COLOR, which CI sets, for a terminal.
    terminal = sys.stdout.isatty()
    return Console(force_terminal=terminal, width=None if terminal else 100)


def _stream_handlers() -> list[logging.StreamHandler]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in dict.fromkeys(handlers) if isinstance(handler, logging.StreamHandler)]


def _cut(path: Path, start_step: int) -> list[dict]:
    """Leave only the rows up to `start_step` in the jsonl file at `path`, and return them."""
    if not path.exists():
        return []
    if start_step == 0:
        if path.stat().st_size:
            path.replace(path.with_name(f"{path.stem}.previous.jsonl"))
        return []
    rows = [row for row in read_rows(path) if row["step"] <= start_step]
    # Beside it and then over it: a kill in between must not cost the rows that are kept.
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewritten.replace(path)
    return rows


def _open_tensorboard(folder: Path, start_step: int, resolved: Mapping[str, Any]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tracking.tensorboard=true needs TensorBoard: pip install tensorboard, or set tracking.tensorboard=false."
        ) from error
    # purge_step hides what a killed run logged after the checkpoint.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else 0)
    writer.add_text("config", f"```\n{json.dumps(_valid_json(resolved), indent=2)}\n```", start_step)
    return writer


def _valid_json(value: Any) -> Any:
    """`value` in what JSON has: tensors and arrays as lists, NaN and inf as null, the unknown as its text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _valid_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_valid_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _short(value: float) -> str:
    if value != 0 and math.isfinite(value) and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _hms(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
