"""The Converser: carries a sample through the turns of a conversation with its environment."""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.utils import get_json_schema

from environments import EnvironmentPool, EnvironmentsConfig, Failed, find, rehearse
from grpo.batch import Ending, Trajectory, Turn
from grpo.config import ConfigError
from grpo.conversation import Call, Dialogue
from rewards import Failure
from workers.engines.config import RolloutConfig
from workers.engines.protocol import Response

Ask = Callable[[int], Awaitable[Response]]
"""Has the policy go on with at most so many tokens, which are in the trajectory when it returns."""


class Cast:
    """Which environment each row has, `name` or that of its `column`, and what a template is told of its tools."""

    def __init__(self, name: str | None, column: str | None, dialogue: Dialogue) -> None:
        self.name, self.column, self.dialogue = name, column, dialogue
        self._tools: dict[str, list[dict[str, Any]]] = {}
        self._first: dict[str, Mapping[str, Any]] = {}  # the first row of each environment

    def name_of(self, row: Mapping[str, Any]) -> str:
        """Raises ConfigError where the row names none."""
        if self.name is not None:
            return self.name
        if self.column not in row:
            raise ConfigError(
                f"environments.column={self.column} is not a column of the data, whose columns are {', '.join(row)}."
            )
        return row[self.column]

    def tools_of(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The schemas of the tools, none of a text environment.

        Raises ConfigError where one cannot be described, or the template cannot keep such a conversation.
        """
        name = self.name_of(row)
        if name not in self._tools:
            try:
                tools = [_schema(name, *tool) for tool in find(name).tools.items()]
            except ValueError as error:
                raise ConfigError(str(error)) from error
            self.dialogue.check(tools)
            self._tools[name], self._first[name] = tools, row
        return self._tools[name]

    def rehearse(self, config: EnvironmentsConfig) -> None:
        """Raises ConfigError where an environment cannot begin with the first row that was asked about."""
        try:
            rehearse(config, self._first)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _schema(name: str, tool: str, function: Callable) -> dict[str, Any]:
    try:
        return get_json_schema(function)
    except Exception as error:
        said = f"Environment {name!r}: the tool {tool} cannot be described to the policy ({error})"
        raise ValueError(f"{said}: give each parameter a type hint and a line under Args: in the docstring.") from error


class Converser:
    """Holds conversations with the environments of `cast`; a context manager."""

    def __init__(self, cast: Cast, config: EnvironmentsConfig, rollout: RolloutConfig) -> None:
        self.cast, self.config, self.longest = cast, config, rollout.max_response_tokens
        self.pool = EnvironmentPool(config)

    def __enter__(self) -> "Converser":
        return self

    def __exit__(self, *exception: object) -> None:
        self.pool.close()

    async def __call__(self, trajectory: Trajectory, ask: Ask) -> None:
        """Go on with `trajectory`, the prompt so far, until the conversation has ended; sets all but its grade."""
        talk = _Talk(self, trajectory)
        try:
            await talk.hold(ask)
            await talk.settle()
        except Failed as failure:
            if failure.kind != "gone":  # by what it is gone is counted already
                talk.fail(failure)
            trajectory.finish_reason = Ending.ERROR
            talk.error = f"{trajectory.errors[-1].kind}: {trajectory.errors[-1].message}"
        finally:
            talk.session.close()
        trajectory.waited = talk.session.waited
        messages = [{"role": turn.role, "content": turn.content} for turn in trajectory.turns]
        trajectory.outcome = {"messages": messages, "environment": {"reward": talk.reward, "error": talk.error}}


class _Talk:
    """One conversation."""

    def __init__(self, converser: Converser, trajectory: Trajectory) -> None:
        self.dialogue, self.config, self.longest = converser.cast.dialogue, converser.config, converser.longest
        self.trajectory, self.name = trajectory, converser.cast.name_of(trajectory.info)
        self.tools = converser.cast.tools_of(trajectory.info)
        self.session = converser.pool.open(self.name)
        self.reward: float | None = None if self.tools else 0.0
        self.error: str | None = None

    async def hold(self, ask: Ask) -> None:
        """Take turns until one side ends it or a limit cuts it; raises Failed where the environment cannot go on."""
        trajectory = self.trajectory
        if (said := await self.session.reset(trajectory.info)) is not None:
            trajectory.prompt, ids = self.dialogue.begin(trajectory.info, said, self.tools)
            if len(ids) > (most := self.dialogue.config.max_prompt_tokens):
                raise Failed("too long", f"reset made a prompt of {len(ids)} tokens: data.max_prompt_tokens={most}")
            trajectory.begin(ids)
        begun = len(trajectory.tokens)
        for number in range(1, self.config.max_turns + 1):
            left = self.longest - (len(trajectory.tokens) - begun)
            response = await ask(min(left, self.config.max_turn_tokens or left))
            text = self.dialogue.text_of(response.tokens)
            trajectory.response = text
            trajectory.turns.append(Turn("assistant", text, len(response.tokens), Ending(response.finish_reason)))
            if response.finish_reason == Ending.ABORT:
                return
            observed = await (self._use(text) if self.tools else self._step(text))
            if observed is None:
                return
            try:
                ids = self.dialogue.suffix(observed, response.tokens[-1] if response.tokens else None)
            except ConfigError as error:
                raise Failed("unreadable", str(error)) from error
            trajectory.finish_reason = Ending.TURNS if number == self.config.max_turns else Ending.LENGTH
            if number == self.config.max_turns or len(trajectory.tokens) - begun + len(ids) >= self.longest:
                return
            trajectory.add_observed(ids)
            trajectory.turns += [Turn(message["role"], message["content"]) for message in observed]
            trajectory.turns[-1].tokens = len(ids)

    async def _step(self, text: str) -> list[dict] | None:
        """What a text environment says to a turn, as messages; None where it ended the conversation."""
        try:
            observation, reward, done = await self.session.step(text)
        except Failed as failure:
            return [{"role": "user", "content": self._told(failure)}]
        self.reward += reward
        if done:
            self.trajectory.finish_reason = Ending.DONE
            return None
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}]
        return [message | {"content": self._cut(message["content"])} for message in observation]

    async def _use(self, text: str) -> list[dict] | None:
        """What the tools that a turn calls give back, as messages in their order; None where it calls none."""
        calls = self.dialogue.calls(text)
        if not calls:
            return None
        self.trajectory.turns[-1].calls = len(calls)
        known = [tool["function"]["name"] for tool in self.tools]
        for call in calls:
            if not call.error and call.name not in known:
                call.error = f"There is no tool {call.name!r}: use {', '.join(known)}."
        good = [(call.name, call.arguments) for call in calls if not call.error]
        try:
            answers = iter(await self.session.tools(good) if good else [])
        except Failed as failure:
            answers = iter([("told", self._told(failure))] * len(good))
        return [{"role": "tool", "name": call.name, "content": self._answer(call, answers)} for call in calls]

    def _answer(self, call: Call, answers: Iterator[tuple[str, str]]) -> str:
        kind, text = ("wrong call", call.error) if call.error else next(answers)
        return self._cut(text) if kind in ("ok", "told") else self._told(Failed(kind, text))

    def _told(self, failure: Failed) -> str:
        """What the policy is told of a failure; raises it where it ends the conversation."""
        if failure.kind == "gone" or (self.config.on_error == "end" and not failure.kind.startswith("wrong ")):
            raise failure
        self.fail(failure)
        return f"Error: {failure}"

    def _cut(self, text: str) -> str:
        text, was_cut = self.dialogue.cut(text, self.config.max_observation_tokens)
        if was_cut:
            self.fail(Failed("too long", f"said more than {self.config.max_observation_tokens} tokens"))
        return text

    def fail(self, failure: Failed) -> None:
        """Count what went wrong."""
        self.trajectory.errors.append(Failure(self.name, failure.kind, str(failure), self.trajectory.response))

    async def settle(self) -> None:
        """Ask for the reward that is given at the end."""
        if self.tools and not self.session.gone:
            self.reward = await self.session.reward()


def conversation_fields(trajectories: Sequence[Trajectory]) -> dict[str, torch.Tensor]:
    """What conversations came to, environment/NAME [B] float32 each; none of single answers."""
    if not any(trajectory.turns or trajectory.errors for trajectory in trajectories):
        return {}
    own = [[turn for turn in trajectory.turns if turn.role == "assistant"] for trajectory in trajectories]
    met = [{error.kind.replace(" ", "_") for error in trajectory.errors} for trajectory in trajectories]
    columns = {
        "turns": [len(turns) for turns in own],
        "calls": [sum(turn.calls for turn in turns) for turns in own],
        "waited": [trajectory.waited for trajectory in trajectories],
        "observed": [sum(turn.tokens for turn in t.turns if turn.role != "assistant") for t in trajectories],
        "misfits": [sum(error.kind.startswith("wrong ") for error in t.errors) for t in trajectories],
        "errors": [bool(kinds) for kinds in met],
    }
    for kind in sorted(set().union(*met)):
        columns[f"errors/{kind}"] = [kind in kinds for kinds in met]
    for ending in (Ending.DONE, Ending.STOP, Ending.TURNS, Ending.LENGTH, Ending.ERROR):
        columns[f"ended/{ending}"] = [trajectory.finish_reason == ending for trajectory in trajectories]
    return {f"environment/{name}": torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}
