"""gsm8k, exact_match, multiple_choice, format and length: what counts as the answer, and what is equal to it."""

import pytest

import rewards
from rewards import RewardsConfig, registry

BUILT_IN = ["code", "exact_match", "format", "gsm8k", "judge", "length", "multiple_choice"]


def grade(name: str, completion: str, row: dict, **options) -> float:
    return rewards.get(name, **options)(completion, row)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "judge"])
def test_each_gives_what_its_own_examples_say(name):
    assert registry.find(name).examples
    for completion, row, value, options in registry.find(name).examples:
        assert grade(name, completion, row, **options) == value, (completion, row)


# gsm8k: (completion, the row's answer, strict, flexible)
NUMBERS = [
    ("#### 42", "42", 1, 1), ("####42", "42", 1, 1), ("#### 42\n", 42, 1, 1), ("#### 42", 42.0, 1, 1),
    ("#### 41", "42", 0, 0), ("42", "42", 0, 1), ("The answer is 42.", "42", 0, 1), ("", "42", 0, 0),
    ("####", "4", 0, 0),
    ("#### $1,234.00", "1234", 1, 1), ("#### 1234.", "1,234", 1, 1), ("#### 1,234,567", "1234567", 1, 1),
    ("#### -5", "-5", 1, 1), ("#### −5", "-5", 1, 1), ("#### -$5", "-5", 1, 1), ("#### 5", "-5", 0, 0),
    ("#### .5", "0.5", 1, 1), ("#### 0.50", ".5", 1, 1), ("#### 42 apples", "42", 1, 1), ("#### 007", "7", 1, 1),
    ("#### 41\n#### 42", "42", 1, 1), ("#### 42\n#### 41", "42", 0, 0), ("#### 42\nor 41", "42", 1, 0),
    ("#### forty-two", "42", 0, 0), ("#### x\n42", "42", 0, 1), ("10-3 = 7, that is 10-3", "3", 0, 1),
    ("x=-3", "-3", 0, 1),
    ("<think>#### 42</think> no", "42", 0, 0), ("<think>41</think>#### 42", "42", 1, 1), ("1,2,3", "3", 0, 1),
    ("#### 42", "So it is 6 * 7 = <<6*7=42>>42.\n#### 42", 1, 1), ("#### 1,234", "It makes 1.\n#### 1,234", 1, 1),
    ("#### " + "9" * 100_000, "9", 0, 0), ("#### ٤٢", "42", 0, 0), ("\ud800 #### 42", "42", 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "answer", "strict", "flexible"), NUMBERS, ids=lambda v: ascii(v)[:40])
def test_gsm8k_compares_the_final_numbers(completion, answer, strict, flexible):
    assert grade("gsm8k", completion, {"answer": answer}) == strict
    assert grade("gsm8k", completion, {"answer": answer}, flexible=True) == flexible


@pytest.mark.parametrize("name", ["gsm8k", "exact_match", "multiple_choice"])
@pytest.mark.parametrize("row", [{}, {"answer": None}, {"answer": []}, {"answer": [None]}], ids=str)
def test_a_row_without_an_answer_is_an_error_whatever_the_completion(name, row):
    for completion in ("", "#### 1", "(A)"):
        with pytest.raises(ValueError, match=f"{name} needs"):
            grade(name, completion, row)


TEXTS = [
    ("Paris", "Paris", {}, 1), (" Paris\n", "Paris", {}, 1), ("New\n York", "New York", {}, 1),
    ("Paris.", "Paris", {}, 0),
    ("paris", "Paris", {}, 0), ("paris", "Paris", {"ignore_case": True}, 1), ("It is Paris", "Paris", {}, 0),
    ("Paris!", "Paris.", {"ignore_punctuation": True}, 1), ("STRASSE", "straße", {"ignore_case": True}, 1),
    ("42", 42, {}, 1), ("b", ["a", "b"], {}, 1), ("c", ("a", "b"), {}, 0), ("<think>x</think>Paris", "Paris", {}, 1),
    ("<answer>Paris</answer>", "Paris", {}, 0), ("<answer>Paris</answer>", "Paris", {"tag": "answer"}, 1),
    ("<answer>Rome</answer><answer>Paris</answer>", "Paris", {"tag": "answer"}, 1),
    ("<answer>Paris</answer><answer>Rome</answer>", "Paris", {"tag": "answer"}, 0),
    ("<answer>Paris", "Paris", {"tag": "answer"}, 0), ("Paris</answer>", "Paris", {"tag": "answer"}, 0),
    ("<think><answer>Paris</answer></think>", "Paris", {"tag": "answer"}, 0), ("", "", {}, 1), ("", "Paris", {}, 0),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "answer", "options", "value"), TEXTS, ids=lambda v: ascii(v)[:40])
def test_exact_match_compares_the_whole_answer(completion, answer, options, value):
    assert grade("exact_match", completion, {"answer": answer}, **options) == value


