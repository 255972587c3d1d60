"""The pool of environments: all that can fail in one, who pays for it, and that nothing of it stays."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import environments
from environments import EnvironmentPool, EnvironmentsConfig, Failed, Session, registry, rehearse
from environments.worker import MAX_MESSAGES
from rewards.worker import MAX_MESSAGE, MAX_STDERR

ROOT = Path(environments.__file__).parents[1]
HASTY = """
import asyncio, contextlib, ctypes, fcntl, json, os, re, signal, subprocess, sys, tempfile, threading, time
from environments import register

REGEX = 're.match("(a+)+$", "a" * 60 + "b")'  # which keeps the interpreter to itself for longer than anybody lives
together = threading.Barrier(20)
gathered = asyncio.Barrier(20)

def nonsense():  # written where the process answers
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if fd > 2 and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
                os.write(fd, b"nonsense" + bytes([10]))

class Talk:  # does what it is told; the file `notes` gets a line for each that was closed
    def __init__(self, notes=os.devnull):
        self.notes = notes

    def reset(self, row):
        self.row = row
        exec(row.get("begin", ""))
        return row.get("say")

    def step(self, text):
        result = eval(text, globals(), {"self": self})
        return result if isinstance(result, tuple) else (json.dumps(result), 0.0, False)

    def where(self):
        return [os.getpid(), threading.get_ident(), id(self)]

    def close(self):
        with open(self.notes, "a") as notes:
            notes.write(json.dumps([self.row.get("name"), *self.where()]) + chr(10))
        exec(self.row.get("end", ""))

register("hasty")(Talk)
"""
SOURCE = (
    HASTY
    + """
register("patient", seconds=120)(Talk)

class Later(Talk):
    async def step(self, text):
        return json.dumps(await eval(text)), 0.0, False

    async def leave(self):
        sys.exit(3)

    async def close(self):
        await asyncio.sleep(0)
        super().close()

register("later", seconds=120)(Later)
register("tardy")(Later)

@register("raw", seconds=120)
class Raw(Talk):
    def step(self, text):
        return eval(text)

met = threading.Barrier(3)

@register("desk", seconds=120)
class Desk:
    def meet(self, name: str) -> str:
        '''Wait for two others.

        Args:
            name: Who waits.
        '''
        met.wait(60)
        return name

    async def hand(self, what: str) -> dict:
        '''Hand it over.

        Args:
            what: What it is.
        '''
        met.wait(60)
        return {"what": what}

    def run(self, code: str) -> object:
        '''Run it.

        Args:
            code: Some Python.
        '''
        return eval(code)
