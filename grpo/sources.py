"""Where dataset rows come from: a file, a folder of save_to_disk, the Hugging Face hub or a Python function.

`load_rows` finds out which of these a source is. What is wrong with it is a ConfigError of one sentence.
"""

import importlib.util
import inspect
import json
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import httpx
import huggingface_hub
import pyarrow
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from grpo.config import ConfigError, nearest

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""What `datasets` reads a file with, by its suffix."""
HUB_SECONDS = 5


def load_rows(
    source: str, split: str, subset: str | None = None, key: str = "data.train", options: dict | None = None
) -> datasets.Dataset:
    """The rows of `source`; what exists on disk wins over a hub name. Raises ConfigError, naming the setting `key`.

    options: keyword arguments of a Python function; other sources have no use for them.
    """
    path = Path(source).expanduser()
    looks_like_path = source.startswith((".", "/", "~")) or source.endswith(tuple(READERS)) or source.count("/") > 1
    if path.is_file():
        rows = _read_file(path, key)
    elif (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        try:
            rows = datasets.load_from_disk(str(path))
        except (ValueError, OSError) as error:
            wrong = f"is no whole folder of save_to_disk ({reason(error)})"
            raise ConfigError(f"{key}: {source} {wrong}; write or copy it again.") from error
        if isinstance(rows, datasets.DatasetDict):
            if split not in rows:
                wrong = f"{beside(key, 'split')}={split}: {source} has no such split"
                raise ConfigError(f"{wrong}; use one of {', '.join(rows)}.")
            rows = rows[split]
    elif "://" in source:
        way_out = "download the file and give its path, or a dataset's name on the Hugging Face hub"
        raise ConfigError(f"{key}: {source} is an address, which is not read; {way_out}.")
    elif ":" in source:
        rows = _run_function(source, split, key, options or {})
    elif path.is_dir() or not looks_like_path:
        rows = _load_dataset(source, split, subset, key)
    else:
        raise ConfigError(f"{key}: there is no file {source}{_nearest_file(path)}; give the path of a file.")
    if not len(rows):
        raise ConfigError(f"{key}: {source} holds no rows; give a source with at least one.")
    return rows


def _read_file(path: Path, key: str) -> datasets.Dataset:
    if path.suffix not in READERS:
        raise ConfigError(f"{key}: {path} cannot be read; give one of {', '.join(READERS)} or file.py:function.")
    if not path.stat().st_size:
        raise ConfigError(f"{key}: {path} holds no rows; give a source with at least one.")
    try:
        rows = datasets.load_dataset(READERS[path.suffix], data_files=str(path))["train"]
        rows.data.validate(full=True)  # bytes that are no text would be found as late as their row is read
        return rows
    except (datasets.exceptions.DatasetsError, StopIteration, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename and path.name not in str(error.filename):
            way_out = "set HF_HOME to a folder that can be written"
            raise ConfigError(f"{key}: datasets cannot keep a copy of {path} ({reason(error)}); {way_out}.") from error
        if path.suffix == ".jsonl" and (broken := _broken_line(path)):
            raise ConfigError(f"{key}: {broken}; repair or delete the line.") from error
        unread = f"{path} holds no rows that can be read as {path.suffix[1:]}"
        raise ConfigError(f"{key}: {unread} ({reason(error.__cause__ or error)}); repair the file.") from error


def _broken_line(path: Path) -> str | None:
    """Which line of a jsonl file is no object, and why, if one is not."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            if line.strip() and not isinstance(json.loads(line), dict):
                return f"line {number} of {path} is not an object in braces"
        except ValueError as error:
            return f"line {number} of {path} is not JSON ({reason(error)})"
    return None


