"""An algorithm in a config: presets, what wins over them, and that contradictions are refused."""

import dataclasses
import re

import pytest

from grpo.algorithm import PRESET_SETTINGS, PRESETS, AlgorithmConfig, BatchConfig
from grpo.choices import CHOICES, Choice, apply
from grpo.config import ConfigError, load, to_yaml
from trainer.config import TrainConfig


def algorithm(*overrides, path=None):
    return load(TrainConfig, path, [f"algorithm.{override}" for override in overrides]).algorithm


def check(config, samples=8):
    config.check()
    config.check_group_size(samples)


def refusal(load_or_check, *given, **named):
    """The one sentence that `algorithm` or `check` refuses what is given with."""
    with pytest.raises(ConfigError) as error:
        load_or_check(*given, **named)
    assert "\n" not in str(error.value)
    return str(error.value)


# what cannot work

NOT_GROUPED = {"baseline": "batch_mean", "scale": "none"}
ALONE = {"samples_per_prompt": 1}
CONTRADICTIONS = [
    ("baseline", "samples_per_prompt", ALONE),
    ("baseline", "samples_per_prompt", ALONE | {"baseline": "leave_one_out", "scale": "none"}),
    ("mask_no_signal", "samples_per_prompt", ALONE | {"mask_no_signal": True} | NOT_GROUPED),
    ("resample_rounds", "samples_per_prompt", ALONE | {"resample_rounds": 3} | NOT_GROUPED),
    ("scale", "baseline", {"baseline": "batch_mean"}),
    ("scale", "baseline", {"baseline": "none"}),
    ("scale", "baseline", {"baseline": "batch_mean", "scale": "group_mean"}),
    ("scale", "combine", {"scale": "group_mean", "combine": "normalised"}),
    ("scale", "overlong_share", {"preset": "maxrl", "overlong_share": 0.2}),
    ("scale", "kl_in", {"preset": "maxrl", "kl_coefficient": 0.1, "kl_in": "reward"}),
    ("combine", "samples_per_prompt", ALONE | {"preset": "gdpo"}),
    ("mask_no_signal", "combine", {"preset": "gdpo", "mask_no_signal": True}),
    ("resample_rounds", "combine", {"preset": "dapo", "combine": "normalised"}),
    ("ratio", "clip", {"ratio": "sequence", "clip": "dppo"}),
    ("ratio", "clip", {"preset": "dppo", "ratio": "sequence"}),
    ("ratio_to", "correction", {"ratio_to": "rollout", "correction": "truncate"}),
    ("ratio_to", "correction", {"preset": "dppo", "correction": "mask", "reject_low": 0.5}),
    ("ratio_to", "reject_low", {"ratio_to": "rollout", "reject_low": 0.5}),
    ("ratio_to", "reject_high", {"ratio_to": "rollout", "reject_high": 2.0}),
    ("reject_low", "reject_high", {"reject_low": 1.5, "reject_high": 1.5}),
    ("teacher_coefficient", "teacher", {"teacher_coefficient": 0.5}),
    ("dual_clip", "clip", {"dual_clip": 3.0, "clip": "cispo"}),
    ("dual_clip", "clip", {"dual_clip": 3.0, "clip": "none"}),
    ("dual_clip", "clip_high", {"dual_clip": 1.1}),
    ("dual_clip", "clip_high", {"dual_clip": 1.5, "clip_high": 0.5}),
    ("dual_clip", "clip_high", {"dual_clip": -3.0}),
    ("correction_low", "correction_high", {"correction": "truncate", "correction_low": 2.0}),
    ("correction_low", "correction_high", {"correction": "mask", "correction_low": 0.5, "correction_high": 0.5}),
    # What nothing reads.
    ("correction_low", "correction", {"correction_low": 0.5}),
    ("correction_high", "correction", {"correction_high": 3.0}),
    ("correction_level", "correction", {"correction_level": "sequence"}),
    ("clip_low", "clip", {"clip": "none", "clip_low": 0.1}),
    ("clip_high", "clip", {"preset": "sapo", "clip_high": 0.3}),
    ("sapo_positive", "clip", {"sapo_positive": 2.0}),
    ("sapo_negative", "clip", {"preset": "dppo", "sapo_negative": 2.0}),
    ("kl_in", "kl_ratio", {"kl_coefficient": 0.1, "kl_in": "reward", "kl_ratio": True}),
    ("kl_estimator", "kl_ratio", {"kl_coefficient": 0.1, "kl_estimator": "k1"}),
    ("kl_in", "kl_coefficient", {"kl_in": "reward"}),
    ("kl_estimator", "kl_coefficient", {"kl_estimator": "k2"}),
    ("kl_ratio", "kl_coefficient", {"kl_ratio": True}),
    ("kl_in", "kl_coefficient", {"preset": "rloo", "kl_in": "loss"}),
]


