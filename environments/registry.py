"""Which environments there are, what each can be asked, and the settings of where they run."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rewards.loading import check_limits, check_positive, import_file, import_folder, refuse_twin

OWN = ("reset", "step", "get_reward", "close")
"""Methods of an environment that no policy calls as a tool."""


@dataclass(frozen=True)
class Environment:
    """A registered environment and where it is defined."""

    name: str
    make: Callable[..., Any]  # with the options, a fresh one for each conversation
    form: Literal["text", "tools"]
    tools: Mapping[str, Callable]  # name -> the function, for its signature and docstring
    options: tuple[str, ...] | None  # names of what `make` takes; None: anything
    seconds: float | None  # a limit of its own for each call
    file: Path
    line: int


REGISTRY: dict[str, Environment] = {}


class Functions:
    """An environment whose tools are plain functions."""

    def __init__(self, functions: Sequence[Callable]) -> None:
        for function in functions:
            setattr(self, function.__name__, function)


def register(name: str, *, seconds: float | None = None) -> Callable:
    """Register the decorated class, or `register(name)([function, ...])` a list of functions, as an environment.

    An instance is made for each conversation, with the config's options as keyword arguments. Methods may be async.

    - text, where it has `step`: `reset(row) -> None | str | list of messages` and `step(text) -> (observation, reward,
      done)`, with what the policy said in its turn, without its end-of-turn token. The observation is text or a list of
      messages. The conversation's reward is the sum of the steps'.
    - tools, otherwise: every public method but reset, get_reward and close, each with type hints and a docstring whose
      part `Args:` describes its parameters; `reset(**row) -> None | str`; a turn without a call ends the conversation,
      whose reward is `get_reward() -> float`.

    `reset` and `close()`, which is called whatever happens, may be left out. What reset returns follows the row's
    prompt (text), or stands in its place (messages). seconds: a limit of its own for each call, in the place of
    environments.timeout_seconds. Raises ValueError for a name that is taken and for a class of neither form.
    """
    if seconds is not None:
        check_positive(f"Environment {name!r}: seconds", seconds)

    def add(made: Any) -> Any:
        tools, form, options = {}, "tools", ()
        if isinstance(made, list | tuple) and made and all(map(inspect.isfunction, made)):
            make, code, tools = partial(Functions, made), made[0].__code__, {each.__name__: each for each in made}
            file, line = code.co_filename, code.co_firstlineno
        elif inspect.isclass(made):
            make, file, line = made, inspect.getfile(made), inspect.getsourcelines(made)[1]
            found = {key: value for key, value in inspect.getmembers(made, callable) if not key.startswith("_")}
            form, options = "text" if "step" in found else "tools", _options_of(made)
            if form == "tools":
                tools = {key: value for key, value in found.items() if key not in OWN}
        else:
            raise ValueError(f"Environment {name!r} is {made!r:.80}: register a class, or a list of functions.")
        if form == "tools" and not tools:
            raise ValueError(
                f"Environment {name!r} ({file}:{line}) has neither step(text) nor a public method that could be a "
                "tool: give it one of them."
            )
        for tool, function in tools.items():
            _check_tool(name, tool, function)
        if form == "text":
            _check_step(name, made)
        place = Path(file).resolve(), line
        refuse_twin(REGISTRY, "Environment", name, *place)
        REGISTRY[name] = Environment(name, make, form, tools, options, seconds, *place)
        return made

    return add


def _options_of(made: type) -> tuple[str, ...] | None:
    if made.__init__ is object.__init__:
        return ()
    parameters = list(inspect.signature(made.__init__).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters)


def _check_step(name: str, made: type) -> None:
    taken = [p for p in inspect.signature(made.step).parameters.values() if p.default is p.empty]
    if len(taken) != 2:  # self and the text
        raise ValueError(f"Environment {name!r}: its step cannot be called as step(text): give it this one parameter.")


def _check_tool(name: str, tool: str, function: Callable) -> None:
    """Raise ValueError where a model could not be told how `tool` is called."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    if not inspect.getdoc(function):
        raise ValueError(f"Environment {name!r}: the tool {tool} has no docstring: tell the policy what it does.")
    for parameter in parameters:
        if parameter.annotation is parameter.empty:
            hint = f"write {parameter.name}: int, or another type, so that the policy can be told"
            raise ValueError(f"Environment {name!r}: parameter {parameter.name} of {tool} has no type hint: {hint}.")


