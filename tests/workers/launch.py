"""Runs a probe of these tests on several processes."""

import os
import subprocess
import sys
from pathlib import Path


def torchrun(processes: int, probe: str, *arguments: object, timeout: float, threads: int = 1) -> None:
    """Run the module `probe` of this folder under torchrun, to its end; raises if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += ["-m", f"tests.workers.{probe}", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, timeout=timeout, env=environment, cwd=Path(__file__).parents[2])
