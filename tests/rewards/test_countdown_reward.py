"""The countdown reward: a table of cases, an oracle built on `ast`, and every expression of small instances."""

import ast
import itertools
import operator
import re
import time
from fractions import Fraction

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards

ROW = {"numbers": [3, 4, 7], "target": 14}
RIGHT, VALID, FORMAT, NOTHING = 1.0, 0.1, 0.05, 0.0


def grade(completion: str, numbers: list[int] | None = None, target: int = 14) -> float:
    return rewards.get("countdown")(completion, {"numbers": numbers or [3, 4, 7], "target": target})


def answer(expression: str) -> str:
    return f"<answer>{expression}</answer>"


WELL_FORMED_AND_RIGHT = [
    "3+4+7", "3 + 4 + 7", " ( 3 + 4 ) + 7 ", "((3)+(4))+(7)", "\n3\t+\r4 +\u00a07\n", "7+4+3", "7-(-3-4)", "--3+4+7",
    "+3+4+7", "3- -4+7", "3+ +4+7", "-(-3-4)+7", "3 −−4 + 7", "3+4+7=14", "3+4+7 = 15", "3+4+7=14=14", "3+4+7=",
    "3+4+7 = nonsense </think", "3+4+7=" + "9" * 100_000,
]  # fmt: skip
ANOTHER_VALUE = ["3*4*7", "3+4-7", "3/4/7", "(3+4)/7", "3-4-7=14", "7/(3-4)", "3+4-7 = 14", "-3-4-7"]


@pytest.mark.parametrize("expression", WELL_FORMED_AND_RIGHT + ANOTHER_VALUE)
def test_well_formed_expressions(expression):
    assert grade(answer(expression)) == (VALID if expression in ANOTHER_VALUE else RIGHT)


ARITHMETIC = [
    ("3 × 4 + 7", [3, 4, 7], 19), ("8 ÷ 4 − 2", [2, 4, 8], 0), ("8 / 4 * 2", [2, 4, 8], 4),
    ("8 / (4 * 2)", [2, 4, 8], 1), ("8 - 4 - 2", [2, 4, 8], 2), ("8 - (4 - 2)", [2, 4, 8], 6),
    ("2 + 4 * 8", [2, 4, 8], 34), ("(2 + 4) * 8", [2, 4, 8], 48), ("2*-4+8", [2, 4, 8], 0), ("-2*4+8", [2, 4, 8], 0),
    ("8/-4/-2", [2, 4, 8], 1), ("8/(3-8/3)", [3, 3, 8, 8], 24), ("(1/3+1/6)*2", [1, 1, 2, 3, 6], 1),
    ("1/3*3", [1, 3, 3], 1), ("7/2*2", [2, 2, 7], 7), ("0*5", [0, 5], 0), ("0/5", [0, 5], 0), ("5", [5], 5),
    ("(5)", [5], 5), ("-5", [5], -5), ("5-5+5", [5, 5, 5], 5),
    ("99999999999999999999*99999999999999999999", [10**20 - 1] * 2, (10**20 - 1) ** 2),
    ("9007199254740993-1", [1, 9007199254740993], 9007199254740992), ("(" * 100 + "5" + ")" * 100, [5], 5),
    ("-" * 500 + "5", [5], 5), ("+".join(["1"] * 300), [1] * 300, 300),
]  # fmt: skip


@pytest.mark.parametrize(("expression", "numbers", "target"), ARITHMETIC)
def test_exact_arithmetic(expression, numbers, target):
    assert grade(answer(expression), numbers, target) == RIGHT
    assert grade(answer(expression), numbers, target + 1) == VALID


@pytest.mark.parametrize("expression", ["1/0", "1/(0)", "(1/0)", "-(1/0)", "+(1/0)"])
@pytest.mark.parametrize("target", [0, 1, -1])
def test_division_by_zero_is_a_wrong_value(expression, target):
    assert grade(answer(expression), [0, 1], target) == VALID


@pytest.mark.parametrize("expression", ["5+1/(2-2)", "1*(5/(2-2))", "(5/(2-2))*1", "-5/(2-2)-1"])
def test_a_division_by_zero_spreads(expression):
    assert grade(answer(expression), [1, 2, 2, 5], 5) == VALID


