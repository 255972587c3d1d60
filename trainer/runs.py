"""Which folder a run has, what of an earlier run stands in it, and that no earlier run is lost.

`open_run` decides before anything is loaded; `Run.begin` acts when the settings and the data have been accepted.
"""

import itertools
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from grpo.config import ConfigError, describe, nearest, parse, to_yaml
from trainer.checkpoint import complete_checkpoints, newest_whole, read_progress
from trainer.config import RunConfig, TrackingConfig


@dataclass(frozen=True)
class Run:
    """The folder of a run, and the checkpoint that it goes on from, if any."""

    folder: Path
    resumed: Path | None = None
    step: int = 0  # of that checkpoint
    data: dict[str, Any] | None = None  # the state of the data at that checkpoint
    auto: bool = False  # whether a run that is finished is nothing to refuse
    passed: tuple[str, ...] = ()  # a sentence about each newer checkpoint, which is damaged
    changed: str = ""  # one on the settings that were others before

    def check_unfinished(self, steps: int | None) -> None:
        """Raise ConfigError where a run of so many `steps` has none left; None: they are not known yet."""
        if self.resumed is not None and not self.auto and steps is not None and self.step >= steps:
            finished = f"{self.folder} is finished: its newest checkpoint is of step {self.step} and steps={steps}"
            way_out = "raise steps to train on, or write the policy with python -m trainer export"
            raise ConfigError(f"checkpoint.resume=true, but {finished}; {way_out}.")

    def begin(self) -> str:
        """Move an earlier run's folder to the first free NAME.previous-N; returns what to tell the user."""
        if self.resumed is not None:
            for step, path in complete_checkpoints(self.folder).items():
                if step > self.step:  # damaged; the next one that is saved removes it
                    path.rename(path.with_suffix(".partial"))
            return "\n".join((*self.passed, f"Going on after step {self.step} from {self.resumed}.{self.changed}"))
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
        newest, passed = newest_whole(folder)
        if newest is None and (passed or config.checkpoint.resume is True):
            way_out = "begin anew by checkpoint.overwrite=true." if passed else _way_out(config.tracking)
            raise ConfigError(" ".join((*passed, f"checkpoint.resume=true, but {folder} has no checkpoint: {way_out}")))
        if newest is not None:
            progress, auto = read_progress(newest), config.checkpoint.resume == "auto"
            rest = tuple(passed), compare_settings(folder, config)
            run = Run(folder, newest, progress["step"], progress["data"], auto, *rest)
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


def compare_settings(folder: Path, config: RunConfig) -> str:
    """A sentence on the settings that were others when the run in `folder` began, as its config.yaml says.

    Raises ConfigError where the model was another: a checkpoint has neither its tokenizer nor what LoRA does not train.
    """
    if not (saved := folder / "config.yaml").is_file():
        return ""
    before, now = parse(saved, OmegaConf.load, saved), OmegaConf.create(to_yaml(config))
    was, path = OmegaConf.select(before, "model.path"), config.model.path
    if was and Path(was).expanduser().resolve() != Path(path or "").expanduser().resolve():
        raise ConfigError(
            f"checkpoint.resume goes on with {folder}, a run of model.path={was}, not of {path}: set it back, choose "
            f"another tracking.name, or correct {saved} where the model has only moved."
        )
    missing, changed = object(), []
    for key, *_ in describe(type(config)):
        old, new = OmegaConf.select(before, key, default=missing), OmegaConf.select(now, key)
        if old not in (new, missing) and key != "epochs" and not key.startswith(("checkpoint.", "tracking.")):
            changed.append(f"{key}={new} (was {old})")
    return f" Changed since: {', '.join(changed)}." if changed else ""


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
