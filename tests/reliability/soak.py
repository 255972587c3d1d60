"""A long run of a tiny model: what it holds of the machine at its end is what it held at step 100.

    python -m tests.reliability.soak [--steps 1000] [--engine torch|sglang] [--ranks 2] [SETTING=VALUE ...]
    python -m tests.reliability.soak --conversations [--steps 22]

Every 50 steps it reads from /proc, for all processes of the run, how many there are, their threads, open files and
pieces of shared memory, and for each its own memory: pages that belong to no file, a shared one in parts. Every step
samples, grades, computes the reference's log-probabilities and updates twice; every 25th evaluates and saves. The exit
code is 1 where anything has grown by more than 2 %. With --conversations each step has 1,000 conversations at once, is
read from step 2 on, and may grow by 5 %.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from examples.countdown import make_model, make_tokenizer, presets, write
from tests.reliability.conftest import Process, steps_of

COUNTS = ("processes", "threads", "files", "segments")
READINGS, PAUSE = 9, 0.2  # of each number the lowest, as a step takes and gives back
GROWTH = 0.02
KINDS = {"serve()": "rewards", "sglang": "engine", "spawn_main": "engine", "resource_tracker": "tracker"}
KINDS = {"distributed.run": "torchrun", " trainer ": "trainer", "environments.worker": "environments"} | KINDS
"""What a process is, by the first of these words in its command line."""

CONVERSATIONS = ["environment=together", f"environments.files=[{Path(__file__).with_name('together.py')}]"]
CONVERSATIONS += ["environments.options={together: {at_once: 500}}", "environments.processes=2"]
CONVERSATIONS += ["environments.timeout_seconds=120", "environments.max_turn_tokens=6", "data.eval=null"]
CONVERSATIONS += ["batch.prompts_per_step=125", "batch.samples_per_prompt=8", "batch.minibatches_per_step=1"]
CONVERSATIONS += ["rollout.concurrent_samples=1000", "rollout.max_response_tokens=64", "checkpoint.every=0"]
CONVERSATIONS += ["rewards.weights={environment: 1}", "algorithm.kl_coefficient=0"]
CONVERSATIONS += ["actor.max_tokens_per_microbatch=8192"]
"""Settings of a step with 1,000 conversations of 4 turns, none of which ends before all have begun."""

CALM = ["env", "MALLOC_MMAP_THRESHOLD_=65536", "MALLOC_ARENA_MAX=2"]
"""Has what is freed given back at once: else a trainer that does not grow has 434 or 492 MiB, as its steps fall."""

WIDER = 0.05
"""The growth that may be where threads come and go by the thousand."""


def soak(
    folder: Path,
    steps: int,
    engine: str,
    first: int = 100,
    every: int = 50,
    ranks: int = 0,
    more: Sequence[str] = (),
    within: Sequence[str] = (),
) -> list[dict[str, float]]:
    """What a run of so many `steps` in `folder` held at its steps `first`, first + every and so on, by name.

    Memory is in bytes, by "memory of PROCESS". Raises AssertionError where the run ends by itself, or badly.
    """
    write(folder, presets()["direct"], seed=0)
    make_model("qwen3", hidden=32, layers=2, feed_forward=64).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    settings = [f"steps={2 * steps}", "device=cpu", f"model.path={folder / 'model'}", "data.max_prompt_tokens=16"]
    settings += [f"data.train={folder / 'train.jsonl'}", f"data.eval={folder / 'heldout.jsonl'}", "data.eval_limit=8"]
    settings += ["rewards.weights={countdown: 1.0, format: 0.1}", "rewards.processes=1"]
    settings += ["batch.prompts_per_step=4", "batch.samples_per_prompt=4", "batch.minibatches_per_step=2"]
    settings += ["algorithm.kl_coefficient=0.01", "actor.learning_rate=0.0001", "actor.max_tokens_per_microbatch=512"]
    settings += [f"rollout.engine={engine}", "rollout.max_response_tokens=12", "rollout.concurrent_samples=16"]
    settings += ["checkpoint.every=25", "evaluation.every=25", "tracking.samples_every=1", "tracking.show_every=0"]
    settings += [f"tracking.folder={folder}", "tracking.name=run", *more]
    command = [*within, sys.executable, "-m"]
    if ranks:
        command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    run, found = Process([*command, "trainer", "train", *settings], folder / "log"), []
    try:
        for step in range(first, steps + 1, every):
            # The row of step 0 is the evaluation before the first step.
            run.until(lambda step=step: steps_of(folder / "run") > step, 3600)
            readings = []
            # Of a long step all of it.
            while len(readings) < READINGS or (steps_of(folder / "run") == step + 1 and run.popen.poll() is None):
                readings.append(held(run.family()))
                time.sleep(PAUSE)
            names = dict.fromkeys(name for reading in readings for name in reading)
            found.append({"step": step} | {n: min(r.get(n, 0) for r in readings) for n in names})
        run.popen.terminate()
        code = run.wait(120)
        assert code == (1 if ranks else 3), f"exit code {code}\n{run.said}"  # by a signal; torchrun has its own
    finally:
        for pid in run.family():
            os.kill(pid, 9)
        run.popen.wait()
    return found


def held(pids: Sequence[int]) -> dict[str, float]:
    """What processes hold of the machine."""
    counts, segments, memory = dict.fromkeys(COUNTS, 0), set(), {}
    for pid in pids:
        place = Path(f"/proc/{pid}")
        try:
            threads, files = len(os.listdir(place / "task")), len(os.listdir(place / "fd"))
            maps = [line.split(maxsplit=5) for line in (place / "maps").read_text().splitlines()]
            rollup = [line.split() for line in (place / "smaps_rollup").read_text().splitlines()[1:]]
            words = (place / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:  # it has ended
            continue
        # Deleted ones count too, and System V's; the inode tells pieces apart.
        segments |= {line[4] for line in maps if len(line) == 6 and line[5].startswith(("/dev/shm", "/memfd", "/SYSV"))}
        for name, value in zip(COUNTS, (1, threads, files, 0), strict=True):
            counts[name] += value
        kind = next((kind for sign, kind in KINDS.items() if sign in words), "trainer")
        memory[f"memory of {kind} {pid}"] = sum(
            1024 * int(amount) for name, amount, *_ in rollup if name in ("Pss_Anon:", "Pss_Shmem:")
        )
    return counts | {"segments": len(segments)} | memory


def grown(found: Sequence[dict[str, float]], growth: float = GROWTH) -> list[str]:
    """What the end has more of than the beginning, by more than that share."""
    begin, end = found[0], found[-1]
    names = [name for name in dict.fromkeys([*begin, *end]) if name != "step"]
    return [
        f"{name}: {begin.get(name, 0):,.0f} at step {begin['step']}, {end.get(name, 0):,.0f} at step {end['step']}"
        for name in names
        if end.get(name, 0) > (1 + growth) * begin.get(name, 0)
    ]


def table(found: Sequence[dict[str, float]]) -> str:
    """`found` in Markdown, memory in MiB, with the change from the first row to the last below."""
    names = list(dict.fromkeys(name for row in found for name in row))

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def cell(name: str, value: float | None) -> str:
        if value is None:
            return ""
        return f"{value / 2**20:.2f}" if name.startswith("memory") else f"{value:.0f}"

    heads = [f"{name.rpartition(' ')[0]}, MiB" if name.startswith("memory") else name for name in names]
    lines = [line(heads), "|---" * len(names) + "|"]
    lines += [line([cell(name, row.get(name)) for name in names]) for row in found]
    begin, end = found[0], found[-1]
    changes = [f"{end[n] / begin[n] - 1:+.2%}" if begin.get(n) and n in end else "0" for n in names[1:]]
    return "\n".join([*lines, line(["change", *changes])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--engine", choices=("torch", "sglang"), default="torch")
    parser.add_argument("--ranks", type=int, default=0)
    parser.add_argument("--conversations", action="store_true")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    first, every, steps, more, within, growth = 100, 50, 1000, [], [], GROWTH
    if given.conversations:
        first, every, steps, more, within, growth = 2, 5, 22, CONVERSATIONS, CALM, WIDER
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        more = [*more, *given.settings]
        found = soak(Path(folder), given.steps or steps, given.engine, first, every, given.ranks, more, within)
    print(table(found), f"{time.monotonic() - begun:.0f} s", *grown(found, growth), sep="\n")
    sys.exit(bool(grown(found, growth)))


if __name__ == "__main__":
    main()
