"""The registry of rewards (forms, options, columns of a row they need), and the settings that choose among them."""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rewards.loading import check_limits, check_positive, import_file, import_folder, refuse_twin

RewardFunction = Callable[..., Any]
NOT_GIVEN = ("completion_ids", "trainer_state", "log_metric", "log_extra")  # what only TRL's own trainer can pass


class Example(NamedTuple):
    """What a reward gives to a completion: `value`, None where it does not apply, with `options` alone.

    For a reward that sees its group these are the lists of a group's completions, rows and values.
    """

    completion: str | Sequence[str]
    row: dict | Sequence[dict]
    value: float | Sequence[float | None] | None
    options: Mapping[str, Any] = {}

    def samples(self) -> list[tuple[str, dict, float | None]]:
        """(completion, row, value) of each completion; TypeError or ValueError for lists that do not match."""
        alone = isinstance(self.completion, str)
        return [self[:3]] if alone else list(zip(self.completion, self.row, self.value, strict=True))


@dataclass(frozen=True)
class Reward:
    """A registered reward and where it is defined."""

    name: str
    function: RewardFunction
    form: Literal["plain", "batched", "TRL"]  # how the function is called: see register
    options: tuple[str, ...]  # names of its parameters with defaults
    needs: tuple[str, ...]  # columns of the row that it reads
    imports: tuple[str, ...]  # modules that it imports when it is called
    seconds: float | None  # a limit of its own
    examples: tuple[Example, ...]
    file: Path
    line: int
    check: Callable[..., None] | None = None  # raises ValueError for options that cannot work
    sees: Literal["completion", "group"] = "completion"  # what one call is given, if not any that wait

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def missing_imports(self) -> list[str]:
        """Of its imports those that are not installed."""
        return [module for module in self.imports if find_spec(module) is None]

    def call(self, samples: Sequence[tuple[str, dict, str]], options: Mapping[str, Any]) -> Any:
        """What it returns, if async once awaited, for (completion, row, prompt)s: a value if plain, else a list."""
        if self.form == "plain":
            [(completion, row, _)] = samples
            return self.function(completion, row, **options)
        completions, rows, prompts = map(list, zip(*samples, strict=True))
        if self.form == "batched":
            return self.function(completions, rows, **options)
        columns = {column: [row.get(column) for row in rows] for column in dict.fromkeys(chain(*rows))}
        given = {**columns, **options, "prompts": prompts, "completions": completions}
        parameters = inspect.signature(self.function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return self.function(**{name: value for name, value in given.items() if takes_all or name in parameters})


REGISTRY: dict[str, Reward] = {}


def register(
    name: str,
    *,
    needs: Sequence[str] = (),
    imports: Sequence[str] = (),
    seconds: float | None = None,
    examples: Sequence[tuple] = (),
    check: Callable[..., None] | None = None,
    sees: Literal["completion", "group"] = "completion",
) -> Callable:
    """Register the decorated function, which may be `async def`, in the form that its parameters tell:

    - plain: `(completion: str, row: dict, *, option=default, ...) -> float | None`
    - batched: `(completions: list[str], rows: list[dict], *, option=default, ...) -> list[float | None]`
    - TRL's: `(completions, **columns)`, with any of `prompts` (the text that was tokenised) and columns of the row by
      name, each a list with one entry a completion. Completions are strings, with conversations too. Columns without a
      default are needs; a parameter with one takes an option, else the column of its name if there is one.

    None stands for a completion that the reward does not apply to: it is left out of its mean and of the total.
    needs: columns of the row that it reads; a run whose data lacks one stops before it starts.
    imports: heavy modules that it imports in its body. Workers import them when they start, so that the first grade
    is not charged (or killed) for the import.
    seconds: a limit of its own in the place of rewards.timeout_seconds, for what is slow by nature.
    examples: (completion, row, value) or (completion, row, value, options); a run refuses a reward that fails one.
    check: called with the config's options before a run; raises ValueError where they cannot work on this machine.
    sees: "group" for one that takes many and compares: each call is given all completions to one prompt, once the last
    is sampled, and no others. Its examples are (completions, rows, values) or (completions, rows, values, options).
    Raises ValueError for a name that is taken, a signature that cannot be called this way and examples of no such form.
    """
    if isinstance(needs, str) or isinstance(imports, str):
        raise ValueError(f"Reward {name!r}: needs and imports are lists of names, such as needs=('answer',).")
    if seconds is not None:
        check_positive(f"Reward {name!r}: seconds", seconds)
    if sees not in ("completion", "group"):
        raise ValueError(f"Reward {name!r}: sees is {sees!r}: it must be 'completion' or 'group'.")

    def add(function: RewardFunction) -> RewardFunction:
        form, options, columns = _read_signature(name, function)
        if sees == "group" and form == "plain":
            raise ValueError(f"Reward {name!r} sees its group: give it the parameters completions and rows, or TRL's.")
        file, line = Path(function.__code__.co_filename).resolve(), function.__code__.co_firstlineno
        refuse_twin(REGISTRY, "Reward", name, file, line)
        shown = tuple(_read_example(name, example, options, sees == "group") for example in examples)
        all_needs = tuple(dict.fromkeys((*needs, *columns)))
        rest = tuple(imports), seconds, shown, file, line, check, sees
        REGISTRY[name] = Reward(name, function, form, options, all_needs, *rest)
        return function

    return add


def _read_signature(name: str, function: RewardFunction) -> tuple[str, tuple[str, ...], list[str]]:
    """The form of a reward's function, its options, and the columns that it names."""
    parameters = list(inspect.signature(function).parameters.values())
    first = [p.name for p in parameters[:2]]
    if "completions" in [p.name for p in parameters] and first != ["completions", "rows"]:
        if any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters):
            called = f"{function.__name__}(completions=..., COLUMN=...)"
            raise ValueError(f"Reward {name!r} cannot be called as {called}: give it parameters passed by name.")
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in ("prompts", "completions")]
        columns = [p.name for p in named if p.default is p.empty]
        for asked in set(NOT_GIVEN).intersection(columns):
            way_out = f"give it a default, such as {asked}=None, or do without it"
            raise ValueError(f"Reward {name!r} asks for {asked}, which only TRL's own trainer passes: {way_out}.")
        return "TRL", tuple(p.name for p in named if p.default is not p.empty), columns
    given, options = parameters[:2], parameters[2:]
    positional = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 or any(p.kind is not p.KEYWORD_ONLY or p.default is p.empty for p in options):
        way_out = "these two parameters, or completions and rows for many at once, and options as keyword-only ones"
        called = f"{function.__name__}(completion, row)"
        raise ValueError(f"Reward {name!r} cannot be called as {called}: give it {way_out} with defaults after a *.")
    return "batched" if first == ["completions", "rows"] else "plain", tuple(p.name for p in options), []


