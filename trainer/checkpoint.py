"""Owns what a run leaves on disk to go on from: sharded checkpoints, and their export to a Hugging Face folder.

A checkpoint holds the model, the optimizer, the position in schedule and data, and the random states. It is
written under a temporary name and renamed when it is whole, so that a folder named step-... can be trusted.
"""

import contextlib
import json
import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from grpo.config import ConfigError
from workers.actor import ActorWorker
from workers.parallel.lora import LoraConfig, adapter_name
from workers.parallel.policy import PREFIX, ModelConfig, local_folder, read_config, read_tokenizer

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""What a checkpoint holds: frozen weights stay in the folder that the run started from."""


class Checkpoints:
    """The checkpoints of one run, in its folder `checkpoints`; the newest `keep` stay."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self.folder, self.keep = run_folder / "checkpoints", keep

    def newest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        return max(self.whole(), default=None)

    def whole(self) -> list[Path]:
        """The whole checkpoints, oldest first."""
        return sorted(self.folder.glob("step-" + "[0-9]" * 8))

    def start_anew(self) -> None:
        """Put what an earlier run left in this folder out of the way, so that it is never taken for this run's."""
        if self.folder.is_dir():
            previous = self.folder.with_name("checkpoints.previous")
            shutil.rmtree(previous, ignore_errors=True)
            self.folder.rename(previous)

    def save(self, step: int, actor: ActorWorker, position: dict[str, Any] | None) -> None:
        """Write the checkpoint of `step`; every rank must take part. `position` is the controller's: the data's."""
        whole = self.folder / f"step-{step:08d}"
        part = whole.with_suffix(".partial")
        if dist.get_rank() == 0:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        actor.optimizer_offload.wait()
        model, optimizer = get_state_dict(actor.policy, actor.optimizer, options=TRAINED)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=part)
        torch.save(_random_states(), part / f"random-{dist.get_rank()}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            progress = {"step": step, "updates": actor.updates, "version": actor.version, "data": position}
            progress["lora"] = asdict(actor.config.lora)
            (part / "progress.json").write_text(json.dumps(progress))
            part.rename(whole)
            for old in self.whole()[: -self.keep]:
                old.rename(old.with_suffix(".partial"))  # before its files go: a kill must not leave half of it
            for part in self.folder.glob("*.partial"):
                shutil.rmtree(part)
        dist.barrier()

    def progress(self, checkpoint: Path) -> dict[str, Any]:
        """How far `checkpoint` is: its `step`, `updates` and `version`, the `data`'s position, and what `lora` was."""
        return json.loads((checkpoint / "progress.json").read_text())

    def load(self, checkpoint: Path, actor: ActorWorker) -> int:
        """Bring `actor` to `checkpoint`, whatever layout saved it; returns its step.

        Raises ConfigError where the checkpoint was trained with other settings of actor.lora.
        """
        progress = self.progress(checkpoint)
        saved, present = LoraConfig(**progress.get("lora", {})), actor.config.lora
        if saved != present and (saved.rank or present.rank):
            raise ConfigError(
                f"{checkpoint} was trained with actor.lora={asdict(saved)} and cannot go on with "
                f"actor.lora={asdict(present)}: use the same settings, or start anew."
            )
        model, optimizer = get_state_dict(actor.policy, actor.optimizer, options=TRAINED)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoint)
        set_state_dict(
            actor.policy, actor.optimizer, model_state_dict=model, optim_state_dict=optimizer, options=TRAINED
        )
        actor.updates, actor.version = progress["updates"], progress["version"]
        states = checkpoint / f"random-{dist.get_rank()}.pt"
        if states.is_file():
            _set_random_states(torch.load(states))
        return progress["step"]


def export(run_folder: Path, out: Path, model: ModelConfig, step: int | None = None) -> Path:
    """Write a run's checkpoint (the newest, or that of `step`) to `out` as a Hugging Face folder, in float32.

    `model` names the folder the run started from, for its config and tokenizer, and for the weights where adapters
    were trained, which are written merged. Needs no process group. Returns the checkpoint. Raises ConfigError where
    there is no such checkpoint.
    """
    checkpoints = Checkpoints(run_folder, keep=1)
    wanted = checkpoints.newest() if step is None else checkpoints.folder / f"step-{step:08d}"
    if wanted is None or not wanted.is_dir():
        there = [int(path.name[5:]) for path in checkpoints.whole()]
        raise ConfigError(
            f"{run_folder} has no checkpoint{'' if step is None else f' of step {step}'}: "
            + (
                f"it has those of steps {', '.join(map(str, there))}."
                if there
                else "give the folder of a run with one."
            )
        )
    causal_lm = transformers.AutoModelForCausalLM.from_config(read_config(model), dtype=torch.float32)
    weights = dict(causal_lm.named_parameters())
    lora = LoraConfig(**checkpoints.progress(wanted).get("lora", {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be here
        if lora.rank:
            reader = dcp.HuggingFaceStorageReader(local_folder(model.path))
            dcp.load(weights, storage_reader=reader, no_dist=True)
            _add_adapters(wanted, lora, weights)
        else:
            weights = {f"{PREFIX}{name}": tensor for name, tensor in weights.items()}
            dcp.load({"model": weights}, checkpoint_id=wanted, no_dist=True)
    causal_lm.save_pretrained(out)
    read_tokenizer(model).save_pretrained(out)
    with contextlib.suppress(OSError):  # a model folder need not have one
        transformers.GenerationConfig.from_pretrained(model.path).save_pretrained(out)
    return wanted


def _add_adapters(checkpoint: Path, lora: LoraConfig, weights: dict[str, torch.Tensor]) -> None:
    A, B = {}, {}
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and layer.rpartition(".")[2] in lora.targets:
            A[name], B[name] = torch.empty(lora.rank, weight.shape[1]), torch.empty(weight.shape[0], lora.rank)
    saved = {PREFIX + adapter_name(name, which): m[name] for which, m in (("A", A), ("B", B)) for name in m}
    dcp.load({"model": saved}, checkpoint_id=checkpoint, no_dist=True)
    for name in A:
        weights[name].data.addmm_(B[name], A[name], alpha=lora.scale)


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
