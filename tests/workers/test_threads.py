"""How many threads a process takes on a CPU, by the size of its model."""

import pytest
import torch

from workers.parallel.mesh import take_threads


@pytest.mark.parametrize(
    ("operations", "processes", "asked", "threads", "torchrun"),
    [
        (1e5, 1, None, 1, False),  # too small for a second one
        (1e9, 1, None, 8, False),
        (1e9, 4, None, 2, True),
        (1e9, 16, None, 1, True),  # more processes than cores
        (1e9, 1, "3", 3, False),  # the user wins
        (1e9, 2, "1", 1, True),  # torchrun did that
        (1e5, 2, "1", 1, True),
    ],
)
def test_threads_follow_from_the_model_unless_they_are_set(
    operations, processes, asked, threads, torchrun, monkeypatch
):
    taken = [int(asked or 99)]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: taken[-1])
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    said = take_threads(int(operations))
    assert taken[-1] == threads
    idle = torchrun and asked is not None and operations > 1e6
    assert said == ("Each process has 1 thread(s): OMP_NUM_THREADS=4 would use all cores." if idle else "")