def _read_example(name: str, given: Any, options: Sequence[str], group: bool) -> Example:
    kinds, form = (str, dict, int | float | None), "(completion, row, value) or (completion, row, value, options)"
    form += ", such as ('4', {'answer': '4'}, 1.0)"
    if group:
        form = "(completions, rows, values), with options if need be, such as (['4', 'four'], [{}, {}], [1.0, 0.0])"
    try:
        example = Example(*given)
        samples = example.samples() if isinstance(example.completion, str) != group else []
    except (TypeError, ValueError):
        samples = []
    if not samples or not all(all(map(isinstance, s, kinds)) for s in samples) or not isinstance(example[3], Mapping):
        raise ValueError(f"Reward {name!r} has the example {given!r:.200}, which is not {form}.")
    _check_options(name, options, example.options)
    return example


def names() -> list[str]:
    """The names of all rewards, sorted; imports the files of this folder, which register theirs."""
    import_folder("rewards")
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
    """The function of the reward `name` with `options`, in its form; ValueError for an unknown name or option."""
    reward = find(name)
    _check_options(name, reward.options, options)
    return functools.partial(reward.function, **options)


def _check_options(name: str, known: Sequence[str], given: Collection[str]) -> None:
    for option in given:
        if not known:
            raise ValueError(f"Reward {name!r} has no option {option!r}: it takes none.")
        if option not in known:
            near, takes = difflib.get_close_matches(option, known, n=1, cutoff=0.0)[0], ", ".join(known)
            raise ValueError(f"Reward {name!r} has no option {option!r}, the nearest is {near!r}: it takes {takes}.")


