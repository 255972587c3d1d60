"""`python -m trainer doctor`: what is installed, what of it fits together, and the line that mends what does not.

Versions and requirements are read from the packages' metadata, as pip reads them; this project's own from its setup.py
where it runs from a checkout. Only processes of their own import torch, SGLang and FlashAttention 4, so that an import
that fails, crashes or hangs is one line.
"""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from workers.engines.config import BEYOND, FIRST, INSTALL

ROOT = Path(__file__).parents[1]
Packages = dict[str, Distribution]
Asked = dict[str, dict[str, SpecifierSet]]
"""{package: {who asks for it: versions}}."""

RAN = {
    ("0.5.17", "2.11.0", "5.12.1"): "one, two and four H200s (Python 3.12)",
    ("0.5.17", "2.13.0", "5.12.1"): "CPU, the tests (Python 3.11)",
    ("0.5.21", "2.13.0", "5.12.1"): "CPU, the tests (Python 3.11)",
    ("none", "2.13.0", "5.12.1"): "CPU, the embedded engine (Python 3.11, 3.13)",
}
"""Where each set of SGLang, torch and transformers was run, as README.md has it: the first on GPUs."""

SHOWN = ("torch", "transformers", "tensordict", "datasets", "math-verify", "peft", "sglang", "flash-attn-4")
PROBES = {
    "torch": "import torch, torch.distributed as d; print(f'CUDA {torch.version.cuda}, NCCL {d.is_nccl_available()}')",
    "GPUs": """
from torch import cuda, ones
cuda.init()
print(len([ones(9, device=index).sum().item() for index in range(cuda.device_count())]))""",
    "sglang": "import sglang.srt.entrypoints.engine",
    "flash-attn-4": "import flash_attn.cute.interface",
}

Report = list[tuple[bool, str, str]]
"""Whether it must be mended, what does not fit, and the line that mends it."""


def show(name: str, said: object) -> None:
    print(f"{name:18} {said}", flush=True)


def read_project() -> tuple[list[Requirement], dict[str, list[Requirement]], SpecifierSet]:
    """What setup.py says: requirements, those of each extra, and the Pythons this is for."""
    said: dict = {}
    recorder = SimpleNamespace(setup=lambda **given: said.update(given), find_packages=lambda **_: [])
    with patch.dict(sys.modules, {"setuptools": recorder}):
        runpy.run_path(str(ROOT / "setup.py"))
    extras = {name: list(map(Requirement, texts)) for name, texts in said["extras_require"].items()}
    return list(map(Requirement, said["install_requires"])), extras, SpecifierSet(said["python_requires"])


def find_packages(path: list[str]) -> Packages:
    """The packages on `path` by name, the first of a name, as an import takes it."""
    named = ((each.metadata["Name"], each) for each in distributions(path=path))
    return {canonicalize_name(name): each for name, each in reversed(list(named)) if name}


def applies(need: Requirement, python: str, extra: str = "") -> bool:
    """Whether `need` holds for this machine with Python `python`, such as 3.12."""
    return need.marker is None or need.marker.evaluate({"extra": extra, "python_version": python})


def follow(needs: Iterable[Requirement], packages: Packages, python: str) -> Asked:
    """What `needs` ask for, what that asks for, and so on."""
    asked: Asked = {}
    queue, seen = [("this project", need) for need in needs], set()
    while queue:
        who, need = queue.pop()
        name = canonicalize_name(need.name)
        asked.setdefault(name, {}).setdefault(who, SpecifierSet())
        asked[name][who] &= need.specifier
        for extra in {"", *need.extras} - {known for of, known in seen if of == name} if name in packages else ():
            seen.add((name, extra))
            further = [each for each in map(Requirement, packages[name].requires or ()) if applies(each, python, extra)]
            queue += [(f"{name} {packages[name].version}", each) for each in further]
    return asked


def compare(report: Report, must: bool, packages: Packages, asked: Asked, mend: str = "") -> None:
    """Report what is not there as `asked`, with `mend` or else a line for pip."""
    for name, by in asked.items():
        there = Version(packages[name].version) if name in packages else None
        unmet = [f"{who} asks for {name}{by[who]}" for who in by if not (there and by[who].contains(there, True))]
        if unmet:
            wanted = SpecifierSet(",".join(str(want) for want in by.values() if str(want)))
            said = f"{name} {there or ''} is {'installed' if there else 'missing'}, and {', '.join(unmet)}"
            report.append((must, said.replace("  ", " "), mend or f"pip install '{name}{wanted}'"))


