"""Rows of the tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym), which are generated from seeds.

The two sides of a task share no question: its text alone decides, by a hash, on which of them it stands.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import datasets

from grpo.config import ConfigError
from grpo.sources import beside, did_you_mean, reason

PREFIX = "reasoning_gym:"
DEFAULT_SIZES = {"train": 5000, "test": 256}
HELD_OUT_SHARE = 8  # one question in so many is held out
DRAWN_AT_ONCE = 500
FRUITLESS = 2000  # so many draws without a new question: there are no more
FAR = 1 << 30  # between the seeds of the two sides: a row's seed is that of its data set plus its number


def load_task(source: str, split: str, options: dict[str, Any], key: str) -> datasets.Dataset:
    """Rows of the task with prompt, answer and entry (what its scorer needs, as a Python literal).

    split: "train" or "test". options: those of the task, and `size`, how many rows. Raises ConfigError.
    """
    name = source.removeprefix(PREFIX)
    if find_spec("reasoning_gym") is None:
        raise ConfigError(f"{key}={source} needs the package reasoning-gym: pip install reasoning-gym.")
    from reasoning_gym.factory import DATASETS

    if split not in DEFAULT_SIZES:
        raise ConfigError(f"{beside(key, 'split')}={split}: {source} has no such split; use train or test.")
    if name not in DATASETS:
        near = did_you_mean(name, DATASETS)
        raise ConfigError(f"{key}: reasoning-gym has no task {name!r}{near}; correct the name in {source}.")
    known = [field.name for field in fields(DATASETS[name][1])]
    for option in options:
        if option not in known:
            near, those = did_you_mean(option, known), ", ".join(known)
            raise ConfigError(f"data.options.{option}: {source} has no such option{near}; use one of {those}.")
    options = dict(options)
    size, seed = options.pop("size", DEFAULT_SIZES[split]), options.pop("seed", 0)
    if not (isinstance(size, int) and size > 0 and isinstance(seed, int)):
        raise ConfigError(f"data.options: {source} takes whole numbers, not size={size!r} and seed={seed!r}.")
    rows: dict[str, dict[str, Any]] = {}
    fruitless = 0
    for entry in _draw(name, options, seed + FAR * (split == "test"), f"{key}: {source}"):
        question = entry["question"]
        held_out = hashlib.sha256(question.encode()).digest()[0] % HELD_OUT_SHARE == 0
        fruitless += 1
        if held_out == (split == "test") and question not in rows:
            scored = {"task": name, "options": options, **entry}
            rows[question] = {"prompt": question, "answer": entry["answer"], "entry": repr(_plain(scored))}
            fruitless = 0
        if len(rows) >= size:
            return datasets.Dataset.from_list(list(rows.values()))
        if fruitless == FRUITLESS:
            break
    asked, setting = f"{size} were asked for", "data.options.size" if key == "data.train" else beside(key, "limit")
    way_out = f"set {setting}={len(rows)} or give its data.options more room" if rows else "take another task"
    raise ConfigError(f"{key}: {source} has {len(rows)} different questions for {split}, and {asked}; {way_out}.")


def _draw(name: str, options: dict[str, Any], seed: int, said: str) -> Iterator[dict[str, Any]]:
    """Entries without end, each from a seed of its own."""
    import reasoning_gym

    while True:
        try:
            yield from reasoning_gym.create_dataset(name, size=DRAWN_AT_ONCE, seed=seed, **options)
        except Exception as error:  # a task's own checks raise what they like
            why = f"{type(error).__name__}: {reason(error)}"
            raise ConfigError(f"{said} cannot be generated with data.options={options} ({why}).") from error
        seed += DRAWN_AT_ONCE


def _plain(value: Any) -> Any:
    """`value` of Python's own types alone, tuples and keys as they are, so that its repr can be read back."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(map(_plain, value))
    if hasattr(value, "tolist"):
        value = value.tolist()
    return value if isinstance(value, str | int | float | None) else str(value)