@pytest.mark.parametrize(("first", "second", "chosen"), CONTRADICTIONS)
def test_a_contradiction_names_both_settings(first, second, chosen):
    config = AlgorithmConfig.of(**{"preset": "grpo"} | {k: v for k, v in chosen.items() if k not in ALONE})
    named = re.findall(r"(\w+\.\w+)=(\S+)", refusal(check, config, chosen.get("samples_per_prompt", 8)))
    values = [(f"algorithm.{name}", str(getattr(config, name))) for name in (first, second) if name not in ALONE]
    assert named == values + ([("batch.samples_per_prompt", "1")] if second in ALONE else [])


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"clip": "none", "clip_low": 0.1}, "it is for clip=ppo or cispo or dppo."),
        ({"sapo_negative": 2.0}, "it is for clip=sapo."),
        ({"dual_clip": 3.0, "clip": "cispo"}, "it is for clip=ppo."),
        ({"correction_low": 0.5}, "it is for correction=truncate or mask."),
    ],
)
def test_a_setting_that_nothing_reads_is_told_what_would(chosen, says):
    assert refusal(check, AlgorithmConfig(**chosen)).endswith(f"it would do nothing; {says}")


@pytest.mark.parametrize(
    "chosen",
    [
        ALONE | NOT_GROUPED,
        {"samples_per_prompt": 2},
        {"dual_clip": 1.3},
        {"correction": "truncate", "correction_low": 1.9},
        {"correction": "mask", "correction_level": "geometric", "reject_low": 0.5, "reject_high": 0.6},
        {"ratio_to": "rollout", "clip": "cispo", "off_policy_mask": 0.0},
        {"preset": "dppo", "ratio_to": "old", "correction": "truncate"},
        {"preset": "dppo", "clip": "none"},  # its clip_low is not of one's own choice
        {"preset": "maxrl", "kl_coefficient": 0.1},
        {"preset": "gspo", "aggregate": "sequence_sum"},
        {"scale": "token_std", "baseline": "none"},
        {"scale": "sample_std", "baseline": "batch_mean"},
        {"teacher": "folder", "teacher_coefficient": 0.5},
        {"signal_reward": "a", "constant_length": 7},  # a name and a length are no part of an algorithm
        {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_ratio": True},
        {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_in": "reward"},
        {"kl_coefficient": 0.1, "kl_estimator": "k2"},
    ],
)
def test_what_is_next_to_a_contradiction_works(chosen):
    chosen = dict(chosen)
    check(samples=chosen.pop("samples_per_prompt", 8), config=AlgorithmConfig.of(**{"preset": "grpo"} | chosen))


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        *((f"batch.{name}_per_step", 0, "at least 1") for name in ("prompts", "minibatches", "epochs")),
        ("batch.samples_per_prompt", 0, "at least 1"),
        ("batch.minibatches_per_step", 5, "use a divisor"),
        ("clip_high", float("nan"), "at least 0"),
        ("resample_rounds", -1, "at least 0"),
        ("constant_length", 0, "at least 1"),
        *((name, -0.1, "at least 0") for name in ("clip_low", "clip_high", "correction_low", "overlong_share")),
        *((name, 1.1, "at most 1") for name in ("clip_low", "overlong_share")),
        *((f"{name}_coefficient", -1.0, "at least 0") for name in ("kl", "entropy", "drift")),
        *((name, -0.1, "at least 0") for name in ("reject_low", "off_policy_mask")),
        *((name, 0.0, "above 0") for name in ("sapo_positive", "sapo_negative", "reject_high", "teacher_coefficient")),
        *((name, "nothing", "use one of") for name in CHOICES),
        *((name, "nothing", "use one of") for name in ("kl_in", "ratio_to", "ungraded")),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(setting, value, says):
    name = setting.removeprefix("batch.")
    kind, key = (AlgorithmConfig, f"algorithm.{name}") if name == setting else (BatchConfig, setting)
    with pytest.raises(ConfigError, match=f"{key}={value!r}.*{says}"):
        kind(**{name: value}).check()


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_works_as_it_is(preset, beta):
    AlgorithmConfig.of(preset, kl_coefficient=beta).check()
    assert set(PRESETS[preset].choices) <= set(PRESET_SETTINGS)
    algorithm(f"preset={preset}", f"kl_coefficient={beta}").check()


@pytest.mark.parametrize(
    ("given", "meant"),
    [("dap", "dapo"), ("drgrpo", "dr_grpo"), ("gsop", "gspo"), ("reinforce+", "reinforce++"), ("rlo", "rloo")],
)
def test_an_unknown_preset_suggests_the_nearest(given, meant, yaml):
    says = f"algorithm.preset={given!r} is not an algorithm: did you mean {meant}?"
    assert refusal(algorithm, f"preset={given}") == says
    assert refusal(algorithm, path=yaml(f"algorithm: {{preset: {given}}}\n")) == says
    with pytest.raises(ConfigError, match="did you mean"):
        AlgorithmConfig(preset=given).check()


def test_a_preset_unlike_any_other_lists_them():
    assert refusal(algorithm, "preset=qqqq").endswith(f"use one of {', '.join(PRESETS)}.")


@pytest.mark.parametrize("value", ["3", "true", "[dapo]", "{a: 1}", "${nothing}", "null", ""])
def test_a_preset_that_is_no_name_is_refused(value, yaml):
    assert "preset" in refusal(algorithm, f"preset={value}")
    assert "preset" in refusal(algorithm, path=yaml(f"algorithm:\n  preset: {value}\n"))


@pytest.mark.parametrize("text", ["- 1\n", "- algorithm\n", "algorithm: [1]\n", "algorithm: dapo\n", "algorithm:\n"])
def test_a_file_of_another_shape_is_refused(text, yaml):
    assert "settings.yaml" in refusal(algorithm, path=yaml(text))


# what wins


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_stands_for_its_choices_and_nothing_else(preset, yaml):
    for config in (algorithm(f"preset={preset}"), algorithm(path=yaml(f"algorithm: {{preset: {preset}}}\n"))):
        expected = dataclasses.asdict(AlgorithmConfig()) | {"preset": preset} | PRESETS[preset].choices
        expected["constant_length"] = 1024 if preset == "dr_grpo" else None
        assert dataclasses.asdict(config) == expected
        assert config.changes() == {}
        assert config.name() == preset
    assert config.clip_high == AlgorithmConfig.of(preset).clip_high == (0.28 if preset == "dapo" else config.clip_high)


@pytest.mark.parametrize("value", [0.2, 0.5])  # also where it is what another preset has
def test_what_is_set_wins_over_the_preset_wherever_it_stands(value, yaml):
    preset, own = "preset=dapo", f"clip_high={value}"
    for config in (
        algorithm(preset, own),
        algorithm(own, preset),
        algorithm(own, path=yaml("algorithm: {preset: dapo}\n")),
        algorithm(preset, path=yaml(f"algorithm: {{clip_high: {value}}}\n")),
        algorithm(path=yaml(f"algorithm: {{clip_high: {value}, preset: dapo}}\n")),
        AlgorithmConfig.of("dapo", clip_high=value),
    ):
        assert (config.clip_high, config.aggregate) == (value, "token_mean")
        assert config.changes() == {"clip_high": (value, 0.28)}
        assert config.name() == f"dapo but for clip_high={value} (dapo: 0.28)"


def test_the_last_preset_counts_and_leaves_nothing_of_the_one_before(yaml):
    config = algorithm("preset=gspo", path=yaml("algorithm: {preset: dapo, entropy_coefficient: 0.1}\n"))
    assert config.changes() == {"entropy_coefficient": (0.1, 0.0)}
    assert dataclasses.replace(config, entropy_coefficient=0.0) == AlgorithmConfig.of("gspo")


def test_the_name_says_what_was_changed():
    assert algorithm("dual_clip=3", "kl_ratio=true").name() == (
        "grpo but for dual_clip=3.0 (grpo: 0.0), kl_ratio=True (grpo: False)"
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_a_written_config_loads_as_the_same(preset, yaml):
    overrides = [f"algorithm.preset={preset}", "algorithm.clip_low=0.125", "rollout.max_response_tokens=77"]
    config = load(TrainConfig, None, overrides)
    again = load(TrainConfig, yaml(to_yaml(config)))
    assert again == config
    assert again.algorithm.changes() == config.algorithm.changes() != {}


def test_the_constant_length_is_that_of_the_longest_response_unless_said():
    longest = ["rollout.max_response_tokens=77"]
    for chosen in (["algorithm.aggregate=constant"], ["algorithm.preset=dr_grpo"]):
        assert load(TrainConfig, None, chosen + longest).algorithm.constant_length == 77
        said = [*chosen, *longest, "algorithm.constant_length=5"]
        assert load(TrainConfig, None, said).algorithm.constant_length == 5
    assert load(TrainConfig, None, longest).algorithm.constant_length is None


# what follows from the choices


@pytest.mark.parametrize(
    ("chosen", "needed"),
    [
        ([], False),
        (["batch.minibatches_per_step=2"], True),
        (["batch.epochs_per_step=2"], True),
        (["algorithm.kl_coefficient=0.1"], False),
        (["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"], True),
        (["algorithm.preset=rloo"], False),  # without a KL term there is none in the reward
        (["algorithm.preset=dppo", "batch.minibatches_per_step=2"], False),
        (["algorithm.preset=dppo", "algorithm.teacher=folder"], True),
        (["algorithm.off_policy_mask=0.1"], False),
    ],
)
def test_only_a_single_update_a_step_is_on_policy(chosen, needed):
    assert load(TrainConfig, None, chosen).needs_old_logprobs is needed


# the table of choices


def test_every_choice_has_a_formula_and_uses_settings_that_there_are():
    fields = {field.name: field for field in dataclasses.fields(AlgorithmConfig)}
    for setting, choices in CHOICES.items():
        for name, found in choices.items():
            assert found.formula
            assert set(found.uses) <= set(fields)
            assert re.search(rf"\b{name}\b", fields[setting].metadata["doc"])
    assert CHOICES["clip"]["ppo"].uses == ["clip_low", "clip_high", "dual_clip"]


def test_a_choice_in_the_table_can_be_chosen_and_gets_the_settings_it_uses(monkeypatch):
    own = Choice("|A|", lambda returns, advantages, *, clip_low, kl_in: (returns, advantages, clip_low, kl_in))
    monkeypatch.setitem(CHOICES["scale"], "own", own)
    config = algorithm("scale=own", "clip_low=0.5")
    config.check()
    assert apply("scale", config, 1, 2) == (1, 2, 0.5, "loss")
    assert refusal(check, AlgorithmConfig(scale="owned")).endswith("sample_std, token_std, none, own.")