def check_packages(report: Report, packages: Packages, python: str, gpu: bool) -> None:
    """Compare what is there with what this project and the packages ask for.

    What SGLang asks for must be met where there is a `gpu`; on CPUs the tests run it with other versions.
    """
    needs, extras, pythons = read_project()
    if python not in pythons:
        report.append((True, f"Python {python} is not within {pythons}", "python3.12 -m venv .venv"))
    for extra, others in extras.items():
        missing = [need.name for need in others if canonicalize_name(need.name) not in packages]
        lagging = [f"is only for {need.marker}" for need in others if not applies(need, python, extra)]
        if missing:
            way = ", ".join(lagging) or f"pip install -e '.[{extra}]'"
            show(f"extra {extra}", f"lacks {', '.join(missing)}: {way}")
        needs += [need for need in others if need.name not in (*missing, "sglang")]
    first, beyond = (".".join(map(str, edge)) for edge in (FIRST, BEYOND))
    engine = follow([Requirement(f"sglang>={first},<{beyond}")] if "sglang" in packages else [], packages, python)
    there = {name: by for name, by in engine.items() if name in packages}
    ours = follow(needs, packages, python)
    compare(report, True, packages, {name: by for name, by in ours.items() if not (gpu and name in there)})
    compare(report, gpu, packages, there, INSTALL)
    if missing := sorted(set(engine) - set(there)):
        report.append((False, f"SGLang asks for packages that are missing: {', '.join(missing)}", INSTALL))
    names = ("sglang", "torch", "transformers")
    here = tuple(packages[name].version.split("+")[0] if name in packages else "none" for name in names)
    title, best = "SGLang {}, torch {}, transformers {}".format, list(RAN)[0 if gpu else -1]
    if here in RAN and (not gpu or here == best):
        show("this set", f"was run on {RAN[here]}")
    elif "none" not in here[1:]:
        mend = INSTALL if gpu else f"pip install torch=={best[1]} transformers=={best[2]}"
        if gpu and not applies(extras["sglang"][0], python, "sglang"):
            mend = f"make an environment for which {extras['sglang'][0].marker}, and there {INSTALL}"
        said = f"{title(*here)}: was not run on {'GPUs' if gpu else 'CPUs'}, as {title(*best)} was"
        report.append((False, said, mend))


def ask(command: list[str]) -> tuple[str, str]:
    """What a command prints, or what is wrong with it in one line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as error:
        return "", str(error)
    words = (done.stderr.strip() or done.stdout.strip() or f"it ended with {done.returncode}").splitlines()[-1]
    return (done.stdout, "") if done.returncode == 0 else ("", words)


def check_imports(report: Report, packages: Packages, drivers: list[str]) -> None:
    """Import what may be broken, and see whether torch can use the GPUs, each of which has one of `drivers`."""
    names = [name for name in PROBES if drivers or name in ("torch", "sglang") if name in packages or name == "GPUs"]
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda name: ask([sys.executable, "-W", "ignore", "-c", PROBES[name]]), names)
    found = dict(zip(names, answers, strict=True))
    built, broken = found.get("torch", ("", "it is missing"))
    show("torch is built for", built.strip() or "?")
    for name in set(names) - {"GPUs"}:
        if wrong := found[name][1]:
            version = packages[name].version.split("+")[0]
            mend = f"pip install --force-reinstall torch=={version}" if name == "torch" else INSTALL
            must = name == "torch" or (name == "sglang" and bool(drivers))
            report.append((must, f"{name} {version} cannot be imported: {wrong}", mend))
    usable, wrong = map(str.strip, found.get("GPUs", ("", "")))
    if broken or usable == str(len(drivers) or ""):
        return
    oldest, hidden = 525 if "CUDA 12" in built else 580, os.environ.get("CUDA_VISIBLE_DEVICES")
    if "CUDA None" in built:
        mend = f"pip uninstall -y torch; {INSTALL}"
    elif int(drivers[0].split(".")[0]) < oldest:
        mend = f"install NVIDIA's driver {oldest} or newer: {drivers[0]} is too old for {built.split(',')[0]}"
    elif hidden is not None:
        mend = f"unset CUDA_VISIBLE_DEVICES, which is '{hidden}'"
    else:
        mend = "nvidia-smi -q, which tells of errors; start the machine or the container again"
    said = f"torch can use {usable or 'none'} of {len(drivers)} GPUs {wrong and f'({wrong})'}"
    report.append((usable in ("", "0"), said, mend))


def check_machine(report: Report) -> list[str]:
    """Show the GPUs, their free memory and the room on disk; returns the drivers of the GPUs, one each."""
    fields, drivers = "name,memory.total,memory.free,compute_cap,driver_version", []
    if shutil.which("nvidia-smi"):
        said, wrong = ask(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"])
        for index, (name, total, free, capability, driver) in enumerate(row.split(", ") for row in said.splitlines()):
            show(f"GPU {index}", f"{name}, {total} ({free} free), compute capability {capability}, driver {driver}")
            drivers.append(driver)
        if wrong:
            report.append((False, f"nvidia-smi fails: {wrong}", "install NVIDIA's driver, and start the machine again"))
    for name, least, mend in (("/dev/shm", 1, "docker run --shm-size=8g ..."), ("runs", 5, "tracking.folder=FOLDER")):
        room = shutil.disk_usage(name if os.path.exists(name) else ".").free / 2**30
        show(name, f"{room:.1f} GiB free")
        if room < least:
            report.append((False, f"{name} has {room:.1f} GiB of room, which NCCL or checkpoints may exceed", mend))
    return drivers


def doctor() -> bool:
    """Print what is here and what does not fit; whether all that is necessary fits."""
    report: Report = []
    packages, python = find_packages(sys.path), f"{sys.version_info.major}.{sys.version_info.minor}"
    show("Python", f"{sys.version.split()[0]} in {sys.prefix}")
    show("grpo-trainer", ROOT if "grpo-trainer" in packages else f"{ROOT}, not installed: pip install -e .")
    for name in SHOWN:
        show(name, packages[name].version if name in packages else "not installed")
    drivers = check_machine(report)
    check_packages(report, packages, python, bool(drivers))
    check_imports(report, packages, drivers)
    for must, said, mend in sorted(report):
        print(f"\n{'misfit' if must else 'note'}: {said}\n    {mend}")
    misfits = sum(must for must, *_ in report)
    print(f"\n{misfits} misfit(s) must be mended." if misfits else "\nAll that is necessary fits.")
    return not misfits
