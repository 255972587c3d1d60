"""The reasoning_gym reward: what a task of reasoning-gym says of an answer, by its own scorer.

Which task that is, its options and the entry that it is scored against stand in the row's column `entry`.
"""

import ast
import functools
import re
from typing import Any

from rewards.exact_match import inside
from rewards.registry import register

ROW = {"entry": repr({"task": "chain_sum", "options": {}, "question": "3 + 4 = ?", "answer": "7", "metadata": {}})}
EXAMPLES = [
    ("7", ROW, 1.0),
    ("<answer> 7 </answer>", ROW, 1.0, {"tag": "answer"}),
    ("It is 7.", ROW, 1.0, {"pattern": "-?[0-9]+"}),
    ("7", ROW, 0.0, {"tag": "answer"}),
]


@register("reasoning_gym", needs=("entry",), imports=("reasoning_gym",), examples=EXAMPLES)
def reasoning_gym(completion: str, row: dict, *, tag: str = "", pattern: str = "") -> float:
    """The task's score, 0 to 1, of the whole completion, or of what stands in the last <tag>...</tag> (0 without).

    pattern: a regular expression, such as -?[0-9]+, of whose matches the last one is the answer (0 without).
    """
    entry = ast.literal_eval(row["entry"])
    if (answer := inside(completion, tag) if tag else completion) is None:
        return 0.0
    if pattern:
        *_, answer = ["", *(match.group() for match in re.finditer(pattern, answer))]
        if not answer:
            return 0.0
    score = _scorer(entry["task"], repr(entry["options"])).score_answer
    try:
        return float(score(answer.strip(), entry))
    except Exception:  # noqa: BLE001 - some scorers raise at what they cannot read: a wrong answer
        score(entry["answer"], entry)  # raises as well where the row is at fault
        return 0.0


@functools.lru_cache(maxsize=64)
def _scorer(task: str, options: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(task, size=1, seed=0, **ast.literal_eval(options))