def names() -> list[str]:
    """The names of all environments, sorted; imports the files of this folder, which register theirs."""
    import_folder("environments")
    return sorted(REGISTRY)


def find(name: str) -> Environment:
    """The environment called `name`; raises ValueError, which names the nearest one, if there is none."""
    # names() looks into the folder, which takes too long for each conversation.
    if name not in REGISTRY and name not in (known := names()):
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"There is no environment {name!r}, the nearest is {near!r}: use one of {', '.join(known)}, or add it with "
            f'@register("{name}") on a class in a .py file of {Path(__file__).parent} or in one listed under '
            "environments.files."
        )
    return REGISTRY[name]


def load_file(path: str | Path) -> None:
    """Import a file from outside environments/, once; raises ValueError where it cannot be or registers nothing."""
    path = Path(path).expanduser().resolve()
    if any(environment.file == path for environment in REGISTRY.values()):
        return
    before = names()  # those of this folder come first, so that a clash of names is blamed on this file
    import_file(path, "environments.files")
    if before == sorted(REGISTRY):
        way_out = 'put @register("name") on a class'
        raise ValueError(f"{path} is listed in environments.files but registers no environment: {way_out}.")


@dataclass
class EnvironmentsConfig:
    """What environments the policy converses with, and how they are run. OmegaConf can hold every field."""

    column: str | None = field(
        default=None, metadata={"doc": "The column that names each row's environment, in the place of `environment`."}
    )
    options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"doc": "Environment name -> its keyword options, such as {guess: {mute: true}}."},
    )
    files: list[str] = field(
        default_factory=list,
        metadata={"doc": "Python files outside environments/ whose @register classes can be used as well."},
    )
    processes: int = field(
        default=2, metadata={"doc": "Processes of each engine that environments run in, each conversation in one."}
    )
    timeout_seconds: float = field(default=10.0, metadata={"doc": "How long a call of an environment may take."})
    memory_megabytes: int = field(
        default=4096, metadata={"doc": "Memory of its own that such a process, and each that it starts, may take."}
    )
    max_turns: int = field(default=8, metadata={"doc": "Turns of the policy after which a conversation is cut."})
    max_turn_tokens: int | None = field(
        default=None,
        metadata={
            "doc": "Longest turn; null: what is left of rollout.max_response_tokens, which is of "
            "a whole conversation without its prompt."
        },
    )
    max_observation_tokens: int = field(
        default=512, metadata={"doc": "Longest text that an environment may say at once; more is cut, and counted."}
    )
    on_error: str = field(
        default="tell",
        metadata={"doc": "What an error of an environment does: tell (it to the policy) or end (the conversation)."},
    )


def validate(config: EnvironmentsConfig, name: str | None) -> None:
    """Import the files and raise a ValueError of one sentence for the first setting that cannot work."""
    check_limits("environments", config, "max_turns", "max_observation_tokens")
    if config.max_turn_tokens is not None and config.max_turn_tokens < 1:
        raise ValueError(f"environments.max_turn_tokens is {config.max_turn_tokens}: give at least 1, or null.")
    if config.on_error not in ("tell", "end"):
        raise ValueError(f"environments.on_error is {config.on_error!r}: it must be tell or end.")
    if name is not None and config.column is not None:
        raise ValueError(f"environment={name} and environments.column={config.column} are both set: unset one.")
    for file in config.files:
        load_file(file)
    if name is not None:
        find(name)
    for named, options in config.options.items():
        if not isinstance(options, Mapping):
            raise ValueError(f"environments.options.{named} is {options!r}: it must hold option: value settings.")
        takes = find(named).options
        for option in () if takes is None else options:
            if option not in takes:
                way_out = f"it takes {', '.join(takes)}" if takes else "it takes none"
                raise ValueError(f"Environment {named!r} has no option {option!r}: {way_out}.")
