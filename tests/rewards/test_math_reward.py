"""The math reward: which answer of a completion counts, which forms are equal, and gold answers of data sets."""

import threading

import pytest

import rewards


def grade(completion: str, gold: str) -> float:
    return rewards.get("math")(completion, {"answer": gold})


EQUAL = [
    ("42", "42"), ("42.0", "42"), ("042", "42"), ("+42", "42"), ("-5", "-5"), ("1{,}234", "1234"), ("1,234", "1234"),
    ("1234", "1,234"), ("12,345,678", "12345678"), ("\\frac{1}{2}", "0.5"), ("0.5", "\\frac{1}{2}"),
    ("\\frac12", "1/2"), ("\\dfrac{2}{4}", "\\frac{1}{2}"), ("1/2", "\\tfrac12"), ("3\\sqrt{2}", "\\sqrt{18}"),
    ("\\sqrt{18}", "3\\sqrt{2}"), ("\\frac{\\sqrt{2}}{2}", "\\frac{1}{\\sqrt{2}}"), ("2^{10}", "1024"),
    ("1+x^2", "x^2+1"), ("(x+1)^2", "x^2+2x+1"), ("x=5", "5"), ("5", "x=5"), ("2\\pi", "\\pi \\cdot 2"),
    ("50\\%", "50\\%"), ("\\$18", "18"), ("18", "$18"), ("5 \\text{ cm}", "5"), ("90^\\circ", "90"),
    ("(1,2)", "(1,2)"), ("[0,1)", "[0,1)"), ("\\{1,2\\}", "\\{2,1\\}"), ("1, 2", "2, 1"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"), ("2+3i", "3i+2"),
    ("\\text{yes}", "\\text{yes}"), ("\\infty", "\\infty"), ("42", "\\boxed{42}"), ("42", "so it is $\\boxed{42}$."),
    ("\\frac{1}{2}", "\\boxed{3} is wrong, \\boxed{\\frac{1}{2}}"), ("42", "6 * 7 = <<6*7=42>>42\n#### 42"),
    ("1234", "It makes 1,234 dollars.\n#### 1,234"), ("-3", "#### -3"), ("7", "$7$"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal(answer, gold):
    assert grade(f"So the answer is $\\boxed{{{answer}}}$.", gold) == 1.0


NOT_EQUAL = [
    ("41", "42"), ("-42", "42"), ("3", "3\\sqrt{2}"), ("0.33", "\\frac{1}{3}"), ("(2,1)", "(1,2)"),
    ("[0,1]", "[0,1)"), ("\\{1,2\\}", "\\{1\\}"), ("1,2,42", "42"), ("x+1", "x+2"), ("y", "x"), ("1234", "1,235"),
    ("\\text{no}", "\\text{yes}"), ("", "42"), ("\\text{}", "42"), ("???", "42"), ("{{{", "42"), ("9" * 5000, "42"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "gold"), NOT_EQUAL)
def test_not_equal(answer, gold):
    assert grade(f"So the answer is $\\boxed{{{answer}}}$.", gold) == 0.0


COMPLETIONS = [
    ("", 0.0), ("I do not know.", 0.0), ("\\boxed{42}", 1.0), ("\\boxed{41} no, \\boxed{42}", 1.0),
    ("\\boxed{42} no, \\boxed{41}", 0.0), ("\\boxed{1} \\boxed{2} \\boxed{42} \\boxed{4}", 0.0),
    ("\\boxed{42} and, cut off, \\boxed{4", 0.0), ("\\boxed{42", 0.0), ("\\boxed{\\frac{84}{2}}", 1.0),
    ("\\boxed{42}, that is, the final answer is 41. I hope it is correct.", 1.0),
    ("\\boxed{42} was easy, unlike 41", 1.0), ("The answer is 42", 1.0), ("The answer is 42.", 1.0),
    ("The answer is $42$.", 1.0), ("First 41, then 42", 1.0), ("First 42, then 41", 0.0),
    ("<answer>42</answer>", 1.0), ("It is 41: <answer>\\frac{84}{2}</answer>", 1.0),
    ("It is 41: <answer>$\\frac{84}{2}$</answer>", 1.0), ("6*7 = 42\n#### 42", 1.0),
    ("\\boxed{42}</think> It is \\boxed{41}", 0.0), ("\\boxed{41}</think> It is \\boxed{42}", 1.0),
    ("\\boxed{42}</think> I cannot tell.", 0.0), ("<think>\\boxed{42}", 1.0), ("42 " + "and so on " * 1000, 0.0),
    ("x" * 1_000_000 + " \\boxed{42}", 1.0), ("\\boxed{" * 50_000, 0.0),
    ("\\boxed{" + "{" * 5000 + "42" + "}" * 5001, 0.0), ("\\boxed{" + "(" * 4 + "42" + ")" * 4 + "}", 1.0),
    ("\\boxed{42\\}}", None), ("\ud800 \\boxed{42}", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("completion", "score"), COMPLETIONS, ids=lambda value: ascii(value[:50]) if isinstance(value, str) else None
)
def test_which_answer_counts(completion, score):
    graded = grade(completion, "42")
    assert graded == score if score is not None else graded in (0.0, 1.0)


@pytest.mark.parametrize("gold", ["", "   ", "#### ", "\\boxed{}", "\\boxed{42", "???", "}{"])
def test_a_gold_answer_that_is_not_mathematics_is_an_error(gold):
    with pytest.raises(ValueError, match="cannot read the row's answer"):
        grade("\\boxed{42}", gold)


@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": 42}, {"solution": "42"}])
def test_a_row_without_an_answer_is_an_error(row):
    with pytest.raises(ValueError, match="column 'answer'"):
        rewards.get("math")("\\boxed{42}", row)


def test_no_signals_are_used():
    """math-verify's own timeouts raise outside a main thread: that nothing raises shows that they are off."""
    scores = []
    completions = ["\\boxed{0.5}", "It is 0.5"]
    thread = threading.Thread(target=lambda: scores.extend(grade(c, "\\frac{1}{2}") for c in completions))
    thread.start()
    thread.join()
    assert scores == [1.0, 1.0]
