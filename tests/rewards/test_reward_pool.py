"""The pool: whose answer is whose, totals, every way a grade can fail, and that no process outlives its parent."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest

import rewards
from rewards import RewardPool, RewardsConfig

PACKAGE = Path(rewards.__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
SOURCE = """
import ctypes, os, subprocess, sys, tempfile, time
from fractions import Fraction
from rewards import register

@register("characters")
def characters(completion, row, *, scale=1.0):
    return len(completion) * scale

@register("row")
def from_row(completion, row):
    return row.pop("value")

@register("lazy", imports=("colorsys",))
def lazy(completion, row):
    return "colorsys" in sys.modules

kept = []

@register("naughty")
def naughty(completion, row):
    if completion == "sleep": time.sleep(60)
    if completion == "regex":
        import re
        re.match(r"(a+)+$", "a" * 60 + "b")
    if completion == "raise": raise KeyError("no such thing")
    if completion == "long": raise ValueError("x" * 100_000)
    if completion == "recurse": return naughty(completion, row)
    if completion == "sys.exit": sys.exit(3)
    if completion == "os._exit": os._exit(3)
    if completion == "segfault": ctypes.string_at(0)
    if completion == "killed": os.kill(os.getpid(), 9)
    if completion == "nan": return float("nan")
    if completion == "inf": return float("inf")
    if completion == "text": return "1.0"
    if completion == "true": return True
    if completion == "fraction": return Fraction(1, 2)
    if completion == "print": print("hello from print"); os.write(1, b"hello from write" + bytes([10]))
    if completion == "child": subprocess.run(["echo", "hello from child"])
    if completion == "chatty": print("x" * 1_000_000)
    if completion == "memory": return float(len(bytearray(1 << 30)))
    if completion == "little by little":
        while True: kept.append(bytearray(1 << 20))
    if completion == "child's memory":
        return subprocess.run([sys.executable, "-c", "bytearray(1 << 30)"]).returncode
    if completion == "temporary":
        open(tempfile.mkstemp()[1], "w").close()
        os._exit(3)
    if completion == "stdin": return float(len(sys.stdin.read()))
    if completion == "pid": return os.getpid()
    if completion.startswith("nap"): time.sleep(0.3)
    while completion == "sing": print("la"); time.sleep(0.01)
    if completion == "grandchild": subprocess.run(["sleep", "60"])
    return 1.0
