"""The exact_match reward: is the answer, as text, one of the row's?

The answer is all that follows the last `</think>`, or of that, with `tag`, what stands in the last <tag>...</tag>.
Spaces around it do not count, and several in a row count as one.
"""

import string

from rewards.registry import register

PUNCTUATION = str.maketrans("", "", string.punctuation)
ROW = {"answer": ["Paris", "City of Paris"]}
EXAMPLES = [
    ("<think>London?</think>\nParis\n", ROW, 1.0),
    ("It is Paris", ROW, 0.0),
    ("It is <answer>paris.</answer>", ROW, 1.0, {"tag": "answer", "ignore_case": True, "ignore_punctuation": True}),
]


@register("exact_match", needs=("answer",), examples=EXAMPLES)
def exact_match(
    completion: str, row: dict, *, tag: str = "", ignore_case: bool = False, ignore_punctuation: bool = False
) -> float:
    """1.0 if the answer equals row["answer"] (text, a number, or a list of what is accepted), else 0.0.

    Raises ValueError for a row without an answer. Punctuation is ASCII's, and ignored on both sides.
    """
    accepted = row.get("answer")
    accepted = accepted if isinstance(accepted, list | tuple) else [accepted]
    if not accepted or None in accepted:
        raise ValueError(f"exact_match needs the column 'answer' to hold an answer, and the row has {str(row)[:200]}.")
    answer = find_answer(completion, tag)

    def plain(text: object) -> str:
        text = str(text).translate(PUNCTUATION if ignore_punctuation else {})
        return " ".join((text.casefold() if ignore_case else text).split())

    return float(answer is not None and plain(answer) in map(plain, accepted))


def find_answer(completion: str, tag: str) -> str | None:
    """What follows the last `</think>`, or of that, with `tag`, what the last <tag>...</tag> holds, if there is one."""
    answer = completion.rpartition("</think>")[2]
    return inside(answer, tag) if tag else answer


def inside(text: str, tag: str) -> str | None:
    """What the last closed <tag>...</tag> of `text` holds, if there is one."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, answer = before.rpartition(f"<{tag}>")
    return answer if opened and closed else None
