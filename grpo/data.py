"""How dataset rows become prompts, rendered and tokenised once before a model is loaded, and in which order they come.

Rows come from grpo/sources.py; a PromptStream decides the order in which the prompts are given out.
"""

import json
import random
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from grpo.config import ConfigError, choose
from grpo.data_config import DataConfig
from grpo.sources import beside, did_you_mean, load_rows, reason
from grpo.tasks import DEFAULT_SIZES, PREFIX, load_task

Tools = Callable[[dict[str, Any]], list[dict]]
"""The schemas of the tools that a row's environment has."""

ROLES = {"human": "user", "gpt": "assistant"}
"""How data with from/value calls the roles."""


@dataclass(frozen=True)
class Prompt:
    """One prompt and the dataset row it was made of."""

    index: int  # of the row in its source
    tokens: list[int]
    text: str  # what was tokenised
    row: dict[str, Any]  # all columns, unchanged


class Prompts(Sequence[Prompt]):
    """The tokenised prompts of the rows `kept`, each with its row read when asked for."""

    def __init__(self, rows: datasets.Dataset, texts: list[str], tokens: list[list[int]], kept: list[int]) -> None:
        self._kept, self._rows = kept, rows.select(kept)
        self.tokens, self.texts = [tokens[index] for index in kept], [texts[index] for index in kept]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(self._kept[i], self.tokens[i], self.texts[i], self._rows[i])

    def __iter__(self) -> Iterator[Prompt]:
        return map(Prompt, self._kept, self.tokens, self.texts, self._rows)  # faster than one by one


def load_prompts(
    config: DataConfig,
    tokenizer: Tokenizer,
    split: str,
    key: str | None = None,
    demonstrations: bool = False,
    tools: Tools | None = None,
) -> Prompts:
    """The prompts of `split`, "train" or "eval": loaded, rendered and tokenised; raises ConfigError naming `key`.

    demonstrations: take the response from the end of conversations where the data has no column of it.
    """
    key, source = key or f"data.{split}", getattr(config, split)
    if source is None:
        raise ConfigError(f"{key} is not set: give it a file, a hub name or module:function.")
    config.check_options()
    rows = _load_rows(config, source, split, key)
    for name, path in config.columns.items():
        values = _follow(rows, path, f"data.columns.{name}")
        rows = rows.remove_columns([name] if name in rows.column_names else []).add_column(name, values)
    if demonstrations and config.response_column not in rows.column_names:
        rows = _split_conversations(rows, config)
    return tokenize_prompts(rows, tokenizer, config, key, tools)


def load_held_out(config: DataConfig, tokenizer: Tokenizer, tools: Tools | None = None) -> dict[str, Prompts]:
    """The prompts of each held-out set by its name, "" where there is but one; raises ConfigError."""
    sets = config.held_out_sets()
    keys = {name: f"data.eval.{name}" if name else None for name in sets}
    return {name: load_prompts(sets[name], tokenizer, "eval", keys[name], tools=tools) for name in sets}


def overlap(train: Prompts, held_out: Iterable[Prompts]) -> list[str]:
    """The texts of held-out prompts that `train` has as well, each as often as it is held out."""
    trained = set(train.texts)
    return [text for prompts in held_out for text in prompts.texts if text in trained]


def _load_rows(config: DataConfig, source: str, split: str, key: str) -> datasets.Dataset:
    part, limit = getattr(config, f"{split}_split"), config.eval_limit if split == "eval" else None
    if limit is not None and limit < 1:
        raise ConfigError(f"{beside(key, 'limit')}={limit} leaves no rows: give at least 1 or null.")
    if not source.startswith(PREFIX):
        rows = load_rows(source, part, config.subset, key, config.options)
        return rows if limit is None else rows.take(min(limit, len(rows)))
    # The size is that of the training rows.
    options = config.options if split == "train" else {**config.options, "size": limit or DEFAULT_SIZES["test"]}
    return load_task(source, part, options, key)


