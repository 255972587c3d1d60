"""The distinct reward: how far an answer is from those of its group, against samples that all come to agree.

A small weight beside a reward for being right (0.05, say): alone it pays for answers that nobody else gives. Answers
are compared as text, whatever their spaces.
"""

from collections import Counter

from rewards.exact_match import find_answer
from rewards.registry import register

EXAMPLES = [
    (["4", "<think>5?</think> 4\n", "5"], [{}] * 3, [0.5, 0.5, 1.0]),
    (["so 4", "<answer>4</answer>", "<answer>5</answer>"], [{}] * 3, [0.0, 1.0, 1.0], {"tag": "answer"}),
    (["alone"], [{}], [None]),
]


@register("distinct", sees="group", examples=EXAMPLES)
def distinct(completions: list[str], rows: list[dict], *, tag: str = "") -> list[float | None]:
    """The share of the group's other completions with another answer: all that follows the last `</think>`, or of that,
    with `tag`, what stands in the last <tag>...</tag>. 0.0 without an answer, None in a group of one.
    """
    answers = [" ".join((find_answer(completion, tag) or "").split()) for completion in completions]
    others, count = len(answers) - 1, Counter(answers)
    return [((others + 1 - count[answer]) / others if answer else 0.0) if others else None for answer in answers]
