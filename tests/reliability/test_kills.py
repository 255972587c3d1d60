"""SIGKILL at random moments: all that is left ends, says who died, leaves nothing, and the next start goes on.

RELIABILITY_KILLS=30 RELIABILITY_SEED=0 python -m pytest tests/reliability/test_kills.py
"""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.reliability.conftest import Process, rows_of, steps_of
from tests.reliability.test_death import assert_all_gone, is_running
from tests.trainer.conftest import deterministic
from trainer.checkpoint import complete_checkpoints, damage, read_progress

pytestmark = pytest.mark.reliability

KILLS, SEED = int(os.environ.get("RELIABILITY_KILLS", 2)), int(os.environ.get("RELIABILITY_SEED", 0))
PROBE = "tests.reliability.hang_probe"
RUN = ["checkpoint.every=2", "evaluation.every=4", "tracking.samples_every=1", "actor.schedule=cosine"]
RUN += ["algorithm.kl_coefficient=0.1", "batch.minibatches_per_step=2", "checkpoint.keep_best=true"]


def roles(run: Process) -> dict[str, list[int]]:
    """What is running, by what it is: the ranks, their rewards' workers, and SGLang's processes."""
    found: dict[str, list[int]] = {}
    for pid in run.family():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            rank = dict(e.split("=", 1) for e in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in e)
        except OSError:
            continue
        if "from rewards.worker import serve; serve()" in " ".join(command):
            found.setdefault("reward", []).append(pid)
        elif "spawn_main" in " ".join(command) or command[0].startswith("sglang::"):
            found.setdefault("engine", []).append(pid)
        elif "trainer" in command and "torch.distributed.run" not in command:
            found.setdefault(f"rank {rank.get('RANK', 0)}", []).append(pid)
    return found


def ports(pids: list[int]) -> set[str]:
    """The inodes of sockets that `pids` listen on."""
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        listening |= {row[9] for row in rows if row[3] == "0A"}
    held = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                held.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    return listening & held


@pytest.mark.timeout(300 + 150 * KILLS)
def test_whoever_is_killed_whenever_all_end_and_the_run_goes_on(begin, start, tmp_path):
    """Ranks and rewards of a run on two ranks die in turn; the last start goes on to the end, as if nothing was."""
    chance, steps, victims = random.Random(SEED), 4 + 4 * KILLS, []
    run, settings = tmp_path / "run", [*RUN, f"steps={steps}"]
    shared = {name for name in os.listdir("/dev/shm") if not name.startswith("sem.loky")}
    for kill in range(KILLS):
        victim = ("rank 0", "rank 1", "reward")[kill % 3] if kill else chance.choice(["rank 0", "rank 1"])
        process = begin("train", "run", *settings, "checkpoint.resume=auto", ranks=2)
        # After the start now and then, or before, and at any moment of a step.
        process.until(lambda victim=victim, process=process: victim in roles(process))
        if chance.random() < 0.8:
            before = steps_of(run)
            process.until(lambda before=before: steps_of(run) > before)
        time.sleep(chance.random())
        family = process.family()
        sockets = ports(family)
        pid = chance.choice(roles(process)[victim])
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        if victim == "reward":  # the pool replaces it, and the run goes on
            before = steps_of(run)
            try:
                process.until(lambda before=before: steps_of(run) > before + 1)
            except AssertionError:
                assert "SIGKILL" in process.said or "reward worker" in process.said, process.said
            process.popen.terminate()
            process.wait(60)
        else:
            assert process.wait(60) == 1
            assert f"Signal 9 (SIGKILL) received by PID {pid}" in process.said
        seconds = time.monotonic() - killed
        victims.append({"victim": victim, "step": steps_of(run), "seconds": round(seconds, 1)})
        assert_all_gone(family)
        assert not sockets & ports([int(path.name) for path in Path("/proc").glob("[0-9]*")])
        assert all(damage(path) is None for path in complete_checkpoints(run).values())
    print(json.dumps(victims))
    last = begin("train", "run", *settings, "checkpoint.resume=auto", ranks=2)
    assert last.wait(90 + 30 * KILLS) == 0, last.said
    whole = begin("train", "whole", *settings, ranks=2)
    assert whole.wait(90 + 30 * KILLS) == 0, whole.said
    rows, expected = deterministic(rows_of(run)), deterministic(rows_of(tmp_path / "whole"))
    assert [row["step"] for row in rows] == list(range(steps + 1))
    # A reward that was killed at work failed on what it graded: from there on it is another run.
    failed = [row["step"] for row in rows if row.get("reward/failed") or row.get("eval/reward/failed")]
    until = min(failed, default=steps + 1)
    assert rows[:until] == expected[:until]
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.loky")} <= shared


