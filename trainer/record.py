"""The record of a run: metrics.jsonl and samples.jsonl in its folder, and copies of the metrics on dashboards."""

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.config import ConfigError
from grpo.sources import reason


def open_record(folder: Path, start_step: int) -> list[dict]:
    """The metrics up to `start_step`; cuts off later rows, which come again. ConfigError where it cannot be written."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)  # samples are the user's alone
        history, _ = [_cut(folder / name, start_step) for name in ("metrics.jsonl", "samples.jsonl")]
    except OSError as error:
        way_out = "choose another tracking.folder"
        raise ConfigError(f"Cannot write the run to {folder} ({error.strerror}): {way_out}.") from error
    return history


def append_rows(path: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append `rows`, which may hold anything (see `valid_json`), each behind its step; ConfigError for a full disk."""
    try:
        with path.open("a") as file:
            file.writelines(json.dumps({"step": step} | valid_json(row)) + "\n" for row in rows)
    except OSError as error:
        way_out = "make room, and go on with checkpoint.resume=true"
        raise ConfigError(f"Cannot write step {step} to {path} ({error.strerror}): {way_out}.") from error


def read_rows(path: Path) -> list[dict]:
    """All rows of a jsonl file but a last line that a kill cut in half; raises ConfigError for any other bad line."""
    rows, lines = [], path.read_text(errors="replace").rstrip("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(f"Line {number} of {path} is not JSON: repair or delete the line.") from error
    return rows


def read_metrics(run_folder: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl by ascending step, null read as NaN; raises ConfigError where there is none."""
    path = run_folder / "metrics.jsonl"
    rows = read_rows(path) if path.is_file() else []
    if not rows:
        raise ConfigError(f"{path} holds no metrics: give the folder of a run that has finished a step.")
    return [{key: math.nan if value is None else value for key, value in row.items()} for row in rows]


def valid_json(value: Any) -> Any:
    """`value` in the types of JSON: tensors and arrays as lists, NaN and inf as null, anything else as its text."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): valid_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [valid_json(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


def _cut(path: Path, start_step: int) -> list[dict]:
    """Leave only the rows up to `start_step` in the file at `path`, made if missing, and return them."""
    path.open("a").close()
    if not path.stat().st_size:
        return []
    assert start_step > 0, f"{path} is the record of an earlier run, which Run.begin() moves aside"
    rows = [row for row in read_rows(path) if row["step"] <= start_step]
    # A new file takes the place of the old one: a kill in between must not cost the rows that stay.
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewritten.replace(path)
    return rows


class TensorBoard:
    """Event files in the run's folder; `resolved`, the configuration, stands beside the curves."""

    def __init__(self, folder: Path, start_step: int, resolved: dict) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides what a killed run logged after the checkpoint.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1 if start_step else 0)
        self._writer.add_text("config", f"```\n{json.dumps(valid_json(resolved), indent=2)}\n```", start_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, offline without login or network; a failure is said once and ends the copy alone."""

    def __init__(self, project: str, folder: Path, start_step: int, resolved: dict, say: Callable[[str], None]) -> None:
        self._say, self._stopped = say, False
        self._run = self._try(lambda: self._start(project, folder, start_step, resolved))

    def _start(self, project: str, folder: Path, start_step: int, resolved: dict) -> Any:
        import wandb

        id_file = folder / "wandb" / "id"
        id_file.parent.mkdir(exist_ok=True)
        if start_step == 0 or not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        # Silent before init: only then does a missing login raise rather than ask for a key on the terminal.
        # No viewer query: its retries outlive init_timeout and hold up the exit where the network is dead.
        settings = wandb.setup(wandb.Settings(silent=True, x_disable_viewer=True)).settings
        mode = os.environ.get("WANDB_MODE") or settings.mode
        arguments = {"project": project, "name": folder.name, "dir": str(folder), "config": valid_json(resolved)}
        # No console: wandb would wrap the streams that the live display wraps. The timeouts (seconds) bound what a bad
        # network can cost.
        own = {"silent": True, "console": "off", "init_timeout": 30, "finish_timeout": 60}
        # Nor the command line, which may hold a key, nor what git has of the user's folder.
        arguments["settings"] = wandb.Settings(**own, x_disable_meta=True, disable_git=True)
        try:
            run = wandb.init(mode=mode, id=id_file.read_text(), resume="allow", **arguments)
        except Exception as error:  # noqa: BLE001 - no login, no network, a bad key: offline works without
            # Another id, because wandb holds the one of the attempt that failed.
            id_file.write_text(secrets.token_hex(4))
            run = wandb.init(mode="offline", id=id_file.read_text(), resume="allow", **arguments)
            kept = f"This run is kept offline; upload it later with: wandb sync {Path(run.dir).parent}"
            self._say(f"wandb: {reason(error)}. {kept}")
        # A step of our own, because wandb's drops the steps that a resumed run does again.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._try(lambda: self._run.log({**metrics, "step": step}))

    def close(self, failed: bool) -> None:
        """Finish the run, marked as crashed where it `failed`."""
        self._try(lambda: self._run.finish(exit_code=int(failed)))

    def _try(self, work: Callable[[], Any]) -> Any:
        """What `work` returns; None once anything has failed."""
        try:
            return None if self._stopped else work()
        except Exception as error:  # noqa: BLE001 - a dashboard must not end a training run
            self._stopped = True
            way_on = "the run goes on and metrics.jsonl has every step"
            self._say(f"warning: wandb stopped ({reason(error)}); {way_on}.")
