"""The gsm8k reward: is the final number of a completion the row's?

Only what follows the last `</think>` is read. Numbers are compared as numbers: "$1,234.00", "1234." and "1234" are one.
Answers with fractions, units or formulas are for `math`.
"""

import re
from decimal import Decimal

from rewards.registry import register

# A minus is a sign only where no number or bracket stands before it: "10-3" ends in 3.
NUMBER = r"(?:(?<![\w.)])[-−])?\$?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
ROW = {"answer": "6 * 7 = <<6*7=42>>42\n#### 42"}
EXAMPLES = [
    ("6 * 7 = 42\n#### $42.00.", ROW, 1.0),
    ("6 * 7 = 42", ROW, 0.0),
    ("6 * 7 = 42", ROW, 1.0, {"flexible": True}),
]


@register("gsm8k", needs=("answer",), examples=EXAMPLES)
def gsm8k(completion: str, row: dict, *, flexible: bool = False) -> float:
    """1.0 if the number after the last `####` with one equals row["answer"] (a number, or what ends in one), else 0.0.

    flexible: it is the last number, wherever that stands. Raises ValueError for a row without a number.
    """
    gold = _last(str(row.get("answer")))
    if gold is None:
        raise ValueError(f"gsm8k needs the column 'answer' to hold a number, and the row has {str(row)[:200]}.")
    return float(_last(completion.rpartition("</think>")[2], "" if flexible else r"####\s*") == gold)


def _last(text: str, before: str = "") -> Decimal | None:
    *_, number = [None, *re.findall(f"{before}({NUMBER})", text, re.ASCII)]
    return number and Decimal(number.replace("−", "-").replace("$", "").replace(",", ""))
