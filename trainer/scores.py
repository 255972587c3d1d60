"""How right a policy is, from graded samples: accuracy, pass@k and majority@k, each with its standard error."""

import math
import re
from collections import Counter
from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

TAG = r"<answer>(.*?)</answer>"
BOX = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
NUMBER = r"-?\d+(?:,\d{3})*(?:\.\d+)?"


def powers(samples: int) -> list[int]:
    """The powers of two up to `samples`."""
    return [2**i for i in range(samples.bit_length())]


def correct(batch: TensorDict, reward: str) -> Tensor:
    """[B] float64: whether the `reward` of each row is 1; NaN where it does not apply."""
    values = batch[f"rewards/{reward}"].double()
    return (values >= 1 - 1e-6).double().masked_fill(values.isnan(), math.nan)


def pass_at_k(right: int, samples: int, k: int) -> float:
    """How likely one of k of the `samples` is right where `right` of them are, unbiased (arXiv:2107.03374)."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_at_k(right: Sequence[float], answers: Sequence[str | None], k: int) -> float:
    """How right the most frequent of k answers is: the mean over as many runs of k samples side by side as there are.

    right: 1.0 or 0.0 of each sample. Answers that are equally frequent share the vote. A sample without an answer,
    None, votes only where all are without.
    """
    votes = []
    for first in range(0, len(right) - k + 1, k):
        run = list(zip(answers[first : first + k], right[first : first + k], strict=True))
        run = [pair for pair in run if pair[0] is not None] or run
        counts = Counter(answer for answer, _ in run)
        winners = [value for answer, value in run if counts[answer] == max(counts.values())]
        votes.append(sum(winners) / len(winners))
    return sum(votes) / len(votes)


def answer_of(response: str, pattern: str | None = None) -> str | None:
    """The answer in a response: the last match of `pattern`, or of its first group if it has one; None without any.

    Without a pattern it stands in the last <answer> tag, or else the last \\boxed{}, or else it is the last number.
    """
    for each in [pattern] if pattern else (TAG, BOX, NUMBER):
        if matches := list(re.finditer(each, response, re.DOTALL)):
            text = matches[-1][1 if matches[-1].re.groups else 0] or ""
            return re.sub(r"(?<=\d),(?=\d{3}\b)", "", " ".join(text.split()))
    return None


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean of a value of each prompt, and its standard error: their standard deviation over sqrt(prompts).

    So samples of a prompt need not be independent. NaN where there is no prompt, or for the error but one.
    """
    column = torch.tensor(values, dtype=torch.double)
    return float(column.mean()), float(column.std() / len(column) ** 0.5) if len(column) > 1 else math.nan


def score(right: Tensor, ks: Sequence[int], answers: Sequence[str | None] | None = None) -> dict[str, float]:
    """accuracy, pass@k for `ks` and, with `answers`, majority@k for k > 1, and NAME/error of each (see mean_and_error).

    right: [P, n], of each prompt's samples, as of `correct`; prompts with NaN are left out. answers: of all P x n.
    """
    rows, samples = right.tolist(), right.shape[1]
    kept = [i for i, row in enumerate(rows) if not any(map(math.isnan, row))]
    columns = {"accuracy": [sum(rows[i]) / samples for i in kept]}
    columns |= {f"pass@{k}": [pass_at_k(round(sum(rows[i])), samples, k) for i in kept] for k in ks}
    if answers is not None:
        of = {i: answers[i * samples : (i + 1) * samples] for i in kept}
        columns |= {f"majority@{k}": [majority_at_k(rows[i], of[i], k) for i in kept] for k in ks if k > 1}
    scores = {}
    for name, values in columns.items():
        scores[name], scores[f"{name}/error"] = mean_and_error(values)
    return scores
