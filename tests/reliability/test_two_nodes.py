"""Two nodes on one machine, network namespaces with an address each and a cable between them; and two runs on one.

Neither node's name leads to its address: both have the machine's own, as many installations have it.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reliability.conftest import Process, rows_of, steps_of
from tests.reliability.test_death import assert_all_gone
from tests.reliability.test_kills import ports, roles
from tests.trainer.conftest import assert_rows_close, deterministic

pytestmark = [pytest.mark.long, pytest.mark.reliability, pytest.mark.timeout(900)]

RUN = ["steps=8", "actor.replicate=2", "checkpoint.every=2", "actor.schedule=cosine", "algorithm.kl_coefficient=0.1"]
RUN += ["evaluation.every=4", "tracking.samples_every=1", "checkpoint.resume=auto"]


def ip(*words: object) -> None:
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(done.args)}: {done.stderr.strip()}")


def set_cable(node: str, state: str) -> None:
    """Plug a node's cable in ("up"), or cut it ("down")."""
    ip("-n", node, "link", "set", "cable", state)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """The names of two namespaces; node n has the address 10.11.12.n + 1."""
    if shutil.which("ip") is None:
        pytest.skip("there is no command `ip` (iproute2), which makes network namespaces")
    names, made = [f"grpo-{os.getpid()}-{n}" for n in range(2)], []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            first, second = ({"name": "cable", "netns": name} for name in names)
            ends = [[word for pair in end.items() for word in pair] for end in (first, second)]
            ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        except OSError as error:
            pytest.skip(f"this machine does not allow network namespaces: {error}")
        for n, name in enumerate(names):
            ip("-n", name, "address", "add", f"10.11.12.{n + 1}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
            set_cable(name, "up")
        yield names
    finally:
        for name in made:
            ip("netns", "delete", name)


@pytest.fixture
def begin_on_both(nodes, begin) -> Callable[..., list[Process]]:
    """begin_on_both(name, *overrides, ranks=1) starts the same command on both nodes, which share a folder."""

    def run(name: str, *overrides: str, ranks: int = 1, restarts: int = 0) -> list[Process]:
        options = ("--nnodes=2", "--master-addr=10.11.12.1", "--master-port=29500", f"--max-restarts={restarts}")
        return [
            begin(
                "train",
                name,
                *overrides,
                ranks=ranks,
                options=(*options, f"--node-rank={n}"),
                within=("ip", "netns", "exec", node),
            )
            for n, node in enumerate(nodes)
        ]

    return run


def assert_ended(processes: list[Process]) -> None:
    """Both end well."""
    for process in processes:
        assert process.wait(300) == 0, process.said


def test_two_nodes_compute_what_one_does_also_where_a_rank_is_killed_on_the_way(begin_on_both, begin, tmp_path):
    """Each node holds a copy of the model on two ranks, and torchrun starts both again."""
    run = tmp_path / "two"
    both = begin_on_both("two", *RUN, ranks=2, restarts=1)
    both[0].until(lambda: steps_of(run) >= 4, 300)
    os.kill(min(roles(both[1])["rank 3"]), signal.SIGKILL)
    assert_ended(both)
    assert "Going on after step" in both[0].said
    one = begin("train", "one", *RUN, ranks=4)
    assert_ended([one])
    rows, expected = deterministic(rows_of(run)), deterministic(rows_of(tmp_path / "one"))
    assert_rows_close(rows, expected, 1e-6)


def test_a_cut_cable_ends_both_nodes_and_a_restart_goes_on(begin_on_both, nodes, tmp_path):
    run = tmp_path / "two"
    both = begin_on_both("two", *RUN, "steps=2000", "timeout_seconds=20")
    both[0].until(lambda: steps_of(run) >= 4, 300)
    families = [pid for process in both for pid in process.family()]
    set_cable(nodes[1], "down")
    for rank, process in enumerate(both):
        assert process.wait(120) == 1, process.said
        report = process.said.rpartition("Root Cause")[2]
        assert f"rank      : {rank} " in report
        assert "Timed out waiting" in report  # for a rank, or for what counts for all of them
        assert "In the phase" in report
    assert_all_gone(families)
    set_cable(nodes[1], "up")
    steps = steps_of(run) + 2
    again = begin_on_both("two", *RUN, f"steps={steps}")
    assert_ended(again)
    assert "Going on after step" in again[0].said
    assert [row["step"] for row in rows_of(run)] == list(range(steps + 1))


def held(family: list[int]) -> set[tuple[str, str]]:
    """The files, by path and inode, that processes have open for writing or share as memory."""
    found = set()
    for pid in family:
        with contextlib.suppress(OSError):
            for row in map(str.split, Path(f"/proc/{pid}/maps").read_text().splitlines()):
                if "s" in row[1] and "w" in row[1] and len(row) > 5:
                    found.add((row[5], row[4]))
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                flags = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text().split()[3]
                status = link.stat()
                if int(flags, 8) & os.O_ACCMODE and stat.S_ISREG(status.st_mode):
                    found.add((os.readlink(link), str(status.st_ino)))
    return found


ENGINES = ["torch", pytest.param("sglang", marks=pytest.mark.sglang)]


@pytest.mark.parametrize("engine", ENGINES)
def test_two_runs_at_once_share_no_file_no_memory_and_no_port_and_both_end(engine, begin, tmp_path):
    ranks = 2 if engine == "torch" else 0
    settings = ["steps=12", f"rollout.engine={engine}", "rollout.concurrent_samples=16"]
    runs = [begin("train", name, *settings, ranks=ranks) for name in ("a", "b")]
    for name, run in zip("ab", runs, strict=True):
        run.until(lambda name=name: steps_of(tmp_path / name) >= 2, 300)
    families = [run.family() for run in runs]
    files, sockets = [held(family) for family in families], [ports(family) for family in families]
    for run, family in zip(runs, families, strict=True):
        assert run.wait(300) == 0, run.said
        assert_all_gone(family)
    assert all(sockets)
    assert all(files)
    assert not files[0] & files[1]
    assert not sockets[0] & sockets[1]
    if engine == "torch":  # whose samples a seed decides
        assert deterministic(rows_of(tmp_path / "a")) == deterministic(rows_of(tmp_path / "b"))