def _follow(rows: datasets.Dataset, path: str, key: str) -> list[Any]:
    """What stands at the dotted `path` of each row; raises ConfigError where a part of it leads nowhere."""
    first, *rest = path.split(".")
    _require_column(first, rows.column_names, key)
    found = []
    for row, value in enumerate(rows[first][:]):
        for part in rest:
            try:
                value = value[int(part)] if isinstance(value, list) else value[part]
            except (LookupError, TypeError, ValueError) as error:
                near = did_you_mean(part, value) if isinstance(value, dict) else ""
                raise ConfigError(f"{key}: row {row} has no {part!r} in {path}{near}; correct the path.") from error
        found.append(value)
    return found


def _split_conversations(rows: datasets.Dataset, config: DataConfig) -> datasets.Dataset:
    """The rows with the last message of the prompt column, which must be the assistant's, as the response column."""
    column, reply = config.prompt_column, config.response_column
    _require_column(column, rows.column_names, "data.prompt_column")
    if not _holds_messages(rows[0][column]):
        return rows
    whole = [_as_messages(messages or []) for messages in rows[column]]
    for row, messages in enumerate(whole):
        if not messages or messages[-1]["role"] != "assistant":
            said = f"there is no column {reply}, and {column} of row {row} does not end with the assistant's message"
            raise ConfigError(f"data.response_column: {said}; set it or complete the row.")
    rows = rows.remove_columns(column).add_column(column, [messages[:-1] for messages in whole])
    return rows.add_column(reply, [messages[-1]["content"] for messages in whole])


def _holds_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _as_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of from/value with role and content; those that have a role stay as they are."""
    named = ({"role": ROLES.get(m.get("from"), m.get("from")), "content": m.get("value")} for m in messages)
    return [m if m.get("role") else other for m, other in zip(messages, named, strict=True)]


def tokenize_prompts(
    rows: datasets.Dataset, tokenizer: Tokenizer, config: DataConfig, key: str, tools: Tools | None = None
) -> Prompts:
    """Render and tokenise every row; raises ConfigError where a column, the template or a prompt does not fit.

    A raw prompt gets the special tokens that the tokenizer adds by itself (such as a leading bos); a chat prompt gets
    none, because the template writes its own.
    """
    choose(config.too_long, ("error", "drop"), "data.too_long")
    texts = _render(rows, tokenizer, config, tools)
    tokens = tokenize(texts, tokenizer, add_special_tokens=not config.chat)
    if [] in tokens:
        row = tokens.index([])
        raise ConfigError(f"{key}: the prompt of row {row} is empty; remove the row or fill its prompt.")
    lengths, limit = [len(ids) for ids in tokens], config.max_prompt_tokens
    kept = [row for row, length in enumerate(lengths) if length <= limit]
    if len(kept) < len(lengths) and config.too_long == "error":
        row, length = next((row, length) for row, length in enumerate(lengths) if length > limit)
        others = f"{len(lengths) - len(kept)} of {len(lengths)} rows are longer, the longest has {max(lengths)}"
        fault = f"the prompt of row {row} has {length} tokens and data.max_prompt_tokens is {limit} ({others})"
        raise ConfigError(f"{key}: {fault}; raise it or set data.too_long=drop.")
    if not kept:
        fault = f"all {len(lengths)} prompts are longer than data.max_prompt_tokens={limit} and were dropped"
        raise ConfigError(f"{key}: {fault}; the shortest has {min(lengths)} tokens, so raise it.")
    return Prompts(rows, texts, tokens, kept)


def tokenize_responses(prompts: Sequence[Prompt], tokenizer: Tokenizer, config: DataConfig) -> list[list[int]]:
    """The token ids of each response to imitate, ended by the eos token; raises ConfigError where one is not text."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("The tokenizer has no eos token to end responses with: set it in its tokenizer_config.json.")
    column = config.response_column
    _require_column(column, list(prompts[0].row), "data.response_column")
    texts = [prompt.row[column] for prompt in prompts]
    texts = [_as_messages(text)[-1]["content"] if _holds_messages(text) else text for text in texts]
    for prompt, text in zip(prompts, texts, strict=True):
        if not isinstance(text, str):
            said = f"row {prompt.index} holds {text!r:.60} in {column}; name a column of text"
            raise ConfigError(f"data.response_column: {said}.")
    return [[*ids, tokenizer.eos_token_id] for ids in tokenize(texts, tokenizer, add_special_tokens=False)]


