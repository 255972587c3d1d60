"""The code reward: which program and tests count, what earns nothing, and what a program reaches and leaves."""

import json
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import rewards
from rewards import RewardPool, RewardsConfig, sandbox

LIMITS = {"seconds": 5.0, "megabytes": 512, "processes": 8, "all_or_nothing": False}
RIGHT = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(2, 2) == 4"]


def refusal() -> str:
    try:
        assert sandbox.run("", [(None, "")], blocked=True, **LIMITS) == [True]
    except RuntimeError as error:
        return str(error)
    return ""


REFUSAL = refusal()
needs_namespaces = pytest.mark.skipif(bool(REFUSAL), reason=f"the system refuses namespaces: {REFUSAL}")
both = pytest.mark.parametrize("network", [pytest.param("blocked", marks=needs_namespaces), "open"])


def block(program: str) -> str:
    return f"It is easy.\n```python\n{program}\n```\n"


def grade(program: str, row: dict, network: str = "open", **options) -> float:
    return rewards.get("code", allow=True, network=network, **options)(block(program), row)


def says(word: str, program: str, network: str, **options) -> bool:
    return grade(program, {"input_output": {"inputs": [""], "outputs": [word]}}, network, **options) == 1.0


def attempt(action: str, error: str) -> str:
    """A program that says whether `action` is refused with `error`."""
    lines = "\n    ".join(action.strip().splitlines())
    return f"import os, socket, sys, time\ntry:\n    {lines}\n    print('done')\nexcept {error}: print('refused')\n"


@both
def test_tests_that_pass_and_fail(network):
    assert grade(RIGHT, {"tests": TESTS}, network) == 1.0
    assert grade("def add(a, b):\n    return 3\n", {"tests": TESTS}, network) == 0.0
    assert grade("def add(a, b):\n    return 3\n", {"tests": TESTS}, network, share=True) == 0.5
    for wrong in ("", "def add(a, b:", "1 / 0", "def add(a): return 3", "input()\n" + RIGHT, "import numpy\n" + RIGHT):
        assert grade(wrong, {"tests": TESTS}, network, share=True) == 0.0


def test_forms_of_tests():
    right, wrong = RIGHT, RIGHT.replace("+", "-")
    for tests in [
        "import math\nassert add(1, 2) == math.sqrt(9)\nassert add(1, 1) == 2",
        "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n",
        "def check(f):\n    assert f(1, 2) == 3\n\ncheck(add)",
        [
            "for a in range(3):\n    assert add(a, 1) == a + 1 and add(1, a) != a",
            "if add(1, 2) != 3:\n    raise ValueError",
        ],
    ]:
        assert [grade(program, {"tests": tests}) for program in (right, wrong)] == [1.0, 0.0]
    # The functions that it is to test may be called like a builtin, and its dataclasses may name their types.
    assert grade("def sum(a, b): return a + b", {"tests": "assert sum(1, 2) == 3"}) == 1.0
    program = "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\n"
    assert grade(program, {"tests": "assert P(1) == P(1) != P(2)"}) == 1.0


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({}, "needs the column 'tests', or 'input_output'"),
        ({"tests": []}, "needs the column 'tests', or 'input_output'"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "as many inputs as outputs"),
        ({"input_output": {"inputs": [1], "outputs": [1], "fn_name": "add"}}, "no fn_name"),
        ({"tests": "assert add("}, "is no Python"),
        ({"tests": "def check(f):\n    assert f(1, 2) == 3\n"}, "calls and asserts nothing"),
        ({"tests": "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.fail()"}, "asserts nothing"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_row_that_tests_nothing_is_an_error(row, sentence):
    with pytest.raises(ValueError, match=sentence):
        grade(RIGHT, row)


@both
def test_what_is_typed_in_and_printed(network):
    program = "a, b = map(int, input().split())\nprint(a + b, '\\nend')\nif __name__ == '__main__': print('main')"
    pairs = {"inputs": ["1 2\n", ["3 4", "5"]], "outputs": ["3\n end\nmain", ["7 ", "end", "main"]]}
    for column in (pairs, json.dumps(pairs)):
        assert grade(program, {"input_output": column}, network) == 1.0
    assert grade(program.replace("a + b", "3"), {"input_output": pairs}, network) == 0.0
    assert grade(program.replace("a + b", "3"), {"input_output": pairs}, network, share=True) == 0.5
    echo = "import sys\nprint(sys.stdin.read().upper())"
    assert grade(echo, {"input_output": {"inputs": ["é" * 1_000_000], "outputs": ["É" * 1_000_000]}}, network) == 1.0


COMPLETIONS = [
    (block(RIGHT), 1), (RIGHT, 1), (block("wrong") + block(RIGHT), 1), (block(RIGHT) + block("wrong"), 0), ("", 0),
    (f"```py\n{RIGHT}```", 1), (f"```Python\n{RIGHT}```", 1), (f"```\n{RIGHT}```", 1), (f"```bash\n{RIGHT}```", 0),
    (block(RIGHT) + "It prints:\n```\n3\n```\n", 1), (block(RIGHT) + "```text\n3\n```\n```\n4\n```\n", 1),
    (f"```python\n{RIGHT}", 0), (f"<think>{block('wrong')}</think>{RIGHT}", 1), (f"<think>{block(RIGHT)}</think>", 0),
    (block(RIGHT + "x = '\ud800'"), 1), (block("\x00"), 0),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "value"), COMPLETIONS, ids=lambda value: ascii(value)[:60])
