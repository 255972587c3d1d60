"""How dataset rows become prompts: rendered (template, chat, opening) and tokenised once, before a model is loaded.

Rows come from grpo/sources.py; grpo/stream.py decides the order in which the prompts are given out.
"""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase as Tokenizer

from grpo.config import ConfigError, choose, option
from grpo.sources import did_you_mean, load_rows, reason


@dataclass
class DataConfig:
    """Where the prompts come from and how they become tokens."""

    train: str | None = option(
        None,
        "The training rows: a .json, .jsonl, .parquet or .csv file, a folder written by save_to_disk, a name on the "
        "Hugging Face hub, or a Python function that yields rows as package.module:function or file.py:function "
        "(it is called with the split).",
    )
    eval: str | None = option(None, "The held-out rows, given like train.")
    train_split: str = option("train", "Which split of train; a single file has no splits.")
    eval_split: str = option("test", "Which split of eval; a single file has no splits.")
    subset: str | None = option(None, "The subset (configuration) of a dataset on the hub, such as main.")
    prompt_column: str = option("prompt", "The column that holds the prompt: text, or with chat also messages.")
    response_column: str = option("response", "The column that holds the response to imitate (supervised only).")
    template: str | None = option(
        None,
        "The prompt as a format string over the row's columns, such as "
        "'Using the numbers {numbers}, make {target}.'; without it the prompt column stands as it is.",
    )
    chat: bool = option(False, "Put the prompt into the tokenizer's chat template, ready for the reply.")
    system: str | None = option(None, "The system message; needs chat.")
    opening: str = option("", "Text after the prompt that the response continues, such as <think>.")
    max_prompt_tokens: int = option(1024, "The longest prompt, in tokens, opening included.")
    too_long: str = option("error", "What to do with a longer prompt: error or drop.")
    shuffle: bool = option(True, "Draw a new order each epoch; otherwise keep the order of the rows.")
    eval_limit: int | None = option(None, "Use only so many of the first held-out rows.")


@dataclass(frozen=True)
class Prompt:
    """One prompt and the dataset row it was made of."""

    index: int  # of the row in its source
    tokens: list[int]
    text: str  # what was tokenised
    row: dict[str, Any]  # all columns, unchanged


class Prompts(Sequence[Prompt]):
    """The tokenised prompts of the rows `kept`, each with its row read when asked for."""

    def __init__(self, rows: datasets.Dataset, texts: list[str], tokens: list[list[int]], kept: list[int]):
        self._kept, self._rows = kept, rows if len(kept) == len(rows) else rows.select(kept)
        self._tokens, self._texts = [tokens[index] for index in kept], [texts[index] for index in kept]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(self._kept[i], self._tokens[i], self._texts[i], self._rows[i])

    def __iter__(self) -> Iterator[Prompt]:
        # Many rows are read at once, which is far faster than one by one.
        batches = (zip(*columns.values(), strict=True) for columns in self._rows.iter(batch_size=1000))
        rows = (dict(zip(self._rows.column_names, values, strict=True)) for batch in batches for values in batch)
        return map(Prompt, self._kept, self._tokens, self._texts, rows)


def load_prompts(config: DataConfig, tokenizer: Tokenizer, split: str) -> Prompts:
    """The prompts of `split`, "train" or "eval": loaded, rendered and tokenised; raises ConfigError."""
    key, source = f"data.{split}", getattr(config, split)
    if source is None:
        raise ConfigError(f"{key} is not set: give it a file, a hub name or module:function.")
    rows = load_rows(source, getattr(config, f"{split}_split"), config.subset, key)
    if split == "eval" and config.eval_limit is not None:
        if config.eval_limit < 1:
            raise ConfigError(f"data.eval_limit={config.eval_limit} leaves no rows: give at least 1 or null.")
        rows = rows.select(range(min(config.eval_limit, len(rows))))
    return tokenize_prompts(rows, tokenizer, config, key)


