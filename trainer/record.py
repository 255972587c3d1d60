"""The record of a run: metrics.jsonl and samples.jsonl in its folder, written row by row and read back."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo.config import ConfigError


class Record:
    """The open files of a run's record. Each row holds its `step` first; a row is on disk when the call returns.

    A run that goes on after `start_step` loses the rows of later steps, which it does again, so that the record has
    each step once. `history` are the metrics that stay. Raises ConfigError where the folder cannot be written.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        paths = [folder / "metrics.jsonl", folder / "samples.jsonl"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.history, _ = [_cut(path, start_step) for path in paths]
            # Line buffered: a kill costs no row.
            self._metrics, self._samples = [path.open("a", buffering=1) for path in paths]
        except OSError as error:
            raise ConfigError(
                f"Cannot write the run to {folder} ({error.strerror}): choose another tracking.folder."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one row to metrics.jsonl."""
        self._metrics.write(json.dumps({"step": step} | valid_json(metrics)) + "\n")

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append `rows` to samples.jsonl; they may hold anything (see `valid_json`)."""
        self._samples.writelines(json.dumps({"step": step} | valid_json(row)) + "\n" for row in rows)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()


def read_rows(path: Path) -> list[dict]:
    """All rows of a jsonl file, but for a last line that a kill cut in half.

    Raises ConfigError where a line before the last is not JSON: such a file was edited, not cut.
    """
    rows, lines = [], path.read_text(errors="replace").rstrip("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(f"Line {number} of {path} is not JSON: repair or delete the line.") from error
    return rows


def read_metrics(run_folder: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl by ascending step, null read as NaN; a half-written last line is left out.

    Raises ConfigError where there is no row.
    """
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
    """Leave only the rows up to `start_step` in the file at `path`, and return them."""
    if not path.exists() or not path.stat().st_size:
        return []
    assert start_step > 0, f"{path} is the record of an earlier run, which Run.begin() moves aside"
    rows = [row for row in read_rows(path) if row["step"] <= start_step]
    # A new file takes the place of the old one: a kill in between must not cost the rows that stay.
    rewritten = path.with_suffix(".tmp")
    rewritten.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewritten.replace(path)
    return rows
