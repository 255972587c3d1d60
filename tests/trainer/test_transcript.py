"""What the user reads of what the policy writes."""

import json
import re

import pytest

from grpo.batch import Trajectory
from tests.trainer.test_tracking import terminal, track  # noqa: F401
from trainer.transcript import pick, render


def sample(group, reward, response="yes", **more):
    return Trajectory([1], group, prompt=f"prompt {group}", reward=reward, response=response, **more)


def test_the_best_and_the_worst_of_the_prompt_that_tells_most():
    def picked(*rewards):
        return [(t.group, t.reward) for t in pick([sample(n, r) for n, each in enumerate(rewards) for r in each])]

    assert picked([1, 1, 1], [0, 0.5, 1], [0, 0, 0.7]) == [(1, 1), (1, 0)]
    assert picked([1, 1], [0, 0]) == [(0, 1), (0, 1)]  # no signal
    assert picked([0.5], [0], [1]) == [(2, 1), (1, 0)]  # one sample each
    assert picked([0.5]) == [(0, 0.5)]


def test_rewards_components_and_cuts_stand_beside_the_text():
    first = sample(0, 1.5, "two\nlines", components={"digits": 1.0, "countdown": 0.5})
    cut = sample(0, 0, components={"digits": 0.0}, finish_reason="length", held_out=True)
    assert render(7, [first, cut]).splitlines() == [
        "--- step 7: what the policy writes",
        *("prompt:", "    prompt 0"),
        *("completion, reward 1.500 (digits 1.000, countdown 0.500):", "    two", "    lines"),
        *("completion, reward 0.000, cut (length):", "    yes", "---"),
    ]
    both = render(0, [cut, sample(1, 0)])
    assert both.startswith("--- step 0: what the policy writes (held out)\n")
    assert both.count("prompt:") == 2


def test_a_long_text_is_shortened_in_the_middle_and_no_character_is_lost_or_obeyed(tmp_path, terminal, capsys):  # noqa: F811
    text = render(1, [sample(0, 1, "a" * 400 + "b" * 5000 + "c" * 400)])
    assert f"    {'a' * 300} [... 5200 characters ...] {'c' * 300}\n" in text
    assert "\n    [... 90 line ends ...]\n    x" in render(1, [sample(0, 1, "\n" * 90 + "x")])
    text = render(1, [sample(0, 1, "[bold]x[/] :smile:\x1b[31m\r\x00\u202e€\ttab")])
    assert r"    [bold]x[/] :smile:\x1b[31m\r\x00\u202e€\ttab" in text
    with track(tmp_path) as tracker:
        tracker.say(text)
    assert r"[bold]x[/] :smile:\x1b[31m\r\x00\u202e€\ttab" in terminal.file.getvalue()


@pytest.mark.parametrize(("every", "trained", "held_out"), [(2, [1, 3, 5], [0, 2, 4]), (20, [1], [0]), (0, [], [])])
def test_they_are_printed_from_the_first_on_at_the_interval(every, trained, held_out, start, capsys):
    start("train", "run", "steps=5", "evaluation.every=1", f"tracking.show_every={every}")
    said = re.findall(
        r"(?ms)^--- step (\d): what the policy writes( \(held out\))?\n(.*?)^---$", capsys.readouterr().out
    )
    assert [int(step) for step, label, _ in said if not label] == trained
    assert [int(step) for step, label, _ in said if label] == held_out
    for _, label, text in said:
        assert text.count("prompt:\n") == (2 if label else 1)
        assert len(re.findall(r"(?m)^completion, reward [\d.]+ \(digits [\d.]+, countdown [\d.]+\)", text)) == 2


def test_a_run_grades_and_learns_from_what_is_written_up_to_a_stop_string(start):
    run = start("train", "run", "steps=1", "rollout.stop=[7, ' + ']", "tracking.samples_every=1")
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    ends = [re.search(r"7|( \+ )", sample["response"]) for sample in samples]
    assert any(end and end[0] == "7" for end in ends)
    for sample, end in zip(samples, ends, strict=True):
        words = sample["response"].split()
        if end:  # the text as it was graded, with the string and what more the completing token has
            assert len(sample["response"][end.end() :].split()) <= 1
            assert sample["finish_reason"] == "stop"
        assert sample["rewards/digits"] == pytest.approx(sum(word.isdigit() for word in words) / max(len(words), 1))
