"""The prompts: loading dataset rows, rendering and tokenising them once, and the order they are trained in.

`load_rows` turns a source (a file, a hub name or a Python function) into rows, `tokenize_prompts` turns rows into
`Prompts`, and `PromptStream` hands these out in a seeded order that resumes exactly. Everything here runs before
a model is loaded, and what is wrong with the data is one sentence.
"""

import importlib
import importlib.util
import random
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import httpx
import huggingface_hub
import pyarrow
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from transformers import PreTrainedTokenizerBase

from grpo.config import ConfigError, choose, nearest, option


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
    """One prompt: its row number in the source, its token ids, its text as tokenised, and the row, unchanged."""

    index: int
    tokens: list[int]
    text: str
    row: dict[str, Any]


class Prompts(Sequence[Prompt]):
    """Tokenised prompts by position; rows are read when asked for. `dropped` counts those that were too long."""

    def __init__(self, rows: datasets.Dataset, texts: list[str], tokens: list[list[int]], kept: list[int]):
        self._rows, self._texts, self._tokens, self._kept = rows, texts, tokens, kept
        self.dropped = len(rows) - len(kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, position: int) -> Prompt:
        index = self._kept[position]
        return Prompt(index, self._tokens[index], self._texts[index], self._rows[index])

    def __iter__(self) -> Iterator[Prompt]:
        # In order, many rows are read at once: far faster than asking for each.
        rows = self._rows.select(self._kept) if self.dropped else self._rows
        kept = iter(self._kept)
        for columns in rows.iter(batch_size=1000):
            for values in zip(*columns.values(), strict=True):
                index = next(kept)
                row = dict(zip(columns, values, strict=True))
                yield Prompt(index, self._tokens[index], self._texts[index], row)


def load_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase, part: str) -> Prompts:
    """The prompts of `part`, "train" or "eval", from its source to its tokens; raises ConfigError."""
    source = getattr(config, part)
    if source is None:
        raise ConfigError(f"data.{part} is not set: give it a file, a hub name or module:function.")
    rows = load_rows(source, getattr(config, f"{part}_split"), config.subset, f"data.{part}")
    if part == "eval" and config.eval_limit is not None:
        if config.eval_limit < 1:
            raise ConfigError(f"data.eval_limit={config.eval_limit} leaves no rows: give at least 1 or null.")
        rows = rows.select(range(min(config.eval_limit, len(rows))))
    return tokenize_prompts(rows, tokenizer, config, f"data.{part}")


