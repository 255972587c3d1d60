"""The forms of rewards (batched, async, TRL's), limits of their own, None, and the examples that stand beside them."""

import os
import time
from pathlib import Path

import pytest

import rewards
from rewards import RewardPool, RewardsConfig, registry
from rewards.testing import check_examples, run_examples
from tests.rewards.test_reward_pool import score

SOURCE = """
import asyncio, os, sys, time
from rewards import register

@register("batch")
def batch(completions, rows, *, scale=1.0):
    for completion in completions:
        if completion == "nap": time.sleep(0.5)
        if completion == "hang": time.sleep(60)
        if completion == "exit": os._exit(3)
        if completion == "raise": raise KeyError("no such thing")
        if completion == "few": return [1.0] * (len(completions) - 1)
        if completion == "number": return 1.0
        if completion == "text": return "x" * len(completions)
        if completion == "generator": return (1.0 for _ in completions)
    if "mixed" in completions: return [None, "7", float("nan"), True][:len(completions)]
    return tuple(scale * len(completions) + row.get("add", 0) for row in rows)

barrier, opened, loops = asyncio.Barrier(64), [], set()

@register("critic")
async def critic(completion, row, *, scale=1.0):
    loops.add(asyncio.get_running_loop())
    if completion == "nap": await asyncio.sleep(0.5)
    if completion == "wait": await barrier.wait()
    if completion == "hang": await asyncio.sleep(60)
    if completion == "block": time.sleep(60)
    if completion == "deaf":
        while True:
            try: await asyncio.sleep(60)
            except asyncio.CancelledError: pass
    if completion == "raise": raise TimeoutError("the judge's own")
    if completion == "cancelled": raise asyncio.CancelledError
    if completion == "sys.exit": sys.exit(3)
    if completion == "none": return None
    if completion == "text": return "1"
    if completion == "pid": return os.getpid()
    return scale * len(loops)

@register("critics", seconds=60)
async def critics(completions, rows):
    if "hang" in completions: await asyncio.sleep(1)
    if "raise" in completions: raise ValueError("all of them")
    return [len(completions)] * len(completions)

@register("trl")
def trl(prompts, completions, answer, bonus=0.5, level=None, log_metric=None, **kwargs):
    hints = kwargs.get("hint", [None] * len(prompts))
    assert "completion_ids" not in kwargs and log_metric is None
    levels = level or [0] * len(prompts)
    given = zip(prompts, completions, answer, hints, levels, strict=True)
    return [(p + c == a) + bonus * (h == "yes") + (x or 0) for p, c, a, h, x in given]

@register("trl_bare")
async def trl_bare(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

@register("trl_closed")
def trl_closed(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

@register("slow")
def slow(completion, row):
    time.sleep(0.4)
    return 1.0

@register("slow_by_nature", seconds=60)
def slow_by_nature(completion, row):
    time.sleep(0.4)
    return 1.0

graded = []

@register("earlier")
def earlier(completion, row):
    graded.append(completion)
    return len(graded)

@register("later")
def later(completion, row):
    return earlier(completion, row)

@register("mean", sees="group")
def mean(completions, rows, *, scale=1.0):
    if "hang" in completions: time.sleep(60)
    if "raise" in completions: raise KeyError("no such thing")
    if "few" in completions: return [1.0]
    middle = sum(map(len, completions)) / len(completions)
    return [None if c == "none" else scale * (len(c) - middle) + row.get("add", 0) for c, row in zip(completions, rows)]

meeting = asyncio.Barrier(3)

@register("rank", sees="group", seconds=60)
async def rank(prompts, completions, answer=None, **columns):
    if "meet" in completions: await meeting.wait()
    if "hang" in completions: await asyncio.sleep(60)
    return [sorted(completions).index(completion) + (prompts[0] == "2+2=") for completion in completions]

@register("even")
def even(completion, row):
    return None if len(completion) % 2 else 1.0
"""


