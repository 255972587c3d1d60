"""The registry of rewards (names, options, columns of a row they need), and the settings that choose among them."""

import difflib
import functools
import importlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

RewardFunction = Callable[..., float]


@dataclass(frozen=True)
class Reward:
    """A registered reward and where it is defined."""

    function: RewardFunction  # (completion: str, row: dict, **options) -> float
    options: tuple[str, ...]  # names of its keyword-only parameters
    needs: tuple[str, ...]  # columns of the row that it reads
    imports: tuple[str, ...]  # modules that it imports when it is called
    file: Path
    line: int


REGISTRY: dict[str, Reward] = {}


def register(name: str, *, needs: Sequence[str] = (), imports: Sequence[str] = ()) -> Callable:
    """Register the decorated function `(completion: str, row: dict, *, option=default, ...) -> float`.

    needs: columns of the row that it reads; a run whose data lacks one stops before it starts.
    imports: heavy modules that it imports in its body. Workers import them when they start, so that the first grade
    is not charged (or killed) for the import.
    Raises ValueError for a name that is taken and for a signature that cannot be called this way.
    """
    if isinstance(needs, str) or isinstance(imports, str):
        raise ValueError(f"Reward {name!r}: needs and imports are lists of names, such as needs=('answer',).")

    def add(function: RewardFunction) -> RewardFunction:
        parameters = list(inspect.signature(function).parameters.values())
        given, options = parameters[:2], parameters[2:]
        positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(positional) < 2 or any(p.kind is not p.KEYWORD_ONLY or p.default is p.empty for p in options):
            raise ValueError(
                f"Reward {name!r} cannot be called as {function.__name__}(completion, row): give it these two "
                "parameters, and options as keyword-only parameters with defaults after a *."
            )
        file, line = Path(function.__code__.co_filename).resolve(), function.__code__.co_firstlineno
        known = REGISTRY.get(name)
        # The same line of the same file again is that file being imported a second time, not a second reward.
        if known and (known.file, known.line) != (file, line):
            places = f"at {known.file}:{known.line} and at {file}:{line}"
            raise ValueError(f"Reward {name!r} is registered twice, {places}: give one of them another name.")
        REGISTRY[name] = Reward(function, tuple(p.name for p in options), tuple(needs), tuple(imports), file, line)
        return function

    return add


def names() -> list[str]:
    """The names of all rewards, sorted; imports the files of this folder, which register theirs."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"rewards.{module.name}")
    return sorted(REGISTRY)


def find(name: str) -> Reward:
    """The reward called `name`; raises ValueError, which names the nearest one, if there is none."""
    known = names()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"There is no reward {name!r}, the nearest is {near!r}: use one of {', '.join(known)}, or add it with "
            f'@register("{name}") on a function (completion, row) -> float in a .py file of {Path(__file__).parent} '
            "or in one listed under rewards.files."
        )
    return REGISTRY[name]


def get(name: str, **options: Any) -> RewardFunction:
    """The reward `name` with `options` as (completion, row) -> float; ValueError for an unknown name or option."""
    reward = find(name)
    for option in options:
        if not reward.options:
            raise ValueError(f"Reward {name!r} has no option {option!r}: it takes none.")
        if option not in reward.options:
            near = difflib.get_close_matches(option, reward.options, n=1, cutoff=0.0)[0]
            takes = ", ".join(reward.options)
            raise ValueError(f"Reward {name!r} has no option {option!r}, the nearest is {near!r}: it takes {takes}.")
    return functools.partial(reward.function, **options)


def load_file(path: str | Path) -> None:
    """Import a file from outside rewards/, once; raises ValueError where it is missing or registers nothing."""
    path = Path(path).expanduser().resolve()
    if any(reward.file == path for reward in REGISTRY.values()):
        return
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"rewards.files lists {path}, which is not a Python file: give the path of a .py file.")
    names()  # the built-in rewards come first, so that a clash of names is blamed on this file
    spec = spec_from_file_location(str(path), path)
    # dataclasses and pickle look a class's module up there.
    sys.modules[str(path)] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    if not any(reward.file == path for reward in REGISTRY.values()):
        raise ValueError(f'{path} is listed in rewards.files but registers no reward: put @register("name") on one.')


@dataclass
class RewardsConfig:
    """Which rewards make up the total, and how they are computed. OmegaConf can hold every field."""

    weights: dict[str, float] = field(
        default_factory=dict,
        metadata={"doc": "Reward name -> weight; the total is the sum of weight * reward (0 only reports it)."},
    )
    options: dict[str, Any] = field(
        default_factory=dict, metadata={"doc": "Reward name -> its keyword options, such as {countdown: {valid: 0.0}}."}
    )
    files: list[str] = field(
        default_factory=list,
        metadata={"doc": "Python files outside rewards/ whose @register functions can be used as well."},
    )
    processes: int = field(default=2, metadata={"doc": "Worker processes of each engine that grade side by side."})
    timeout_seconds: float = field(
        default=5.0, metadata={"doc": "How long one reward may take on one completion before its worker is killed."}
    )


def validate(config: RewardsConfig) -> None:
    """Import the reward files and raise a ValueError of one sentence for the first setting that cannot work."""
    if not config.weights:
        raise ValueError("rewards.weights is empty: give at least one reward, such as rewards.weights.math=1.")
    for key in ("processes", "timeout_seconds"):
        if not 0 < (value := getattr(config, key)) < math.inf:
            raise ValueError(f"rewards.{key} is {value}: it must be a positive number.")
    for file in config.files:
        try:
            load_file(file)
        except ValueError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"rewards.files lists {file}, which fails to import with {why}") from error
    for name, weight in config.weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"rewards.weights.{name} is {weight}: it must be a finite number.")
        for module in find(name).imports:
            if find_spec(module) is None:
                raise ValueError(f"Reward {name!r} needs the Python package {module}: install it with pip.")
    for name, options in config.options.items():
        if name not in config.weights:
            near = difflib.get_close_matches(name, config.weights, n=1, cutoff=0.0)[0]
            raise ValueError(f"rewards.options has {name!r}, which is not in rewards.weights: did you mean {near!r}?")
        if not isinstance(options, Mapping):
            raise ValueError(f"rewards.options.{name} is {options!r}: it must hold option: value settings.")
        get(name, **options)


def missing_columns(config: RewardsConfig, columns: Collection[str]) -> dict[str, list[str]]:
    """Reward name -> the columns it needs that `columns` lacks, for a `config` that is valid; empty if none is."""
    missing = {name: [c for c in find(name).needs if c not in columns] for name in config.weights}
    return {name: absent for name, absent in missing.items() if absent}