"""
)


@pytest.fixture
def config(tmp_path) -> EnvironmentsConfig:
    """One process; a second for a call, but of the environments that have a limit of their own."""
    file = tmp_path / "talk.py"
    file.write_text(SOURCE)
    registry.load_file(file)
    named = {"notes": str(tmp_path / "notes")}
    options = dict.fromkeys(("hasty", "patient", "later", "tardy"), named)
    return EnvironmentsConfig(files=[str(file)], processes=1, timeout_seconds=1.0, options=options)


def hold(config: EnvironmentsConfig, conversations: Callable[[EnvironmentPool], Awaitable[Any]]) -> Any:
    with EnvironmentPool(config) as pool:
        return asyncio.run(conversations(pool))


async def begin(pool: EnvironmentPool, environment: str = "patient", /, **row: Any) -> Session:
    session = pool.open(environment)
    await session.reset(row)
    return session


async def ask(session: Session, text: str) -> Any:
    """What a step evaluates to."""
    return json.loads((await session.step(text))[0])


async def failure_of(call: Awaitable[Any]) -> Failed:
    with pytest.raises(Failed) as caught:
        await call
    return caught.value


def alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # which ended before, or as, it was read
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until_gone(pids: Iterable[int], seconds: float = 60.0) -> list[int]:
    pids, until = list(pids), time.monotonic() + seconds
    while time.monotonic() < until and any(map(alive, pids)):
        time.sleep(0.02)
    return [pid for pid in pids if alive(pid)]


def closed(config: EnvironmentsConfig, count: int, seconds: float = 60.0) -> list[list]:
    """[name, pid, thread, id] of each environment that was closed, once there are `count`."""
    file, until = Path(config.options["hasty"]["notes"]), time.monotonic() + seconds
    while time.monotonic() < until and (not file.exists() or len(file.read_text().splitlines()) < count):
        time.sleep(0.02)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_conversation_stays_in_its_process_and_its_thread_until_it_is_closed(config):
    config.processes = 2

    async def talk(pool):
        sessions = [await begin(pool, name=number) for number in range(6)]
        places = [await asyncio.gather(*[ask(session, "self.where()") for session in sessions]) for _ in range(3)]
        for session in sessions:
            session.close()
        return places

    first, *others = hold(config, talk)
    assert others == [first, first]
    assert len({thread for _, thread, _ in first}) == 6
    assert sorted([pid for pid, _, _ in first].count(pid) for pid in {pid for pid, _, _ in first}) == [3, 3]
    assert sorted(closed(config, 6)) == [[number, *place] for number, place in enumerate(first)]


def test_what_reset_says_and_what_a_step_gives_arrive_as_they_are(config):
    async def talk(pool):
        messages = [{"role": "user", "content": "Begin."}]
        said = [await pool.open("patient").reset({"say": say}) for say in (None, "Begin.", messages)]
        session = await begin(pool)
        return said, await session.step("'ünï', 0.5, True"), await session.step("None, 1, 0"), await session.reward()

    said, *steps, reward = hold(config, talk)
    assert said == [None, "Begin.", [{"role": "user", "content": "Begin."}]]
    assert steps == [["ünï", 0.5, True], ["", 1.0, False]]
    assert reward is None


@pytest.mark.parametrize("name", ["patient", "later"])
def test_twenty_steps_wait_side_by_side(config, name):
    text = "together.wait(60)" if name == "patient" else "gathered.wait()"

    async def talk(pool):
        sessions = [await begin(pool, name) for _ in range(20)]
        return await asyncio.gather(*[ask(session, text) for session in sessions])

    assert len(hold(config, talk)) == 20


FAILING = [
    ("patient", "1 / 0", "exception", "ZeroDivisionError: division by zero"),
    ("patient", "sys.exit(3)", "exception", "SystemExit: 3"),
    ("patient", "(_ for _ in ()).throw(KeyboardInterrupt())", "exception", "KeyboardInterrupt"),
    ("patient", "int('x' * 10**6)", "exception", "ValueError: invalid literal"),
    ("later", "asyncio.sleep('x')", "exception", "TypeError"),
    ("later", "self.leave()", "exception", "SystemExit(3)"),
    ("raw", "None", "not a step", "step returned None, not (observation, reward, done)"),
    ("raw", "('x', 1.0)", "not a step", "step returned ('x', 1.0), not"),
    ("raw", "(3, 0.0, False)", "not text", "step returned 3, neither text nor messages"),
    ("raw", "([{'role': 'user'}], 0.0, False)", "not text", "neither text nor messages with role and content"),
    ("raw", "('x', 'much', False)", "not a number", "step gave the reward 'much', which is not a finite number"),
    ("raw", "('x', float('nan'), False)", "not a number", "nan"),
]


def test_a_step_that_fails_is_told_and_its_conversation_goes_on(config):
    async def talk(pool):
        found, other = [], await begin(pool)
        for name, text, *_ in FAILING:
            session = await begin(pool, name)
            failure = await failure_of(session.step(text))
            on = await session.step("asyncio.sleep(0, 'on')" if name == "later" else "'on', 0.0, False")
            found.append((failure, on[0].strip('"'), await ask(other, "1")))
        return found

    for (*case, kind, words), (failure, on, others) in zip(FAILING, hold(config, talk), strict=True):
        assert (failure.kind, on, others) == (kind, "on", 1), case
        assert words in str(failure)
        assert len(str(failure)) <= MAX_MESSAGE
        assert not failure.gone


@pytest.mark.parametrize(
    ("name", "text"),
    [("hasty", "time.sleep(600)"), ("tardy", "asyncio.sleep(600)"), ("hasty", "os.read(os.pipe()[0], 1)")],
)
def test_a_step_that_hangs_ends_its_conversation_alone_and_its_process_takes_no_more(config, name, text):
    async def talk(pool):
        other, session = await begin(pool, name="other"), await begin(pool, name)
        process = session.process
        failure, again = await failure_of(session.step(text)), await failure_of(session.step("1"))
        session.close()
        pids = [await ask(other, "os.getpid()"), await ask(await begin(pool, name="new"), "os.getpid()")]
        assert alive(process.popen.pid)
        other.close()
        return failure, again, process.popen.pid, pids, wait_until_gone([process.popen.pid])

    failure, again, pid, (others, news), left = hold(config, talk)
    assert (failure.kind, str(failure), failure.gone) == ("timeout", "step took longer than 1 seconds", True)
    assert (again.kind, again.gone) == ("gone", True)
    assert others == pid != news
    assert left == []
    assert sorted(str(name) for name, *_ in closed(config, 3)) == ["None", "new", "other"]


def test_a_step_that_is_late_but_ends_costs_the_others_nothing(config):
    async def talk(pool):
        session, other = await begin(pool, "hasty"), await begin(pool)
        failure = await failure_of(session.step("time.sleep(2)"))
        return failure, await ask(other, "time.sleep(1.5)"), await ask(other, "4")

    failure, *others = hold(config, talk)
    assert failure.kind == "timeout"
    assert others == [None, 4]


def test_c_code_that_keeps_the_interpreter_costs_the_conversations_of_its_process_alone_and_is_ended_by_the_kernel(
    config,
):
    Path(config.files[0]).write_text(HASTY)
    for name in ("patient", "later", "tardy", "raw", "desk"):  # whose limits would have the kernel wait for minutes
        del registry.REGISTRY[name]
    config.options = {}

    async def ask_on(session):  # the first may be answered before the other's begins
        while True:
            try:
                await session.step("1")
            except Failed as failure:
                return failure

    async def talk(pool):
        stuck, other, patient = [await begin(pool, "hasty") for _ in range(3)]
        patient.seconds = 120.0
        failures = await asyncio.gather(failure_of(stuck.step("eval(REGEX)")), ask_on(other))
        return [*failures, await ask_on(patient)], await ask(await begin(pool, "hasty"), "1")

    failures, new = hold(config, talk)
    assert [failure.kind for failure in failures] == ["timeout", "timeout", "crash"]
    assert "ended by signal 14" in str(failures[2])
    assert new == 1


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("os._exit(3)", "exited with code 3"),
        ("os.kill(os.getpid(), 9)", "was ended by signal 9 (Killed)"),
        ("ctypes.string_at(0)", "was ended by signal 11"),
        ("nonsense()", "its process"),
    ],
)
def test_a_process_that_dies_ends_its_conversations_and_another_takes_its_place(config, text, how):
    async def talk(pool):
        session, other = await begin(pool), await begin(pool)
        waiting = asyncio.create_task(failure_of(other.step("time.sleep(600)")))
        await asyncio.sleep(0)
        failures = await failure_of(session.step(text)), await waiting, await failure_of(other.step("1"))
        return failures, await ask(await begin(pool), "1")

    failures, new = hold(config, talk)
    assert [failure.kind for failure in failures] == ["crash", "crash", "gone"]
    assert how in str(failures[0])
    assert all(failure.gone for failure in failures)
    assert new == 1


def test_a_step_that_takes_all_memory_ends_its_conversation_and_its_process_takes_no_more(config):
    config.memory_megabytes = 1024

    async def talk(pool):
        session, other = await begin(pool), await begin(pool)
        failure = await failure_of(session.step("len(bytearray(2 << 30))"))
        place, new = await ask(other, "self.where()"), await ask(await begin(pool), "self.where()")
        desk = await begin(pool, "desk")
        answers = await desk.tools([("run", {"code": "len(bytearray(2 << 30))"}), ("run", {"code": "1"})])
        return failure, place[0], new[0], answers, await failure_of(desk.tools([]))

    failure, pid, new, answers, after = hold(config, talk)
    assert (failure.kind, failure.gone) == ("memory", True)
    assert pid != new
    assert [kind for kind, _ in answers] == ["memory", "ok"]
    assert after.kind == "gone"


def test_what_is_said_is_cut_and_what_is_printed_is_no_answer(config, capfd):
    config.max_observation_tokens = 10

    async def talk(pool):
        session = await begin(pool)
        said, *_ = await session.step("'x' * 10**7, 0.0, False")
        messages, *_ = await session.step("[{'role': 'user' * 10**6, 'content': 'x' * 10**6}] * 10**4, 0.0, False")
        answer = await ask(
            session, "[print('from print'), os.write(1, b'from write'), os.system('echo from a child')][:0]"
        )
        await session.step("print('y' * 10**7, flush=True)")
        while len(session.process._said) < MAX_STDERR:
            await asyncio.sleep(0.01)
        return said, messages, answer, session.process._said

    said, messages, answer, kept = hold(config, talk)
    assert said == "x" * 320
    assert len(messages) == MAX_MESSAGES
    assert {(len(message["role"]), len(message["content"])) for message in messages} == {(MAX_MESSAGE, 320)}
    assert answer == []
    assert len(kept) == MAX_STDERR
    printed = capfd.readouterr().err
    assert all(f"from {what}" in printed for what in ("print", "write", "a child"))


def test_tools_of_a_turn_run_side_by_side_and_answer_in_their_order(config):
    async def talk(pool):
        desk = await begin(pool, "desk")
        calls = [("meet", {"name": "a"}), ("hand", {"what": "b"}), ("meet", {"name": "c"})]
        return await desk.tools(calls)

    assert hold(config, talk) == [["ok", "a"], ["ok", '{"what": "b"}'], ["ok", "c"]]


def test_a_tool_that_fails_leaves_those_beside_it(config):
    codes = "1 / 0", "{'a': [1, None]}", "{1}", "sys.exit(3)", "'text'"

    async def talk(pool):
        desk = await begin(pool, "desk")
        calls = [("run", {"code": code}) for code in codes]
        return await desk.tools([*calls, ("run", {}), ("run", {"code": "1", "more": 2}), ("run", {"code": "2"})])

    answers = hold(config, talk)
    assert [kind for kind, _ in answers] == ["exception", "ok", "exception", "exception", "ok"] + [
        "wrong arguments"
    ] * 2 + ["ok"]
    assert [text for kind, text in answers if kind == "ok"] == ['{"a": [1, null]}', "text", "2"]
    assert "missing a required argument: 'code'" in answers[5][1]


def test_the_first_reset_in_a_process_may_take_longer_as_it_imports(config):
    async def talk(pool):
        session = await begin(pool, "hasty", begin="time.sleep(2)")
        return await ask(session, "1"), await failure_of(begin(pool, "hasty", begin="time.sleep(600)"))

    answer, failure = hold(config, talk)
    assert answer == 1
    assert (failure.kind, str(failure)) == ("timeout", "reset took longer than 1 seconds")


@pytest.mark.parametrize("name", ["patient", "later"])
@pytest.mark.parametrize("ending", ["done", "never", "aborted", "raised", "unreset"])
def test_an_environment_is_closed_once_whatever_happens(config, ending, name):
    async def talk(pool):
        session = pool.open(name)
        if ending == "unreset":
            session.close()
            return None
        await session.reset({"name": "it"})
        place = await ask(session, "self.where()" if name == "patient" else "asyncio.to_thread(self.where)")
        if ending == "done":
            session.close()
            session.close()
        if ending == "raised":
            await failure_of(session.step("1 / 0"))
            session.close()
        if ending == "aborted":
            task = asyncio.create_task(session.step("time.sleep(1)" if name == "patient" else "asyncio.sleep(1)"))
            await asyncio.sleep(0.1)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            session.close()
            await ask(await begin(pool), "time.sleep(2)")  # until what was given up has ended as well
        return place

    place = hold(config, talk)
    if ending == "unreset":
        assert not Path(config.options[name]["notes"]).exists()
        return
    found = [line for line in closed(config, 1) if line[0] == "it"]
    assert len(found) == 1
    if ending in ("done", "raised") and name == "patient":
        assert found == [["it", *place]]  # in its own thread


def test_a_close_that_hangs_is_not_waited_for_and_its_process_is_replaced(config):
    async def talk(pool):
        first = await begin(pool, "hasty", end="time.sleep(600)")
        first.close()
        pid = until = first.process.popen.pid
        while until == pid:
            session = await begin(pool)
            until = await ask(session, "os.getpid()")
            session.close()
        return wait_until_gone([pid])

    assert hold(config, talk) == []


def test_nothing_that_has_left_the_group_holds_up_the_end(config):
    config.processes = 2

    async def talk(pool):
        sessions = [await begin(pool), await begin(pool)]
        left = [await ask(s, "subprocess.Popen(['sleep', '600'], start_new_session=True).pid") for s in sessions]
        children = [await ask(s, "subprocess.Popen(['sleep', '600']).pid") for s in sessions]
        failure = await failure_of(sessions[0].step("os._exit(3)"))  # though its stderr is held open
        return left, [*children, *(s.process.popen.pid for s in sessions)], failure

    left, pids, failure = hold(config, talk)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert failure.kind == "crash"
    assert wait_until_gone(pids) == []


PARENT = """
import asyncio, json, sys
from environments import EnvironmentPool, EnvironmentsConfig, validate
file, notes, *texts = sys.argv[1:]

