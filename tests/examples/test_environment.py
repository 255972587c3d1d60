"""examples/environment.sh: which Python it takes, what it refuses, and that it says how to get into what it made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples/environment.sh"


@pytest.fixture
def source(tmp_path):
    """source(extras, pythons, settings, after) sources the script where `pythons` ({name: (3, 12)}) are on the PATH.

    They are real ones of another version in name, whose pip does nothing, and whose venv copies them.
    """
    root, bin_folder = tmp_path / "tree", tmp_path / "bin"
    root.mkdir()
    bin_folder.mkdir()
    (root / "setup.py").touch()
    for tool in ("bash", "cksum", "grep", "rm", "cp", "mkdir"):
        (bin_folder / tool).symlink_to(f"/usr/bin/{tool}")

    def run(extras: str, pythons: dict, settings: dict | None = None, after: str = "") -> subprocess.CompletedProcess:
        for name, version in pythons.items():
            (bin_folder / name).write_text(
                f"""#!/bin/bash
case "$1 $2" in
-c*) exec "{sys.executable}" -c "import sys; sys.version_info = {version}; $2" ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") ;;
esac
"""
            )
            (bin_folder / name).chmod(0o755)
        lines = f'set -euo pipefail; root={root}; source "{SCRIPT}" "{extras}"; echo "at $VIRTUAL_ENV"; {after}'
        environment = {"PATH": str(bin_folder), "HOME": os.environ.get("HOME", "/")} | (settings or {})
        return subprocess.run(["/usr/bin/bash", "-c", lines], env=environment, capture_output=True, text=True)

    run.root = root
    return run


@pytest.mark.parametrize("version", [(3, 11), (3, 13), (3, 14)])
def test_any_python_that_fits_makes_the_environment_which_is_named_at_the_end(source, version):
    done = source("test", {"python3": version}, after="tell_environment")
    assert done.returncode == 0, done.stderr
    assert f"at {source.root}/.venv\n" in done.stdout
    assert f"source {source.root}/.venv/bin/activate" in done.stdout


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_one_that_does_not_fit_is_refused(source, version):
    done = source("", {"python3": version})
    assert (done.returncode, done.stdout) == (2, "")
    assert "Python 3.11 to 3.14 is needed" in done.stderr


def test_with_sglang_an_older_python_is_taken_or_asked_for(source):
    done = source("pretrained,sglang", {"python3": (3, 13)})
    assert done.returncode == 2
    assert "Python 3.11 or 3.12 (SGLang has nothing newer) is needed" in done.stderr
    assert source("pretrained,sglang", {"python3": (3, 13), "python3.12": (3, 12)}).returncode == 0


def test_a_python_of_choice_has_an_environment_of_its_own(source):
    done = source("test", {"python3.12": (3, 12), "python3.13": (3, 13)}, {"PYTHON": "python3.13"})
    assert f"at {source.root}/.venv-python3.13\n" in done.stdout
    assert not (source.root / ".venv").exists()
    missing = source("test", {}, {"PYTHON": "python3.14"})
    assert missing.returncode == 2
    assert "python3.14 is not" in missing.stderr


def test_an_active_environment_is_used_and_nothing_is_said_of_it(source, tmp_path):
    active = tmp_path / "active"
    active.mkdir()
    done = source("", {"python": (3, 13)}, {"VIRTUAL_ENV": str(active)}, after="tell_environment")
    assert done.stdout.endswith(f"at {active}\n")
    refused = source("sglang", {"python": (3, 13)}, {"VIRTUAL_ENV": str(active)})
    assert refused.returncode == 2
    assert "has another: activate one that has it" in refused.stderr
