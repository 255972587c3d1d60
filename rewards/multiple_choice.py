"""The multiple_choice reward: does a completion choose the row's letter?

Only what follows the last `</think>` is read. The choice is, of the first of these that a completion has, the last:
`\\boxed{B}`; `<answer>B</answer>`; "answer is B", "Answer: (B)"; "option B"; "(B)"; "B" alone on a line, or "B) text"
at its start. A letter is a capital, so that "a" is a word, and letters in the middle of a sentence are none.
"""

import re
import string

from rewards.registry import register

FORMS = (  # L stands for any letter of the row's choices
    r"\\boxed\{\W*(?:\\text(?:bf)?\{\W*)?(L)\b",
    r"<answer>\W*(L)\b",
    r"(?i:answer)(?i:\s+is|\s+would\s+be)?\W{0,6}(L)(?![\w'’])",
    r"(?i:choice|option)(?i:\s+is)?\W{0,6}(L)(?![\w'’])",
    r"\((L)\)",
    r"^[^\w\n]*(L)(?:[^\w\n]*$|[.:)]\s)",
)
ARC = {"choices": {"label": ["1", "2"], "text": ["a cat", "a dog"]}, "answer": "2"}
EXAMPLES = [
    ("Not (A). The answer is **B**.", {"answer": "B"}, 1.0),
    ("I think A or B", {"answer": "B"}, 0.0),
    ("\\boxed{B}", {"answer": 1}, 1.0),
    ("C) a fox", {"answer": "a fox", "choices": ["a cat", "a dog", "a fox"]}, 1.0),
    ("Answer: 2", ARC, 1.0),
]


@register("multiple_choice", needs=("answer",), examples=EXAMPLES)
def multiple_choice(completion: str, row: dict) -> float:
    """1.0 if the chosen letter is row["answer"]'s, else 0.0; ValueError for a row whose answer is no choice.

    row["answer"]: a letter, an index from 0 (int), or a choice's text where row["choices"] has it: a list, or ARC's
    {"label": [...], "text": [...]}, whose labels are then the letters.
    """
    choices, answer = row.get("choices") or [], row.get("answer")
    texts = list(choices["text"] if isinstance(choices, dict) else choices)
    letters = list(choices["label"]) if isinstance(choices, dict) else list(string.ascii_uppercase[: len(texts) or 26])
    gold = answer.strip(" ().") if isinstance(answer, str) else answer
    if isinstance(gold, int) and 0 <= gold < len(letters):
        gold = letters[gold]
    elif gold not in letters and answer in texts:
        gold = letters[texts.index(answer)]
    if gold not in letters:
        wanted = "a letter, an index from 0 or the text of one of its choices"
        raise ValueError(f"multiple_choice needs 'answer' to hold {wanted}, and the row has {str(row)[:200]}.")
    text, letter = completion.rpartition("</think>")[2], "|".join(map(re.escape, letters))
    found = (re.findall(form.replace("L", letter), text, re.MULTILINE) for form in FORMS)
    *_, chosen = next(filter(None, found), [None])
    return float(chosen == gold)
