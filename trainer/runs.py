"""Which folder a run has, what of an earlier run stands in it, and that no earlier run is lost.

`open_run` decides before anything is loaded; `Run.begin` acts when the settings and the data have been accepted.
"""

import itertools
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo.config import ConfigError, nearest
from trainer.checkpoint import complete_checkpoints, read_progress
from trainer.config import RunConfig, TrackingConfig


@dataclass(frozen=True)
class Run:
    """The folder of a run, and the checkpoint that it goes on from, if any."""

    folder: Path
    resumed: Path | None = None
    step: int = 0  # of that checkpoint
    data: dict[str, Any] | None = None  # the state of the data at that checkpoint

    def check_unfinished(self, steps: int | None) -> None:
        """Raise ConfigError where a run of so many `steps` has none left; None: they are not known yet."""
        if self.resumed is not None and steps is not None and self.step >= steps:
            raise ConfigError(
                f"checkpoint.resume=true, but {self.folder} is finished: its newest checkpoint is of step {self.step} "
                f"and steps={steps}; raise steps to train on, or write the policy with python -m trainer export."
            )

    def begin(self) -> str:
        """Move an earlier run's folder to the first free NAME.previous-N; returns a sentence for the user."""
        if self.resumed is not None:
            return f"Going on after step {self.step} from {self.resumed}."
        if not holds_run(self.folder):
            return f"The run is in {self.folder}."
        aside = _free_name(self.folder)
        try:
            self.folder.rename(aside)
        except OSError as error:
            failed = f"Cannot move {self.folder} to {aside} ({error.strerror})"
            raise ConfigError(f"{failed}: choose another tracking.name.") from error
        return f"The run is in {self.folder}, and the earlier one of that name in {aside} now."


def open_run(config: RunConfig) -> Run:
    """The run that `config` asks for; changes nothing on disk.

    Raises ConfigError where the name has checkpoints but neither checkpoint.resume nor checkpoint.overwrite is set,
    where there is nothing to resume, and where the model or the data is in a folder that would be moved.
    """
    folder = run_folder(config.tracking)
    checkpoints = complete_checkpoints(folder)
    if config.checkpoint.resume:
        if not checkpoints:
            raise ConfigError(f"checkpoint.resume=true, but {folder} has no checkpoint: {_way_out(config.tracking)}")
        newest = max(checkpoints)
        run = Run(folder, checkpoints[newest], newest, read_progress(checkpoints[newest])["data"])
        run.check_unfinished(config.steps)
        return run
    if checkpoints and not config.checkpoint.overwrite:
        raise ConfigError(
            f"{folder} has checkpoints of an earlier run (steps {', '.join(map(str, checkpoints))}): go on with it by "
            "checkpoint.resume=true, choose another tracking.name, or begin anew by checkpoint.overwrite=true, which "
            f"moves it to {_free_name(folder)}."
        )
    inputs = [("model.path", config.model.path), ("data.train", config.data.train)]
    inputs += [("data.eval", held_out.eval) for held_out in config.data.held_out_sets().values()]
    for key, path in inputs:
        if path and holds_run(folder) and folder.resolve() in Path(path).expanduser().resolve().parents:
            moved = f"is in {folder}, which holds an earlier run and would be moved to {_free_name(folder)}"
            raise ConfigError(f"{key}={path} {moved}: choose another tracking.name.")
    return Run(folder)


def run_folder(tracking: TrackingConfig) -> Path:
    """The folder a run writes to. One without a name is named after the second in which this is called."""
    return Path(tracking.folder) / (tracking.name or datetime.now().strftime("%Y%m%d-%H%M%S"))


def holds_run(folder: Path) -> bool:
    """Whether a run has left checkpoints in `folder`, or a record that is not empty."""
    record = [path for path in (folder / "metrics.jsonl", folder / "samples.jsonl") if path.is_file()]
    return bool(complete_checkpoints(folder)) or any(path.stat().st_size for path in record)


def _free_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}.previous-{number}") for number in itertools.count(1))
    return next(path for path in names if not path.exists())


def _way_out(tracking: TrackingConfig) -> str:
    """What to do where the run has no checkpoint to go on from."""
    root, begin = Path(tracking.folder), "set checkpoint.resume=false to begin it."
    runs = (path.parent for depth in ("*", "*/*") for path in root.glob(f"{depth}/checkpoints"))
    names = sorted(str(run.relative_to(root)) for run in runs if complete_checkpoints(run))
    if (root / tracking.name).exists() or not names:
        return begin
    if near := nearest(tracking.name, names):
        return f"did you mean tracking.name={near}?"
    return f"correct tracking.name ({', '.join(names)}), or {begin}"
