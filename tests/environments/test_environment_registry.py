"""The registry of environments: the forms they have, and each thing that is refused, in one sentence."""

import asyncio
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from transformers.utils import get_json_schema

import environments
from environments import EnvironmentPool, EnvironmentsConfig, find, register, registry, validate

DOCSTRING = '''"""Add.

        Args:
            a: One.
        """'''


@pytest.fixture
def load(tmp_path):
    """Registers what a source says, as a file of environments.files does; returns that file's path."""

    def load(source: str, name: str = "mine.py") -> str:
        file = tmp_path / name
        file.write_text("from environments import register\n" + textwrap.dedent(source))
        registry.load_file(file)
        return str(file)

    return load


def refused(wanted: str, call, *arguments) -> None:
    with pytest.raises(ValueError, match=re.escape(wanted)) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)


def test_a_class_with_step_is_a_text_environment(load):
    load(
        """
        @register("text", seconds=3)
        class Text:
            def __init__(self, highest=9, *, lowest: int = 0): ...
            def helper(self): ...
            def step(self, text, more=None): ...
        """
    )
    known = find("text")
    assert (known.form, dict(known.tools), known.options, known.seconds) == ("text", {}, ("highest", "lowest"), 3)


def test_a_class_without_step_is_its_public_methods_but_those_that_have_a_meaning(load):
    load(
        f"""
        class Base:
            def inherited(self, a: int) -> int:
                {DOCSTRING}
        @register("desk")
        class Desk(Base):
            limit = 3
            def reset(self, **row): ...
            def get_reward(self): ...
            def close(self): ...
            def _hidden(self): ...
            async def later(self, a: int) -> int:
                {DOCSTRING}
            @staticmethod
            def alone(a: int) -> int:
                {DOCSTRING}
        """
    )
    known = find("desk")
    assert (known.form, sorted(known.tools), known.options) == ("tools", ["alone", "inherited", "later"], ())
    for tool in known.tools.values():
        assert list(get_json_schema(tool)["function"]["parameters"]["properties"]) == ["a"]


def test_functions_are_an_environment_as_they_are(load):
    file = load(
        f"""
        def add(a: int, b: int = 1) -> int:
            '''Add.

            Args:
                a: One.
                b: Another.
            '''
            return a + b

        async def later(a: int) -> int:
            {DOCSTRING}
            return a

        register("functions")([add, later])
        """
    )
    assert sorted(find("functions").tools) == ["add", "later"]

    async def talk(pool):
        session = pool.open("functions")
        said = await session.reset({"any": 1})
        return said, await session.tools([("add", {"a": 2}), ("later", {"a": 7})]), await session.reward()

    with EnvironmentPool(EnvironmentsConfig(files=[file], processes=1)) as pool:
        assert asyncio.run(talk(pool)) == (None, [["ok", "3"], ["ok", "7"]], None)


TRL = '''
class IncrementEnv:
    def reset(self, **kwargs) -> str | None:
        self.counter = kwargs["start"]
        return f"The counter is {self.counter}."

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.counter += step
        return self.counter

    def get_reward(self) -> float:
        return float(self.counter == 5)
'''


def test_a_class_written_for_trls_environment_factory_is_used_as_it_is(load):
    """The class of TRL 1.16.0's documentation, with a reset that has something to say and its own reward."""
    file = load(f"{TRL}\nregister('increment')(IncrementEnv)\n")
    schema = get_json_schema(find("increment").tools["increment"])["function"]
    assert schema["description"] == "Increment the internal counter."
    assert schema["parameters"]["required"] == ["step"]

    async def talk(pool):
        session = pool.open("increment")
        said = await session.reset({"prompt": "Count.", "start": 2})
        answers = await session.tools([("increment", {"step": 1})]), await session.tools([("increment", {"step": 2})])
        return said, answers, await session.reward()

    with EnvironmentPool(EnvironmentsConfig(files=[file], processes=1)) as pool:
        assert asyncio.run(talk(pool)) == ("The counter is 2.", ([["ok", "3"]], [["ok", "5"]]), 1.0)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("class E:\n    limit = 3", "has neither step(text) nor a public method that could be a tool"),
        (
            "class E:\n    def reset(self, **row): ...\n    def _a(self): ...",
            "has neither step(text) nor a public method",
        ),
        ("class E:\n    def step(self): ...", "its step cannot be called as step(text): give it this one parameter."),
        ("class E:\n    def step(self, text, more): ...", "its step cannot be called as step(text)"),
        ("class E:\n    def add(self, a: int): ...", "the tool add has no docstring: tell the policy what it does."),
        (
            "class E:\n    def add(self, a): 'Add.'",
            "parameter a of add has no type hint: write a: int, or another type",
        ),
        ("E = 3", "is 3: register a class, or a list of functions."),
        ("E = []", "is []: register a class, or a list of functions."),
        ("E = [print]", "register a class, or a list of functions."),
        ("def a(x): 'Add.'\nE = [a]", "parameter x of a has no type hint"),
        ("def a(x: int): ...\nE = [a]", "the tool a has no docstring"),
    ],
)
def test_a_class_of_neither_form_is_refused(load, body, wanted):
    refused(wanted, load, textwrap.dedent(body) + "\nregister('odd')(E)\n")


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_a_limit_of_its_own_is_a_positive_number(seconds):
    with pytest.raises(ValueError, match=r"Environment 'odd': seconds is .*: it must be a positive number"):
        register("odd", seconds=seconds)