def load_rows(source: str, split: str, subset: str | None = None, key: str = "data.train") -> datasets.Dataset:
    """The rows of `source` (see `DataConfig.train`); what exists on disk wins over a hub name.

    Raises ConfigError, naming the setting `key`, for a source that is missing, unreachable, unreadable or empty
    and for a split it does not have.
    """
    path = Path(source).expanduser()
    module, colon, function = source.rpartition(":")
    if path.is_file():
        rows = _read_file(path, key)
    elif (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
        rows = _pick_split(datasets.load_from_disk(str(path)), source, split, key)
    elif colon:
        rows = _run_function(module, function, split, key)
    elif path.is_dir() or not _looks_like_path(source):
        rows = _load_dataset(source, split, subset, key)
    else:
        raise ConfigError(f"{key}: there is no file {source}{_nearest_file(path)}; give the path of a file.")
    if not len(rows):
        raise ConfigError(f"{key}: {source} holds no rows; give a source with at least one.")
    return rows


def tokenize_prompts(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig, key: str = "data.train"
) -> Prompts:
    """Render and tokenise every row once.

    A raw prompt gets the special tokens the tokenizer adds by itself (such as a leading bos); one from the chat
    template gets none, because the template writes its own. Raises ConfigError, naming the setting and the row,
    for columns, templates and prompts that do not fit.
    """
    choose(config.too_long, ("error", "drop"), "data.too_long")
    texts = _render(rows, tokenizer, config)
    tokens: list[list[int]] = []
    for start in range(0, len(texts), 1000):
        batch = tokenizer(texts[start : start + 1000], add_special_tokens=not config.chat)
        tokens.extend(batch["input_ids"])
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


def tokenize_responses(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, config: DataConfig, key: str = "data.train"
) -> list[list[int]]:
    """The token ids of each prompt's response to imitate, with the tokenizer's eos token at its end.

    Raises ConfigError where the response column is missing or not text, and where the tokenizer has no eos token.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{key}: the tokenizer has no eos token to end a response with; set eos_token in its tokenizer_config.json."
        )
    column = config.response_column
    _require_column(column, list(prompts[0].row), "data.response_column")
    texts = []
    for prompt in prompts:
        if not isinstance(prompt.row[column], str):
            raise ConfigError(
                f"data.response_column: row {prompt.index} holds {prompt.row[column]!r:.60} in {column}, which is "
                "not text; name a text column."
            )
        texts.append(prompt.row[column])
    tokens: list[list[int]] = []
    for start in range(0, len(texts), 1000):
        tokens.extend(tokenizer(texts[start : start + 1000], add_special_tokens=False)["input_ids"])
    return [[*ids, tokenizer.eos_token_id] for ids in tokens]


class PromptStream:
    """Prompts without end: every epoch gives each prompt once, in an order made from the seed and the epoch alone.

    A step that crosses the border of an epoch takes the rest from the next one, so it may hold a prompt twice.
    Raises ConfigError, naming the setting `key`, for fewer prompts than one step takes.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        prompts_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
        key: str = "algorithm.prompts_per_step",
    ):
        if not 1 <= prompts_per_step <= len(prompts):
            raise ConfigError(
                f"{key}={prompts_per_step} does not fit a dataset of {len(prompts)} prompts (data.train); "
                f"set it between 1 and {len(prompts)}."
            )
        self.prompts, self.prompts_per_step, self.seed, self.shuffle = prompts, prompts_per_step, seed, shuffle
        self.given = 0
        self._order = self._order_of(0)

    @property
    def epoch(self) -> float:
        """How many times the dataset has been gone through."""
        return self.given / len(self.prompts)

    def next(self, count: int | None = None) -> list[Prompt]:
        """The next `count` prompts; where it is not said, the `prompts_per_step` of a step."""
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
        here = self.state_dict()
        settings = {"size": "data.train has {} prompts", "seed": "seed is {}", "shuffle": "data.shuffle is {}"}
        for name, says in settings.items():
            if state[name] != here[name]:
                raise ConfigError(
                    f"The checkpoint cannot be resumed: {says.format(here[name])} but it was {state[name]} when the "
                    "checkpoint was saved; set it back or start a new run."
                )
        self.given = int(state["given"])
        self._order = self._order_of(self.given // len(self.prompts))

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"prompts {self.seed} {epoch}").shuffle(order)
        return order


def _read_file(path: Path, key: str) -> datasets.Dataset:
    readers = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
    if path.suffix not in readers:
        raise ConfigError(
            f"{key}: {path} is not a kind of file that can be read; give one of {', '.join(readers)} "
            "or file.py:function."
        )
    if not path.stat().st_size:
        raise ConfigError(f"{key}: {path} holds no rows; give a source with at least one.")
    try:
        return datasets.load_dataset(readers[path.suffix], data_files=str(path))["train"]
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        raise ConfigError(
            f"{key}: {path} holds no rows that can be read as {path.suffix[1:]} ({_reason(error)}); repair the file."
        ) from error