def load_file(path: str | Path) -> None:
    """Import a file from outside rewards/, once; raises ValueError where it cannot be or registers nothing."""
    path = Path(path).expanduser().resolve()
    if any(reward.file == path for reward in REGISTRY.values()):
        return
    names()  # the built-in rewards come first, so that a clash of names is blamed on this file
    import_file(path, "rewards.files (or --file)")
    if not any(reward.file == path for reward in REGISTRY.values()):
        raise ValueError(f'{path} is listed in rewards.files but registers no reward: put @register("name") on one.')


def setting(default: Any, doc: str) -> Any:
    """A field of the config with its doc; a default that is a type is made anew each time."""
    kind = "default_factory" if isinstance(default, type) else "default"
    return field(**{kind: default}, metadata={"doc": doc})


@dataclass
class RewardsConfig:
    """Which rewards make up the total, and how they are computed. OmegaConf can hold every field."""

    weights: dict[str, float] = setting(
        dict, "Reward name -> weight; the total is the sum of weight * reward (0 only reports it)."
    )
    options: dict[str, Any] = setting(dict, "Reward name -> its keyword options, such as {countdown: {valid: 0.0}}.")
    files: list[str] = setting(list, "Python files outside rewards/ whose @register functions can be used as well.")
    processes: int = setting(2, "Worker processes of each engine that grade side by side.")
    timeout_seconds: float = setting(
        5.0, "How long a reward may take on a completion (a batched one: a call) before its worker is killed."
    )
    timeouts: dict[str, float] = setting(
        dict, "Reward name -> its own limit in seconds, such as {judge: 120}; wins over what it asks for."
    )
    memory_megabytes: int = setting(4096, "Memory of its own that a worker process, and each that it starts, may take.")


def validate(config: RewardsConfig) -> None:
    """Import the reward files and raise a ValueError of one sentence for the first setting that cannot work."""
    if not config.weights:
        raise ValueError("rewards.weights is empty: give at least one reward, such as rewards.weights.math=1.")
    check_limits("rewards", config)
    for file in config.files:
        load_file(file)
    for name, weight in config.weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"rewards.weights.{name} is {weight}: it must be a finite number.")
        for module in find(name).missing_imports():
            raise ValueError(f"Reward {name!r} needs the Python package {module}: install it with pip.")
    for key in ("options", "timeouts"):
        for name in getattr(config, key).keys() - config.weights.keys():
            near = difflib.get_close_matches(name, config.weights, n=1, cutoff=0.0)[0]
            raise ValueError(f"rewards.{key} has {name!r}, which is not in rewards.weights: did you mean {near!r}?")
    for name, seconds in config.timeouts.items():
        check_positive(f"rewards.timeouts.{name}", seconds)
    for name, options in config.options.items():
        if not isinstance(options, Mapping):
            raise ValueError(f"rewards.options.{name} is {options!r}: it must hold option: value settings.")
        get(name, **options)
    for name in config.weights:
        if check := find(name).check:
            check(**config.options.get(name, {}))


def missing_columns(config: RewardsConfig, columns: Collection[str]) -> dict[str, list[str]]:
    """Reward name -> the columns it needs that `columns` lacks, for a `config` that is valid; empty if none is."""
    missing = {name: [c for c in find(name).needs if c not in columns] for name in config.weights}
    return {name: absent for name, absent in missing.items() if absent}
