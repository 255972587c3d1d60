"""How every setting is declared, loaded and explained: typed dataclasses, one YAML file, dotted overrides.

Each component declares its settings as a dataclass beside itself, every field with its doc (`option`);
`load` builds the tree from a YAML file and `key=value` overrides; it refuses an unknown key, and names its new name or
the nearest known one. `describe` lists the tree for `--help` and docs/config.md, which MAPPINGS is a sentence of.
"""

import dataclasses
import difflib
import operator
import re
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")

SECRET = re.compile(r"(?i)(api|access|secret|private|auth|hf)[_-]?(key|token)$|^token$|secret$|passw|authorization")
"""Names of what is nobody else's; `key_variable` and `eos_token` are none of them."""

RENAMED = {
    "algorithm.prompts_per_step": "batch.prompts_per_step",
    "algorithm.samples_per_prompt": "batch.samples_per_prompt",
    "algorithm.minibatches_per_step": "batch.minibatches_per_step",
    "algorithm.epochs_per_step": "batch.epochs_per_step",
    "actor.final_learning_rate": "actor.final_learning_rate_ratio",
}
REMOVED = {
    "rollout.min_response_tokens": "a response ends where the policy ends it",
    "rollout.bucket_megabytes": "weights travel in buckets of 512 MiB",
}
"""Settings of earlier versions: their new name, or what holds instead."""


MAPPINGS = (
    "On the command line a whole mapping replaces the file's ('rewards.weights={math: 1}'), a dotted key adds or\n"
    "changes one entry (rewards.weights.math=1), and null takes one away (rewards.weights.math=null)."
)


class ConfigError(ValueError):
    """What the user gave cannot work. The message, one sentence for the command line, names it and the way out."""


def unusable(error: OSError) -> ConfigError:
    """What to say of a file or folder that cannot be used."""
    return ConfigError(f"Cannot use {error.filename} ({error.strerror}): correct the path, or what stands there.")


def option(default: Any, doc: str, stands_for: Callable[[Any], dict[str, Any]] | None = None, **limits: Any) -> Any:
    """A dataclass field with its doc; a default that is a list, a dict or a dataclass type is made anew each time.

    stands_for: gives for the field's value those of other fields of its dataclass; what the user sets wins over them.
    limits, for `check_values`: choices (of the value, or of each in a list), above, at_least, at_most.
    """
    metadata = {"doc": doc, "stands_for": stands_for, **limits}
    if isinstance(default, type | list | dict):
        factory = default if isinstance(default, type) else default.copy
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def choose(value: str, allowed: Collection[str], key: str) -> str:
    """`value` if it is one of `allowed`; raises ConfigError naming the choices otherwise."""
    if value not in allowed:
        raise ConfigError(f"{key}={value!r} is not a choice: use one of {', '.join(allowed)}.")
    return value


def check_values(config: Any, prefix: str = "") -> None:
    """Raise ConfigError for the first setting below `config` that is outside its limits; None is within all."""
    tests = {"above": operator.gt, "below": operator.lt, "at_least": operator.ge, "at_most": operator.le}
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            check_values(value, f"{key}.")
        if choices := field.metadata.get("choices"):
            for each in value if isinstance(value, list) else [value]:
                choose(each, choices, key)
        limits = {name: field.metadata[name] for name in tests if name in field.metadata}
        if value is not None and not all(tests[name](value, limit) for name, limit in limits.items()):
            wanted = " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in limits.items())
            raise ConfigError(f"{key}={value} must be {wanted}.")