def _load_dataset(source: str, split: str, subset: str | None, key: str) -> datasets.Dataset:
    if not Path(source).is_dir() and not datasets.config.HF_HUB_OFFLINE:
        _require_on_hub(source, key)
    try:
        return datasets.load_dataset(source, subset, split=split)
    except (ConnectionError, httpx.HTTPError) as error:
        raise ConfigError(
            f"{key}: {source} is no file here and the Hugging Face hub cannot be reached ({_reason(error)}); give "
            "the path of a local file."
        ) from error
    except (datasets.exceptions.DatasetsError, ValueError, OSError) as error:
        raise ConfigError(
            f"{key}: {source} cannot be loaded with {key}_split={split} and data.subset={subset} "
            f"({_reason(error)}); correct these or give the path of a local file."
        ) from error


def _require_on_hub(name: str, key: str) -> None:
    # datasets tries an unreachable hub again for half a minute and more; one short request answers first.
    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"{key}: {name} is neither a file here nor a dataset you can read on the Hugging Face hub; correct it or "
            "give the path of a local file."
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise ConfigError(
            f"{key}: {name} is no file here and the Hugging Face hub cannot be reached ({_reason(error)}); give the "
            "path of a local file, or set HF_HUB_OFFLINE=1 if the dataset was downloaded before."
        ) from error


def _pick_split(loaded: datasets.Dataset | datasets.DatasetDict, source: str, split: str, key: str) -> datasets.Dataset:
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if split not in loaded:
        raise ConfigError(f"{key}_split={split}: {source} has no such split; use one of {', '.join(loaded)}.")
    return loaded[split]


def _run_function(module: str, name: str, split: str, key: str) -> datasets.Dataset:
    function = _find_function(module, name, key)
    rows = list(function(split))
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigError(
                f"{key}: {module}:{name} yields {row!r:.60} as row {index}; let it yield dicts of columns."
            )
    columns = dict.fromkeys(column for row in rows for column in row)
    try:
        return datasets.Dataset.from_dict({column: [row.get(column) for row in rows] for column in columns})
    except (pyarrow.ArrowException, ValueError, TypeError) as error:
        raise ConfigError(
            f"{key}: the rows of {module}:{name} do not share types ({_reason(error)}); give each column one type."
        ) from error


def _find_function(module: str, name: str, key: str) -> Callable[[str], Iterable[dict]]:
    if module.endswith(".py"):
        path = Path(module).expanduser()
        if not path.is_file():
            raise ConfigError(f"{key}: there is no file {module}{_nearest_file(path)}; give it as file.py:function.")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    else:
        try:
            loaded = importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{key}: there is no module {module} to take {name} from (missing: {error.name}); install it or give "
                "file.py:function."
            ) from error
    function = getattr(loaded, name, None)
    if not callable(function):
        names = [other for other in vars(loaded) if callable(getattr(loaded, other))]
        raise ConfigError(f"{key}: {module} has no function {name}{_nearest(name, names)}; name one it has.")
    return function


def _render(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> list[str]:
    if config.system is not None and not config.chat:
        raise ConfigError("data.system needs a chat template: set data.chat=true or write it into data.template.")
    if config.chat and not tokenizer.chat_template:
        raise ConfigError(
            "data.chat=true but the tokenizer has no chat template: set data.chat=false or use a model that has one."
        )
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
            f"data.template is not a format string ({_reason(error)}): write a brace meant as text twice, {{{{ or }}}}."
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
            f"data.template cannot be filled from row {index} ({_reason(error)}): correct its braces or the row."
        ) from error


def _require_column(name: str, columns: list[str], key: str) -> None:
    if name not in columns:
        raise ConfigError(
            f"{key} names the column {name!r}, which the data does not have{_nearest(name, columns)}; use one of "
            f"{', '.join(columns)}."
        )


def _looks_like_path(source: str) -> bool:
    endings = (".json", ".jsonl", ".parquet", ".csv")
    return source.startswith((".", "/", "~")) or source.endswith(endings) or source.count("/") > 1


def _nearest_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" (nor a folder {folder})"
    return _nearest(path.name, [entry.name for entry in folder.iterdir()])


def _nearest(name: str, known: list[str]) -> str:
    near = nearest(name, known)
    return f" (did you mean {near}?)" if near else ""


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__
