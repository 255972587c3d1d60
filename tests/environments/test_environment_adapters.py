"""Environments of other packages, the real ones: GEM, SkyRL-gym, an OpenEnv server, tasks of reasoning-gym.

Two of them ask for versions of packages that others here forbid, so they are fetched beside the environment, once.
"""

import asyncio
import os
import random
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from environments import EnvironmentPool, EnvironmentsConfig, Failed, adapters, find, rehearse
from grpo.tasks import load_task

GYMS = "gem-llm==0.1.0", "skyrl-gym==0.4.0"
OPENENV = ("openenv-core==0.3.0",)
SERVED = "fastapi", "uvicorn", "websockets", "fastmcp"  # what openenv-core imports; it asks for 50 more


def pip(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--quiet"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def fetch(request, tmp_path_factory):
    """Makes packages importable here and in processes started here; they stay in pytest's cache."""
    patch = pytest.MonkeyPatch()

    def fetch(name: str, bare: tuple[str, ...], whole: tuple[str, ...] = ()) -> Path:
        folder = request.config.cache.mkdir("environments") / f"{name}-{sys.version_info[0]}.{sys.version_info[1]}"
        if not folder.is_dir():
            made = folder.with_name(f"{folder.name}-{os.getpid()}")
            for packages in (["--no-deps", "--ignore-requires-python", *bare], whole):
                done = pip("install", "--no-compile", "--target", str(made), *packages) if packages else None
                if done and done.returncode:
                    if pip(
                        "download", "--no-deps", "--dest", str(tmp_path_factory.mktemp("probe")), "pytest"
                    ).returncode:
                        pytest.skip("no package index is reachable")
                    pytest.fail(done.stderr)
            made.rename(folder)
        patch.setattr(sys, "path", [*sys.path, str(folder)])  # behind what is installed
        return folder

    yield fetch
    patch.undo()


@pytest.fixture(scope="module")
def gyms(fetch) -> Path:
    return fetch("gyms", GYMS)


def hold(conversations, **options):
    with EnvironmentPool(EnvironmentsConfig(processes=1, timeout_seconds=120.0, options=options)) as pool:
        return asyncio.run(conversations(pool))


async def play(pool, name: str, row: dict, turns: list[str]) -> list:
    """What reset said and each step gave, until it is done."""
    session = pool.open(name)
    try:
        found = [await session.reset(row)]
        for turn in turns:
            try:
                found.append(await session.step(turn))
            except Failed as failure:
                found.append([failure.kind, str(failure)])
            if found[-1][-1] is True:
                break
    finally:
        session.close()
    return found


def test_gem_plays_its_games_from_the_seed_of_a_row(gyms):
    async def talk(pool):
        rows = [{"seed": 1}, {"seed": 2}, {"prompt": "a"}, {"prompt": "b"}] * 8
        turns = [f"\\boxed{{{number}}}" for number in (2, 4, 6, 8)]
        return await asyncio.gather(*[play(pool, "gem", row, turns) for row in rows])

    games = hold(talk, gem={"env": "game:GuessTheNumber-v0-easy"})
    for start in range(4):
        assert all(game == games[start] for game in games[start::4])  # though all began at once, in one process
    assert games[0] != games[1] or games[0] != games[2]
    said, first, *_, last = games[0]
    assert said.startswith("You are playing Guess The Number.\n")
    assert said.endswith("Enter your first guess to start the game.\n\nEnter your next guess.")
    assert re.fullmatch(r"At turn 1, you guessed 2, and the target number is \w+ than 2.\nEnter .*", first[0])
    assert last[2]


def test_gem_lets_nobody_draw_between_a_seed_and_what_is_drawn_from_it(monkeypatch):
    class Game:
        def reset(self, seed):
            random.seed(seed)
            time.sleep(0.01)
            return str(random.random()), {}

    monkeypatch.setattr(adapters, "_load", lambda path, package: lambda name: Game())
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(lambda seed: adapters.Gem("any").reset({"seed": seed}), [1, 2, 3, 4] * 8))
    assert len(set(said)) == 4


def test_gem_takes_the_environment_of_a_row_and_options_of_the_game(gyms):
    async def talk(pool):
        return await play(pool, "gem", {"env": "game:GuessTheNumber-v0-hard"}, ["no number"])

    said, (text, reward, done) = hold(talk, gem={"max_turns": 3})
    assert "between 1 and 50 (inclusive) within 3 turns" in said
    assert (text.splitlines()[0], reward, done) == ("At turn 1, you did not provide a valid guess.", -0.1, True)


ROW = {"prompt": [{"role": "user", "content": "What is 2 + 2?"}], "reward_spec": {"ground_truth": "4"}}


def test_skyrl_gym_is_given_the_row_and_gives_messages(gyms):
    async def talk(pool):
        several = play(pool, "skyrl_gym", ROW, ["It is #### 3", "#### 4", "#### 4"])
        once = play(pool, "skyrl_gym", {**ROW, "env_class": "gsm8k", "prompt": "What is 2 + 2?"}, ["#### 4"])
        return await several, await once

    several, once = hold(talk, skyrl_gym={"env": "gsm8k_multi_turn", "max_turns": 2})
    now = "Now provide only the final numeric answer in the exact format: '#### ANSWER'."
    assert several == [None, [[{"role": "user", "content": now}], 0.1, False], ["", 1.0, True]]
    assert once == [None, ["", 1.0, True]]


SERVER = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Say(Action):
    message: str

class Heard(Observation):
    heard: str

