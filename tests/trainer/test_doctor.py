"""`python -m trainer doctor`: misfits of packages that are only metadata, imports that fail, and GPUs that are not."""

import os
import re
import subprocess
import sys
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import trainer.doctor
from trainer.doctor import (
    INSTALL,
    RAN,
    check_imports,
    check_machine,
    check_packages,
    doctor,
    find_packages,
    read_project,
)

ROOT = Path(__file__).parents[2]
BASE = {
    "torch": ("2.11.0", []),
    "transformers": ("5.12.1", ["tokenizers<=0.23,>=0.22", "torch>=2.4; extra == 'torch'"]),
    "tokenizers": ("0.22.2", []),
    **{name: ("20.0", []) for name in ("datasets", "safetensors", "rich", "wandb", "matplotlib", "numpy")},
    "tensordict": ("0.15.3", ["torch>=2.11.0a0"]),
    "omegaconf": ("2.4.0", []),
    "math-verify": ("0.9.0", []),
}
SGLANG = {"sglang": ("0.5.17", ["torch==2.11.0", "transformers==5.12.1", "flash-attn-4>=4.0.0b18", "xgrammar[cu]"])}
SGLANG |= {"flash-attn-4": ("4.0.0b19", []), "xgrammar": ("0.2.1", ["triton; extra == 'cu'"]), "triton": ("3.6.0", [])}
H200 = "NVIDIA H200, 143771 MiB, 143156 MiB, 9.0, 580.95.05"


@pytest.fixture
def packages(tmp_path):
    """packages(changes) are those of BASE with `changes`: {name: (version, requirements)}, None for one that is not."""

    def make(changes: dict):
        for name, said in (BASE | changes).items():
            if said:
                folder = tmp_path / f"{name.replace('-', '_')}-{said[0]}.dist-info"
                folder.mkdir()
                lines = [f"Name: {name}", f"Version: {said[0]}", *(f"Requires-Dist: {need}" for need in said[1])]
                (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.1", *lines]))
        return find_packages([str(tmp_path)])

    return make


def diagnose(found, python="3.12", gpu=True) -> dict[str, list[tuple[str, str]]]:
    report = []
    check_packages(report, found, python, gpu)
    told = {True: [], False: []}
    for must, said, mend in report:
        told[must].append((said, mend))
    return {"misfits": told[True], "notes": told[False]}


@pytest.mark.parametrize(
    ("changes", "misfit", "mend"),
    [
        ({"torch": ("2.10.0", [])}, "this project asks for torch<2.14,>=2.11", "torch<2.14,>=2.11"),
        ({"datasets": None}, "datasets is missing, and this project asks for datasets>=4", "datasets>=4"),
        ({"tokenizers": ("0.24.0", [])}, "transformers 5.12.1 asks for tokenizers<=0.23", "tokenizers<=0.23,>=0.22"),
        ({"tokenizers": None}, "tokenizers is missing, and transformers 5.12.1 asks for", "tokenizers<=0.23,>=0.22"),
        ({"peft": ("0.18.0", [])}, "peft 0.18.0 is installed, and this project asks for peft<0.22,>=0.19", "peft<0.22"),
    ],
)
def test_a_package_that_does_not_fit_is_a_misfit_with_the_line_that_mends_it(packages, changes, misfit, mend):
    found = diagnose(packages(changes), gpu=False)["misfits"]
    assert any(misfit in said for said, _ in found)
    assert all(line.startswith("pip install '") for _, line in found)
    assert any(mend in line for _, line in found)


def test_what_fits_is_no_misfit_and_a_set_that_was_run_is_said(packages, capsys):
    assert diagnose(packages(SGLANG)) == {"misfits": [], "notes": []}
    said = capsys.readouterr().out
    assert RAN["0.5.17", "2.11.0", "5.12.1"] in said
    assert "lacks peft: pip install -e '.[lora]'" in said


@pytest.mark.parametrize("gpu", [True, False])
def test_what_sglang_asks_for_must_be_met_where_there_is_a_gpu(packages, gpu):
    found = diagnose(packages(SGLANG | {"torch": ("2.13.0+cu130", []), "triton": None}), gpu=gpu)
    wrong = "torch 2.13.0+cu130 is installed, and sglang 0.5.17 asks for torch==2.11.0", INSTALL
    assert found["misfits"] == [wrong] * gpu
    assert (wrong in found["notes"]) != gpu
    assert ("SGLang asks for packages that are missing: triton", INSTALL) in found["notes"]
    assert any("was not run on GPUs, as SGLang 0.5.17, torch 2.11.0" in said for said, _ in found["notes"]) == gpu


def test_an_sglang_beyond_those_that_work_and_a_python_beyond_are_misfits(packages):
    said = [said for said, _ in diagnose(packages({"sglang": ("0.5.22", [])}), python="3.15")["misfits"]]
    assert any("sglang 0.5.22 is installed, and this project asks for sglang<0.5.22,>=0.5.17" in each for each in said)
    assert any(each.startswith("Python 3.15 is not within <3.15,>=3.11") for each in said)


def test_an_extra_that_lags_behind_says_for_which_python_it_is(packages, tmp_path, capsys):
    assert diagnose(packages({}), python="3.13", gpu=False)["misfits"] == []
    assert 'lacks sglang: is only for python_version < "3.13"' in capsys.readouterr().out
    (_, mend), *_ = diagnose(find_packages([str(tmp_path)]), python="3.13")["notes"]
    assert mend.startswith('make an environment for which python_version < "3.13", and there pip install')


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import does_not_exist", "cannot be imported: ModuleNotFoundError: No module named 'does_not_exist'"),
        ("import os; os.kill(os.getpid(), 11)", "cannot be imported: it ended with -11"),
    ],
)
def test_an_import_that_fails_or_crashes_is_one_line(packages, tmp_path, monkeypatch, source, words):
    found = packages({"sglang": ("0.5.17", [])})
    for name in ("torch", "sglang"):
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = []
    check_imports(report, found, [])
    must = {said.split()[0]: (must, words in said, mend) for must, said, mend in report}
    assert must == {
        "torch": (True, True, "pip install --force-reinstall torch==2.11.0"),
        "sglang": (False, True, INSTALL),
    }