NOT_AN_EXPRESSION = [
    # nothing, or other numbers
    "", " ", "\n", "=", "= 14", "14", "14 = 3+4+7", "3+4", "3+4+7+7", "3+3+4+7", "3+4+7+0", "3+11", "34+7", "3 4 + 7",
    "3 4 7", "347", "3+4 7", "1e3", "1_000", "0x10", "1 2", "00", "--", "+", "(", ")", "((((", "<answer",
    # brackets and operators that do not fit
    "3+4+7)", "(3+4+7", ")3+4+7(", "()3+4+7", "3+4+7()", "(3)(4)+7", "3(4)+7", "(3)4+7", "3++", "3+4+7+", "3+4+7-",
    "*3+4+7", "/3+4+7", "[3+4]+7", "{3+4}+7", "|3+4|+7", "3,4,7", "(3,4,7)", "3+4+7!", "3+4+7;", "3+4+7\\",
    # operators and numbers of other notations
    "3**4+7", "3//4+7", "3^4+7", "3%4+7", "3 x 4 + 7", "3 X 4 + 7", "3·4+7", "3 \\times 4 + 7", "3 – 4 + 7", "~3+4+7",
    "3<<4>>7", "3<4<7", "3+4+7.", "3.+4+7", "3.0+4+7", "3.+4.+7.", "03+4+7", "3+04+7", "003+4+7", "3+4+7e0", "3e0+4+7",
    "0x3+4+7", "0b11+4+7", "3_+4+7", "3+4+7j", "3+4+7L", "'3'+4+7", "3+4+\x007", "3+4+7\x00", "3&plus;4+7",
    # digits of other scripts: Arabic, full-width, superscript, circled, Roman
    "\u0663+4+7", "\u0663+\u0664+\u0667", "\uff13+\uff14+\uff17", "3\uff0b4\uff0b7", "³+4+7", "3+4+⑦", "Ⅲ+4+7",
    # text and code
    "3+4+7 # sum", "$3+4+7$", "\\boxed{3+4+7}", "<b>3+4+7</b>", "The answer is 3+4+7", "three+4+7", "\ud800", "3+4+7🙂",
    "__import__('os')", "__import__('os').system('echo 3+4+7')", "exec('3')+4+7", "lambda: 3+4+7", "sum([3,4,7])",
    "3 if 4 else 7", "3 and 4 or 7",
    # what would take long to compute or to read
    "9**9**9", "9**9**9**9**9", "3**4**7", "7**(4**3)", "9*" * 499 + "9", "9" * 999, "1" * 10_000, "9" * 1_000_000,
    "(" * 10_000 + "3+4+7" + ")" * 10_000, "(" * 10_000, "-" * 10_000 + "3+4+7", "3+4+7" + " " * 1_000_000,
    "(" * 1_000_000, "3+4+7+" * 200_000,
]  # fmt: skip


@pytest.mark.parametrize("expression", NOT_AN_EXPRESSION, ids=lambda text: ascii(text[:40]))
def test_an_answer_that_is_not_an_expression_of_the_numbers(expression):
    started = time.perf_counter()
    assert grade(answer(expression)) == FORMAT
    assert time.perf_counter() - started < 0.5


def test_a_division_by_zero_does_not_hide_what_is_malformed():
    for expression in ["(1/0) + )", "1/0)", "(1/0", "1/0+", "(1/0)()"]:
        assert grade(answer(expression), [0, 1], 1) == FORMAT


