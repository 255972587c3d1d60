"""Settings: what wins over what, and that nothing wrong is taken silently."""

import dataclasses
import operator
from dataclasses import dataclass
from typing import Any

import pytest

from grpo.algorithm import AlgorithmConfig
from grpo.config import ConfigError, choose, describe, load, option, to_yaml
from grpo.data_config import DataConfig


@dataclass
class Optimizer:
    rate: float = option(0.1, "How far a step goes.")
    betas: list[float] = option([0.9, 0.95], "Decay rates.")


@dataclass
class Settings:
    seed: int = option(0, "Where randomness starts.")
    name: str | None = option(None, "What it is called.")
    fast: bool = option(False, "Whether to hurry.")
    weights: dict[str, float] = option({"a": 1.0}, "What counts how much.")
    options: dict[str, Any] = option({}, "What else.")
    optimizer: Optimizer = option(Optimizer, "How to step.")
    warmup: Optimizer = option(Optimizer, "How to start.")


def refusal(path=None, overrides=()):
    """The one-sentence error that these settings are refused with."""
    with pytest.raises(ConfigError) as error:
        load(Settings, path, overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_overrides_win_over_the_file_and_the_file_over_the_defaults(yaml):
    path = yaml("seed: 1\nname: from file\noptimizer: {rate: 0.2}\n")
    config = load(Settings, path, ["seed=2", "optimizer.betas=[0.1,0.2]", "seed=3"])
    assert type(config) is Settings
    assert type(config.optimizer) is Optimizer
    assert config == Settings(seed=3, name="from file", optimizer=Optimizer(0.2, [0.1, 0.2]))


def test_without_a_file_the_defaults_stand_and_are_not_shared():
    first, second = load(Settings), load(Settings)
    assert first == Settings()
    first.optimizer.betas.append(0.5)
    Settings().weights["b"] = 2.0
    Settings().optimizer.betas.append(0.5)
    assert second == load(Settings) == Settings()


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("name=null", None),
        ("name=a=b", "a=b"),
        ("fast=true", True),
        ("optimizer.rate=1e-6", 1e-6),
        ("optimizer.rate=2", 2.0),
        ("seed=-3", -3),
    ],
)
def test_an_override_is_read_as_the_type_of_its_setting(override, expected):
    value = operator.attrgetter(override.partition("=")[0])(load(Settings, overrides=[override]))
    assert (value, type(value)) == (expected, type(expected))


def test_entries_of_a_dict_are_added_by_file_and_by_override(yaml):
    config = load(Settings, yaml("weights: {b: 2}\n"), ["weights.c=3.5", "weights.a=0"])
    assert config.weights == {"a": 0.0, "b": 2.0, "c": 3.5}


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("sed", "seed"),
        ("optimizer.rat", "optimizer.rate"),
        ("optimiser.betas", "optimizer.betas"),
        ("betas", "optimizer.betas"),  # stands elsewhere
        ("optimizer.seed", "seed"),
        ("warmup.beta", "warmup.betas"),
    ],
)
def test_an_unknown_key_names_itself_its_source_and_the_nearest_known_one(key, nearest, yaml):
    message = refusal(overrides=[f"{key}=1"])
    assert f"in {key}=1: did you mean {nearest}?" in message
    first, *rest = key.split(".")
    path = yaml(f"{first}: {{{rest[0]}: 1}}\n" if rest else f"{first}: 1\n")
    message = refusal(path)
    assert str(path) in message
    assert message.startswith("Unknown setting") or "must hold settings" in message


def test_a_key_unlike_any_other_points_to_the_list():
    assert "lists all settings" in refusal(overrides=["zzzzzzzz=1"])


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("seed=many", ["seed", "many"]),
        ("seed=1.5", ["seed", "1.5"]),
        ("fast=perhaps", ["fast", "perhaps"]),
        ("optimizer.rate=quick", ["optimizer.rate", "quick"]),
        ("optimizer.betas=[a]", ["optimizer.betas"]),
        ("weights.a=heavy", ["weights.a", "heavy"]),
        ("optimizer.betas={a: 1}", ["optimizer.betas"]),
        ("optimizer.betas.0=1", ["optimizer.betas"]),
        ("weights=[1]", ["weights"]),
        ("seed=null", ["seed"]),
        ("optimizer=3", ["optimizer", "3", "settings of its own"]),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(override, names):
    message = refusal(overrides=[override])
    assert [name for name in names if name not in message] == []


def test_a_missing_file_is_named(tmp_path):
    assert str(tmp_path / "none.yaml") in refusal(tmp_path / "none.yaml")
    assert str(tmp_path) in refusal(tmp_path)


NO_YAML, NO_KEYS = "settings.yaml is not valid YAML", "at its top level"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("seed: [1\n", NO_YAML),
        ("a: b: c\n", NO_YAML),
        ("\tseed: 1\n", NO_YAML),
        ("- 1\n- 2\n", NO_KEYS),
        ("- seed\n", NO_KEYS),
    ],
)
def test_a_file_that_holds_no_settings_is_refused(text, says, yaml):
    assert says in refusal(yaml(text))


