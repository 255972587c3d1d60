"""The registry and the settings: drop-in files, names, options, columns, and the sentences of the errors."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import rewards
from rewards import RewardsConfig, registry

PACKAGE = Path(rewards.__file__).parent


def run(code: str, *paths: Path) -> subprocess.CompletedProcess:
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, paths)))
    return subprocess.run([sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=60)


def copy_of_the_package(tmp_path: Path) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "rewards", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "rewards"


def test_a_file_dropped_into_the_folder_is_all_it_takes(tmp_path):
    folder = copy_of_the_package(tmp_path)
    (folder / "polite.py").write_text(
        "from rewards import register\n"
        "@register('polite', needs=('question',))\n"
        "def polite(completion: str, row: dict, *, bonus: float = 1.0) -> float:\n"
        "    return bonus * ('please' in completion)\n"
    )
    code = (
        "import rewards\n"
        "assert {'countdown', 'math', 'polite', 'reasoning_gym'} <= set(rewards.names()), rewards.names()\n"
        "assert rewards.get('polite', bonus=2.0)('yes please', {}) == 2.0\n"
        "with rewards.RewardPool(rewards.RewardsConfig(weights={'polite': 1.0}, processes=1)) as pool:\n"
        "    assert [pool.submit(text, {}).result().total for text in ('please', 'no')] == [1.0, 0.0]\n"
    )
    assert run(code, tmp_path).returncode == 0


def test_two_files_with_one_name_are_both_named(tmp_path):
    folder = copy_of_the_package(tmp_path)
    source = "from rewards import register\n@register('twin')\ndef twin(completion, row): return 0.0\n"
    (folder / "one.py").write_text(source)
    (folder / "two.py").write_text(source)
    done = run("import rewards; rewards.names()", tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError: Reward 'twin' is registered twice")
    assert "one.py:2" in last
    assert "two.py:2" in last


def test_importing_the_package_and_looking_up_names_is_light():
    code = (
        "import sys, rewards; rewards.names(); rewards.get('math'); rewards.get('countdown')\n"
        "heavy = {'torch', 'numpy', 'sympy', 'math_verify', 'omegaconf', 'grpo', 'workers', 'trainer'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    assert run(code, PACKAGE.parent).returncode == 0


def test_names_and_needs():
    assert {"countdown", "math"} <= set(rewards.names())
    assert registry.find("countdown").needs == ("numbers", "target")
    assert registry.find("countdown").options == ("valid", "format")


def test_an_unknown_name_gives_the_nearest_and_all_of_them():
    with pytest.raises(ValueError, match=r"no reward 'cuontdown', the nearest is 'countdown'.*countdown, .*math") as e:
        rewards.get("cuontdown")
    assert '@register("cuontdown")' in str(e.value)
    assert str(PACKAGE) in str(e.value)
    with pytest.raises(ValueError, match="There is no reward"):
        rewards.get("")


def test_an_unknown_option_gives_the_nearest():
    with pytest.raises(ValueError, match=r"'countdown' has no option 'vaild', the nearest is 'valid'.*valid, format"):
        rewards.get("countdown", vaild=0.0)
    with pytest.raises(ValueError, match="'math' has no option 'strict': it takes none"):
        rewards.get("math", strict=True)


def test_signatures_that_cannot_be_called_are_refused(registered):
    def option_without_default(completion, row, *, scale): ...
    def positional_option(completion, row, scale=1.0): ...
    def one_parameter(completion): ...
    def keyword_row(completion, *, row=None): ...
    def open_ended(completion, row, **options): ...

    for function in (option_without_default, positional_option, one_parameter, keyword_row, open_ended):
        with pytest.raises(ValueError, match=f"{function.__name__}\\(completion, row\\)"):
            rewards.register("bad")(function)
    with pytest.raises(ValueError, match="lists of names"):
        rewards.register("bad", needs="answer")
    assert "bad" not in registered


def test_a_function_registered_again_by_the_same_line_replaces_itself(registered, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from rewards import register\n@register('mine')\ndef mine(completion, row): return 1.0\n")
    registry.load_file(file)
    registry.load_file(file)
    exec(compile(file.read_text(), str(file), "exec"), {})
    assert rewards.get("mine")("", {}) == 1.0


def write(tmp_path: Path, source: str) -> str:
    file = tmp_path / "own.py"
    file.write_text("from rewards import register\n" + source)
    return str(file)


def test_a_valid_config_passes(registered, tmp_path):
    file = write(tmp_path, "@register('own', needs=('hint',))\ndef own(completion, row, *, scale=1.0): return scale\n")
    weights, options = {"countdown": 1.0, "own": -0.5, "math": 0.0}, {"countdown": {"valid": 0.0}, "own": {}}
    config = RewardsConfig(weights, options, [file])
    rewards.validate(config)
    assert rewards.missing_columns(config, ["numbers", "target", "answer", "hint", "more"]) == {}
    missing = {"countdown": ["target"], "own": ["hint"], "math": ["answer"]}
    assert rewards.missing_columns(config, ["numbers"]) == missing


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"weights": {}}, "weights is empty"),
        ({"weights": {"maths": 1.0}}, "no reward 'maths', the nearest is 'math'"),
        ({"weights": {"math": float("nan")}}, "weights.math is nan"),
        ({"weights": {"math": float("inf")}}, "weights.math is inf"),
        ({"options": {"countdown": {"valid": 0}}}, "'countdown', which is not in rewards.weights"),
        ({"options": {"math": 3}}, "options.math is 3"),
        ({"options": {"math": {"x": 3}}}, "no option 'x'"),
        ({"processes": 0}, "processes is 0"),
        ({"processes": -1}, "processes is -1"),
        ({"timeout_seconds": 0.0}, "timeout_seconds is 0"),
        ({"timeout_seconds": -1.0}, "timeout_seconds is -1"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds is nan"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds is inf"),
        ({"files": ["/no/such/file.py"]}, "/no/such/file.py, which is not a Python file"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        rewards.validate(RewardsConfig(**{"weights": {"math": 1.0}, **settings}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("import no_such_module_at_all\n", "fails to import with ModuleNotFoundError"),
        ("def f(:\n", "fails to import with SyntaxError"),
        ("x = 1\n", "registers no reward"),
        ("@register('math')\ndef math(completion, row): return 1.0\n", "registered twice, at .*math.py:.*own.py:2"),
        (
            "@register('own', imports=('no_such_module',))\ndef own(completion, row): return 1.0\n",
            "needs the Python package no_such_module",
        ),
    ],
)
def test_a_file_that_cannot_work_is_one_sentence(registered, tmp_path, source, sentence):
    weights = {"own": 1.0} if "'own'" in source else {"countdown": 1.0}
    with pytest.raises(ValueError, match=sentence):
        rewards.validate(RewardsConfig(weights=weights, files=[write(tmp_path, source)]))


def test_omegaconf_holds_the_config():
    schema = OmegaConf.structured(RewardsConfig)
    given = OmegaConf.from_dotlist(["weights.countdown=1", "options.countdown.valid=0.0", "processes=3"])
    config = OmegaConf.to_object(OmegaConf.merge(schema, given))
    assert config == RewardsConfig(weights={"countdown": 1.0}, options={"countdown": {"valid": 0.0}}, processes=3)
    rewards.validate(config)
    assert all(field.metadata["doc"] for field in RewardsConfig.__dataclass_fields__.values())
