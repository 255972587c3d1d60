"""The settings of the data, apart from what reads it, which takes seconds to import."""

from dataclasses import dataclass

from grpo.config import option


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
