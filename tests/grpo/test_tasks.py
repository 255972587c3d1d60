"""Tasks of reasoning-gym: rows that its own scorer can grade, two sides that share no question, and what is refused."""

from importlib.util import find_spec

import datasets
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import rewards
from grpo.config import load
from grpo.data import load_held_out, load_prompts
from grpo.data_config import DataConfig
from grpo.tasks import load_task
from tests.grpo.test_data import refused

pytestmark = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs reasoning-gym")


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


# Quick ones of every kind: answers as text, numbers and grids, scorers that read tuples, options or NumPy's strings.
TASKS = [
    "ab", "arc_1d", "base_conversion", "basic_arithmetic", "binary_matrix", "bitwise_arithmetic", "caesar_cipher",
    "calendar_arithmetic", "chain_sum", "circuit_logic", "complex_arithmetic", "count_primes", "course_schedule",
    "decimal_arithmetic", "dice", "family_relationships", "gcd", "jugs", "kakurasu", "knights_knaves",
    "letter_counting", "mini_sudoku", "number_sorting", "path_star", "prime_factorization", "rearc", "shortest_path",
    "simple_equations", "spell_backward", "syllogism", "time_intervals", "tower_of_hanoi", "word_sorting",
]  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_a_tasks_own_answer_scores_one_from_a_file(task, tmp_path):
    load_task(f"reasoning_gym:{task}", "test", {"size": 2}, "data.eval").to_parquet(tmp_path / "rows.parquet")
    for row in datasets.Dataset.from_parquet(str(tmp_path / "rows.parquet"), cache_dir=tmp_path):
        assert rewards.get("reasoning_gym")(f" {row['answer']}\n", row) == 1.0
        assert rewards.get("reasoning_gym")("no answer", row) < 1.0


def test_what_the_reward_scores():
    row = load_task("reasoning_gym:letter_counting", "train", {"size": 1}, "data.train")[0]
    whole, tagged = rewards.get("reasoning_gym"), rewards.get("reasoning_gym", tag="answer")
    answer = row["answer"]
    assert 0 < whole(f"it is {answer}", row) < 1
    assert tagged(f"<answer>x</answer> or <answer> {answer} </answer>.", row) == 1.0
    assert [tagged(text, row) for text in (answer, f"<answer>{answer}", f"{answer}</answer>", "")] == [0.0] * 4
    last = rewards.get("reasoning_gym", pattern="-?[0-9]+")
    assert last(f"3 - 12 is {answer}, I think.", row) == 1.0
    assert last(f"{answer} or 4711", row) < 1
    assert [last(text, row) for text in ("no number", "")] == [0.0] * 2
    both = rewards.get("reasoning_gym", tag="answer", pattern="-?[0-9]+")
    assert both(f"<answer>so it is {answer}!</answer> 4711", row) == 1.0


SMALL = "options={max_terms: 2, max_digits: 1}"  # a + b and a - b of digits: 200 questions


def test_the_sides_share_no_question_and_have_them_all(tokenizer):
    sums = ["train=reasoning_gym:chain_sum", "eval=reasoning_gym:chain_sum", "eval_limit=28"]
    config = load(DataConfig, overrides=[*sums, SMALL, "options.size=172"])
    train = load_prompts(config, tokenizer, "train")
    (held_out,) = load_held_out(config, tokenizer).values()
    assert (len(train), len(held_out)) == (172, 28)
    assert len({*train.texts, *held_out.texts}) == 200
    assert load_prompts(config, tokenizer, "train").texts == train.texts
    config.options["seed"] = 1
    assert load_prompts(config, tokenizer, "train").texts != train.texts
    assert train[0].row["prompt"] == train.texts[0]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ([SMALL], ["172 different questions", "5000 were asked for", "data.options.size=172"]),
        (["train=reasoning_gym:chan_sum"], ["no task 'chan_sum'", "did you mean chain_sum?"]),
        (["options.max_term=3"], ["data.options.max_term", "did you mean max_terms?", "min_terms, max_terms"]),
        (["options.max_terms=0"], ["data.options={'max_terms': 0}", "max_terms must be"]),
        (["options.size=many"], ["whole numbers", "'many'"]),
        (["train_split=tarin"], ["data.train_split=tarin", "use train or test"]),
    ],
    ids=lambda value: value[0],
)
def test_tasks_that_cannot_be_had(settings, says, tokenizer):
    config = load(DataConfig, overrides=["train=reasoning_gym:chain_sum", *settings])
    with refused("reasoning_gym:ch", *says):
        load_prompts(config, tokenizer, "train")


def test_too_few_held_out_questions_name_their_setting(tokenizer):
    for sets, setting in (("reasoning_gym:chain_sum", "eval_limit"), ("{a: reasoning_gym:chain_sum}", "eval.a.limit")):
        with refused("28 different questions", "256 were asked for", f"data.{setting}=28"):
            load_held_out(load(DataConfig, overrides=[f"eval={sets}", SMALL]), tokenizer)


def test_without_the_package_it_says_what_to_install(monkeypatch, tokenizer):
    monkeypatch.setattr("grpo.tasks.find_spec", lambda _: None)
    with refused("pip install reasoning-gym"):
        load_prompts(DataConfig(train="reasoning_gym:chain_sum"), tokenizer, "train")