@pytest.fixture
def config(tmp_path):
    """config(*names, ...): settings of these rewards of the file above, with one worker and a long limit."""
    (tmp_path / "forms.py").write_text(SOURCE)

    def make(*names: str, **settings) -> RewardsConfig:
        settings = {"processes": 1, "timeout_seconds": 60.0, "files": [str(tmp_path / "forms.py")]} | settings
        return RewardsConfig(dict.fromkeys(names, 1.0), **settings)

    return make


def test_a_batched_reward_gets_all_that_waits_in_one_call_and_each_its_own_row(config):
    with RewardPool(config("batch", options={"batch": {"scale": 2.0}})) as pool:
        first = pool.submit("nap", {"add": 0.5})
        time.sleep(0.2)  # it is being graded while the others come
        scores = score(pool, ["x"] * 100, [{"add": 1000 * n} for n in range(100)])
        assert first.result().total == 2.5
    assert scores.total == [128 + 1000 * n for n in range(64)] + [72 + 1000 * n for n in range(64, 100)]


def graded_together(pool: RewardPool, *completions: str, wait: str = "nap"):
    """The scores of completions that wait while another is graded, so that they are sent at once."""
    pool.submit(wait, {})
    time.sleep(0.2)
    return score(pool, completions)


@pytest.mark.parametrize(
    ("completion", "kind", "message"),
    [
        (
            "few",
            "not a list",
            "returned a list of 2: reward 'batch' must return a list of 3, a number or None for each",
        ),
        ("number", "not a list", "returned 1.0: reward 'batch' must return a list of 3, a number or None for each"),
        ("text", "not a list", "returned 'xxx': reward 'batch' must return a list of 3, a number or None for each"),
        ("generator", "not a list", "returned <generator object "),
        ("raise", "exception", "KeyError at "),
        ("exit", "crash", "exited with code 3"),
        ("hang", "timeout", "took longer than 1 seconds, in one call with 2 other completion(s)"),
    ],
)
def test_a_batched_call_that_fails_is_a_failure_of_all_its_completions(config, completion, kind, message):
    with RewardPool(config("batch", "even", timeout_seconds=1.0 if kind == "timeout" else 60.0)) as pool:
        scores = graded_together(pool, "ok", completion, "fine")
        assert score(pool, ["ok"]).components["batch"] == [1.0]
    assert [(f.reward, f.kind, f.completion) for f in scores.failures] == [
        ("batch", kind, each) for each in ("ok", completion, "fine")
    ]
    assert all(message in failure.message for failure in scores.failures), scores.failures[0]
    assert scores.components["batch"] == [0.0] * 3
    assert scores.components["even"][::2] == [1.0, 1.0]


def test_a_value_of_a_batch_that_is_no_number_costs_its_completion_alone(config):
    with RewardPool(config("batch", "slow")) as pool:
        scores = graded_together(pool, "mixed", "a", "b", "c")
    assert scores.components["batch"] == [None, 0.0, 0.0, 1.0]
    wanted = "reward 'batch' must return a finite number, or None where it does not apply"
    assert [(f.kind, f.completion, f.message) for f in scores.failures] == [
        ("not a number", "a", f"returned '7': {wanted}"),
        ("not a number", "b", f"returned nan: {wanted}"),
    ]


def test_async_rewards_of_a_chunk_run_side_by_side_in_a_loop_that_lasts(config):
    """Each waits for all 64 to be there."""
    with RewardPool(config("critic")) as pool:
        assert graded_together(pool, *["wait"] * 64).total == [1.0] * 64
        assert score(pool, ["x"] * 3).total == [1.0] * 3


def test_each_async_call_has_a_limit_of_its_own_and_the_worker_lives_on(config):
    with RewardPool(config("critic", timeout_seconds=1.0)) as pool:
        (pid,) = score(pool, ["pid"]).total
        bad = ("hang", "raise", "cancelled", "sys.exit", "text")
        scores = graded_together(pool, *bad, "pid", "x")
    kinds = [(f.completion, f.kind) for f in scores.failures]
    expected = ["timeout", "exception", "exception", "exception", "not a number"]
    assert kinds == list(zip(bad, expected, strict=True))
    assert scores.failures[0].message == "took longer than 1 seconds"
    assert "TimeoutError at" in scores.failures[1].message
    assert scores.total == [0.0] * 5 + [pid, 1.0]