async def talk(pool):
    sessions = []
    for text in texts:
        sessions.append(pool.open("hasty"))
        await sessions[-1].reset({"name": text})
    where = "[os.getpid(), subprocess.Popen(['sleep', '600']).pid, os.environ['TMPDIR']]"
    print(json.dumps([json.loads((await session.step(where))[0]) for session in sessions]), flush=True)
    steps = [session.step(text) for session, text in zip(sessions, texts) if text != "rest"]
    await asyncio.gather(*steps, return_exceptions=True)
    await asyncio.sleep(600)

config = EnvironmentsConfig(files=[file], processes=2, timeout_seconds=1.0, options={"hasty": {"notes": notes}})
validate(config, "hasty")
with EnvironmentPool(config) as pool:
    asyncio.run(talk(pool))
"""


@pytest.mark.parametrize("texts", [("rest", "rest", "time.sleep(600)", "1 / 0"), ("eval(REGEX)",)])
def test_nothing_outlives_a_trainer_that_is_killed(tmp_path, texts):
    file, notes = tmp_path / "talk.py", tmp_path / "notes"
    file.write_text(HASTY)
    command = [sys.executable, "-c", PARENT, str(file), str(notes), *texts]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)})
    places = json.loads(parent.stdout.readline())
    if "rest" not in texts:
        time.sleep(0.5)  # until it runs; with luck it does not yet, and the test is an easier one
    parent.kill()
    parent.wait()
    workers, children, folders = map(set, zip(*places, strict=True))
    assert wait_until_gone(workers) == []
    if "rest" in texts:  # C code that keeps the interpreter lets nothing else be done
        assert wait_until_gone(children, 1.0) == []
        assert sorted(json.loads(line)[0] for line in notes.read_text().splitlines()) == sorted(texts)
        assert not any(Path(folder).exists() for folder in folders)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_a_thousand_conversations_leave_no_thread_no_process_and_no_memory(config):
    sizes = "[int(re.search('VmRSS:\\s+([0-9]+)', open('/proc/self/status').read())[1]), threading.active_count()]"

    async def talk(pool):
        found, pids = [], set()
        for _ in range(20):
            sessions = await asyncio.gather(*[begin(pool, "patient", ballast="x" * 10**5) for _ in range(50)])
            pids |= set(await asyncio.gather(*[ask(session, "os.getpid()") for session in sessions]))
            for session in sessions:
                session.close()
            alone = await begin(pool)
            while (size := await ask(alone, sizes))[1] > 5:  # until those are closed
                await asyncio.sleep(0.02)
            alone.close()
            found.append((*size, threading.active_count()))
        return found, pids

    found, pids = hold(config, talk)
    assert len(pids) == 1
    assert found[-1][0] - found[4][0] < 20_000  # kB, where the conversations since had 75 MB of rows alone
    assert found[-1][2] <= found[4][2]
    assert len(closed(config, 1020)) == 1020


def test_processes_whose_conversations_hang_do_not_pile_up(config):
    async def talk(pool):
        begun = []

        async def one(hangs):
            session = await begin(pool, "hasty")
            begun.append(session.process)
            with contextlib.suppress(Failed):
                await session.step("time.sleep(600)" if hangs else "1")
            session.close()

        for _ in range(3):
            await asyncio.gather(*[one(number % 5 == 0) for number in range(20)])
        pids = {process.popen.pid for process in begun}
        return len(pids), wait_until_gone(pids - {begun[-1].popen.pid})

    count, left = hold(config, talk)
    assert count <= 4
    assert left == []


def test_a_pool_leaves_neither_threads_nor_processes_nor_files(config, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before, pids = threading.active_count(), []

    async def talk(pool):
        pids.extend(process.popen.pid for process in pool._processes)
        assert len(list(tmp_path.glob("environment-*"))) == 3
        await (await begin(pool)).step("1")

    config.processes = 3
    hold(config, talk)
    assert len(pids) == 3
    assert wait_until_gone(pids) == []
    until = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert list(tmp_path.glob("environment-*")) == []


def test_a_pool_whose_processes_cannot_start_says_why(config, tmp_path):
    Path(config.files[0]).write_text("raise OSError('no such luck')")
    with pytest.raises(RuntimeError, match=r"(?s)could not be started: its process exited with code 1; .*no such luck"):
        EnvironmentPool(config)


def test_an_environment_is_rehearsed_before_a_run(config):
    rehearse(config, {"patient": {"name": "first"}, "later": {"name": "second"}})
    assert sorted(name for name, *_ in closed(config, 2)) == ["first", "second"]
    with pytest.raises(ValueError, match=r"'patient' cannot begin with the first row .*exception: KeyError: 'column'"):
        rehearse(config, {"patient": {"begin": "row['column']"}})
    config.options["patient"] = {"nots": "x"}
    with pytest.raises(ValueError, match="unexpected keyword argument 'nots'"):
        rehearse(config, {"patient": {}})