@pytest.mark.parametrize("override", ["seed", "--seed", "=1", ""])
def test_an_override_without_key_and_value_is_refused(override):
    assert f"{override!r} is not an override: write it as key=value" in refusal(overrides=[override])


def test_an_override_that_is_no_yaml_or_refers_to_nothing_is_refused():
    assert "The value in 'seed=[1' is not valid YAML" in refusal(overrides=["seed=[1"])
    assert "seed" in refusal(overrides=["seed=${nothing}"])


@pytest.mark.parametrize(
    ("overrides", "weights"),
    [
        (["weights={c: 1}"], {"c": 1.0}),
        (["weights={c: 1}", "weights.d=2"], {"c": 1.0, "d": 2.0}),
        (["weights.c=1", "weights.b=3"], {"a": 1.0, "b": 3.0, "c": 1.0}),
        (["weights.a=null"], {"b": 2.0}),
        (["weights.a=null", "weights.a=4"], {"b": 2.0, "a": 4.0}),
        (["weights={}"], {}),
    ],
)
def test_a_mapping_of_the_command_line_replaces_and_a_dotted_key_adds_or_takes_away(overrides, weights, yaml):
    assert load(Settings, yaml("weights: {b: 2}\n"), overrides).weights == weights


@pytest.mark.parametrize(
    ("override", "held_out"),
    [
        ("eval={c: c.jsonl}", {"c": "c.jsonl"}),
        ("eval.c=c.jsonl", {"a": "a.jsonl", "b": "b.jsonl", "c": "c.jsonl"}),
        ("eval.a=null", {"b": "b.jsonl"}),
        ("eval=c.jsonl", "c.jsonl"),
        ("eval=null", None),
    ],
)
def test_the_same_holds_where_a_setting_may_be_a_mapping_or_text(override, held_out, yaml):
    assert load(DataConfig, yaml("eval: {a: a.jsonl, b: b.jsonl}\n"), [override]).eval == held_out


def test_an_entry_to_take_away_must_be_there_where_null_is_no_value(yaml):
    said = refusal(yaml("weights: {b: 2}\n"), ["weights.c=null"])
    assert "weights.c=null" in said
    assert "it has a, b" in said
    path = yaml("options: {fast: {a: 1, b: 2}}\n")
    assert load(Settings, path, ["options.fast={c: 3}"]).options == {"fast": {"c": 3}}
    assert load(Settings, path, ["options.fast.b=null", "options.slow=null"]).options == {
        "fast": {"a": 1},
        "slow": None,
    }


@pytest.mark.parametrize("given", ["weights={x:1}", "weights=x:1", "options={fast: {x:1}}", "options.fast={x:1}"])
def test_a_mapping_without_spaces_or_split_by_the_shell_is_told_how_to_write_it(given):
    said, key = refusal(overrides=[given]), given.partition("=")[0].partition(".")[0]
    assert f"Setting {key} in {given} is not a mapping" in said
    assert f"'{key}={{x: 1}}'" in said
    assert f"{key}.x=1" in said


def test_an_override_that_the_shell_split_at_a_space_is_told_to_be_quoted():
    assert "quote the whole" in refusal(overrides=["weights={x:", "1}"])


def test_to_yaml_loads_again_as_the_same_settings(yaml):
    config = load(Settings, overrides=["seed=3", "name='null'", "weights.b=2", "optimizer.rate=1e-6", "warmup.rate=1"])
    again = load(Settings, yaml(to_yaml(config)))
    assert again == config
    assert again.name == "null"


@pytest.mark.parametrize("schema", [Settings, AlgorithmConfig, DataConfig])
def test_every_setting_is_described_once_in_order_and_loadable(schema):
    def keys(part, prefix=""):
        for field in dataclasses.fields(part):
            if isinstance(field.default_factory, type) and dataclasses.is_dataclass(field.default_factory):
                yield from keys(field.default_factory, f"{prefix}{field.name}.")
            else:
                yield prefix + field.name

    described = list(describe(schema))
    assert [key for key, *_ in described] == list(keys(schema))
    assert all(doc.strip().endswith(".") for *_, doc in described)


def test_a_description_has_the_type_and_the_default():
    lines = {key: (name, default, doc) for key, name, default, doc in describe(Settings)}
    assert lines["seed"] == ("int", 0, "Where randomness starts.")
    assert lines["name"] == ("str | None", None, "What it is called.")
    assert lines["weights"] == ("dict[str, float]", {"a": 1.0}, "What counts how much.")
    assert lines["warmup.betas"] == ("list[float]", [0.9, 0.95], "Decay rates.")


def test_choose_names_the_choices():
    assert choose("a", ("a", "b"), "x.y") == "a"
    with pytest.raises(ConfigError, match=r"x\.y='c' is not a choice: use one of a, b"):
        choose("c", ("a", "b"), "x.y")