@pytest.mark.parametrize("completion", ["block", "deaf"])
def test_an_async_reward_that_does_not_let_go_is_killed_and_says_whom_it_took_along(config, completion):
    with RewardPool(config("critic", timeout_seconds=1.0)) as pool:
        scores = graded_together(pool, completion, "x")
        assert score(pool, ["x"]).total == [1.0]
    assert [(f.kind, f.completion) for f in scores.failures] == [("timeout", completion), ("timeout", "x")]
    assert "with 1 other completion(s)" in scores.failures[0].message


def test_an_async_batched_reward_has_one_call_and_one_limit(config):
    with RewardPool(config("critics", timeout_seconds=0.1)) as pool:
        assert graded_together(pool, "a", "b", wait="hang").total == [2.0, 2.0]
        failures = graded_together(pool, "raise", "b", wait="hang").failures
    assert [f.kind for f in failures] == ["exception"] * 2
    with RewardPool(config("critics", timeouts={"critics": 0.5})) as pool:
        (failure,) = score(pool, ["hang"]).failures
    assert failure.message == "took longer than 0.5 seconds"


def test_trls_form_gets_prompts_and_columns_as_lists(config):
    rows = [
        {"answer": "21", "hint": "yes", "bonus": 9},
        {"answer": "no", "hint": "no", "other": 1},
        {"answer": "21", "level": 3},
    ]
    with RewardPool(config("trl", "trl_bare", "trl_closed", options={"trl": {"bonus": 0.25}})) as pool:
        futures = [pool.submit("1", row, "2") for row in rows]
        grades = [future.result() for future in futures]
    assert [grade.failures for grade in grades] == [[]] * 3
    assert [grade.components["trl"] for grade in grades] == [1.25, 0.0, 4.0]
    assert [grade.components["trl_bare"] for grade in grades] == [1.0] * 3
    assert [grade.components["trl_closed"] for grade in grades] == [0.0] * 3


def test_forms_are_told_by_the_parameters(registered, config):
    registry.load_file(config().files[0])
    about = {name: (r.form, r.is_async, r.needs, r.options) for name, r in registered.items()}
    assert about["even"] == ("plain", False, (), ())
    assert about["batch"] == ("batched", False, (), ("scale",))
    assert about["critic"] == ("plain", True, (), ("scale",))
    assert about["critics"] == ("batched", True, (), ())
    assert about["trl"] == ("TRL", False, ("answer",), ("bonus", "level", "log_metric"))
    assert about["trl_bare"] == ("TRL", True, (), ())
    assert rewards.missing_columns(config("trl", "trl_closed"), ["hint"]) == {
        "trl": ["answer"],
        "trl_closed": ["answer"],
    }


def test_signatures_that_cannot_be_called_are_refused(registered):
    def ids(prompts, completions, completion_ids, **kwargs): ...
    def state(completions, *, trainer_state): ...
    def positional(completions, /, **kwargs): ...
    def star(completions, *columns): ...
    def third(completions, rows, answer): ...

    for function, said in (
        (ids, "asks for completion_ids, which only TRL's own trainer passes: give it a default, such as"),
        (state, "asks for trainer_state, which only TRL's own trainer passes"),
        (positional, r"cannot be called as positional\(completions=..., COLUMN=...\)"),
        (star, r"cannot be called as star\(completions=..., COLUMN=...\)"),
        (third, r"cannot be called as third\(completion, row\)"),
    ):
        with pytest.raises(ValueError, match=f"^Reward 'bad' {said}"):
            rewards.register("bad")(function)
    for seconds in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"'bad': seconds is .*must be a positive number"):
            rewards.register("bad", seconds=seconds)
    assert "bad" not in registered


def test_the_reward_whose_completions_wait_longest_is_next(config):
    with RewardPool(config("earlier", "later")) as pool:
        scores = score(pool, ["x"] * 200)
    assert scores.components["later"][0] < scores.components["earlier"][-1]


