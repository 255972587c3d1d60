"""The examples that stand beside rewards, graded by the pool that grades a run."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from rewards.pool import Grade, RewardPool
from rewards.registry import Example, find

TOLERANCE = 1e-6  # by which a value may differ from its example's


class Outcome(NamedTuple):
    """What came of an example: whether it passed, and a few words on what was to come and what did."""

    passed: bool
    said: str


def run_examples(pool: RewardPool, names: Iterable[str]) -> dict[str, list[Outcome]]:
    """Reward name -> what came of each of its examples, graded side by side; `pool` has the rewards `names`."""
    graded = {name: [(each, pool.submit_example(name, each)) for each in find(name).examples] for name in names}
    wait = {name: [(each, [f.result() for f in futures]) for each, futures in those] for name, those in graded.items()}
    return {name: [_outcome(name, each, grades) for each, grades in those] for name, those in wait.items()}


def check_examples(pool: RewardPool, names: Iterable[str]) -> None:
    """Raise a ValueError of one sentence for the first of the rewards `names` of `pool` that fails its own example."""
    for name, outcomes in run_examples(pool, names).items():
        for outcome in outcomes:
            if not outcome.passed:
                where, way_out = f"{find(name).file}:{find(name).line}", f"python -m trainer rewards test {name}"
                said = f"Reward {name!r} ({where}) fails its own example: {outcome.said}"
                raise ValueError(f"{said}; mend the reward or the example ({way_out}).")


def _outcome(name: str, example: Example, grades: list[Grade]) -> Outcome:
    values, wanted = [grade.components[name] for grade in grades], [value for *_, value in example.samples()]
    failures = [each for grade in grades for each in grade.failures if each.kind != "none applies"]
    gave = values[0] if isinstance(example.completion, str) else values
    if failures:
        gave = f"{failures[0].kind}: {failures[0].message}"
    asked = f"{example.completion!r:.200}{f' with {dict(example.options)}' if example.options else ''}"
    passed = not failures and all(map(_is_close, values, wanted))
    return Outcome(passed, f"{asked} must give {example.value} and gave {gave}")


def _is_close(value: float | None, wanted: float | None) -> bool:
    if value is None or wanted is None:
        return value is wanted
    return math.isclose(value, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
