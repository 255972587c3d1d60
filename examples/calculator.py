"""The calculator example: a tool, and questions that are too large to answer without it. Listed in calculator.yaml."""

from collections.abc import Iterator

from environments import register
from rewards.countdown import MAX_CHARACTERS, TO_ASCII, TOKEN, evaluate

SHOWN = ("52907 + 8164", "7312 - 40958 + 615")
"""What the questions are preceded by, each with the call that answers it: the model has never seen a tool."""


def calculate(expression: str) -> str:
    """
    Work out an arithmetic expression.

    Args:
        expression: Whole numbers with + - * / and brackets, such as 2 * (3 + 4).
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has more than {MAX_CHARACTERS} characters")
    if (value := evaluate(TOKEN.findall(expression.translate(TO_ASCII)))) is None:
        raise ZeroDivisionError("it divides by zero")
    return str(value if value.denominator == 1 else float(value))


register("calculator")([calculate])


def questions(split: str, **options: int) -> Iterator[dict]:
    """Rows of reasoning-gym's chain_sum with these options, behind conversations about SHOWN."""
    from grpo.tasks import load_task  # not where the environment runs, which imports this file as well

    asked = "State the final answer to the following arithmetic problem: {} ="
    call = '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
    shown = []
    for expression in SHOWN:
        result = calculate(expression)
        said = asked.format(expression), call.format(expression), result, result
        shown += [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(said)]
    for row in load_task("reasoning_gym:chain_sum", split, options, "data.options"):
        yield row | {"prompt": [*shown, {"role": "user", "content": row["prompt"]}]}