def test_a_limit_is_the_configs_own_then_the_rewards_then_that_of_all(config):
    names = ("slow", "slow_by_nature")
    failed = {}
    for timeouts in ({}, {"slow": 60.0, "slow_by_nature": 0.1}):
        with RewardPool(config(*names, timeout_seconds=0.1, timeouts=timeouts)) as pool:
            failed[len(timeouts)] = [(f.reward, f.message) for f in score(pool, ["x"]).failures]
    late = "took longer than 0.1 seconds"
    assert failed == {0: [("slow", late)], 2: [("slow_by_nature", late)]}


@pytest.mark.parametrize(
    ("timeouts", "sentence"),
    [
        ({"mth": 3.0}, "rewards.timeouts has 'mth', which is not in rewards.weights: did you mean 'math'"),
        ({"math": 0.0}, "rewards.timeouts.math is 0.0: it must be a positive number"),
        ({"math": float("inf")}, "rewards.timeouts.math is inf"),
    ],
)
def test_a_timeout_that_cannot_work_is_one_sentence(timeouts, sentence):
    with pytest.raises(ValueError, match=sentence):
        rewards.validate(RewardsConfig({"math": 1.0}, timeouts=timeouts))


def test_none_leaves_a_reward_out_and_a_completion_to_which_none_applies_is_a_failure(config):
    settings = config("critic", "even", "slow", options={"critic": {"scale": 3.0}})
    settings.weights = {"critic": 1.0, "even": 10.0, "slow": 0.0}
    with RewardPool(settings) as pool:
        scores = score(pool, ["none", "x", "ab", "abc", "text"])
    assert scores.components["critic"] == [None, 3.0, 3.0, 3.0, 0.0]
    assert scores.components["even"] == [1.0, None, 1.0, None, 1.0]
    assert scores.total == [10.0, 3.0, 13.0, 3.0, 10.0]
    assert [(f.reward, f.completion) for f in scores.failures] == [("critic", "text")]
    settings.weights = {"even": 1.0, "slow": 0.0}  # what has no weight does not make up for it
    with RewardPool(settings) as pool:
        (grade,) = score(pool, ["x"]).grades
    assert (grade.total, grade.components) == (0.0, {"even": None, "slow": 1.0})
    assert [(f.reward, f.kind, f.completion) for f in grade.failures] == [("even", "none applies", "x")]


def graded_in_groups(pool: RewardPool, *groups: str, row: dict | None = None, prompt: str = "") -> list[list]:
    """The grades of groups, each given as words, whose first completions come first."""
    words = [text.split() for text in groups]
    parts = [rewards.Group(len(each)) for each in words]
    futures = [[] for _ in groups]
    for turn in range(max(map(len, words))):
        for each, part, those in zip(words, parts, futures, strict=True):
            those += [pool.submit(each[turn], row or {}, prompt, part)] if turn < len(each) else []
    return [[future.result(timeout=60) for future in those] for those in futures]


def test_a_reward_that_sees_its_group_is_given_one_whole_group_and_each_completion_gets_its_own_value(config):
    settings = config("mean", "rank", "even", options={"mean": {"scale": 2.0}}, processes=2)
    with RewardPool(settings) as pool:
        groups = [f"{'x' * n} {'y' * (n + 2)} none{'' if n % 2 else ' a'}" for n in range(1, 60)]
        for text, grades in zip(groups, graded_in_groups(pool, *groups, row={"add": 100}), strict=True):
            words = text.split()
            middle = sum(map(len, words)) / len(words)
            wanted = [None if word == "none" else 2 * (len(word) - middle) + 100 for word in words]
            assert [grade.components["mean"] for grade in grades] == pytest.approx(wanted)
            assert [grade.components["rank"] for grade in grades] == [sorted(words).index(word) for word in words]
            assert [grade.components["even"] for grade in grades] == [None if len(w) % 2 else 1.0 for w in words]
        (alone,) = graded_in_groups(pool, "x", prompt="2+2=")
        assert (alone[0].components, pool.submit("x", {}).result().components["mean"]) == (
            {"mean": 0.0, "rank": 1.0, "even": None},
            0.0,
        )


