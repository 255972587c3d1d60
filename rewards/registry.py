"""The registry of rewards: their names, the options they take and the columns of a row they need."""

import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RewardFunction = Callable[..., float]


@dataclasses.dataclass(frozen=True)
class Reward:
    """A registered reward and where it is defined."""

    name: str
    function: RewardFunction  # (completion: str, row: dict, **options) -> float
    options: tuple[str, ...]  # names of its keyword-only parameters
    needs: tuple[str, ...]  # columns of the row that it reads
    imports: tuple[str, ...]  # modules that it imports when it is called
    file: str
    line: int


REGISTRY: dict[str, Reward] = {}


def register(
    name: str, *, needs: Sequence[str] = (), imports: Sequence[str] = ()
) -> Callable[[RewardFunction], RewardFunction]:
    """Register the decorated function `(completion: str, row: dict, *, option=default, ...) -> float`.

    needs: columns of the row that it reads; a run whose data lacks one stops before it starts.
    imports: heavy modules that it imports in its body. Workers import them when they start, so that the first grade
    is not charged (or killed) for the import.
    Raises ValueError for a name that is taken and for a signature that cannot be called this way.
    """
    if isinstance(needs, str) or isinstance(imports, str):
        raise ValueError(f"Reward {name!r}: needs and imports are lists of names, such as needs=('answer',).")

    def add(function: RewardFunction) -> RewardFunction:
        file, line = str(Path(function.__code__.co_filename).resolve()), function.__code__.co_firstlineno
        reward = Reward(name, function, _options(name, function), tuple(needs), tuple(imports), file, line)
        known = REGISTRY.get(name)
        # The same line of the same file again is that file being imported a second time, not a second reward.
        if known is not None and (known.file, known.line) != (reward.file, reward.line):
            raise ValueError(
                f"Reward {name!r} is registered twice, at {known.file}:{known.line} and at "
                f"{reward.file}:{reward.line}: give one of them another name."
            )
        REGISTRY[name] = reward
        return function

    return add


def names() -> list[str]:
    """The names of all rewards, sorted."""
    _discover()
    return sorted(REGISTRY)


def find(name: str) -> Reward:
    """The reward called `name`; raises ValueError, which names the nearest one, if there is none."""
    known = names()
    if name in REGISTRY:
        return REGISTRY[name]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    raise ValueError(
        f"There is no reward {name!r}, the nearest is {near[0]!r}: use one of {', '.join(known)}, or add it with "
        f'@register("{name}") on a function (completion, row) -> float in a .py file of {Path(__file__).parent} '
        "or in one listed under rewards.files."
        if near
        else f"There is no reward {name!r}, and none is registered at all."
    )


def get(name: str, **options: Any) -> RewardFunction:
    """The reward `name` with these `options`, as a function `(completion: str, row: dict) -> float`.

    Raises ValueError for a reward that does not exist and for an option that it does not take.
    """
    reward = find(name)
    for option in options:
        if option not in reward.options:
            near = difflib.get_close_matches(option, reward.options, n=1, cutoff=0.0)
            takes = f"it takes {', '.join(reward.options)}" if reward.options else "it takes none"
            nearest = f", the nearest is {near[0]!r}" if near else ""
            raise ValueError(f"Reward {name!r} has no option {option!r}{nearest}: {takes}.")
    return functools.partial(reward.function, **options) if options else reward.function


def load_file(path: str | Path) -> None:
    """Import a Python file from outside rewards/, which registers its rewards; a second time does nothing.

    Raises ValueError for a file that is missing or registers nothing, and what the file itself raises.
    """
    path = Path(path).expanduser().resolve()
    if any(reward.file == str(path) for reward in REGISTRY.values()):
        return
    if not path.is_file() or path.suffix != ".py":
        raise ValueError(f"rewards.files lists {path}, which is not a Python file: give the path of a .py file.")
    # The built-in rewards come first, so that a clash of names is blamed on this file and not on theirs.
    _discover()
    spec = importlib.util.spec_from_file_location(str(path), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(path)] = module  # dataclasses and pickle look a class's module up there
    spec.loader.exec_module(module)
    if not any(reward.file == str(path) for reward in REGISTRY.values()):
        raise ValueError(f'{path} is listed in rewards.files but registers no reward: put @register("name") on one.')


def _discover() -> None:
    package = importlib.import_module("rewards")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"rewards.{module.name}")


def _options(name: str, function: RewardFunction) -> tuple[str, ...]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())
    given, options = parameters[:2], parameters[2:]
    if (
        len(given) < 2
        or any(p.kind not in positional for p in given)
        or any(p.kind is not inspect.Parameter.KEYWORD_ONLY or p.default is p.empty for p in options)
    ):
        raise ValueError(
            f"Reward {name!r} cannot be called as {function.__name__}(completion, row): give it these two "
            "parameters, and options as keyword-only parameters with defaults after a *."
        )
    return tuple(p.name for p in options)