def _load_dataset(source: str, split: str, subset: str | None, key: str) -> datasets.Dataset:
    try:
        if not Path(source).is_dir() and not datasets.config.HF_HUB_OFFLINE:
            # datasets tries an unreachable hub again for half a minute and more; one short request answers first.
            huggingface_hub.HfApi().dataset_info(source, timeout=HUB_SECONDS)
        return datasets.load_dataset(source, subset, split=split)
    except (RepositoryNotFoundError, HFValidationError) as error:
        wrong = "is neither a file here nor a dataset you can read on the Hugging Face hub"
        raise ConfigError(f"{key}: {source} {wrong}; correct it or give the path of a local file.") from error
    except (ConnectionError, httpx.HTTPError) as error:
        wrong = f"is no file here and the Hugging Face hub cannot be reached ({reason(error)})"
        way_out = "give the path of a local file, or set HF_HUB_OFFLINE=1 if the dataset was downloaded before"
        raise ConfigError(f"{key}: {source} {wrong}; {way_out}.") from error
    except (datasets.exceptions.DatasetsError, ValueError, OSError, RuntimeError) as error:  # the last for a script
        wrong = f"cannot be loaded with {beside(key, 'split')}={split} and data.subset={subset} ({reason(error)})"
        raise ConfigError(f"{key}: {source} {wrong}; correct these or give the path of a local file.") from error


def _run_function(source: str, split: str, key: str, options: dict[str, Any]) -> datasets.Dataset:
    function, file = _find_function(source, key)
    named = inspect.signature(function).parameters
    others = [p for name, p in named.items() if name not in options]
    for option in options:
        if option not in named and not any(p.kind is p.VAR_KEYWORD for p in others):
            near = did_you_mean(option, named)
            raise ConfigError(f"data.options.{option}: {source} takes no such argument{near}; correct the name.")
    takes_split = any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in others)
    try:
        rows = list(function(*[split] * takes_split, **options))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a generator is anybody's code, and this is its report
        raise ConfigError(f"{key}: {source} raised {_blame(error, file)}; correct it.") from error
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{key}: {source} yields {row!r:.60} as row {index}; let it yield dicts.")
    columns = dict.fromkeys(column for row in rows for column in row)
    try:
        return datasets.Dataset.from_dict({column: [row.get(column) for row in rows] for column in columns})
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        mixed = f"the rows of {source} do not share types ({reason(error)})"
        raise ConfigError(f"{key}: {mixed}; give each column one type.") from error


def _find_function(source: str, key: str) -> tuple[Callable[..., Iterable[dict]], str]:
    """The function that `source` names, and the file of its module."""
    module, _, name = source.rpartition(":")
    path = Path(module).expanduser()
    if module.endswith(".py"):
        if not path.is_file():
            raise ConfigError(f"{key}: there is no file {module}{_nearest_file(path)}; give it as file.py:function.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        loaded = importlib.util.module_from_spec(spec)
    try:
        if module.endswith(".py"):
            spec.loader.exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if path.is_file():
            raise ConfigError(f"{key}: {module} imports {error.name}, which is not there: install it.") from error
        way_out = "install it or give file.py:function"
        raise ConfigError(f"{key}: there is no module {module} (missing: {error.name}); {way_out}.") from error
    except (Exception, SystemExit) as error:  # a module is anybody's code, and this is its report
        raise ConfigError(f"{key}: {module} cannot be imported: {_blame(error, str(path))}; correct it.") from error
    function = getattr(loaded, name, None)
    if not callable(function):
        names = [other for other in vars(loaded) if callable(getattr(loaded, other))]
        raise ConfigError(f"{key}: {module} has no function {name}{did_you_mean(name, names)}; name one it has.")
    return function, loaded.__file__


def _blame(error: BaseException, file: str) -> str:
    """What was raised and where: the last line of `file` that it went through, the last of all if there is none."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    where = next((frame for frame in reversed(frames) if frame[0] == file), frames[-1])
    if isinstance(error, SyntaxError):
        where = error.filename, error.lineno
    return f"{type(error).__name__}: {reason(error)} ({where[0]}, line {where[1]})"


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent})"
    return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir() if entry.exists()])


def beside(key: str, name: str) -> str:
    """The setting `name` of what `key` names: data.eval_split of data.eval, data.eval.aime.split of data.eval.aime."""
    return f"{key}_{name}" if key.count(".") == 1 else f"{key}.{name}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " (did you mean NAME?)" with the one of `known` that `name` is likeliest a typing error for, or ""."""
    near = nearest(name, known)
    return f" (did you mean {near}?)" if near else ""


def reason(error: BaseException) -> str:
    """The first line of the error's message, to stand inside a sentence; its type where it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
