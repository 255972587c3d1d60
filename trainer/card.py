"""The model card of an export: what a run's config.yaml and metrics.jsonl say of the weights, and nothing else."""

import json
import platform
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from omegaconf import OmegaConf

from grpo.config import ConfigError
from trainer.record import read_metrics


def versions() -> dict[str, str]:
    """The versions of what computes: this trainer, Python, torch, transformers and, where it is installed, SGLang."""
    found = {"python": platform.python_version()}
    for package in ("grpo-trainer", "torch", "transformers", "sglang"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def model_card(run_folder: Path, checkpoint: Path, weights: str, library: str) -> str:
    """README.md of what is written of `checkpoint`, for use with `library`; `weights` says what that is."""
    text, name = (run_folder / "config.yaml").read_text(), run_folder.resolve().name
    config, step = OmegaConf.to_container(OmegaConf.create(text)), int(checkpoint.name.removeprefix("step-"))
    model, rewards = config["model"]["path"], config.get("rewards", {}).get("weights")
    saved = datetime.fromtimestamp((checkpoint / "progress.json").stat().st_mtime).astimezone()
    facts = {
        "run": f"{name}, step {step} of {config['steps']}",
        "trained from": model,
        "algorithm": text.partition("\n")[0].removeprefix("# algorithm: ") if rewards else "supervised training",
        "rewards and weights": rewards,
        "trained on": config["data"]["train"],
        "held out": config["data"]["eval"],
        "weights": weights,
        "saved": saved.isoformat(" ", "seconds"),
        "written by": ", ".join(f"{package} {number}" for package, number in versions().items()),
    }
    evaluated: dict[str, float] = {}
    with suppress(ConfigError):  # of a run without metrics
        for row in read_metrics(run_folder):
            if row["step"] <= step and (found := {k: v for k, v in row.items() if k.startswith("eval/")}):
                evaluated = {"evaluated after step": row["step"]} | found
    facts |= {key: f"{value:.6g}" for key, value in evaluated.items() if "/time/" not in key}
    lines = [
        f"| {key} | {fact if isinstance(fact, str) else json.dumps(fact)} |" for key, fact in facts.items() if fact
    ]
    base = "" if Path(model).exists() else f"base_model: {model}\n"  # which the hub takes for one of its names
    head = f"---\n{base}library_name: {library}\n---\n\n# {name}\n\n| | |\n|---|---|\n"
    return head + "\n".join(lines) + "\n"