COMPLETIONS = [
    ("", NOTHING), ("3+4+7", NOTHING), ("the answer is 14", NOTHING), ("<answer>", NOTHING), ("</answer>", NOTHING),
    ("<answer>3+4+7", NOTHING), ("3+4+7</answer>", NOTHING), ("</answer>3+4+7<answer>", NOTHING),
    ("</answer><answer>3+4+7", NOTHING), ("<ANSWER>3+4+7</ANSWER>", NOTHING), ("<answer >3+4+7</answer >", NOTHING),
    ("<answer>3+4+7</answer", NOTHING), ("answer>3+4+7</answer>", NOTHING), ("<answer>3+4+7</answer>", RIGHT),
    ("<answer>3+4+7</answer><|im_end|>", RIGHT), ("<answer>3+4+7</answer>\n\nI hope this helps: 3*4*7.", RIGHT),
    ("<answer>3*4*7</answer> no, <answer>3+4+7</answer>", RIGHT),
    ("<answer>3+4+7</answer> no, <answer>3*4*7</answer>", VALID),
    ("<answer>3+4+7</answer> no, <answer></answer>", FORMAT), ("<answer>3+4+7</answer> or <answer>3*4", RIGHT),
    ("<answer>3*4*7</answer> or <answer>3+4+7", VALID), ("<answer><answer>3+4+7</answer>", RIGHT),
    ("<answer><answer>3+4+7</answer></answer>", RIGHT), ("<answer>3*4*7<answer>3+4+7</answer>", RIGHT),
    ("<answer>3+4+7</answer></answer>", RIGHT), ("<answer>3+4+7</answer> </answer>", RIGHT),
    ("I think. </think> <answer>3+4+7</answer>", RIGHT), ("<think>I think. </think><answer>3+4+7</answer>", RIGHT),
    ("<answer>3+4+7</answer> maybe </think>", NOTHING),
    ("<think> <answer>3+4+7</answer> </think> I do not know", NOTHING),
    ("<think> <answer>3+4+7</answer> </think> <answer>3*4*7</answer>", VALID),
    ("<think> <answer>3*4*7</answer> </think> <answer>3+4+7</answer>", RIGHT),
    ("<think> <answer> </think> 3+4+7 </answer>", NOTHING), ("</think></think><answer>3+4+7</answer>", RIGHT),
    ("<answer>3+4+7</think></answer>", NOTHING), ("<think> still thinking <answer>3+4+7</answer>", RIGHT),
    ("x" * 1_000_000 + "<answer>3+4+7</answer>", RIGHT), ("<answer>" * 100_000, NOTHING),
    ("</answer>" * 100_000, NOTHING), ("<answer>" * 100_000 + "3+4+7" + "</answer>" * 100_000, RIGHT),
    ("<think>" * 100_000 + "</think>" * 100_000 + "<answer>3+4+7</answer>", RIGHT),
]  # fmt: skip


@pytest.mark.parametrize(
    ("completion", "score"), COMPLETIONS, ids=lambda value: ascii(value[:60]) if isinstance(value, str) else None
)
def test_which_answer_counts(completion, score):
    assert grade(completion) == score


def test_the_length_limit_is_on_what_stands_before_the_equals_sign():
    assert grade(answer("3+4+7" + " " * 995)) == RIGHT
    assert grade(answer("3+4+7" + " " * 996)) == FORMAT


def test_options():
    generous = rewards.get("countdown", valid=0.5, format=0.25)
    assert [generous(answer(text), ROW) for text in ("3+4+7", "3*4*7", "3", "")] == [1.0, 0.5, 0.25, 0.25]
    assert generous("nothing", ROW) == 0.0
    strict = rewards.get("countdown", valid=0.0, format=0.0)
    assert [strict(answer(text), ROW) for text in ("3+4+7", "3*4*7", "3")] == [1.0, 0.0, 0.0]
    assert grade(answer("3*4*7")) == VALID


MALFORMED_ROWS = [
    {}, {"numbers": [3]}, {"target": 3}, {"numbers": [], "target": 3}, {"numbers": None, "target": 3},
    {"numbers": 3, "target": 3}, {"numbers": "34", "target": 7}, {"numbers": ["3", "4"], "target": 7},
    {"numbers": [3.0, 4], "target": 7}, {"numbers": [True, 4], "target": 7}, {"numbers": [-3, 4], "target": 7},
    {"numbers": [3, None], "target": 7}, {"numbers": [[3, 4]], "target": 7}, {"numbers": [3, 4], "target": "7"},
    {"numbers": [3, 4], "target": 7.0}, {"numbers": [3, 4], "target": None}, {"numbers": [3, 4], "target": True},
]  # fmt: skip


@pytest.mark.parametrize("row", MALFORMED_ROWS, ids=str)
@pytest.mark.parametrize("completion", ["", "<answer>3+4</answer>"])
def test_a_malformed_row_is_an_error_whatever_the_completion(row, completion):
    with pytest.raises(ValueError, match="countdown needs"):
        rewards.get("countdown")(completion, row)


def test_numbers_as_data_sets_hold_them():
    for numbers in [(3, 4, 7), numpy.array([3, 4, 7]), list(numpy.array([3, 4, 7], dtype="int32"))]:
        row = {"numbers": numbers, "target": numpy.int64(14)}
        assert rewards.get("countdown")(answer("3+4+7"), row) == RIGHT


# The oracle: Python's own parser reads the text, and a walk over its tree computes. It shares no code and no method
# with the reward.


