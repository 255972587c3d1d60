"""The math reward: is the final answer of a completion mathematically equal to the row's answer?

math-verify (https://github.com/huggingface/Math-Verify) parses and compares; this file decides what is compared:
- Only what follows the last `</think>` is read; without one, the whole completion.
- A completion's answer is its last `\\boxed{...}`; one that is not closed (cut off) is no answer. Boxes before it
  do not count, so that listing guesses earns nothing; several values go into one box, as in \\boxed{1, 2}.
- Without any box it is the last expression in the last MAX_CHARACTERS characters.
- The row's answer may be plain ("3\\sqrt{2}", "1,234"), boxed, or a GSM8K solution that ends in "#### 42".

Both of math-verify's own timeouts are off: they are alarm signals, which work only in a main thread. The pool kills
what hangs, and some does: brackets nested twenty deep take seconds, a tower of powers is computed digit by digit.
"""

import functools
import logging
import re
from typing import Any

from rewards.registry import register

MAX_CHARACTERS = 1000
BOX = "\\boxed{"


EXAMPLES = [
    ("So it is \\boxed{\\frac{84}{2}}.", {"answer": "42"}, 1.0),
    ("First 41, then 42", {"answer": "6 * 7 = <<6*7=42>>42\n#### 42"}, 1.0),
    ("\\boxed{42} no, \\boxed{41}", {"answer": "42"}, 0.0),
]


@register("math", needs=("answer",), imports=("math_verify",), examples=EXAMPLES)
def math(completion: str, row: dict) -> float:
    """1.0 if the final answer equals row["answer"] (str), else 0.0; ValueError where that is no mathematics."""
    from math_verify import parse, verify

    if not isinstance(row.get("answer"), str):
        raise ValueError(f"math needs the column 'answer' to hold a string, and the row has {row!r}.")
    # It warns once per process that its timeouts are off, which is what this file wants.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    gold = _parse_gold(row["answer"])
    text = completion.rpartition("</think>")[2]
    # math-verify does not see a number that touches a tag.
    tail = re.sub("</?answer>", " ", text[-MAX_CHARACTERS:])
    answer = _parse_box(_last_box(text)) if BOX in text else parse(tail, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))


# A prompt is answered many times over, and its gold answer is the slower half of a grade.
@functools.lru_cache(maxsize=1024)
def _parse_gold(answer: str) -> list[Any]:
    gold = _last_box(answer) if BOX in answer else answer.rpartition("####")[2]
    parsed = _parse_box(gold)
    if all(isinstance(value, str) for value in parsed):
        raise ValueError(f"math cannot read the row's answer {answer!r} as mathematics.")
    return parsed


def _parse_box(content: str) -> list[Any]:
    # Outside a box math-verify reads plain text, where the "3\sqrt{2}" of a data set would be a 3.
    from math_verify import LatexExtractionConfig, parse

    content = content.strip().removeprefix("$").removesuffix("$").strip()
    if not content or len(content) > MAX_CHARACTERS:
        return []
    box_first = LatexExtractionConfig(boxed_match_priority=0)
    return parse(f"{BOX}{content}}}", [box_first], parsing_timeout=None)


def _last_box(text: str) -> str:
    """What stands in the last \\boxed{...} of `text`; an empty string where its brace is not closed."""
    start = text.rindex(BOX) + len(BOX)
    depth = 1
    for position in range(start, min(len(text), start + MAX_CHARACTERS)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
        if depth == 0:
            return text[start:position]
    return ""