@pytest.mark.parametrize(
    ("built", "usable", "driver", "hidden", "mend"),
    [
        ("CUDA None, NCCL False", "raise AssertionError('no CUDA')", "580.95", None, "pip uninstall -y torch; "),
        ("CUDA 13.0, NCCL True", "raise RuntimeError('too old')", "535.1", None, "driver 580 or newer: 535.1"),
        ("CUDA 13.0, NCCL True", "print(0)", "580.95", "", "unset CUDA_VISIBLE_DEVICES"),
        ("CUDA 13.0, NCCL True", "raise RuntimeError('ECC')", "580.95", None, "nvidia-smi -q"),
        ("CUDA 13.0, NCCL True", "print(2)", "580.95", None, ""),
    ],
)
def test_gpus_that_torch_cannot_use_are_a_misfit_with_the_cause(
    packages, monkeypatch, built, usable, driver, hidden, mend
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(trainer.doctor, "PROBES", {"torch": f"print('{built}')", "GPUs": usable})
    report = []
    check_imports(report, packages({}), [driver, driver])
    assert [must for must, *_ in report] == [True] * bool(mend)
    assert all(mend in line for *_, line in report)


def test_the_gpus_are_those_of_nvidia_smi_and_one_that_fails_is_told(tmp_path, monkeypatch, capsys):
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for script, drivers in ((f"echo {H200}; echo {H200}", ["580.95.05"] * 2), ("echo no driver; exit 9", [])):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        report = []
        assert check_machine(report) == drivers
        assert ("nvidia-smi fails: no driver" in [said for _, said, _ in report]) != bool(drivers)
    assert (
        "GPU 1              NVIDIA H200, 143771 MiB (143156 MiB free), compute capability 9.0"
        in capsys.readouterr().out
    )


def test_the_command_answers_for_this_environment_without_importing_torch_itself_or_being_installed(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "doctor"], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert "cannot be imported: ImportError: libcudart.so.13: cannot open" in done.stdout
    assert done.stdout.endswith("1 misfit(s) must be mended.\n")
    assert done.stderr == ""


def test_of_two_packages_of_a_name_the_first_on_the_path_counts(packages, tmp_path):
    packages({"torch": ("2.12.0", [])})
    for path, expected in (([], "2.13.0"), ([str(tmp_path)], "2.12.0")):
        (tmp_path / "other/torch-2.13.0.dist-info").mkdir(parents=True, exist_ok=True)
        (tmp_path / "other/torch-2.13.0.dist-info/METADATA").write_text("Name: torch\nVersion: 2.13.0\n")
        assert find_packages([*path, str(tmp_path / "other")])["torch"].version == expected


def test_an_installation_without_metadata_is_said(monkeypatch, capsys):
    found = {name: each for name, each in find_packages(sys.path).items() if name != "grpo-trainer"}
    monkeypatch.setattr(trainer.doctor, "find_packages", lambda path: found)
    monkeypatch.setattr(trainer.doctor, "check_imports", lambda *_: None)
    assert doctor()
    assert f"{ROOT}, not installed: pip install -e ." in capsys.readouterr().out


def test_the_extra_asks_for_the_set_that_was_run_on_gpus_and_this_project_takes_every_set():
    needs, extras, _ = read_project()
    taken = {need.name: need.specifier for need in needs}
    assert [row for row in RAN if row[0] in extras["sglang"][0].specifier] == list(RAN)[:2]
    assert "H200" in next(iter(RAN.values()))
    assert all(torch in taken["torch"] and here in taken["transformers"] for _, torch, here in RAN)


@pytest.mark.sglang
def test_a_set_of_the_table_is_what_sglang_itself_asks_for():
    _, torch, transformers = next(row for row in RAN if row[0] == version("sglang"))
    asked = {need.name: need.specifier for need in map(Requirement, requires("sglang"))}
    assert torch in asked["torch"]
    assert transformers in asked["transformers"]


def test_the_readme_has_the_same_sets():
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    table = {(sglang, torch.split("+")[0], transformers): where for sglang, torch, transformers, where in rows}
    assert {key: table.get(key) for key in RAN} == RAN