ARC = {"label": ["A", "B", "C", "D"], "text": ["ice", "water", "steam", "A"]}
CHOICES = [
    ("B", 1), ("B.", 1), ("(B)", 1), ("**B**", 1), ("B) water", 1), ("b", 0), ("\\boxed{B}", 1), ("\\boxed{(B)}", 1),
    ("$\\boxed{\\text{B}}$", 1), ("\\boxed{\\textbf{(B)}}", 1), ("\\boxed{C}", 0), ("\\boxed{Because}", 0),
    ("<answer>B</answer>", 1), ("<answer> (B) water </answer>", 1), ("<answer>A</answer>", 0), ("<answer>B", 1),
    ("Answer: B", 1), ("The answer is B", 1), ("The correct answer is: **(B)** water.", 1), ("answer is C", 0),
    ("ANSWER:\n\nB", 1), ("The answer is C. No, the answer is B.", 1), ("The answer is B. No, the answer is C.", 0),
    ("(A) is wrong, and so is (C). The answer is B.", 1), ("The answer is B. Option A is wrong, as (C) is.", 1),
    ("I choose option B", 1), ("Not (A), so (B)", 1), ("I think it is\nB", 1), ("It is A or B", 0),
    ("A cat and a B", 0),
    ("", 0), ("Because of water", 0), ("Answer: Because", 0), ("The answer is E", 0), ("A, B, C, D", 0),
    ("<think>B</think>", 0), ("<think>The answer is C</think>\nB", 1), ("\\boxed{C} although the answer is B", 0),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "value"), CHOICES, ids=lambda v: ascii(v)[:40])
def test_multiple_choice_finds_the_letter(completion, value):
    rows = [{"answer": "B"}, {"answer": "(B)"}, {"answer": 1}, {"answer": "water", "choices": ARC["text"]}]
    rows += [{"answer": "B", "choices": ARC}, {"answer": 1, "choices": ARC}, {"answer": "water", "choices": ARC}]
    assert [grade("multiple_choice", completion, row) for row in rows[3:]] == [value] * 4
    if "E" not in completion:
        assert [grade("multiple_choice", completion, row) for row in rows[:3]] == [value] * 3


def test_multiple_choice_takes_the_labels_of_the_row():
    numbered = {"label": ["1", "2", "3"], "text": ["x", "y", "z"]}
    for completion, answer, value in [("Answer: 2", "2", 1), ("(3)", "2", 0), ("\\boxed{2}", "y", 1), ("2", 1, 1)]:
        assert grade("multiple_choice", completion, {"answer": answer, "choices": numbered}) == value
    # A letter comes before a text: the answer "A" is the first choice, though the fourth says so.
    assert grade("multiple_choice", "(A)", {"answer": "A", "choices": ARC}) == 1


@pytest.mark.parametrize("answer", ["E", 4, -1, "fire", "BC", "", 1.0])
def test_an_answer_that_is_no_choice_of_the_row_is_an_error(answer):
    with pytest.raises(ValueError, match="one of its choices"):
        grade("multiple_choice", "(A)", {"answer": answer, "choices": ARC})


FORMATS = [
    ("<think>a</think><answer>b</answer>", 1), ("\n<think>a\nb</think>\n\n<answer>\nb</answer>\n", 1),
    ("<think></think><answer></answer>", 1), ("<think>a</think>b<answer>c</answer>", 0), ("a", 0), ("", 0),
    ("<think>a</think><answer>b</answer> and more", 0), ("more <think>a</think><answer>b</answer>", 0),
    ("<think>a</think><answer>b", 0), ("<answer>b</answer><think>a</think>", 0), ("<answer>b</answer>", 0),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 0), ("<think><think>a</think><answer>b</answer>", 0),
    ("<think>a</think></think><answer>b</answer>", 0), ("<think>a</think><answer><think>b</think></answer>", 0),
    ("<think>" + "a<" * 200_000 + "</think><answer>b</answer>", 1),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "value"), FORMATS, ids=lambda v: ascii(v)[:40])
def test_format_wants_one_think_and_one_answer_and_nothing_else(completion, value):
    assert grade("format", completion, {}) == value
    if completion.startswith("<think>"):
        assert grade("format", completion.removeprefix("<think>"), {}, opening="<think>") == value


def test_format_takes_a_pattern_of_its_own():
    assert [grade("format", text, {}, pattern="Answer: .+") for text in ("Answer: 4\n2", "So Answer: 4")] == [1, 0]


def test_length_falls_from_the_buffer_to_the_limit():
    of = {size: grade("length", "x" * size, {}, limit=100, buffer=20) for size in (0, 80, 81, 90, 99, 100, 101, 5000)}
    assert of == pytest.approx({0: 0, 80: 0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1, 101: -1, 5000: -1})
    assert grade("length", "word " * 90, {}, limit=100, buffer=20, unit="words") == pytest.approx(-0.5)
    assert grade("length", "x" * 1750, {}) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("format", {"pattern": "(unclosed"}, "format.pattern is no regular expression"),
        ("length", {"unit": "tokens"}, "unit is characters or words.* not 'tokens'"),
        ("length", {"buffer": 0}, "buffer above 0"),
        ("length", {"limit": 10, "buffer": 20}, "at most limit"),
    ],
)
def test_options_that_cannot_work_are_refused_before_a_run(name, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        rewards.validate(RewardsConfig(weights={name: 1.0}, options={name: options}))
    rewards.validate(RewardsConfig(weights={name: 1.0}))
