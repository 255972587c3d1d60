"""A reward of one's own, to copy: docs/tutorial.md. Other forms, such as many completions at once: docs/rewards.md.

Its examples are graded before each training, and by

    python -m trainer rewards test the_number --file examples/your_reward.py
"""

import re

from rewards import register

PAID = {"answer": "60"}


@register(
    "the_number",
    needs=("answer",),  # columns of the data that it reads
    examples=[
        ("60", PAID, 1.0),
        ("The price is 60 euros.", PAID, 1.0),
        ("60 euros for order 141.", PAID, 0.2),
        ("141", PAID, 0.0),
        ("It was free.", PAID, 0.0),
    ],
)
def the_number(completion: str, row: dict, *, among_others: float = 0.2) -> float:
    """1 where the only number of the completion is the right one, `among_others` where it is one of several."""
    answer, numbers = str(row["answer"]), re.findall(r"\d+", completion)
    if numbers == [answer]:
        return 1.0
    return among_others if answer in numbers else 0.0
