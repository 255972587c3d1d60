"""Where dataset rows come from: a file, a folder of save_to_disk, the Hugging Face hub or a Python function.

`load_rows` finds out which of these a source is. What is wrong with it is a ConfigError of one sentence.
"""

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

import datasets
import httpx
import huggingface_hub
import pyarrow
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from grpo.config import ConfigError, nearest

READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
"""What `datasets` reads a file with, by its suffix."""


def load_rows(source: str, split: str, subset: str | None = None, key: str = "data.train") -> datasets.Dataset:
    """The rows of `source`; what exists on disk wins over a hub name. Raises ConfigError, naming the setting `key`."""
    path = Path(source).expanduser()
    looks_like_path = source.startswith((".", "/", "~")) or source.endswith(tuple(READERS)) or source.count("/") > 1
    if path.is_file():
        rows = _read_file(path, key)
    elif (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        rows = datasets.load_from_disk(str(path))
        if isinstance(rows, datasets.DatasetDict):
            if split not in rows:
                raise ConfigError(f"{key}_split={split}: {source} has no such split; use one of {', '.join(rows)}.")
            rows = rows[split]
    elif ":" in source:
        rows = _run_function(source, split, key)
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
        return datasets.load_dataset(READERS[path.suffix], data_files=str(path))["train"]
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        unread = f"{path} holds no rows that can be read as {path.suffix[1:]}"
        raise ConfigError(f"{key}: {unread} ({reason(error)}); repair the file.") from error


def _load_dataset(source: str, split: str, subset: str | None, key: str) -> datasets.Dataset:
    try:
        if not Path(source).is_dir() and not datasets.config.HF_HUB_OFFLINE:
            # datasets tries an unreachable hub again for half a minute and more; one short request answers first.
            huggingface_hub.HfApi().dataset_info(source, timeout=10)
        return datasets.load_dataset(source, subset, split=split)
    except (RepositoryNotFoundError, HFValidationError) as error:
        wrong = "is neither a file here nor a dataset you can read on the Hugging Face hub"
        raise ConfigError(f"{key}: {source} {wrong}; correct it or give the path of a local file.") from error
    except (ConnectionError, httpx.HTTPError) as error:
        wrong = f"is no file here and the Hugging Face hub cannot be reached ({reason(error)})"
        way_out = "give the path of a local file, or set HF_HUB_OFFLINE=1 if the dataset was downloaded before"
        raise ConfigError(f"{key}: {source} {wrong}; {way_out}.") from error
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        wrong = f"cannot be loaded with {key}_split={split} and data.subset={subset} ({reason(error)})"
        raise ConfigError(f"{key}: {source} {wrong}; correct these or give the path of a local file.") from error


def _run_function(source: str, split: str, key: str) -> datasets.Dataset:
    rows = list(_find_function(source, key)(split))
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(f"{key}: {source} yields {row!r:.60} as row {index}; let it yield dicts.")
    columns = dict.fromkeys(column for row in rows for column in row)
    try:
        return datasets.Dataset.from_dict({column: [row.get(column) for row in rows] for column in columns})
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        mixed = f"the rows of {source} do not share types ({reason(error)})"
        raise ConfigError(f"{key}: {mixed}; give each column one type.") from error


def _find_function(source: str, key: str) -> Callable[[str], Iterable[dict]]:
    module, _, name = source.rpartition(":")
    if module.endswith(".py"):
        path = Path(module).expanduser()
        if not path.is_file():
            raise ConfigError(f"{key}: there is no file {module}{_nearest_file(path)}; give it as file.py:function.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    else:
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            way_out = "install it or give file.py:function"
            raise ConfigError(f"{key}: there is no module {module} (missing: {error.name}); {way_out}.") from error
    function = getattr(loaded, name, None)
    if not callable(function):
        names = [other for other in vars(loaded) if callable(getattr(loaded, other))]
        raise ConfigError(f"{key}: {module} has no function {name}{did_you_mean(name, names)}; name one it has.")
    return function


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent})"
    return did_you_mean(path.name, [entry.name for entry in path.parent.iterdir()])


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ " (did you mean NAME?)" with the one of `known` that `name` is likeliest a typing error for, or ""."""
    near = nearest(name, known)
    return f" (did you mean {near}?)" if near else ""


def reason(error: Exception) -> str:
    """The first line of the error's message, to stand inside a sentence; its type where it has no message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