"""


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "naughty.py"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def config(file) -> RewardsConfig:
    return RewardsConfig(weights={"naughty": 1.0}, files=[file], processes=2, timeout_seconds=1.0)


@pytest.fixture
def patient(config) -> RewardsConfig:
    config.timeout_seconds = 60.0
    return config


def score(pool: RewardPool, completions: Sequence[str], rows: Sequence[dict] | None = None) -> SimpleNamespace:
    """Grade a batch and wait for it: grades, their totals, components by name, failures, and the seconds it took."""
    started = time.monotonic()
    samples = zip(completions, rows or [{}] * len(completions), strict=True)
    grades = [future.result() for future in [pool.submit(completion, row) for completion, row in samples]]
    return SimpleNamespace(
        grades=grades,
        total=[grade.total for grade in grades],
        components={name: [grade.components[name] for grade in grades] for name in grades[0].components},
        failures=[failure for grade in grades for failure in grade.failures],
        seconds=time.monotonic() - started,
    )


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(map(alive, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


def test_order_components_weights_and_options(file):
    config = RewardsConfig(weights={"characters": 0.5, "row": -2.0}, options={"characters": {"scale": 3.0}})
    config.files, config.processes, config.timeout_seconds = [file], 3, 60.0
    completions = ["x" * (i * 7 % 50) for i in range(500)]
    row = {"value": 0.25}
    with RewardPool(config) as pool:
        for rows in ([{"value": float(i)} for i in range(500)], [row] * 500):
            scores = score(pool, completions, rows)
            assert scores.components["characters"] == [3.0 * len(c) for c in completions]
            assert scores.components["row"] == [r["value"] for r in rows]
            samples = zip(completions, rows, strict=True)
            assert scores.total == pytest.approx([1.5 * len(c) - 2 * r["value"] for c, r in samples])
            assert scores.failures == []
            assert 0 < scores.seconds < 30
    assert row == {"value": 0.25}


def test_countdown_and_math_in_one_pool():
    row = {"numbers": [3, 4], "target": 7, "answer": "9"}
    with RewardPool(RewardsConfig({"countdown": 1.0, "math": 10.0}, processes=1, timeout_seconds=60.0)) as pool:
        scores = score(pool, ["<answer>3+4</answer>", "\\boxed{9}", "\\boxed{8}"], [row] * 3)
    assert scores.total == [1.0, 10.0, 0.0]


def test_what_a_reward_imports_lazily_is_imported_before_its_first_grade(file):
    with RewardPool(RewardsConfig(weights={"lazy": 1.0}, files=[file], processes=1)) as pool:
        assert score(pool, [""]).total == [1.0]


def test_a_power_tower_in_a_box_is_a_timeout():
    """math-verify computes it, in one call that no signal and no thread can interrupt."""
    with RewardPool(RewardsConfig({"math": 1.0}, processes=1, timeout_seconds=1.5)) as pool:
        scores = score(pool, ["\\boxed{2^{2^{2^{42}}}}"], [{"answer": "42"}])
    assert [f.kind for f in scores.failures] == ["timeout"]


def test_many_short_completions_take_milliseconds():
    rows = [{"numbers": [3, 4, 7], "target": 14}] * 256
    with RewardPool(RewardsConfig(weights={"countdown": 1.0}, processes=1, timeout_seconds=60.0)) as pool:
        batches = [score(pool, ["<answer>3+4+7</answer>"] * 256, rows) for _ in range(5)]
    assert all(scores.total == [1.0] * 256 for scores in batches)
    assert min(scores.seconds for scores in batches) < 0.15


def test_completions_come_from_many_threads_and_each_gets_its_own_answer(patient):
    patient.weights = {"characters": 2.0, "row": -1.0, "naughty": 0.0}

    def grades(thread: int) -> list[rewards.Grade]:
        futures = [pool.submit("x" * (thread * 100 + i), {"value": float(i)}) for i in range(100)]
        return [future.result(timeout=60.0) for future in futures]

    with RewardPool(patient) as pool, ThreadPoolExecutor(8) as threads:
        for thread, answers in enumerate(threads.map(grades, range(8))):
            lengths = [float(thread * 100 + i) for i in range(100)]
            components = [{"characters": n, "row": float(i), "naughty": 1.0} for i, n in enumerate(lengths)]
            totals = [2 * n - i for i, n in enumerate(lengths)]
            assert answers == [rewards.Grade(t, c, []) for t, c in zip(totals, components, strict=True)]


def test_answers_come_in_any_order_and_a_failure_names_its_reward(patient):
    patient.weights = {"naughty": 1.0, "characters": 1.0}
    with RewardPool(patient) as pool:
        slow, quick = pool.submit("nap", {}), pool.submit("raise", {})
        assert not slow.cancel()
        grade = quick.result(timeout=30.0)
        assert not slow.done()
        assert (grade.total, grade.components) == (5.0, {"naughty": 0.0, "characters": 5.0})
        assert [(f.reward, f.kind, f.completion) for f in grade.failures] == [("naughty", "exception", "raise")]
        assert slow.result(timeout=30.0) == rewards.Grade(4.0, {"naughty": 1.0, "characters": 3.0}, [])


def test_while_one_grade_hangs_others_are_answered_and_close_ends_it(patient):
    with RewardPool(patient) as pool:
        score(pool, ["fine"] * 500)  # after quick ones, workers are sent many tasks at once
        started = time.monotonic()
        hanging = pool.submit("sleep", {})
        quick = [pool.submit("fine", {}) for _ in range(3)]
        assert [future.result(timeout=30.0).total for future in quick] == [1.0] * 3
        waiting = [pool.submit(completion, {}) for completion in ("sleep", "fine", "fine")]
        pool.close()
        assert time.monotonic() - started < 30
    for future in (hanging, *waiting):
        with pytest.raises(RuntimeError, match="pool is closed"):
            future.result(timeout=0.0)


def test_slow_grades_are_spread_over_the_workers_until_the_queue_ends(config):
    with RewardPool(config) as pool:
        score(pool, ["fine"] * 500)
        assert score(pool, [f"nap {i}" for i in range(8)]).seconds < 7 * 0.3


def test_a_worker_that_cannot_be_replaced_ends_all_that_waits(patient, file):
    with RewardPool(patient) as pool:
        Path(file).write_text("raise ImportError('gone in the meantime')")
        futures = [pool.submit(completion, {}) for completion in ("os._exit", "sleep", "sleep", "fine")]
        for future in futures[1:]:
            with pytest.raises(RuntimeError, match=r"could not be started(.|\n)*gone in the meantime"):
                future.result(timeout=30.0)
        with pytest.raises(RuntimeError, match="gone in the meantime"):
            pool.submit("fine", {})
    assert [f.kind for f in futures[0].result().failures] == ["crash"]


FAILURES = {
    "raise": ("exception", r"KeyError at .*naughty.py:\d+: 'no such thing'"),
    "long": ("exception", "ValueError at "),
    "recurse": ("exception", "RecursionError"),
    "sys.exit": ("exception", "SystemExit"),
    "os._exit": ("crash", "exited with code 3"),
    "segfault": ("crash", r"signal 11 .*(.|\n)*naughty.py"),
    "killed": ("crash", "signal 9"),
    "nan": ("not a number", "returned nan"),
    "inf": ("not a number", "returned inf"),
    "text": ("not a number", "returned '1.0'"),
    "sleep": ("timeout", "longer than 1 seconds"),
    "regex": ("timeout", "longer than 1 seconds"),
    "sing": ("timeout", "longer than 1 seconds"),  # what it prints all the while must not put off its end
}


def test_every_failure_costs_its_own_grade_and_no_other(config):
    completions = [completion for name in FAILURES for completion in ("fine", name, "fine", "fine")]
    config.weights["characters"] = 1.0
    with RewardPool(config) as pool:
        scores = score(pool, completions)
        again = score(pool, ["fine"] * 40)
    assert scores.components["naughty"] == [0.0 if c in FAILURES else 1.0 for c in completions]
    assert scores.components["characters"] == [float(len(c)) for c in completions]
    assert [f.completion for f in scores.failures] == list(FAILURES)
    assert [bool(grade.failures) for grade in scores.grades] == [c in FAILURES for c in completions]
    for failure in scores.failures:
        kind, message = FAILURES[failure.completion]
        assert (failure.kind, failure.reward) == (kind, "naughty"), failure
        assert re.search(message, failure.message), failure
        assert len(failure.message) < 6000
    assert again.failures == []
    assert again.components["naughty"] == [1.0] * 40


def test_a_batch_of_only_timeouts_is_bounded(config):
    config.timeout_seconds = 0.2  # nothing here is expected to make it
    with RewardPool(config) as pool:
        scores = score(pool, ["sleep"] * 6)
    assert [[f.kind for f in grade.failures] for grade in scores.grades] == [["timeout"]] * 6
    # 6 grades of 0.2 seconds on 2 workers, and the start of as many new ones on a busy machine.
    assert scores.seconds < 10


def test_the_time_limit_is_for_one_grade_not_for_a_chunk(config):
    config.processes = 1
    with RewardPool(config) as pool:
        scores = score(pool, ["nap"] * 5)
    assert scores.failures == []
    assert scores.seconds > 5 * 0.3


def test_memory_is_limited_and_what_was_kept_is_given_back(patient):
    patient.memory_megabytes, patient.processes = 256, 1
    with RewardPool(patient) as pool:
        scores = score(pool, ["fine", "memory", "fine", "little by little", "fine", "child's memory", "fine"])
        assert score(pool, ["pid"]).total != score(pool, ["memory", "pid"]).total[1:]
    assert scores.total == [1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert [(f.kind, f.completion) for f in scores.failures] == [("memory", "memory"), ("memory", "little by little")]
    said = r"MemoryError at .*naughty.py:\d+: needs more than rewards.memory_megabytes"
    assert all(re.search(said, failure.message) for failure in scores.failures), scores.failures


def test_no_temporary_file_outlives_its_worker(patient, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RewardPool(patient) as pool:
        assert [f.kind for f in score(pool, ["temporary", "fine"]).failures] == ["crash"]
        assert len(list(tmp_path.glob("reward-*"))) in (1, 2)
    assert list(tmp_path.glob("reward-*")) == []


def test_numbers_that_are_not_floats(config):
    with RewardPool(config) as pool:
        scores = score(pool, ["true", "fraction"])
    assert (scores.total, scores.failures) == ([1.0, 0.5], [])


def test_what_a_reward_prints_and_reads_is_not_the_protocol(patient, capsys):
    patient.processes = 1
    with RewardPool(patient) as pool:
        scores = score(pool, ["print", "child", "chatty", "stdin", "fine"])
        score(pool, ["fine"])
    assert (scores.total, scores.failures) == ([1.0, 1.0, 1.0, 0.0, 1.0], [])
    stderr = capsys.readouterr().err
    assert all(f"hello from {source}" in stderr for source in ("print", "write", "child"))


def test_rows_and_completions_of_any_kind_survive(patient):
    patient.weights = {"characters": 1.0, "row": 1.0}
    # The first numpy value makes the worker import numpy.
    rows = [{"value": numpy.float32(2.5), "other": {1, 2}, "bytes": b"\xff"}, {"value": 1}]
    with RewardPool(patient) as pool:
        scores = score(pool, ["\ud800\x00\n", "é" * 1_000_000], rows)
    assert scores.components == {"characters": [3.0, 1e6], "row": [2.5, 1.0]}


def test_a_worker_that_dies_between_batches_is_replaced_unblamed(patient):
    patient.processes = 1
    with RewardPool(patient) as pool:
        pid = int(score(pool, ["pid"]).total[0])
        os.kill(pid, signal.SIGKILL)
        # Its last thread closes its pipes, which can be after /proc calls it a zombie.
        assert select.select([pool._workers[0].process.stdout], [], [], 30.0)[0]
        scores = score(pool, ["fine"] * 20)
    assert (scores.total, scores.failures) == ([1.0] * 20, [])


def test_close_ends_the_workers_and_what_they_started(config):
    config.processes = 1
    pool = RewardPool(config)
    pid = int(score(pool, ["pid"]).total[0])
    assert alive(pid)
    pool.close()
    pool.close()
    assert not alive(pid)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("fine", {})


def test_a_timeout_ends_what_the_reward_started(config):
    with RewardPool(config) as pool:
        before = sleepers()
        scores = score(pool, ["grandchild"])
        started = sleepers() - before
    assert [f.kind for f in scores.failures] == ["timeout"]
    assert wait_until_gone(list(started)) == []


def sleepers() -> set[int]:
    """The ids of all processes `sleep 60`."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if entry.read_bytes() == b"sleep\x0060\x00":
                found.add(int(entry.parent.name))
    return found


