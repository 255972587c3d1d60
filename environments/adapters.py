"""Environments of other packages in the form of this one: GEM, SkyRL-gym, OpenEnv's client, tasks of reasoning-gym.

Classes in the form of TRL's environment_factory, and lists of functions, are registered as they are.
"""

import json
import threading
import zlib
from importlib import import_module
from typing import Any

from environments.registry import register
from rewards.reasoning_gym import reasoning_gym

SEEDED = threading.Lock()
"""Held while an environment begins from a seed: GEM's draw from Python's one generator, which all threads share."""


def _load(path: str, package: str) -> Any:
    """What `path`, MODULE:NAME, names; raises ImportError that names the `package` where it is not installed."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        raise ImportError(f"{path} cannot be imported ({error}): pip install {package}") from error


def _chosen(row: dict, column: str, option: str) -> str:
    if name := row.get(column) or option:
        return name
    raise ValueError(f"neither the option env nor the row's column {column} names an environment: set one of them")


@register("gem")
class Gem:
    """GEM's `env`, or that of the row's column env, from the row's `seed`, or one that the row's contents give.

    So all samples of a prompt meet the same task. Other options go to gem.make.
    """

    def __init__(self, env: str = "", **options: Any) -> None:
        self.env, self.options, self.make = env, options, _load("gem:make", "gem-llm")

    def reset(self, row: dict) -> str:
        seed = row.get("seed")
        seed = zlib.crc32(repr(sorted(row.items())).encode()) if seed is None else int(seed)
        with SEEDED:
            self.game = self.make(_chosen(row, "env", self.env), **self.options)
            return self.text(*self.game.reset(seed=seed))

    def step(self, text: str) -> tuple[str, float, bool]:
        said, reward, terminated, truncated, info = self.game.step(text)
        return self.text(said, info), reward, terminated or truncated

    def text(self, said: str, info: dict) -> str:
        return "\n".join(part for part in (info.get("prefix"), said, info.get("suffix")) if part)


@register("skyrl_gym")
class SkyRLGym:
    """SkyRL-gym's `env`, or that of the row's env_class; the row is its extras, `config` its env_config."""

    def __init__(self, env: str = "", config: dict | None = None, max_turns: int | None = None) -> None:
        self.env, self.config, self.make = env, config or {}, _load("skyrl_gym:make", "skyrl-gym")
        self.extras = {} if max_turns is None else {"max_turns": max_turns}

    def reset(self, row: dict) -> list[dict] | None:
        from omegaconf import OmegaConf

        extras, name = self.extras | row, _chosen(row, "env_class", self.env)
        self.game = self.make(name, env_config=OmegaConf.create(self.config), extras=extras)
        self.close = self.game.close
        prompt = row["prompt"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        begun, _ = self.game.init(messages)
        return None if begun == messages else begun

    def step(self, text: str) -> tuple[list[dict], float, bool]:
        result = self.game.step(text)
        return result["observations"], result["reward"], result["done"]


@register("openenv")
class OpenEnv:
    """A session with the OpenEnv server at `url`; its reset is given what it takes of the row.

    A turn is the field `says` of an action, a dict or the class that `action` names (MODULE:NAME). The policy is told
    the field `hears` of the observation, or all of it as JSON. `client` names a class of the environment's own.
    """

    def __init__(self, url: str, client: str = "", action: str = "", says: str = "message", hears: str = "") -> None:
        client = client or "openenv.core.generic_client:GenericEnvClient"
        self.client = _load(client, "openenv-core, or the environment's package")(base_url=url)
        self.action = _load(action, "the environment's package") if action else dict
        self.says, self.hears = says, hears

    async def reset(self, row: dict) -> str:
        return self.text((await self.client.reset(**row)).observation)

    async def step(self, text: str) -> tuple[str, float, bool]:
        result = await self.client.step(self.action(**{self.says: text}))
        return self.text(result.observation), result.reward or 0.0, result.done

    def text(self, observation: Any) -> str:
        fields = observation if isinstance(observation, dict) else vars(observation)
        return str(fields[self.hears]) if self.hears else json.dumps(fields, default=str)

    async def close(self) -> None:
        await self.client.close()


@register("reasoning_gym")
class ReasoningGym:
    """A task of reasoning-gym with `tries`: after a wrong one the policy is told its score; the last one's counts.

    tag, pattern: where the answer stands in a turn, as for the reward of this name.
    """

    def __init__(self, tries: int = 1, tag: str = "", pattern: str = "") -> None:
        self.tries, self.where = tries, {"tag": tag, "pattern": pattern}

    def reset(self, row: dict) -> None:
        self.row = row
        if "entry" not in row:
            raise ValueError("the row has no column entry: take the data from data.train=reasoning_gym:TASK")

    def step(self, text: str) -> tuple[str, float, bool]:
        self.tries -= 1
        score = reasoning_gym(text, self.row, **self.where)
        done = score >= 1 or self.tries <= 0
        return f"That is not right (score {score:.2g} of 1). Try again.", score if done else 0.0, done