def test_the_other_rewards_do_not_wait_for_the_last_of_a_group(config):
    with RewardPool(config("mean", "earlier")) as pool:
        group = rewards.Group(3)
        first, second = (pool.submit(text, {}, "", group) for text in ("a", "bb"))
        assert pool.submit("alone", {}).result(timeout=60).components == {"mean": 0.0, "earlier": 3.0}
        assert not first.done()
        last = pool.submit("ccc", {}, "", group)
        grades = [future.result(timeout=60) for future in (first, second, last)]
    assert [grade.components for grade in grades] == [
        {"mean": -1.0, "earlier": 1.0},
        {"mean": 0.0, "earlier": 2.0},
        {"mean": 1.0, "earlier": 4.0},
    ]


def test_groups_of_an_async_reward_are_graded_side_by_side_each_under_its_own_limit(config):
    with RewardPool(config("rank", timeouts={"rank": 2.0})) as pool:
        graded_in_groups(pool, "warm up")
        groups = graded_in_groups(pool, "meet a", "meet b", "meet c", "hang d")
    assert [[grade.total for grade in grades] for grades in groups] == [[1.0, 0.0]] * 3 + [[0.0, 0.0]]
    late = ("timeout", "took longer than 2 seconds, in one call with 1 other completion(s)")
    assert [[(f.kind, f.message) for grade in grades for f in grade.failures] for grades in groups] == [
        *[[]] * 3,
        [late] * 2,
    ]


@pytest.mark.parametrize(
    ("word", "kind", "message"),
    [
        ("hang", "timeout", "took longer than 1 seconds, in one call with 2 other completion(s)"),
        ("raise", "exception", "'no such thing', in one call with 2 other completion(s)"),
        ("few", "not a list", "returned a list of 1: reward 'mean' must return a list of 3"),
    ],
)
def test_what_fails_costs_its_group_and_no_other(config, word, kind, message):
    with RewardPool(config("mean", timeout_seconds=1.0)) as pool:
        groups = graded_in_groups(pool, "a bbb", f"a {word} b", "cc aaaa", "d e")
    assert [[grade.total for grade in grades] for grades in groups] == [[-1, 1], [0, 0, 0], [-1, 1], [0, 0]]
    failures = [failure for grades in groups for grade in grades for failure in grade.failures]
    assert [(f.kind, f.completion) for f in failures] == [(kind, "a"), (kind, word), (kind, "b")]
    assert message in failures[1].message


def test_a_group_is_for_forms_that_take_many_and_its_examples_are_lists(registered):
    with pytest.raises(ValueError, match="'bad' sees its group: give it the parameters completions and rows"):
        rewards.register("bad", sees="group")(lambda completion, row: 1.0)
    with pytest.raises(ValueError, match="'bad': sees is 'prompt': it must be 'completion' or 'group'"):
        rewards.register("bad", sees="prompt")
    for example in (
        ("a", {}, 1.0),
        (["a"], {}, 1.0),
        (["a"], [{}], [1.0, 2.0]),
        (["a", "b"], [{}], [1.0, 2.0]),
        ([], [], []),
        ("ab", [{}, {}], [1.0, 1.0]),
        (["a"], [{}], ["1"]),
        (["a"], [{}], [1.0], 3),
    ):
        with pytest.raises(ValueError, match=r"'bad' has the example .*, which is not \(completions, rows, values\)"):
            rewards.register("bad", sees="group", examples=[example])(lambda completions, rows: [1.0])
    assert "bad" not in registered


@pytest.mark.parametrize(
    "example",
    [
        "abc",
        (["a"], [{}], [1.0]),
        ("text", {}),
        ("text", {}, "1"),
        (1, {}, 1.0),
        ("text", [], 1.0),
        ("text", {}, 1.0, 3),
        7,
        ("", {}, 1, {}, 2),
    ],
)
def test_an_example_of_another_form_is_refused_where_it_stands(registered, example):
    with pytest.raises(ValueError, match=r"^Reward 'bad' has the example .*, which is not \(completion, row, value\)"):
        rewards.register("bad", examples=[("fine", {}, 1), example])(lambda completion, row: 1.0)
    with pytest.raises(ValueError, match="'bad' has no option 'scale'"):
        rewards.register("bad", examples=[("fine", {}, None, {"scale": 2})])(lambda completion, row: 1.0)
    assert "bad" not in registered


