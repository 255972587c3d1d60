"""How what has a name is found: in the files of a folder of ours, and in those that a config lists.

Rewards and environments are registered in the same way.
"""

import importlib
import math
import pkgutil
import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any


def import_folder(package: str) -> None:
    """Import all files of the folder `package`, which register what they have."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


def import_file(path: Path, key: str) -> None:
    """Import a file that the setting `key` lists; raises ValueError where it cannot be."""
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"{key} lists {path}, which is not a Python file: give the path of a .py file.")
    spec = spec_from_file_location(str(path), path)
    # dataclasses and pickle look a class's module up there.
    sys.modules[str(path)] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ValueError:
        raise
    except (Exception, SystemExit) as error:
        why = f"fails to import with {type(error).__name__}: {error}"
        raise ValueError(f"{key} lists {path}, which {why}; correct the file.") from error


def refuse_twin(registry: Mapping[str, Any], what: str, name: str, file: Path, line: int) -> None:
    """Raise ValueError where `registry` has the `what` called `name` from elsewhere than `file`:`line`.

    The same line of the same file again is that file being imported a second time.
    """
    known = registry.get(name)
    if known and (known.file, known.line) != (file, line):
        places = f"at {known.file}:{known.line} and at {file}:{line}"
        raise ValueError(f"{what} {name!r} is registered twice, {places}: give one of them another name.")


def check_positive(what: str, value: float) -> None:
    """Raise ValueError, which names it as `what`, for a `value` that is not positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{what} is {value}: it must be a positive number.")


def check_limits(group: str, config: Any, *keys: str) -> None:
    """Raise ValueError for a setting of `group` among `keys` that is not positive, or too little memory."""
    for key in ("processes", "timeout_seconds", "memory_megabytes", *keys):
        check_positive(f"{group}.{key}", getattr(config, key))
    if config.memory_megabytes < 32:
        raise ValueError(f"{group}.memory_megabytes is {config.memory_megabytes}: Python alone needs 32 or more.")