def _settings(schema: type, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield (dotted key, field, type) for every setting below `schema`, in declaration order."""
    hints = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _settings(hints[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field, hints[field.name]


def describe(schema: type) -> Iterator[tuple[str, str, Any, str]]:
    """Yield (dotted key, type, default, doc) for every setting below `schema`, in declaration order."""
    for key, field, hint in _settings(schema):
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
        yield key, name.replace("typing.", ""), default, field.metadata["doc"]


def load(schema: type[T], path: str | Path | None = None, overrides: list[str] | tuple[str, ...] = ()) -> T:
    """`schema` from defaults, the YAML file at `path` and `key=value` overrides; ConfigError for what does not fit."""
    given = []
    if path is not None:
        if not Path(path).is_file():
            way_out = "pass the path of a YAML file, such as examples/countdown_cpu.yaml"
            raise ConfigError(f"There is no config file {path}: {way_out}.")
        given.append((str(path), parse(path, OmegaConf.load, path)))
    for override in overrides:
        key, separator, _ = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"{override!r} is not an override: write it as key=value, such as seed=1.")
        if override.count("{") > override.count("}"):
            raise ConfigError(f"{override!r} ends inside braces: quote the whole, so that the shell does not split it.")
        given.append((override, parse(f"The value in {override!r}", OmegaConf.from_dotlist, [override])))
    settings = {key: field for key, field, _ in _settings(schema)}
    mappings = {key: hint for key, _, hint in _settings(schema) if typing.get_origin(hint) is dict}
    # What may be a mapping, or something else.
    open_ended = {key: dict[str, str] for key, _, hint in _settings(schema) if hint is Any}
    for source, layer in given:
        if not OmegaConf.is_dict(layer):
            raise ConfigError(f"{source} must hold `key: value` settings at its top level.")
        _refuse_unknown_keys(OmegaConf.to_container(layer), schema, settings, source)
        for key in mappings:
            value = OmegaConf.select(layer, key)
            if isinstance(value, str) or _lacks_space(value):
                fault = f"Setting {key} in {source} is not a mapping of names to values: write a space after each colon"
                raise ConfigError(f"{fault} and quote the whole, as in '{key}={{x: 1}}', or write {key}.x=1.")
    tree = OmegaConf.structured(schema)
    try:
        for key, field in settings.items():
            if stands_for := field.metadata.get("stands_for"):
                values = [value for _, layer in given if (value := OmegaConf.select(layer, key)) is not None]
                if values:
                    OmegaConf.update(tree, key.rpartition(".")[0], stands_for(values[-1]))
        for source, layer in given:
            try:
                if source in overrides:
                    layer = _make_room(tree, source.partition("=")[0], layer, mappings | open_ended)
                tree = OmegaConf.unsafe_merge(tree, layer)  # without a copy of the whole each time
            except OmegaConfBaseException as error:
                raise _misfit(schema, source, error, error.full_key) from error
            except TypeError as error:  # OmegaConf's own for a list where a mapping stands, and the other way round
                raise _misfit(schema, source, error, source.partition("=")[0]) from error
        return OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise _misfit(schema, f"Setting {error.full_key}", error, error.full_key) from error


def _misfit(schema: type, source: str, error: Exception, place: str) -> ConfigError:
    """What to say where OmegaConf refuses a value of `source` for the setting, or the entry of one, at `place`."""
    said = f"{source}: {str(error).splitlines()[0].rstrip('.')}"
    for key, kind, *_ in describe(schema):
        if re.match(rf"{key}\b", place):
            return ConfigError(f"{said}; {key} takes {kind}{', such as [a, b]' * kind.startswith('list')}.")
    return ConfigError(f"{said}; --help tells what each setting takes.")


def _lacks_space(value: Any) -> bool:
    """Whether a mapping, at any depth, was written as {x:1}, which is YAML for {"x:1": null}."""
    if not isinstance(value, Mapping):
        return False
    return any((":" in str(name) and held is None) or _lacks_space(held) for name, held in value.items())


def _make_room(tree: DictConfig, key: str, layer: DictConfig, mappings: Mapping[str, Any]) -> DictConfig:
    """Take from `tree` what an override of `key` replaces or takes away in `mappings`; returns what is left to merge.

    Raises ConfigError for an entry to take away that is not there. mappings: the types of those settings by their keys.
    """
    for mapping in mappings:
        # What was given as a whole: the mapping, an entry of it, or a group of settings that has it.
        place = key if key.startswith(f"{mapping}.") else mapping
        if place != key and not mapping.startswith(f"{key}."):
            continue
        value = OmegaConf.select(layer, place)
        if isinstance(value, Mapping):
            OmegaConf.update(tree, place, {}, merge=False, force_add=True)
        elif value is None and place != mapping:
            parent, _, name = place.rpartition(".")
            held = OmegaConf.select(tree, parent) or {}
            if name not in held:
                if typing.get_args(mappings[mapping])[1] is Any:
                    continue  # null may be what the option is to be
                has = f"it has {', '.join(map(str, held))}" if held else "it has no entry"
                raise ConfigError(f"{place}=null takes away what {parent} does not have: {has}.")
            with open_dict(held):
                del held[name]
            return OmegaConf.create()
    return layer


def parse(what: str | Path, reader: Callable, text: Any) -> Any:
    """What `reader` makes of `text`; raises ConfigError naming `what` for what is no YAML."""
    try:
        return reader(text)
    except Exception as error:
        raise ConfigError(f"{what} is not valid YAML: {' '.join(str(error).split())}.") from error


def to_yaml(config: Any) -> str:
    """The whole resolved config as YAML, ready to be loaded again but for its secrets."""
    return OmegaConf.to_yaml(OmegaConf.create(without_secrets(config)))


def without_secrets(config: Any) -> dict[str, Any]:
    """The whole config as a mapping, with *** for texts under names such as api_key, and for passwords in URLs."""

    def hide(value: Any, name: str = "") -> Any:
        if isinstance(value, Mapping):
            return {key: hide(held, str(key)) for key, held in value.items()}
        if isinstance(value, list | tuple):
            return [hide(held, name) for held in value]
        if not isinstance(value, str):
            return value
        return "***" if SECRET.search(name) else re.sub(r"(://)[^/\s]+@", r"\1***@", value)

    return hide(dataclasses.asdict(config))


def _refuse_unknown_keys(values: Mapping, schema: type, known: Iterable[str], source: str, prefix: str = "") -> None:
    hints = typing.get_type_hints(schema)
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in hints:
            if RENAMED.get(key) in known:
                raise ConfigError(f"Setting {key} in {source} is called {RENAMED[key]} now.")
            if key in REMOVED:
                raise ConfigError(f"Setting {key} in {source} is gone, leave it out: {REMOVED[key]}.")
            hint = f"did you mean {near}?" if (near := _nearest(key, value, known)) else "--help lists all settings."
            if key in known:  # with dots, which a file does not know
                hint = f"in a file write {': {'.join(key.split('.'))}: ...{'}' * key.count('.')}."
            raise ConfigError(f"Unknown setting {key!r} in {source}: {hint}")
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, Mapping):
                raise ConfigError(f"Setting {key} in {source} must hold settings of its own, not {value!r}.")
            _refuse_unknown_keys(value, hints[name], known, source, key + ".")


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `known` that a mistyped `name` most likely means, if any is as similar to it as `cutoff`, 0 to 1."""
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=cutoff)), None)


def _nearest(key: str, value: Any, known: Iterable[str]) -> str | None:
    """The known setting that an unknown `key` most likely means; `value` may hold settings below it."""
    while isinstance(value, Mapping) and value:
        key, value = f"{key}.{next(iter(value))}", next(iter(value.values()))
    same_name = [k for k in known if k.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    if same_name and "." not in key:
        return same_name[0]
    return nearest(key, same_name, cutoff=0.0) or nearest(key, known)
