"""What a policy may write to harm a grader: a few thousand completions of `fuzz_rewards`, and texts that are long."""

import pytest

from rewards import RewardPool, RewardsConfig
from tests.reliability.fuzz_rewards import CASES, bad, fuzz

pytestmark = pytest.mark.reliability

# What made, or could make, a regular expression go over the text once for each of its characters.
LONG = [
    "\n" * 1_000_000, "*\n" * 500_000, "\\boxed{" + " " * 1_000_000, "answer" + " " * 1_000_000, "A) " * 300_000,
    "<think>" + "a" * 1_000_000, "<think>" * 140_000, "<think>a</think>" + "\n" * 1_000_000 + "a", "1," * 500_000,
    "9" * 1_000_000, "<answer>" * 120_000, "\\boxed{" * 140_000, "(" * 1_000_000, "-" * 1_000_000,
]  # fmt: skip


def test_no_fuzzed_completion_raises_is_late_or_earns_what_it_should_not():
    found = fuzz(2000, seed=0)
    assert bad(found) == []
    assert {name: mine.graded for name, mine in found.items() if CASES[name].every == 1} == {
        name: 2000 for name, case in CASES.items() if case.every == 1
    }
    assert min(mine.graded for mine in found.values()) >= 4


def test_no_long_text_takes_any_reward_long():
    for name, case in CASES.items():
        if case.every == 1:
            config = RewardsConfig({case.reward: 1.0}, {case.reward: case.options}, timeout_seconds=10.0)
            with RewardPool(config) as pool:
                grades = [pool.submit(text, case.row) for text in LONG]
                failures = [failure for grade in grades for failure in grade.result().failures]
            assert not [(name, ascii(f.completion[:20]), f.kind) for f in failures if f.kind != "none applies"]