def test_which_program_counts(completion, value):
    assert rewards.get("code", allow=True, network="open")(completion, {"tests": TESTS}) == value


FORGERIES = [
    "import sys\nsys.exit(0)", "import os\nos._exit(0)", "raise SystemExit(0)", "def add(a, b): raise SystemExit(0)",
    "import os\ndef add(a, b): os._exit(0)", "print('passed', 'OK', True, 1.0)", "quit()",
    "class All:\n    def __eq__(self, other): return True\ndef add(a, b): return All()",
    "class All:\n    def __eq__(self, _): return 1\n    def __ne__(self, _): return 0\nadd = lambda a, b: All()",
    "import builtins\nfor name in ('exec', 'compile', 'open', 'print', 'AssertionError'):\n"
    "    setattr(builtins, name, lambda *a, **k: None)\ndef add(a, b): return 0",
    "import builtins\nbuiltins.AssertionError = SystemExit\nbuiltins.exec = lambda *a: None\ndef add(a, b): return 0",
    "import os, sys\nsys.stdout.write('[true, true]')\nsys.stdout.flush()\nos.write(1, b'[true, true]')\nos._exit(0)",
    "import os\nfor number in range(3, 64):\n    try: os.write(number, b'[true, true]')\n    except OSError: pass\n",
    "import sys\nsys.excepthook = lambda *a: None\ndef add(a, b): return 0",
    "import atexit, os\natexit.register(os._exit, 0)",
    "import signal, os\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(os.getpid(), 9)",
    "import threading, os\nthreading.Timer(0.1, os._exit, [0]).start()\ndef add(a, b):\n    while True: pass",
    "import sys, types\nsys.modules['solution'] = types.SimpleNamespace(add=None)\ndef add(a, b): return 0",
]  # fmt: skip


@pytest.mark.parametrize("program", FORGERIES, ids=lambda text: ascii(text)[:60])
def test_forgeries_earn_nothing(program):
    assert grade(program, {"tests": TESTS[0]}, seconds=3) == 0.0


def test_a_test_has_the_builtins_from_before_the_program():
    program = "import builtins\nbuiltins.abs = lambda number: 0\ndef add(a, b): return 0"
    assert grade(program, {"tests": "assert abs(add(1, 2) - 3) < 1e-6"}) == 0.0