class PromptStream:
    """Prompts without end: each epoch gives every prompt once, in an order of its own that depends on the seed alone.

    A step at the end of an epoch takes what it lacks from the next one, so it may hold a prompt twice. Raises
    ConfigError, naming the setting `key`, where a step takes more prompts than there are.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        prompts_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
        key: str = "batch.prompts_per_step",
    ) -> None:
        if not 1 <= prompts_per_step <= len(prompts):
            data, fits = f"a dataset of {len(prompts)} prompts (data.train)", f"set it between 1 and {len(prompts)}"
            raise ConfigError(f"{key}={prompts_per_step} does not fit {data}; {fits}.")
        self.prompts, self.prompts_per_step, self.seed, self.shuffle = prompts, prompts_per_step, seed, shuffle
        self.given = 0  # prompts in all
        self._order = self._order_of(0)

    def next(self, count: int | None = None) -> list[Prompt]:
        """The next `count` prompts; None stands for `prompts_per_step`."""
        step = []
        for _ in range(self.prompts_per_step if count is None else count):
            step.append(self.prompts[self._order[self.given % len(self.prompts)]])
            self.given += 1
            if self.given % len(self.prompts) == 0:
                self._order = self._order_of(self.given // len(self.prompts))
        return step

    def state_dict(self) -> dict[str, int | bool]:
        """What `load_state_dict` needs to go on with the very next prompt; plain numbers, fit for JSON."""
        return {"given": self.given, "size": len(self.prompts), "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Go on where `state` was taken; raises ConfigError where it belongs to another order of prompts."""
        settings = {"size": "data.train has {} prompts", "seed": "seed is {}", "shuffle": "data.shuffle is {}"}
        for name, says in settings.items():
            if state[name] != (present := self.state_dict()[name]):
                differs = f"{says.format(present)} but it was {state[name]} when the checkpoint was saved"
                raise ConfigError(f"The checkpoint cannot be resumed: {differs}; set it back or start a new run.")
        self.given = state["given"]
        self._order = self._order_of(self.given // len(self.prompts))

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"prompts {self.seed} {epoch}").shuffle(order)
        return order


def tokenize(texts: list[str], tokenizer: Tokenizer, add_special_tokens: bool) -> list[list[int]]:
    """The ids of each text; raises ConfigError for one that the tokenizer has no tokens for."""
    batches = (texts[start : start + 1000] for start in range(0, len(texts), 1000))
    try:
        return [ids for some in batches for ids in tokenizer(some, add_special_tokens=add_special_tokens)["input_ids"]]
    except Exception as error:
        wrong = f"a prompt, such as one like {texts[0]!r:.100} ({str(error).rpartition('error: ')[2]})"
        way_out = "use only what is in its vocabulary, or another model"
        raise ConfigError(f"The model's tokenizer cannot read {wrong}: {way_out}.") from error


def text_of(tokens: Sequence[int], tokenizer: Tokenizer, stop: Collection[int]) -> str:
    """What was sampled, as text, without the token of `stop` that ended it."""
    # Of an array: the elements of a list are looked at one by one.
    return tokenizer.decode(np.asarray(tokens[:-1] if len(tokens) and tokens[-1] in stop else tokens))


def _render(rows: datasets.Dataset, tokenizer: Tokenizer, config: DataConfig, tools: Tools | None) -> list[str]:
    if config.system is not None and not config.chat:
        raise ConfigError("data.system needs a chat template: set data.chat=true or write it into data.template.")
    if config.chat and not tokenizer.chat_template:
        raise ConfigError("data.chat=true, but the tokenizer has no chat template: set data.chat=false.")
    if config.template is None:
        _require_column(config.prompt_column, rows.column_names, "data.prompt_column")
        contents = rows[config.prompt_column][:]
    else:
        contents = _fill(config.template, rows)
    texts = []
    schemas = map(tools, rows) if tools else repeat(None)
    for index, (content, known) in enumerate(zip(contents, schemas, strict=False)):
        texts.append(render(messages_of(content, config, f"row {index}"), tokenizer, config, known))
    return texts