def test_a_name_is_given_once(load):
    step = "@register('mine')\nclass E:\n    def step(self, text): ...\n"
    load(step)
    load(step)  # the same file again
    refused("Environment 'mine' is registered twice, at ", load, step, "yours.py")
    refused("Environment 'guess' is registered twice, at ", load, step.replace("mine", "guess"), "theirs.py")


def test_an_environment_that_is_not_there_is_told_with_the_nearest():
    refused("There is no environment 'gues', the nearest is 'guess': use one of ", find, "gues")
    refused("There is no environment 3, the nearest is ", find, 3)
    refused("There is no environment 'openenvs', the nearest is 'openenv'", validate, EnvironmentsConfig(), "openenvs")


def test_files_that_cannot_be_used_are_refused(tmp_path, load):
    refused("which is not a Python file: give the path of a .py file", registry.load_file, tmp_path / "none.py")
    (tmp_path / "text.txt").write_text("")
    refused("which is not a Python file", registry.load_file, tmp_path / "text.txt")
    refused("which fails to import with ZeroDivisionError: division by zero", load, "1 / 0", "zero.py")
    refused("which fails to import with SyntaxError", load, "def", "syntax.py")
    refused("which fails to import with SystemExit", load, "raise SystemExit(3)", "exits.py")
    refused(
        "which fails to import with ModuleNotFoundError: No module named 'nowhere'", load, "import nowhere", "no.py"
    )
    refused('registers no environment: put @register("name") on a class', load, "x = 1", "nothing.py")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"processes": 0}, "environments.processes is 0: it must be a positive number."),
        ({"timeout_seconds": -1.0}, "environments.timeout_seconds is -1.0: it must be a positive number."),
        ({"timeout_seconds": float("nan")}, "environments.timeout_seconds is nan: it must be a positive number."),
        ({"memory_megabytes": 0}, "environments.memory_megabytes is 0: it must be a positive number."),
        ({"max_turns": 0}, "environments.max_turns is 0: it must be a positive number."),
        ({"max_observation_tokens": 0}, "environments.max_observation_tokens is 0: it must be a positive number."),
        ({"max_turn_tokens": 0}, "environments.max_turn_tokens is 0: give at least 1, or null."),
        ({"on_error": "raise"}, "environments.on_error is 'raise': it must be tell or end."),
        ({"column": "which"}, "environment=guess and environments.column=which are both set: unset one."),
        ({"options": {"guess": 3}}, "environments.options.guess is 3: it must hold option: value settings."),
        ({"options": {"openenv": {"urls": "x"}}}, "has no option 'urls': it takes url, client, action, says, hears."),
        ({"options": {"gues": {}}}, "There is no environment 'gues', the nearest is 'guess'"),
        ({"files": ["nowhere.py"]}, "nowhere.py, which is not a Python file"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, wanted):
    refused(wanted, validate, EnvironmentsConfig(**settings), "guess")


def test_an_environment_takes_the_options_of_its_class(load):
    load("@register('mine')\nclass E:\n    def step(self, text): ...\n")
    wanted = "Environment 'mine' has no option 'highest': it takes none."
    refused(wanted, validate, EnvironmentsConfig(options={"mine": {"highest": 3}}), "mine")
    validate(EnvironmentsConfig(options={"gem": {"env": "game", "any": 3}}), "gem")


def test_no_environment_of_the_folder_imports_anything_heavy():
    """Each process imports them all, whichever it runs."""
    code = "import sys; from environments import registry; registry.names(); print(*sys.modules)"
    root = Path(environments.__file__).parents[1]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True).stdout
    assert {"torch", "transformers", "numpy", "pandas", "reasoning_gym", "sympy"}.isdisjoint(found.split())