def oracle(text: str, numbers: list[int], target: int) -> float:
    if re.search(r"[^0-9+\-*/() ]|(?<![0-9])0[0-9]|\*\s*\*|/\s*/", text):
        return FORMAT
    depths = list(itertools.accumulate({"(": 1, ")": -1}.get(c, 0) for c in text))
    if min(depths, default=0) < 0:
        return FORMAT
    used: list[int] = []
    try:
        # The brackets keep a leading space from being read as an indent.
        value = walk(ast.parse(f"({text})", mode="eval").body, used)
    except (SyntaxError, LookupError):
        return FORMAT
    if sorted(used) != sorted(numbers):
        return FORMAT
    return RIGHT if value == target else VALID


BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def walk(node: ast.AST, used: list[int]) -> Fraction | float:
    if isinstance(node, ast.Constant):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp):
        return UNARY[type(node.op)](walk(node.operand, used))
    if isinstance(node, ast.BinOp):
        left, right = walk(node.left, used), walk(node.right, used)
        if isinstance(node.op, ast.Div) and right == 0:
            return float("nan")
        return BINARY[type(node.op)](left, right)
    raise LookupError("calls and tuples are no arithmetic")


@settings(max_examples=800, deadline=None)
@given(st.text(alphabet="0123 +-*/()", max_size=14), st.integers(-4, 6))
def test_random_texts_agree_with_the_oracle(text, target):
    numbers = [int(n) for n in re.findall(r"[0-9]+", text)] or [1]
    assert grade(answer(text), numbers, target) == oracle(text, numbers, target)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60))
def test_no_completion_raises(text):
    assert grade(text) == NOTHING or "<answer>" in text
    assert grade(answer(text)) in (RIGHT, VALID, FORMAT, NOTHING)


def trees(numbers: list[int]) -> st.SearchStrategy:
    """(text, exact value or None) of random expressions over exactly these numbers, in this order."""
    if len(numbers) == 1:
        return st.just((str(numbers[0]), Fraction(numbers[0])))

    @st.composite
    def build(draw):
        cut = draw(st.integers(1, len(numbers) - 1))
        (left, a), (right, b) = draw(trees(numbers[:cut])), draw(trees(numbers[cut:]))
        sign, space = draw(st.sampled_from("+-*/")), draw(st.sampled_from(["", " ", "  "]))
        text = f"({left}{space}{sign}{space}{right})"
        if draw(st.booleans()):
            text = f"({space}{text})"
        if a is None or b is None:
            return text, None
        return text, {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]

    return build()


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.data())
def test_random_trees(numbers, data):
    text, value = data.draw(trees(numbers))
    shuffled = data.draw(st.permutations(numbers))
    whole = value is not None and value.denominator == 1
    assert grade(answer(text), shuffled, int(value) if whole else 0) == (RIGHT if whole else VALID)
    assert grade(answer(text), shuffled, int(value or 0) + 1) in ({VALID} if whole else {VALID, FORMAT})
    assert grade(answer(text), [*numbers, 1], int(value or 0)) == FORMAT
    if len(numbers) > 1:
        assert grade(answer(text), numbers[1:], int(value or 0)) == FORMAT
    changed = [numbers[0] + 1, *numbers[1:]]
    assert grade(answer(text), changed, int(value or 0)) == FORMAT


def test_every_expression_of_three_numbers():
    """All orders, operators and bracketings of [2, 3, 4]: the reward accepts exactly those that make 14."""
    shapes = ["{}{}{}{}{}", "({}{}{}){}{}", "{}{}({}{}{})"]
    right = 0
    for (a, b, c), p, q, shape in itertools.product(itertools.permutations([2, 3, 4]), "+-*/", "+-*/", shapes):
        text = shape.format(a, p, b, q, c)
        expected = oracle(text, [2, 3, 4], 14)
        assert expected in (RIGHT, VALID)
        assert grade(answer(text), [2, 3, 4], 14) == expected
        right += expected == RIGHT
    # 2+3*4 with and without its redundant brackets and 2*(3+4), each in four orders.
    assert right == 12


def test_every_short_text():
    """Every text of up to four characters over a small alphabet, against the oracle."""
    for length in range(1, 5):
        for letters in itertools.product("12+-*/()", repeat=length):
            text = "".join(letters)
            numbers = [int(n) for n in re.findall(r"[0-9]+", text)] or [1]
            assert grade(answer(text), numbers, 1) == oracle(text, numbers, 1), text