def messages_of(content: Any, config: DataConfig, where: str) -> list[dict[str, Any]]:
    """What the template is given of a prompt that is text or messages; ConfigError for any other, naming `where`."""
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    if isinstance(content, str):
        return [*system, {"role": "user", "content": content}]
    if not (config.chat and _holds_messages(content)):
        fault = f"{where} holds {content!r:.60} in {config.prompt_column}, which is not text"
        way_out = "name a text column, set data.template or, for messages, data.chat=true"
        raise ConfigError(f"data.prompt_column: {fault}; {way_out}.")
    messages = [*system, *_as_messages(content)]
    for m in messages:
        if not (isinstance(m["role"], str) and (isinstance(m.get("content"), str | list) or m.get("tool_calls"))):
            said = f"{where} of {config.prompt_column} has the message {m!r:.80}"
            raise ConfigError(f"data.prompt_column: {said}: give each text as role and content, or as from and value.")
    if messages[-1]["role"] == "assistant":
        said = f"{where} of {config.prompt_column} ends with the assistant's message, which is sampled here"
        cut = f"data.columns={{question: {config.prompt_column}.0.content}} data.prompt_column=question"
        raise ConfigError(f"data.prompt_column: {said}: take what comes before it, as by {cut}.")
    return messages


def render(messages: Sequence[dict], tokenizer: Tokenizer, config: DataConfig, tools: list[dict] | None = None) -> str:
    """The text that is tokenised of `messages`, which a response or a turn follows; tools: their schemas."""
    if not config.chat:
        return "".join(message["content"] for message in messages) + config.opening
    if tools and "tools" not in tokenizer.chat_template:
        messages = announce(messages, tools)
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools or None, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template raises what it likes
        said = f"The tokenizer's chat template cannot be filled from {messages!r:.100} ({reason(error)})"
        raise ConfigError(f"{said}: correct the messages or the template, or set data.chat=false.") from error
    return text + config.opening


def announce(messages: Sequence[dict], tools: Sequence[dict]) -> list[dict]:
    """`messages` with the tools in the system message, for a template that has no place for them."""
    system, *others = messages if messages[0]["role"] == "system" else [{"role": "system", "content": ""}, *messages]
    listed = "\n".join(json.dumps(tool) for tool in tools)
    said = (
        f"{system['content']}\n\nYou can call these functions, each described as JSON:\n{listed}\nTo call one, write "
        '<tool_call>\n{"name": NAME, "arguments": {ARGUMENT: VALUE}}\n</tool_call> and end your turn: you are then '
        "told what it returns."
    )
    return [{"role": "system", "content": said.strip()}, *others]


def _fill(template: str, rows: datasets.Dataset) -> Iterator[str]:
    """The template filled from each row; only the columns that it names are read."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        way_out = "write a brace meant as text twice, {{ or }}"
        raise ConfigError(f"data.template is not a format string ({reason(error)}): {way_out}.") from error
    names = list(dict.fromkeys(field.split(".")[0].split("[")[0] for field in fields))
    if not names:
        raise ConfigError(
            f"data.template={template!r} names no column, so that every prompt would be the same: put one in braces "
            f"(columns: {', '.join(rows.column_names)})."
        )
    for name in names:
        _require_column(name, rows.column_names, "data.template")
    for index, row in enumerate(rows.select_columns(names)):
        try:
            yield template.format(**row)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            said = f"cannot be filled from row {index} ({reason(error)})"
            raise ConfigError(f"data.template {said}: correct its braces or the row.") from error


def _require_column(name: str, columns: list[str], key: str) -> None:
    if name not in columns:
        missing = f"the column {name!r}, which the data does not have{did_you_mean(name, columns)}"
        raise ConfigError(f"{key} names {missing}; use one of {', '.join(columns)}.")
