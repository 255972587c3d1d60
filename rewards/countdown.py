"""The countdown reward: an arithmetic expression that uses the given numbers once each and makes the target.

The rules, wherever a text could be read in more than one way:
- Only what follows the last `</think>` is read; without one, the whole completion (a prompt may have opened the
  thinking, so a completion can begin in the middle of it).
- The answer is the last `<answer>` that is closed, up to its first `</answer>`. An unclosed `<answer>` after it
  (a completion cut off) is ignored; an unclosed one alone is no answer.
- What an answer says from its first "=" on is ignored: "3 + 4 = 8" is "3 + 4".
- An expression is decimal integers without leading zeros, + - * / (also × ÷ −) and round brackets, with signs as
  in Python (-5, 2*-3, --5, +5). Nothing else: no "x", "^", "**", "//", decimal points or implied products.
- Arithmetic is exact (fractions), and dividing by zero makes a wrong value, not an error.
- An answer of more than MAX_CHARACTERS before the "=" is not valid. As the numbers are checked before anything is
  computed, and the parser does not recurse, this bounds depth, digits and time.
"""

import operator
import re
from fractions import Fraction

from rewards.registry import register

MAX_CHARACTERS = 1000
PREFIXES = {"(": "(", "+": "sign+", "-": "sign-"}  # what may stand before a number, and what it is there
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "sign+": 3, "sign-": 3}
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
OPERATIONS |= {"sign+": operator.pos, "sign-": operator.neg}
TO_ASCII = str.maketrans("×÷−", "*/-")
# "05" and "1 2" become two numbers side by side, which no expression has.
TOKEN = re.compile(r"0|[1-9][0-9]*|\S")


ROW = {"numbers": [3, 4, 7], "target": 14}
EXAMPLES = [
    ("<think>3*4+7 is 19.</think> <answer>(3 + 4) + 7 = 14</answer>", ROW, 1.0),
    ("<answer>3 × 4 + 7</answer>", ROW, 0.1),
    ("<answer>3 × 4 + 7</answer>", ROW, 0.0, {"valid": 0.0}),
    ("<answer>7 + 7</answer>", ROW, 0.05),
    ("3 + 4 + 7", ROW, 0.0),
]


@register("countdown", needs=("numbers", "target"), examples=EXAMPLES)
def countdown(completion: str, row: dict, *, valid: float = 0.1, format: float = 0.05) -> float:
    """Grade one completion against row["numbers"] (ints >= 0) and row["target"] (int).

    1.0 for the target; `valid` for a well-formed expression of exactly these numbers with another value;
    `format` for any other closed `<answer>`; 0.0 without one. No completion raises; a row that lacks a column or
    holds something else raises ValueError. The task is TinyZero's (https://github.com/Jiayi-Pan/TinyZero).
    """
    numbers, target = _read_row(row)
    text = completion.rpartition("</think>")[2]
    _, opened, answer = text.rpartition("</answer>")[0].rpartition("<answer>")
    if not opened:
        return 0.0
    expression = answer.partition("</answer>")[0].partition("=")[0]
    if len(expression) > MAX_CHARACTERS:
        return format
    tokens = TOKEN.findall(expression.translate(TO_ASCII))
    if sorted(int(token) for token in tokens if _is_number(token)) != sorted(numbers):
        return format
    try:
        value = evaluate(tokens)
    except ValueError:
        return format
    return 1.0 if value == target else valid


def evaluate(tokens: list[str]) -> Fraction | None:
    """The value of an expression's tokens (shunting-yard), None if it divides by zero; ValueError if it is none."""
    values: list[Fraction | None] = []
    pending: list[str] = []
    operand_next = True
    for token in tokens:
        if operand_next:
            if token in PREFIXES:
                pending.append(PREFIXES[token])
            elif _is_number(token):
                values.append(Fraction(int(token)))
                operand_next = False
            else:
                raise ValueError(f"{token!r} stands where a number or a bracket should open")
        elif token == ")":
            _reduce(values, pending, 0)
            if not pending:
                raise ValueError("a bracket closes that was not opened")
            pending.pop()
        elif token in PRECEDENCE:
            _reduce(values, pending, PRECEDENCE[token])
            pending.append(token)
            operand_next = True
        else:
            raise ValueError(f"{token!r} stands where an operator should")
    if operand_next:
        raise ValueError("the expression ends where a number should stand")
    _reduce(values, pending, 0)
    if pending:
        raise ValueError("a bracket is not closed")
    return values[0]


def _reduce(values: list[Fraction | None], pending: list[str], level: int) -> None:
    while pending and pending[-1] != "(" and PRECEDENCE[pending[-1]] >= level:
        operation, right = pending.pop(), values.pop()
        operands = (right,) if operation.startswith("sign") else (values.pop(), right)
        # None goes on as None: an expression that divides by zero must still be read to its end, it may be malformed.
        undefined = None in operands or (operation == "/" and right == 0)
        values.append(None if undefined else OPERATIONS[operation](*operands))


def _is_number(token: str) -> bool:
    # isdigit alone also holds for digits of other scripts.
    return token.isascii() and token.isdigit()


def _read_row(row: dict) -> tuple[list[int], int]:
    for column in ("numbers", "target"):
        if column not in row:
            raise ValueError(f"countdown needs the column {column!r}, and the row has {sorted(row)}.")
    try:
        values = [*row["numbers"], row["target"]]
        *numbers, target = map(operator.index, values)  # also takes what numpy and arrow call an integer
        if any(isinstance(value, bool) for value in values):
            raise TypeError("a bool is not a number here")
    except TypeError as error:
        given = f"numbers={row['numbers']!r} and target={row['target']!r}"
        raise ValueError(f"countdown needs a list of integers and an integer, not {given}.") from error
    if not numbers or min(numbers) < 0:
        raise ValueError(f"countdown needs one or more numbers, none of them negative, not {numbers}.")
    return numbers, target