class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, number=3):
        self.number = number
        return Heard(heard="Find it.")

    def step(self, action, timeout_s=None):
        right = int(action.message) == self.number
        side = "higher" if int(action.message) < self.number else "lower"
        return Heard(heard="yes" if right else side, reward=1.0 if right else None, done=right)

    @property
    def state(self):
        return State()

    def close(self):
        print("closed", flush=True)

app = create_fastapi_app(Guess, Say, Heard, max_concurrent_envs=64)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
CLIENT = """
from openenv.core.generic_client import GenericEnvClient

class Say:
    def __init__(self, message):
        self.message = message

class Client(GenericEnvClient):  # what a package of an environment has
    def _parse_result(self, payload):
        result = super()._parse_result(payload)
        result.observation = type("Heard", (), {})()
        result.observation.heard = payload["observation"]["heard"]
        return result
"""


@pytest.fixture(scope="module")
def server(fetch, tmp_path_factory):
    """(the address of an OpenEnv server of this machine, the file it prints to)."""
    folder, printed = fetch("openenv", OPENENV, SERVED), tmp_path_factory.mktemp("server") / "printed"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with printed.open("w") as out:
        path = {"PYTHONPATH": str(folder)}
        process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], env=os.environ | path, stdout=out)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        assert process.poll() is None
        yield f"http://127.0.0.1:{port}", printed
    finally:
        process.kill()
        process.wait()


def test_openenv_holds_sessions_with_a_server_that_are_closed(server):
    url, printed = server
    before = printed.read_text().count("closed")

    async def talk(pool):
        rows = [{"number": number, "prompt": "Begin."} for number in range(1, 9)]
        return await asyncio.gather(*[play(pool, "openenv", row, ["3", "x", str(row["number"])]) for row in rows])

    games = hold(talk, openenv={"url": url, "hears": "heard"})
    assert [game[0] for game in games] == ["Find it."] * 8
    assert [game[1][0] for game in games] == ["lower"] * 2 + ["yes"] + ["higher"] * 5
    for game in [*games[:2], *games[3:]]:
        kind, said = game[2]
        assert kind == "exception"
        assert "Server error: invalid literal" in said  # and the session goes on
        assert game[3] == ["yes", 1.0, True]
    until = time.monotonic() + 60
    while time.monotonic() < until and printed.read_text().count("closed") < before + 8:
        time.sleep(0.05)
    assert printed.read_text().count("closed") == before + 8


def test_openenv_takes_the_client_and_the_action_of_an_environments_package(server, tmp_path, monkeypatch):
    (tmp_path / "its_package.py").write_text(CLIENT)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    named = {"client": "its_package:Client", "action": "its_package:Say"}

    async def talk(pool):
        return await play(pool, "openenv", {"number": 5}, ["5"])

    assert hold(talk, openenv={"url": server[0], **named}) == ['{"heard": "Find it."}', ['{"heard": "yes"}', 1.0, True]]


@pytest.fixture(scope="module")
def task() -> dict:
    """A row of a task that adds numbers."""
    [row] = load_task("reasoning_gym:chain_sum", "train", {"size": 1}, "data.train")
    return row


def test_a_task_of_reasoning_gym_takes_one_turn_or_several(task):
    right = eval(task["entry"])["answer"]
    wrong = str(int(right) + 1)

    async def talk(pool):
        return [await play(pool, "reasoning_gym", task, turns) for turns in ([right], [wrong, right], [wrong] * 4)]

    first, second, third = hold(talk, reasoning_gym={"tries": 3})
    assert first[0] is None
    assert first[1][1:] == [1.0, True]
    assert [step[1:] for step in second[1:]] == [[0.0, False], [1.0, True]]
    assert second[1][0] == "That is not right (score 0 of 1). Try again."
    assert [step[2] for step in third[1:]] == [False, False, True]
    [_, (_, reward, done)] = hold(lambda pool: play(pool, "reasoning_gym", task, [wrong, right]))
    assert (reward, done) == (third[3][1], True)


@pytest.mark.parametrize(
    ("name", "options", "row", "wanted"),
    [
        ("openenv", {}, {}, "missing 1 required positional argument: 'url'"),
        (
            "openenv",
            {"url": "http://127.0.0.1:9", "client": "nowhere.client:Client"},
            {},
            "pip install openenv-core, or",
        ),
        ("reasoning_gym", {}, {}, "the row has no column entry: take the data from data.train=reasoning_gym:TASK"),
    ],
)
def test_what_cannot_begin_is_one_sentence(name, options, row, wanted):
    with pytest.raises(ValueError, match=f"Environment '{name}' cannot begin with the first row") as caught:
        rehearse(EnvironmentsConfig(options={name: options}), {name: row})
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "row", "wanted"),
    [
        ("gem", {}, {}, "neither the option env nor the row's column env names an environment"),
        ("gem", {"env": "game:Guess"}, {}, "Environment game:Guess not found in registry"),
        ("skyrl_gym", {}, {"prompt": "a"}, "neither the option env nor the row's column env_class"),
        ("skyrl_gym", {"env": "gsm8k"}, {"prompt": "a"}, "reward_spec field is required"),
        ("skyrl_gym", {"env": "gsm8k"}, {"reward_spec": {"ground_truth": "4"}}, "prompt"),
    ],
)
def test_what_an_installed_package_cannot_begin_says_why(gyms, name, options, row, wanted):
    environment = find(name).make(**options)
    with pytest.raises(Exception, match=re.escape(wanted)):
        environment.reset(row)


def test_a_server_that_cannot_be_reached_is_one_sentence(server):
    wanted = "Failed to connect to ws://127.0.0.1:9/ws"
    test_what_cannot_begin_is_one_sentence("openenv", {"url": "http://127.0.0.1:9"}, {}, wanted)
