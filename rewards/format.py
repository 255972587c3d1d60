"""The format reward: does the whole completion have the form that was asked for?"""

import re

from rewards.registry import register

INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
THINK_ANSWER = rf"<think>{INSIDE}</think>\s*<answer>{INSIDE}</answer>"
EXAMPLES = [
    ("<think>6 * 7</think>\n<answer>42</answer>\n", {}, 1.0),
    ("<think>6 * 7</think> <answer>42</answer> or <answer>41</answer>", {}, 0.0),
    ("6 * 7</think><answer>42</answer>", {}, 1.0, {"opening": "<think>"}),
]


def check(*, pattern: str = THINK_ANSWER, opening: str = "") -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"rewards.options.format.pattern is no regular expression ({error}): {pattern}") from error


@register("format", check=check, examples=EXAMPLES)
def format(completion: str, row: dict, *, pattern: str = THINK_ANSWER, opening: str = "") -> float:
    """1.0 if `opening` + completion, without the spaces around it, matches `pattern` from end to end, else 0.0.

    pattern: a regular expression in which . is any character; by default one <think>...</think>, then one
    <answer>...</answer>. opening: what data.opening, or the chat template, has put before the completion.
    """
    return float(re.fullmatch(pattern, (opening + completion).strip(), re.DOTALL) is not None)
