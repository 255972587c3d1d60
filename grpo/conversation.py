"""Conversations as tokens: what an environment says becomes ids that follow those sampled, which nothing touches.

Of the template only what stands behind an answer is used, so a history is never rendered and tokenised again. That this
is what the template itself would make of the conversation is checked before a model is loaded.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import is_jmespath_available

from grpo.config import ConfigError
from grpo.data import messages_of, render, text_of, tokenize
from grpo.data_config import DataConfig

ANSWER = "ANSWER-THAT-STANDS-HERE"
"""Stands for what the policy says where only what follows it is wanted."""

NO_THOUGHTS = re.compile(r"\s*<think>\s*</think>\s*$")
"""Where a template says of an earlier turn that nothing was thought."""

HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


@dataclass
class Call:
    """A call of a tool as the policy wrote it; `error` tells it what was wrong with that."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Dialogue:
    """How conversations become tokens with `tokenizer` and the template of `config`. stop: ids that end a turn."""

    def __init__(self, tokenizer: Tokenizer, config: DataConfig, stop: Collection[int]) -> None:
        self.tokenizer, self.config, self.stop = tokenizer, config, set(stop)
        tokenize([""], tokenizer, add_special_tokens=False)  # which leaves the backend without limits of its own
        self.backend = getattr(tokenizer, "backend_tokenizer", None)

    def begin(self, row: Mapping[str, Any], said: str | list[dict], tools: list[dict]) -> tuple[str, list[int]]:
        """The prompt of `row` as text and ids: what its environment `said` follows it, or, if messages, replaces it."""
        if isinstance(said, str):
            template, column = self.config.template, self.config.prompt_column
            messages = messages_of(row[column] if template is None else template.format(**row), self.config, "the row")
            said = [*messages[:-1], messages[-1] | {"content": f"{messages[-1]['content']}{self._gap}{said}"}]
        text = render(said, self.tokenizer, self.config, tools)
        return text, tokenize([text], self.tokenizer, add_special_tokens=not self.config.chat)[0]

    def suffix(self, messages: Sequence[dict], last: int | None) -> list[int]:
        """The ids that follow a turn which ended with the token `last`, for it to be answered by `messages`."""
        text = self._behind(self._fit(messages))
        if last in self.stop:
            text = text.removeprefix(self.tokenizer.decode([last]))
        return self._ids(text)

    def text_of(self, tokens: Sequence[int]) -> str:
        """A turn as text, without the token that ended it."""
        return text_of(tokens, self.tokenizer, self.stop)

    def cut(self, text: str, most: int) -> tuple[str, bool]:
        """At most `most` tokens of what an environment said, and whether it was more."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if len(text) > most else []
        return (f"{self.tokenizer.decode(ids[:most])} [cut]", True) if len(ids) > most else (text, False)

    def calls(self, text: str) -> list[Call]:
        """The tools that a turn calls: by the tokenizer's own schema of responses, else in Hermes' or Llama's form."""
        if getattr(self.tokenizer, "response_schema", None):
            try:
                said = self.tokenizer.parse_response(text) or {}
            except Exception as error:  # noqa: BLE001 - the schema is the model's, and with it what it raises
                return [Call(error=f"The call could not be read: {error}")]
            # Schemas know nothing of a call that is cut in the middle.
            if (found := said.get("tool_calls")) or "<tool_call>" not in text:
                return [_call(each) for each in found or []]
        answer = text.rpartition("</think>")[2]  # what was only thought of is not called
        found, bare = HERMES.findall(answer), answer.strip().removeprefix("<|python_tag|>").strip()
        if not found and bare.startswith("{") and '"name"' in bare:
            found = [bare]
        return [call for each in found for call in _read(each)]

    def check(self, tools: list[dict]) -> None:
        """Raise ConfigError where the template would write a conversation otherwise than it is kept here.

        A template may leave out of earlier turns what it opens for the present one, such as <think>: tokens stay.
        """
        if not self.config.chat:
            return
        schema = json.dumps(getattr(self.tokenizer, "response_schema", None))
        if tools and '"transform"' in schema and not is_jmespath_available():
            raise ConfigError(
                "The model's response_schema, by which calls of tools are read, needs a package: pip install jmespath."
            )
        role, turns = "tool" if tools else "user", [{"role": "user", "content": "Q"}]
        for number in range(2):
            said = self._fit([{"role": role, "content": f"O{number}"}])
            turns += [{"role": "assistant", "content": f"{ANSWER}{number}"}, *said]
        try:
            whole = render(turns, self.tokenizer, self.config, tools)
            begun = render(turns[:1], self.tokenizer, self.config, tools)
            behind = [self._behind([turns[place]]) for place in (2, 4)]
        except Exception as error:
            said = f"The chat template of the model cannot write a conversation ({error})"
            raise ConfigError(f"{said}: use a model whose template can, or data.chat=false.") from error
        parts = re.split(f"{ANSWER}[01]", whole)
        if len(parts) != 3:
            raise ConfigError(
                "The chat template of the model leaves out of a conversation what was said: use a model whose template "
                "keeps it, or data.chat=false."
            )
        for mine, its in zip([begun, *behind], parts, strict=True):
            # What opens the present turn, or says of an earlier one that nothing was thought, are tokens that stay.
            if not mine.startswith(NO_THOUGHTS.sub("", its)) or (its is parts[2] and mine != its):
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, its, strict=False)))
                place = max(0, same - 20)
                raise ConfigError(
                    f"The chat template of the model rewrites a conversation as it goes on: it writes "
                    f"{its[place:]!r:.80} where {mine[place:]!r:.80} stood. Use a model whose template only appends, "
                    "or data.chat=false."
                )

    def _ids(self, text: str) -> list[int]:
        if self.backend is not None:
            try:  # a third of the time that it takes below
                return self.backend.encode(text, add_special_tokens=False).ids
            except Exception:  # noqa: BLE001 - what is wrong is said below
                pass
        return tokenize([text], self.tokenizer, add_special_tokens=False)[0]

    def _fit(self, messages: Sequence[dict]) -> list[dict]:
        """`messages`, those of tools as one of the user where the template knows nothing of tools."""
        if messages[0]["role"] != "tool" or not self.config.chat or "tools" in self.tokenizer.chat_template:
            return list(messages)
        return [{"role": "user", "content": "\n".join(message["content"] for message in messages)}]

    @property
    def _gap(self) -> str:
        return "\n\n" if self.config.chat else ""

    def _behind(self, messages: Sequence[dict]) -> str:
        """What stands behind an answer that is answered by `messages`, up to where the next turn begins."""
        if not self.config.chat:
            return render(messages, self.tokenizer, self.config)
        before = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": ANSWER}]
        return render([*before, *messages], self.tokenizer, self.config).rpartition(ANSWER)[2]


def _read(text: str) -> list[Call]:
    """A call in JSON, or, as SmolLM2 writes them, several in a list."""
    try:
        given = json.loads(text)
    except ValueError as error:
        return [Call(error=f"The call is not JSON that ends ({error}): write it again.")]
    return [_call(each) for each in (given if isinstance(given, list) else [given])]


def _call(given: Any) -> Call:
    given = given.get("function", given) if isinstance(given, dict) else given
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        return Call(error='A call has the form {"name": NAME, "arguments": {ARGUMENT: VALUE}}: write it again.')
    arguments = given.get("arguments", given.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        return Call(given["name"], error=f"The arguments of {given['name']} are no JSON object: write it again.")
    return Call(given["name"], arguments)