def test_answers_that_nobody_waits_for_do_not_reach_the_next_batch(config):
    config.weights = {"characters": 1.0}
    with RewardPool(config) as pool:
        for _ in range(10):
            pool.submit("x" * 50, {})
        assert score(pool, ["x" * n for n in range(40)]).total == list(range(40))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module_at_all\n", "exited with code 1(.|\n)*ModuleNotFoundError: .*no_such_module_at_all"),
        ("import os; os._exit(7)\n", "exited with code 7"),
        ("import time; time.sleep(60)\n", "not ready after 1 seconds"),
        ("", "registers no reward"),
    ],
)
def test_a_worker_that_cannot_start_is_an_error_with_its_stderr(tmp_path, source, message):
    file = tmp_path / "broken.py"
    file.write_text(source)
    config = RewardsConfig(weights={"countdown": 1.0}, files=[str(file)])
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        RewardPool(config, start_timeout_seconds=1.0 if "sleep" in source else 60.0)
    assert time.monotonic() - started < 20


def test_workers_start_whatever_the_directory_and_do_not_import_the_main_script(tmp_path):
    script = tmp_path / "heavy.py"
    script.write_text(
        "import os, sys\n"
        "print('main script imported', flush=True)\n"
        "import rewards\n"
        "sys.path.remove(os.environ['PYTHONPATH'])\n"
        "config = rewards.RewardsConfig(weights={'countdown': 1.0}, processes=1)\n"
        "pool = rewards.RewardPool(config)\n"
        "print(pool.submit('<answer>1+2</answer>', {'numbers': [1, 2], 'target': 3}).result().total)\n"
    )
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "json.py").write_text("raise ImportError('not the json of the standard library')")
    for directory in (tmp_path, PACKAGE, trap):
        command = [sys.executable, str(script)]
        done = subprocess.run(command, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
        assert done.stdout == "main script imported\n1.0\n", done.stderr


PARENT = """
import sys, rewards
config = rewards.RewardsConfig(weights={"naughty": 1.0}, files=[sys.argv[1]], processes=3, timeout_seconds=TIMEOUT)
pool = rewards.RewardPool(config)
print(*[worker.process.pid for worker in pool._workers], flush=True)
for completion in sys.argv[2:]:
    pool.submit(completion, {}).result()
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("busy_with", "timeout"), [([], 60.0), (["sleep"], 60.0), (["grandchild"], 60.0), (["regex"], 1.0)], ids=str
)
def test_nothing_outlives_a_parent_that_is_killed(file, busy_with, timeout):
    """Idle, asleep, with a child of its own, and in C code that never lets another thread run."""
    before = sleepers()
    command = [sys.executable, "-c", PARENT.replace("TIMEOUT", str(timeout)), file, *busy_with]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert [alive(pid) for pid in pids] == [True] * 3
        time.sleep(0.5)
        started = sleepers() - before
        assert bool(started) == (busy_with == ["grandchild"])
        parent.kill()
    assert wait_until_gone(pids + list(started)) == []
