"""The settings of the data, apart from what reads it, which takes seconds to import."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo.config import ConfigError, nearest, option

SET_SETTINGS = {"split": "eval_split", "limit": "eval_limit"}
SET_SETTINGS |= {name: name for name in ("subset", "options", "columns", "prompt_column", "template")}
"""What one of several held-out sets may have otherwise, and the setting of DataConfig that it takes the place of."""


@dataclass
class DataConfig:
    """Where the prompts come from and how they become tokens."""

    train: str | None = option(
        None,
        "The training rows: a .json, .jsonl, .parquet or .csv file, a folder written by save_to_disk, a name on the "
        "Hugging Face hub, a task of reasoning-gym such as reasoning_gym:chain_sum, or a Python function that yields "
        "rows as package.module:function or file.py:function (it is called with the split and data.options).",
    )
    eval: Any = option(
        None,
        "The held-out rows, given like train, or several sets by name, such as {easy: easy.jsonl, hard: hard.jsonl}. "
        f"A set may also be {{source: hard.jsonl, ...}} with what differs: {', '.join(SET_SETTINGS)}.",
    )
    options: dict[str, Any] = option(
        {},
        "Options of a reasoning-gym task, such as {size: 2000, max_terms: 3} (size: training rows, 5000 otherwise), "
        "or keyword arguments of a Python function.",
    )
    columns: dict[str, str] = option(
        {}, "New columns by the dotted path of what a row holds, such as {answer: reward_model.ground_truth}."
    )
    train_split: str = option("train", "Which split of train; a single file has no splits.")
    eval_split: str = option("test", "Which split of eval; a single file has no splits.")
    subset: str | None = option(None, "The subset (configuration) of a dataset on the hub, such as main.")
    prompt_column: str = option(
        "prompt", "The column that holds the prompt: text, or with chat also messages (role/content or from/value)."
    )
    response_column: str = option(
        "response",
        "The column that holds the response to imitate (supervised only); where the data has none, it is the last "
        "message of the prompt column.",
    )
    template: str | None = option(
        None,
        "The prompt as a format string over the row's columns, such as "
        "'Using the numbers {numbers}, make {target}.'; without it the prompt column stands as it is.",
    )
    chat: bool = option(False, "Put the prompt into the tokenizer's chat template, ready for the reply.")
    system: str | None = option(None, "The system message; needs chat.")
    opening: str = option("", "Text after the prompt that the response continues, such as <think>.")
    max_prompt_tokens: int = option(1024, "The longest prompt, in tokens, opening included.", at_least=1)
    too_long: str = option("error", "What to do with a longer prompt: error or drop.")
    shuffle: bool = option(True, "Draw a new order each epoch; otherwise keep the order of the rows.")
    eval_limit: int | None = option(None, "Use only so many of the first held-out rows (null: all, of a task 256).")

    def held_out_sets(self) -> dict[str, "DataConfig"]:
        """The settings of each held-out set by its name, "" where there is but one; raises ConfigError."""
        if not isinstance(self.eval, str | Mapping | None):
            raise ConfigError(f"data.eval={self.eval} is no source: give one, or several by name, as in {{a: FILE}}.")
        if not isinstance(self.eval, Mapping):
            return {} if self.eval is None else {"": self}
        sets = {}
        for name, given in self.eval.items():
            given = dict(given) if isinstance(given, Mapping) else {"source": given}
            source, key = given.pop("source", None), f"data.eval.{name}"
            if not isinstance(source, str):
                raise ConfigError(f"{key} names no source: write {name}: FILE or {name}: {{source: FILE, limit: 100}}.")
            for setting, value in given.items():
                if setting not in SET_SETTINGS:
                    near = nearest(setting, SET_SETTINGS, 0.0)
                    raise ConfigError(f"{key}.{setting} is no setting of a held-out set: did you mean {near}?")
                kind = {"limit": int, "options": dict, "columns": dict}.get(setting, str)
                if not isinstance(value, kind | None):
                    raise ConfigError(f"{key}.{setting}={value!r} does not fit: it takes {kind.__name__}.")
            if "options" in given and not takes_options(source):
                raise ConfigError(f"{key}.options: only a reasoning_gym task or a module:function takes options.")
            sets[str(name)] = replace(self, eval=source, **{SET_SETTINGS[setting]: given[setting] for setting in given})
        return sets

    def check_options(self) -> None:
        """Raise ConfigError where no source takes the options."""
        sources = [self.train, *(held_out.eval for held_out in self.held_out_sets().values())]
        if self.options and not any(takes_options(source) for source in sources if source):
            raise ConfigError("data.options: only a reasoning_gym task or a module:function takes options; unset them.")


def takes_options(source: str) -> bool:
    return ":" in source and not Path(source).expanduser().is_file()
