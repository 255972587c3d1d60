"""What a run tells its user: the Tracker passes metrics, samples and messages to the record, screen and dashboards.

The Tracker lives on the controller alone. The Stopwatch, which times the phases of a step, is for every rank.
"""

import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from trainer.config import TrackingConfig
from trainer.death import Stopped
from trainer.pulse import Pulse
from trainer.record import TensorBoard, Wandb, append_rows, open_record
from trainer.screen import Screen

PHASES = {
    "engine_start": "starting the engine",
    "actor_start": "loading the weights that are trained",
    "rewards_start": "starting the processes that grade",
    "evaluation": "evaluating the policy as it is",
    "rollout": "sampling and grading the first responses",
    "ref": "computing the reference's log-probabilities",
    "teacher": "computing the teacher's log-probabilities",
    "old_logprobs": "computing the old log-probabilities",
    "update": "making the first update (on CUDA layers are compiled for it)",
}
"""What a run does until its first step is done, by the names of its times."""


class Stopwatch:
    """Adds up the seconds that each phase of a step takes: `with watch("rollout"): ...`.

    `cuda`: wait for the device at both ends, so that queued kernels count for the phase that queued them.
    `phase`: also entered for each phase, such as `Tracker.phase`, which shows it to the user.
    """

    def __init__(self, cuda: bool = False, phase: Callable[[str], AbstractContextManager] = nullcontext) -> None:
        self._cuda, self._phase = cuda, phase
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as `name`; phases may nest, and the same name adds up."""
        with self._phase(name):
            started = self._now()
            try:
                yield
            except Exception as error:
                error.add_note(f"In the phase {name}.")
                raise
            finally:
                self._seconds[name] += self._now() - started

    def metrics(self) -> dict[str, float]:
        """Seconds by "time/NAME" since the last call, from which on the watch counts anew."""
        seconds, self._seconds = self._seconds, defaultdict(float)
        return {f"time/{name}": value for name, value in seconds.items()}

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


class Tracker:
    """Writes a run's record and shows the run, live where stdout is a terminal; for the controller alone.

    `resolved` is the whole configuration, for the dashboards. `start_step` is that of the checkpoint which this process
    goes on from, or 0. Raises ConfigError where `folder`, which is made if missing, cannot be written.
    """

    def __init__(
        self,
        config: TrackingConfig,
        folder: Path,
        total_steps: int,
        resolved: dict,
        start_step: int,
        screen: type[Screen] = Screen,
    ) -> None:
        self._config, self._total, self._start_step = config, total_steps, start_step
        # Whether it is a terminal is decided here, because rich also takes FORCE_COLOR, which CI sets, for one.
        terminal = sys.stdout.isatty()
        self._console = Console(force_terminal=terminal, width=None if terminal else 100)
        self._folder, history = folder, open_record(folder, start_step)
        self._last_step, self._line_printed_at = start_step or -1, float("-inf")
        self._screen = screen(folder.name, total_steps, start_step, history)
        self._closing = ExitStack()
        self._pulse: Pulse | None = None  # until the first step is done
        self._dashboards: list[TensorBoard | Wandb] = []
        if config.tensorboard:
            self._dashboards.append(TensorBoard(folder, start_step, resolved))
        if config.wandb:
            self._dashboards.append(Wandb(config.wandb_project, folder, start_step, resolved, self.say))

    def __enter__(self) -> "Tracker":
        if self._console.is_interactive:
            # Loggers made before the display hold the real stdout or stderr and would write across it.
            streams = {sys.stdout: "stdout", sys.stderr: "stderr"}
            loggers = [logging.root, *logging.root.manager.loggerDict.values()]
            handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
            early = {h: h.stream for h in handlers if isinstance(h, logging.StreamHandler) and h.stream in streams}
            live = Live(get_renderable=lambda: self._screen, console=self._console, refresh_per_second=2)
            live.start(refresh=True)
            for handler, stream in early.items():
                self._closing.callback(handler.setStream, stream)
                handler.setStream(getattr(sys, streams[stream]))
            self._closing.callback(live.stop)
        else:
            self._pulse = self._closing.enter_context(Pulse("", self.say))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind not in (None, Stopped))

    @property
    def elapsed(self) -> float:
        return self._screen.elapsed

    def log(self, step: int, metrics: Mapping[str, float], bad: Sequence[str] = ()) -> None:
        """Record one step's metrics as one row, everywhere, and show what is `bad` in them.

        Steps must ascend; NaN and inf are null in the row.
        """
        assert step > self._last_step, f"step {step} was logged after step {self._last_step}"
        if self._pulse is not None and step > self._start_step:
            self._pulse.end()
        self._last_step = step
        metrics = {key: float(value) for key, value in metrics.items()}
        append_rows(self._folder / "metrics.jsonl", step, [metrics])
        self._screen.record(step, metrics, bad)
        for dashboard in self._dashboards:
            dashboard.log(step, metrics)
        if not self._console.is_interactive:
            now, evaluated = time.monotonic(), any(name.startswith("eval/") for name in metrics)
            if evaluated or step == self._total or now - self._line_printed_at >= 1.0:
                self.say(self._screen.line(metrics))
                self._line_printed_at = now

    def wants_samples(self, step: int) -> bool:
        """Whether `samples` would keep anything at this step."""
        every, kept = self._config.samples_every, self._config.samples_kept
        return every > 0 and kept > 0 and step % every == 0

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append `samples_kept` of `rows`, spread evenly over them, to samples.jsonl if this step's are kept."""
        if self.wants_samples(step):
            count = min(self._config.samples_kept, len(rows))
            kept = [rows[i * len(rows) // count] for i in range(count)]
            append_rows(self._folder / "samples.jsonl", step, kept)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show `name` as what the run is doing now."""
        before, self._screen.phase = self._screen.phase, name
        self._phase_began = time.monotonic()
        if self._pulse is not None and name in PHASES:
            self._pulse(PHASES[name])
        try:
            yield
        finally:
            self._screen.phase = before
            self._screen.rollout = None

    def progress(self, done: int, total: int, tokens: int) -> None:
        """Show how far the rollout of this phase is: samples done, samples in all, tokens sampled so far."""
        self._screen.rollout = (done, total, tokens / max(time.monotonic() - self._phase_began, 1e-3))

    def say(self, what: RenderableType) -> None:
        """Print text or anything rich can render, above the live display where there is one."""
        # As Text, because print's own markup and wrapping options would also govern how the display is redrawn.
        text = isinstance(what, str)
        self._console.print(Text(what) if text else what, soft_wrap=text and not self._console.is_interactive)

    def close(self, failed: bool = False) -> None:
        """End the display and finish the record and the dashboards; a second call does nothing."""
        self._screen.phase = "failed" if failed else "done"
        self._closing.close()
        while self._dashboards:
            self._dashboards.pop().close(failed)
