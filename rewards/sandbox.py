"""Runs programs for the `code` reward. `run` starts this file (standard library alone), which starts each program.

A program gets limits, an empty environment and folder, and is killed with all that it started. With `blocked` this is
in namespaces: no network, no process outside is seen, and of all files Python's and the system's libraries, read-only,
and an empty /tmp in memory. When the first process in there ends, the kernel ends all others.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time

NOBODY = 65534
MAX_OUTPUT, MAX_FILES = 16 << 20, 64 << 20  # bytes of one file, or of what is printed, and of all files in /tmp
# The test and its token are read after the program's own code has run, and the test gets the builtins from before.
TESTER = """
def main():
    import builtins, os, sys
    sys.path.insert(0, os.getcwd())
    answers, questions = (os.fdopen(int(sys.argv.pop()), mode) for mode in "wr")
    clean, run, leave = dict(vars(builtins)), exec, os._exit
    scope = dict(vars(__import__("solution")), __builtins__=clean)
    token, _, test = questions.read().partition("\\n")
    run(test, scope)
    answers.write(token)
    answers.flush()
    leave(0)
main()
"""


def run(program: str, tests: list[tuple[str | None, str]], **settings: float | bool) -> list[bool]:
    """Which tests pass: (None, Python code that must not raise), or (what is on stdin, what must come to stdout).

    settings: seconds (wall clock, for all), megabytes (of a process), processes (at a time), blocked, all_or_nothing
    (none runs after the first that fails). Raises RuntimeError where the system refuses what it takes.
    """
    with tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True) as folder:
        command = [os.path.realpath(sys._base_executable), "-I", "-S", __file__]
        job, limit = json.dumps({"program": program, "tests": tests, **settings}), settings["seconds"] + 60
        done = subprocess.run(command, input=job, capture_output=True, text=True, cwd=folder, env={}, timeout=limit)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"its process ended with code {done.returncode}")
    return json.loads(done.stdout)


def main() -> None:
    job = json.load(sys.stdin)
    if job["blocked"]:
        _enter_namespaces(os.getcwd())
        if child := os.fork():
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)
        assert os.getpid() == 1
        _call("prctl", 1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
    else:
        _call("prctl", 36, 1)  # PR_SET_CHILD_SUBREAPER: whose parent has ended becomes a child of this process
        _call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS: no sudo
    deadline, passed = time.monotonic() + job["seconds"], []
    for test in job["tests"]:
        seconds = deadline - time.monotonic()
        passed.append(seconds > 0 and (all(passed) or not job["all_or_nothing"]) and _passes(job, *test, seconds))
    print(json.dumps(passed))


def _passes(job: dict, given: str | None, expected: str, seconds: float) -> bool:
    token, folder = secrets.token_hex(), tempfile.mkdtemp(dir=os.getcwd())
    with open(f"{folder}/solution.py", "wb") as file:
        file.write(job["program"].encode(errors="replace"))
    with contextlib.ExitStack() as stack:
        inbox, outbox, unread = (stack.enter_context(os.fdopen(os.memfd_create("file"), "w+b")) for _ in range(3))
        inbox.write((f"{token}\n{expected}" if given is None else given).encode(errors="replace"))
        inbox.seek(0)
        command, streams, passed = ["solution.py"], (inbox, outbox, unread), ()
        if given is None:
            passed = inbox.fileno(), outbox.fileno()
            command, streams = ["-c", TESTER, *map(str, passed)], (unread, unread, unread)
        command = [os.path.realpath(sys.executable), "-I", "-S", *command]
        own = {"cwd": folder, "start_new_session": True, "preexec_fn": lambda: _limit(job)}
        process = subprocess.Popen(command, -1, None, *streams, pass_fds=passed, **own)
        select.select([stack.enter_context(os.fdopen(os.pidfd_open(process.pid)))], [], [], seconds)
        _end_all(process.pid, job["blocked"])
        outbox.seek(0)
        printed = outbox.read().decode(errors="replace")
    same = [line.split() for line in printed.strip().splitlines()] == [s.split() for s in expected.strip().splitlines()]
    return printed == token if given is None else same


def _limit(job: dict) -> None:
    limits = {"CPU": math.ceil(job["seconds"]) + 1, "AS": job["megabytes"] << 20, "FSIZE": MAX_OUTPUT, "NOFILE": 64}
    for name, value in (limits | {"NPROC": job["processes"], "CORE": 0}).items():
        highest = resource.getrlimit(number := getattr(resource, f"RLIMIT_{name}"))[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(number, (value, value))


def _end_all(session: int, blocked: bool) -> None:
    """Kill all that a program started and wait for it."""
    with contextlib.suppress(ChildProcessError):
        while True:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL) if blocked else os.killpg(session, signal.SIGKILL)
            if not blocked:
                with open(f"/proc/self/task/{os.getpid()}/children") as children:
                    for child in children.read().split():
                        os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def _enter_namespaces(root: str) -> None:
    """Leave the system's network, processes and files, a few of which appear under `root`; OSError where refused."""
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        os.setresuid(NOBODY, 0, 0)  # the kernel counts no processes of root; files go by the second one
    # CLONE_NEWUSER, NEWPID, NEWNET, NEWIPC, NEWNS
    _call("unshare", 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000)
    for name, text in {"setgroups": "deny", "uid_map": f"{NOBODY} {user} 1", "gid_map": f"{NOBODY} {group} 1"}.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    recursive, private, bind = 1 << 14, 1 << 18, 1 << 12
    _call("mount", None, b"/", None, recursive | private, None)
    _call("mount", b"tmpfs", root.encode(), b"tmpfs", 0, b"size=1m")
    os.mkdir(f"{root}/tmp")
    for path in ("/usr", "/lib", "/lib64", "/bin", sys.base_prefix):
        if os.path.exists(path) and not os.path.exists(root + path):
            os.makedirs(root + path)
            _call("mount", path.encode(), (root + path).encode(), None, bind | recursive, None)
    # mount_setattr(..., AT_RECURSIVE, MOUNT_ATTR_RDONLY)
    _call("syscall", 442, -1, root.encode(), 0x8000, (ctypes.c_uint64 * 4)(1), ctypes.c_size_t(32))
    _call("mount", b"tmpfs", f"{root}/tmp".encode(), b"tmpfs", 0, f"size={MAX_FILES}".encode())
    os.chroot(root)
    os.chdir("/tmp")


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name} is refused: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
