"""examples/slurm.sh and kubernetes.yaml: what they start on each node runs, and what was told to end goes on."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.reliability.conftest import Process, rows_of, steps_of
from tests.trainer.conftest import countdown, settings  # noqa: F401 - fixtures

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = {  # on a cluster of this machine alone
    "srun": """
while [[ $1 == --* ]]; do shift; done
trap : TERM
for node in 0 1; do SLURM_NODEID=$node "$@" & echo $! >> "$STATE/tasks"; done
code=0
for task in $(cat "$STATE/tasks"); do wait $task || code=$?; done
exit $code""",
    "scancel": 'kill -TERM $(cat "$STATE/tasks")',
    "scontrol": '[ "$1" = show ] && printf "localhost\\nother\\n" || echo "$*" >> "$STATE/requeued"',
}


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Process]]:
    """start(*command, **environment) begins it, with this Python and the COMMANDS on its PATH."""
    begun: list[Process] = []
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join(map(str, (tmp_path, Path(sys.executable).parent, os.environ["PATH"])))

    def run(*command: object, **environment: object) -> Process:
        given = [f"{name}={value}" for name, value in (environment | {"PATH": path, "STATE": tmp_path}).items()]
        begun.append(Process(["env", *given, *command], tmp_path / f"{len(begun)}.log"))
        return begun[-1]

    yield run
    for process in begun:
        for pid in process.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.popen.wait()
        process.file.close()


@pytest.fixture
def arguments(settings, tmp_path) -> list[str]:  # noqa: F811
    return [*settings["train"], f"tracking.folder={tmp_path}", "tracking.name=run", "actor.replicate=2"]


def test_a_slurm_job_that_is_told_to_end_is_queued_again_and_one_that_is_finished_is_not(start, arguments, tmp_path):
    node_list = {"SLURM_JOB_NODELIST": "any[1-2]", "SLURM_NNODES": 2, "SLURM_JOB_ID": os.getpid()}
    command = ["bash", EXAMPLES / "slurm.sh", *arguments]
    told = start(*command, "steps=500", **node_list)
    told.until(lambda: steps_of(tmp_path / "run") >= 3, 300)
    told.popen.terminate()  # the batch shell alone, as --signal=B:TERM does
    assert told.wait(300) == 0, told.said
    assert "A signal ended the run after step" in told.said
    assert (tmp_path / "requeued").read_text() == f"requeue {os.getpid()}\n"
    last = rows_of(tmp_path / "run")[-1]["step"]
    (tmp_path / "tasks").unlink()
    again = start(*command, f"steps={last + 2}", **node_list)
    assert again.wait(300) == 0, again.said
    assert f"Going on after step {last} " in again.said
    assert (tmp_path / "requeued").read_text().count("\n") == 1


def test_the_pods_of_the_kubernetes_job_run_together(start, arguments, tmp_path):
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    name, environment = job["metadata"]["name"], {each["name"]: each["value"] for each in container["env"]}
    # A pod of an indexed Job has the name JOB-INDEX, under the Service that its subdomain names.
    assert environment["MASTER_ADDR"] == f"{name}-0.{spec['subdomain']}"
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert int(environment["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(environment["GPUS"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    grace = int(container["command"][2].partition("grace_seconds=")[2])
    assert grace <= int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < spec["terminationGracePeriodSeconds"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    here = environment | {"MASTER_ADDR": "localhost", "GPUS": 1}
    pods = [start(*container["command"], *arguments, **here, JOB_COMPLETION_INDEX=index) for index in range(2)]
    for pod in pods:
        assert pod.wait(300) == 0, pod.said
    assert rows_of(tmp_path / "run")[-1]["step"] == 2
