"""python -m trainer data CONFIG: the prompts as the model will see them, and what is wrong with them."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grpo.data import load_held_out, load_prompts, overlap, tokenize_responses
from trainer.config import SftConfig, TrainConfig
from trainer.controller import cast_of, describe_overlap
from workers.models.hub import read_tokenizer

ROWS = 5
SHOWN = 70  # characters of a column


def report_data(config: TrainConfig | SftConfig) -> None:
    """Print rows, lengths, what is too long, duplicates and overlap of the training data and each held-out set."""
    tokenizer, console, sft = read_tokenizer(config.model), Console(soft_wrap=True), isinstance(config, SftConfig)
    limit, too_long = config.data.max_prompt_tokens, config.data.too_long
    whole = replace(config.data, max_prompt_tokens=sys.maxsize)
    cast = None if sft else cast_of(config, tokenizer)
    tools = cast and cast.tools_of
    prompts = load_prompts(whole, tokenizer, "train", demonstrations=sft, tools=tools)
    sets = {f"data.eval.{name}".rstrip("."): found for name, found in load_held_out(whole, tokenizer, tools).items()}
    for prompt in list(prompts)[:ROWS]:
        console.rule(f"row {prompt.index}, {len(prompt.tokens)} tokens", align="left")
        console.print(escape(tokenizer.decode(prompt.tokens)))
        for name, value in prompt.row.items():
            text = value if isinstance(value, str) else repr(value)
            console.print(f"[dim]{escape(name)}: {escape(repr(text[:SHOWN]))}{'...' * (len(text) > SHOWN)}[/]")
    table = Table("tokens", "rows", "min", "median", "p90", "max", f"longer than {limit}", "duplicates", box=None)
    for name, those in {"data.train": prompts, **sets}.items():
        lengths = [len(prompt) for prompt in those.tokens]
        over = sum(length > limit for length in lengths)
        table.add_row(name, *_figures(lengths), str(over), str(len(those) - len(set(those.texts))))
    if sft:
        responses = tokenize_responses(prompts, tokenizer, config.data)
        table.add_row(f"{config.data.response_column} and eos", *_figures([len(ids) for ids in responses]))
    console.print(table)
    if any(len(ids) > limit for those in (prompts, *sets.values()) for ids in those.tokens):
        then = "are left out" if too_long == "drop" else "end a run with an error"
        console.print(f"Prompts longer than data.max_prompt_tokens={limit} {then} (data.too_long={too_long}).")
    if same := overlap(prompts, sets.values()):
        console.print(escape(describe_overlap(same, sum(map(len, sets.values())))))
    elif sets:
        console.print("No prompt stands in data.train and data.eval both.")


def _figures(lengths: Sequence[int]) -> list[str]:
    """How many there are, the shortest, the median, what nine of ten are not longer than, the longest."""
    ordered, last = sorted(lengths), len(lengths) - 1
    return [str(len(ordered)), *(str(ordered[round(share * last)]) for share in (0, 0.5, 0.9, 1))]