EXAMPLES = """
import time
from rewards import register

@register("good", examples=[("a", {}, 1), ("aa", {}, 2.0), ("aa", {}, 4, {"scale": 2.0}), ("", {}, None)])
def good(completions, rows, *, scale=1.0):
    return [scale * len(completion) if completion else None for completion in completions]

@register("asks", examples=[("4", {"prompt": "2+2="}, 1.0)])
def asks(prompts, completions, **kwargs):
    return [float(eval(p[:-1]) == int(c)) for p, c in zip(prompts, completions)]

@register("wrong", examples=[("right", {}, 1.0), ("wrong", {}, 0.0), ("later", {}, 0.0)])
def wrong(completion, row):
    return float(completion != "later")

@register("raises", examples=[("x", {}, 0.0)])
def raises(completion, row):
    return row["value"]

@register("none", examples=[("x", {}, 0.0), ("y", {}, None)])
def none(completion, row):
    return None if completion == "x" else 0.0

@register("first", sees="group", examples=[(["a", "b", "a"], [{}] * 3, [1, None, 1.0]), (["b", "a"], [{}] * 2, [1, 0])])
def first(completions, rows):
    return [1.0 if completion == completions[0] else None for completion in completions]

@register("hangs", seconds=0.5, examples=[("x", {}, 0.0)])
def hangs(completion, row):
    time.sleep(60)
"""


def test_examples_are_graded_by_the_pool_with_their_own_options_and_the_real_limits(registered, tmp_path):
    file = tmp_path / "examples.py"
    file.write_text(EXAMPLES)
    names = ["good", "asks", "wrong", "raises", "none", "hangs", "first"]
    config = RewardsConfig(dict.fromkeys(names, 1.0), {"good": {"scale": 100.0}}, [str(file)], processes=2)
    rewards.validate(config)
    with RewardPool(config) as pool:
        outcomes = run_examples(pool, names)
        assert pool.submit("a", {}).result().components["good"] == 100.0  # the config's options are back
        check_examples(pool, ["good", "asks"])
        line = f"{file}:{registered['wrong'].line}"
        with pytest.raises(ValueError, match=r"'wrong' \(.*fails its own example: 'wrong' must give 0.0") as error:
            check_examples(pool, ["good", "wrong"])
    assert line in str(error.value)
    assert "and gave 1.0; mend" in str(error.value)
    passed = {name: [outcome.passed for outcome in each] for name, each in outcomes.items()}
    bad = {"wrong": [True, False, True], "raises": [False], "none": [False, False], "hangs": [False]}
    bad |= {"first": [True, False]}
    assert outcomes["first"][1].said == "['b', 'a'] must give [1, 0] and gave [1.0, None]"
    assert passed == {"good": [True] * 4, "asks": [True]} | bad
    assert outcomes["raises"][0].said.startswith("'x' must give 0.0 and gave exception: KeyError at ")
    said = ["'x' must give 0.0 and gave None", "'y' must give None and gave 0.0"]
    assert [outcome.said for outcome in outcomes["none"]] == said
    assert outcomes["hangs"][0].said == "'x' must give 0.0 and gave timeout: took longer than 0.5 seconds"


def test_the_built_in_rewards_keep_their_examples():
    able = [r.name for r in map(registry.find, rewards.names()) if r.examples and not r.missing_imports()]
    assert {"countdown", "math"} <= set(able)
    with RewardPool(RewardsConfig(dict.fromkeys(able, 1.0))) as pool:
        check_examples(pool, able)


def test_no_reward_of_the_package_imports_the_trainer_or_torch():
    for file in Path(rewards.__file__).parent.glob("*.py"):
        words = [line.split()[:2] for line in file.read_text().splitlines()]
        imported = {word[1].split(".")[0] for word in words if word[:1] in (["import"], ["from"])}
        assert not imported & {"trainer", "workers", "grpo", "torch"}, os.path.basename(file)