def test_torchrun_goes_on_by_itself(begin, tmp_path):
    run, settings = tmp_path / "run", [*RUN, "steps=8"]
    options = ("--max-restarts=2",)
    process = begin("train", "run", *settings, "checkpoint.resume=auto", ranks=2, options=options)
    for least in (1, 5):  # before there is a checkpoint, and after
        process.until(lambda least=least: steps_of(run) >= least)
        os.kill(min(roles(process)["rank 1"]), signal.SIGKILL)
        process.until(lambda least=least: steps_of(run) < least or "Going on after" in process.said)
    family = process.family()
    assert process.wait(120) == 0, process.said
    assert "Going on after step" in process.said
    whole = begin("train", "whole", *settings, ranks=2)
    assert whole.wait(120) == 0, whole.said
    assert deterministic(rows_of(run)) == deterministic(rows_of(tmp_path / "whole"))
    assert (run / "samples.jsonl").read_text() == (tmp_path / "whole/samples.jsonl").read_text()
    assert not any(map(is_running, family))
    progress = read_progress(complete_checkpoints(run)[8])  # each rank's files are summed by it
    assert progress["sums"].keys() == progress["files"].keys() >= {"__0_0.distcp", "__1_0.distcp", ".metadata"}


def test_a_rank_that_hangs_is_named_with_its_stacks(begin, tmp_path):
    run = tmp_path / "run"
    process = begin("train", "run", "steps=9", "data.eval=null", "timeout_seconds=20", ranks=2, module=PROBE)
    process.until(lambda: steps_of(run) == 1)
    family, begun = process.family(), time.monotonic()
    assert process.wait(60) == 1
    assert 15 < time.monotonic() - begun < 40
    assert "Rank 1 hangs at tests/reliability/hang_probe.py:" in process.said
    assert "(stop_for_good), where others waited for it" in process.said
    waited, hung = ((run / f"stacks-{rank}.txt").read_text() for rank in (0, 1))
    assert "In the phase update." in waited
    assert "in stop_for_good" in hung
    assert_all_gone(family)


def test_a_process_alone_that_hangs_is_ended_with_its_stack(begin, tmp_path):
    run = tmp_path / "run"
    process = begin("train", "run", "steps=9", "data.eval=null", "timeout_seconds=10", module=PROBE)
    process.until(lambda: steps_of(run) == 1)
    family = process.family()
    assert process.wait(40) == 1
    assert "Rank 0 hangs at tests/reliability/hang_probe.py:" in process.said
    assert f"(stop_for_good), where timeout_seconds=10 went by: {run / 'stacks-0.txt'}." in process.said
    assert "in stop_for_good" in (run / "stacks-0.txt").read_text()
    assert_all_gone(family)


@pytest.mark.sglang
@pytest.mark.long
@pytest.mark.timeout(900)
def test_whichever_of_sglangs_processes_is_killed_whenever_the_run_ends_and_goes_on(begin, tmp_path):
    chance, run, shared = random.Random(SEED), tmp_path / "run", set(os.listdir("/dev/shm"))
    settings = ["checkpoint.every=1", "checkpoint.resume=auto", "rollout.engine=sglang", "steps=500"]
    settings += ["rollout.concurrent_samples=16", "data.eval=null"]
    for _ in range(max(1, KILLS // 4)):
        process, before = begin("train", "run", *settings), steps_of(run)
        process.until(lambda before=before, process=process: steps_of(run) > before + 1, 300)
        time.sleep(chance.random())
        family, sockets, victim = process.family(), ports(process.family()), chance.choice(roles(process)["engine"])
        os.kill(victim, signal.SIGKILL)
        assert process.wait(60) == 1
        assert re.search(r"SGLang's [\w -]+ failed: its process ended with exit code -9", process.said), process.said
        assert_all_gone(family)
        assert not sockets & ports([int(path.name) for path in Path("/proc").glob("[0-9]*")])
        assert set(os.listdir("/dev/shm")) <= shared
        assert all(damage(path) is None for path in complete_checkpoints(run).values())
