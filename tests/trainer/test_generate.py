"""python -m trainer generate: one answer of a model or a run, or a chat."""

import io

import pytest
import torch
import transformers

from examples.countdown import make_tokenizer

PROMPT = "1 2 3 to 6 <think>"
SHORT = ["--max-tokens", 8]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] | upper | replace('S', '=') | replace('U', '+') | replace('A', '-') }} "
)
TEMPLATE += "{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}<think>{% endif %}"


class Lines(io.StringIO):
    """What a user types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def ask(run_main, monkeypatch, capsys):
    """ask(place, *options, typed=...): the lines that the command prints, `typed` on a terminal or piped into it."""

    def run(*arguments, typed: io.StringIO | None = None) -> list[str]:
        monkeypatch.setattr("sys.stdin", typed or Lines())
        capsys.readouterr()
        assert run_main("generate", *arguments) == 0
        return capsys.readouterr().out.splitlines()

    return run


@pytest.fixture
def chatty(countdown, tmp_path):
    """The model with a chat template of words that it knows: = for the system, + for the user, - for itself."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    transformers.AutoModelForCausalLM.from_pretrained(countdown / "model").save_pretrained(tmp_path / "chatty")
    tokenizer.save_pretrained(tmp_path / "chatty")
    return tmp_path / "chatty"


def greedy(folder, text: str, tokens: int = 8) -> str:
    """What transformers' own generate answers to `text`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([make_tokenizer()(text).input_ids])
    sampled = model.generate(ids, attention_mask=ids >= 0, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
    return make_tokenizer().decode(sampled[:-1] if sampled[-1] == 1 else sampled)


def test_an_answer_is_that_of_transformers(ask, countdown):
    (answer,) = ask(countdown / "model", PROMPT, *SHORT, "--temperature", 0)
    assert answer == greedy(countdown / "model", PROMPT)


def test_a_run_answers_with_the_checkpoint_asked_for(ask, start, run_main):
    run = start("train", "run", "checkpoint.every=1", "actor.learning_rate=0.1", "data.eval=null")
    before, answers = sorted(path.name for path in run.iterdir()), []
    for step in (1, 2):
        assert run_main("export", run, run.parent / f"out{step}", "--step", step) == 0
        answers += ask(run, PROMPT, *SHORT, "--temperature", 0, "--step", step)
        assert answers[-1] == greedy(run.parent / f"out{step}", PROMPT)
    assert answers[0] != answers[1]
    assert ask(run, PROMPT, *SHORT, "--temperature", 0) == answers[1:]
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_seed_decides_the_answer(ask, countdown):
    one, again, other = (ask(countdown / "model", PROMPT, *SHORT, "--seed", seed) for seed in (1, 1, 2))
    assert one == again != other


def test_a_question_may_come_through_a_pipe(ask, countdown):
    given = [countdown / "model", *SHORT, "--temperature", 0]
    assert ask(*given, typed=io.StringIO(PROMPT + "\n")) == ask(*given, PROMPT)


def test_a_chat_remembers_what_was_said(ask, chatty):
    given = [chatty, *SHORT, "--temperature", 0, "--system", "7"]
    shown = ask(*given, typed=Lines("1 2\n3\n\nnever\n"))
    first = greedy(chatty, "= 7 + 1 2 <think>")
    second = greedy(chatty, f"= 7 + 1 2 - {first} + 3 <think>")
    assert [line.removeprefix("> ") for line in shown[:2]] == [first, second]
    assert "never" not in " ".join(shown)
    assert second != greedy(chatty, "= 7 + 3 <think>")


@pytest.mark.parametrize(
    ("given", "typed", "words"),
    [
        ([], "\n", ["nothing to answer", "PROMPT"]),
        (["1 " * 600], "", ["600 tokens", "1 to 511"]),
        (["What is 6 times 7?"], "", ["tokenizer cannot read", "What is 6", "vocabulary"]),
    ],
)
def test_what_cannot_be_answered(given, typed, words, run_main, countdown, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert run_main("generate", countdown / "model", *given) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert all(word in error for word in words), error