@both
def test_a_pool_that_is_closed_in_the_middle_leaves_no_folder(network, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = {"code": {"allow": True, "network": network}}
    with RewardPool(RewardsConfig({"code": 1.0}, options, processes=1)) as pool:
        pool.submit(block("import time\ntime.sleep(60)"), {"tests": TESTS})
        until = time.monotonic() + 60
        while not list(tmp_path.glob("reward-*/code-*")):
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(0.5)
    assert list(tmp_path.iterdir()) == []


@both
def test_an_endless_loop_takes_its_time_from_the_other_tests_alone(network):
    tests = ["assert add(1, 2) == 3", "add(0, 0)", "assert add(1, 2) == 3"]
    program = "def add(a, b):\n    while not a: pass\n    return a + b\n"
    assert grade(program, {"tests": tests}, network, share=True, seconds=1) == pytest.approx(1 / 3)
    assert grade("while True: pass", {"tests": tests}, network, seconds=1) == 0.0
    sleeping = "import time, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)"
    assert grade(sleeping, {"tests": tests}, network, seconds=1) == 0.0


@both
def test_memory_and_files_are_limited(network):
    assert says("refused", attempt("bytearray(10 << 30)", "MemoryError"), network)
    assert says("done", attempt("bytearray(10 << 20)", "MemoryError"), network)
    big = "with open('big', 'wb') as file:\n    for _ in range({}): file.write(bytes(1 << 20))"
    assert says("refused", attempt(big.format(10_000), "OSError"), network)
    assert says("done", attempt(big.format(10), "OSError"), network)
    many = "files = [open(__file__) for _ in range({})]"
    assert says("refused", attempt(many.format(100), "OSError"), network)
    assert says("done", attempt(many.format(10), "OSError"), network)
    assert says("word " * 1000, "print('word ' * 1000)", network)
    assert not says("done", "while True: print('done ' * 1000)", network)


@needs_namespaces
def test_files_together_and_processes_are_limited_where_namespaces_are():
    many = "for n in range(20):\n    with open(f'{n}', 'wb') as file: file.write(bytes(10 << 20))"
    assert says("refused", attempt(many, "OSError"), "blocked")
    # A bomb of at most 200, should nothing stop it.
    bomb = "for n in range(200):\n    if os.fork() == 0:\n        time.sleep(60)"
    assert says("refused", attempt(bomb, "BlockingIOError"), "blocked", processes=8)
    assert says("done", attempt(bomb.replace("200", "4"), "BlockingIOError"), "blocked", processes=8)


@needs_namespaces
def test_nothing_outside_is_reached_where_namespaces_are(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("answers")
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 2)"
        for action in (connect, f"open({str(secret)!r})", f"open('/proc/{os.getpid()}/environ')", "os.listdir('/etc')"):
            assert says("done", attempt(action, "OSError"), "open")  # so that it is the sandbox that refuses it
            assert says("refused", attempt(action, "OSError"), "blocked")
    assert says("refused", attempt(f"os.kill({os.getpid()}, 0)", "OSError"), "blocked")
    assert says("done", attempt("os.kill(1, 9)\ntime.sleep(0.1)", "OSError"), "blocked")  # the first process ignores it
    assert says("refused", attempt(f"open({sys.executable!r}, 'ab')", "OSError"), "blocked")
    assert says("refused", attempt("open(os.__file__, 'ab')", "OSError"), "blocked")
    assert says("refused", attempt("os.chroot('/tmp')", "OSError"), "blocked")


@both
def test_the_environment_and_the_folder_are_empty(network, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "secret")
    look = "if set(os.environ) - {'LC_CTYPE'} or os.listdir() != ['solution.py']: raise OSError"
    assert says("done", attempt(look, "OSError"), network)


def test_a_thread_that_does_not_end_keeps_no_test_waiting():
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=[1000]).start()\n" + RIGHT
    assert grade(program, {"tests": TESTS}, seconds=3) == 1.0


@both
def test_a_program_that_deletes_its_folder_leaves_the_next_test_alone(network):
    program = "import os, shutil\nshutil.rmtree(os.getcwd())\n" + RIGHT
    assert grade(program, {"tests": TESTS}, network) == 1.0