def tokenize_prompts(
    rows: datasets.Dataset, tokenizer: Tokenizer, config: DataConfig, key: str = "data.train"
) -> Prompts:
    """Render and tokenise every row.

    A raw prompt gets the special tokens that the tokenizer adds by itself (such as a leading bos); a chat prompt gets
    none, because the template writes its own. Raises ConfigError, naming the setting and the row, where a column, the
    template or a prompt does not fit.
    """
    choose(config.too_long, ("error", "drop"), "data.too_long")
    texts = _render(rows, tokenizer, config)
    tokens = _tokenize(texts, tokenizer, add_special_tokens=not config.chat)
    for index, ids in enumerate(tokens):
        if not ids:
            raise ConfigError(f"{key}: the prompt of row {index} is empty; remove the row or fill its prompt.")
    limit = config.max_prompt_tokens
    kept = [index for index, ids in enumerate(tokens) if len(ids) <= limit]
    if len(kept) < len(tokens) and config.too_long == "error":
        index = next(index for index, ids in enumerate(tokens) if len(ids) > limit)
        raise ConfigError(
            f"{key}: the prompt of row {index} has {len(tokens[index])} tokens and data.max_prompt_tokens is {limit} "
            f"({len(tokens) - len(kept)} of {len(tokens)} rows are longer, the longest has "
            f"{max(map(len, tokens))}); raise it or set data.too_long=drop."
        )
    if not kept:
        raise ConfigError(
            f"{key}: all {len(tokens)} prompts are longer than data.max_prompt_tokens={limit} and were dropped; "
            f"the shortest has {min(map(len, tokens))} tokens, so raise it."
        )
    return Prompts(rows, texts, tokens, kept)


def tokenize_responses(prompts: Sequence[Prompt], tokenizer: Tokenizer, config: DataConfig) -> list[list[int]]:
    """The token ids of each prompt's response to imitate, with the tokenizer's eos token at its end.

    Raises ConfigError where the response column is missing or not text, and where the tokenizer has no eos token.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError("The tokenizer has no eos token to end responses with: set it in its tokenizer_config.json.")
    column = config.response_column
    _require_column(column, list(prompts[0].row), "data.response_column")
    texts = [prompt.row[column] for prompt in prompts]
    for prompt, text in zip(prompts, texts, strict=True):
        if not isinstance(text, str):
            raise ConfigError(
                f"data.response_column: row {prompt.index} holds {text!r:.60} in {column}; name a column of text."
            )
    return [[*ids, tokenizer.eos_token_id] for ids in _tokenize(texts, tokenizer, add_special_tokens=False)]


def _tokenize(texts: list[str], tokenizer: Tokenizer, add_special_tokens: bool) -> list[list[int]]:
    batches = (texts[start : start + 1000] for start in range(0, len(texts), 1000))
    return [ids for batch in batches for ids in tokenizer(batch, add_special_tokens=add_special_tokens)["input_ids"]]


def _render(rows: datasets.Dataset, tokenizer: Tokenizer, config: DataConfig) -> list[str]:
    if config.system is not None and not config.chat:
        raise ConfigError("data.system needs a chat template: set data.chat=true or write it into data.template.")
    if config.chat and not tokenizer.chat_template:
        raise ConfigError("data.chat=true, but the tokenizer has no chat template: set data.chat=false.")
    if config.template is None:
        _require_column(config.prompt_column, rows.column_names, "data.prompt_column")
        contents = rows[config.prompt_column][:]
    else:
        columns = _template_columns(config.template, rows.column_names)
        contents = (_fill(config.template, row, i) for i, row in enumerate(rows.select_columns(columns)))
    system = [] if config.system is None else [{"role": "system", "content": config.system}]
    texts = []
    for index, content in enumerate(contents):
        if config.chat and isinstance(content, list):
            messages = [*system, *content]
        elif isinstance(content, str):
            messages = [*system, {"role": "user", "content": content}]
        else:
            raise ConfigError(
                f"data.prompt_column: row {index} holds {content!r:.60} in {config.prompt_column}, which is not text; "
                "name a text column, set data.template or, for messages, data.chat=true."
            )
        if config.chat:
            content = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        texts.append(content + config.opening)
    return texts


def _template_columns(template: str, columns: list[str]) -> list[str]:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ConfigError(
            f"data.template is not a format string ({reason(error)}): write a brace meant as text twice, {{{{ or }}}}."
        ) from error
    names = list(dict.fromkeys(field.split(".")[0].split("[")[0] for field in fields))
    if not names:
        raise ConfigError(
            f"data.template={template!r} names no column, so that every prompt would be the same: put one in braces "
            f"(columns: {', '.join(columns)})."
        )
    for name in names:
        _require_column(name, columns, "data.template")
    return names


def _fill(template: str, row: dict[str, Any], index: int) -> str:
    try:
        return template.format(**row)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"data.template cannot be filled from row {index} ({reason(error)}): correct its braces or the row."
        ) from error


def _require_column(name: str, columns: list[str], key: str) -> None:
    if name not in columns:
        raise ConfigError(
            f"{key} names the column {name!r}, which the data does not have{did_you_mean(name, columns)}; use one of "
            f"{', '.join(columns)}."
        )
