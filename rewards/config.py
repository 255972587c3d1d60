"""The settings of the rewards, and the checks that need only the settings and the names of the data's columns."""

import dataclasses
import difflib
import importlib.util
import math
from collections.abc import Iterable, Mapping
from typing import Any

from rewards import registry


@dataclasses.dataclass
class RewardsConfig:
    """Which rewards make up the total, and how they are computed. OmegaConf can hold every field."""

    weights: dict[str, float] = dataclasses.field(
        default_factory=dict,
        metadata={"doc": "Reward name -> weight; the total is the sum of weight * reward (0 only reports it)."},
    )
    options: dict[str, Any] = dataclasses.field(
        default_factory=dict,
        metadata={"doc": "Reward name -> its keyword options, such as {countdown: {valid: 0.0}}."},
    )
    files: list[str] = dataclasses.field(
        default_factory=list,
        metadata={"doc": "Python files outside rewards/ whose @register functions can be used as well."},
    )
    processes: int = dataclasses.field(default=2, metadata={"doc": "Worker processes that grade side by side."})
    timeout_seconds: float = dataclasses.field(
        default=5.0,
        metadata={"doc": "How long one reward may take on one completion before its worker is killed."},
    )


def validate(config: RewardsConfig) -> None:
    """Raise a ValueError of one sentence for the first setting that cannot work.

    This imports the reward files, but not what they import when they are called.
    """
    if not config.weights:
        raise ValueError("rewards.weights is empty: give at least one reward, such as rewards.weights.math=1.")
    for key in ("processes", "timeout_seconds"):
        value = getattr(config, key)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"rewards.{key} is {value}: it must be a positive number.")
    for file in config.files:
        try:
            registry.load_file(file)
        except ValueError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"rewards.files lists {file}, which fails to import with {why}") from error
    for name, weight in config.weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"rewards.weights.{name} is {weight}: it must be a finite number.")
        for module in registry.find(name).imports:
            if importlib.util.find_spec(module) is None:
                raise ValueError(f"Reward {name!r} needs the Python package {module}: install it with pip.")
    for name, options in config.options.items():
        if name not in config.weights:
            near = difflib.get_close_matches(name, config.weights, n=1, cutoff=0.0)[0]
            raise ValueError(f"rewards.options has {name!r}, which is not in rewards.weights: did you mean {near!r}?")
        if not isinstance(options, Mapping):
            raise ValueError(f"rewards.options.{name} is {options!r}: it must hold option: value settings.")
        registry.get(name, **options)


def missing_columns(config: RewardsConfig, columns: Iterable[str]) -> dict[str, list[str]]:
    """Reward name -> the columns it needs that `columns` lacks; empty if nothing is missing.

    Raises ValueError for a reward that does not exist.
    """
    for file in config.files:
        registry.load_file(file)
    present = set(columns)
    missing = {name: [c for c in registry.find(name).needs if c not in present] for name in config.weights}
    return {name: absent for name, absent in missing.items() if absent}