def marked(mark: str) -> list[str]:
    """The processes with `mark` in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in command and process.name != str(os.getpid()):
            found.append(process.name)
    return found


def leaves_behind(mark: str) -> str:
    """A program that starts a process in a session of its own, whose parent ends, with `mark` in its command line."""
    child = f"os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(300)', {mark!r}])"
    forks = f"if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: {child}\n    os._exit(0)\nos.wait()\n"
    return f"import os, sys, time\n{forks}"


def wait_until(condition) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(
    "network",
    [
        pytest.param("blocked", marks=needs_namespaces),
        # Others than root can start no process at all there, where they have more than the limit.
        "open",
    ],
)
def test_nothing_outlives_the_grade(network, tmp_path):
    for ending in ("", "time.sleep(1000)"):
        mark = f"mark-{network}-{os.getpid()}-{bool(ending)}"
        grade(leaves_behind(mark) + ending, {"tests": ["add(1, 2)"]}, network, seconds=2, processes=100_000)
        assert marked(mark) == []


@needs_namespaces
def test_nothing_outlives_a_pool_that_is_closed_in_the_middle():
    mark = f"mark-pool-{os.getpid()}"
    options = {"allow": True, "seconds": 50}
    with RewardPool(RewardsConfig(weights={"code": 1.0}, options={"code": options}, processes=1)) as pool:
        pool.submit(block(leaves_behind(mark) + "time.sleep(1000)"), {"tests": ["add(1, 2)"]})
        assert wait_until(lambda: marked(mark))
    assert wait_until(lambda: not marked(mark))


@needs_namespaces
def test_nothing_outlives_the_process_that_keeps_the_time():
    mark = f"mark-killed-{os.getpid()}"
    with ThreadPoolExecutor(1) as thread:
        grading = thread.submit(
            grade, leaves_behind(mark) + "time.sleep(1000)", {"tests": ["1()"]}, "blocked", seconds=50
        )
        assert wait_until(lambda: marked(mark))
        [keeper] = [number for number in marked(sandbox.__file__) if parent(number) == os.getpid()]
        os.kill(int(keeper), signal.SIGKILL)
        with pytest.raises(ValueError, match="ended with code -9"):
            grading.result(timeout=20)
    assert wait_until(lambda: not marked(mark))


def parent(process: str) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def validate(**options) -> None:
    rewards.validate(RewardsConfig(weights={"code": 1.0}, options={"code": options}))


def test_it_is_off_until_it_is_allowed():
    for options in ({}, {"network": "open"}, {"allow": False}):
        with pytest.raises(ValueError, match=r"no security boundary.*rewards.options.code.allow=true"):
            validate(**options)
        with pytest.raises(ValueError, match="no security boundary"):
            rewards.get("code", **options)(block(RIGHT), {"tests": TESTS})
    validate(allow=True, network="open")


@pytest.mark.parametrize("options", [{"network": "none"}, {"seconds": 0}, {"memory_megabytes": -1}, {"processes": 0}])
def test_settings_that_cannot_work_are_one_sentence(options):
    with pytest.raises(ValueError, match="network is blocked or open, and seconds"):
        validate(allow=True, **options)


def test_limits_that_no_program_fits_into_are_refused_before_a_run():
    with pytest.raises(ValueError, match="too few for a program of two lines"):
        validate(allow=True, network="open", memory_megabytes=4)


def test_a_system_that_refuses_the_sandbox_is_said_before_a_run(tmp_path, monkeypatch):
    source = Path(sandbox.__file__).read_text()
    assert source.count('_call("unshare", 0x10000000') == 1
    # Both user and thread-group flags together are refused everywhere.
    (tmp_path / "sandbox.py").write_text(source.replace('_call("unshare", 0x10000000', '_call("unshare", -1'))
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sandbox.py"))
    with pytest.raises(ValueError, match=r"refuses the sandbox .*unshare is refused.*code.network=open does without"):
        validate(allow=True)
    validate(allow=True, network="open")
