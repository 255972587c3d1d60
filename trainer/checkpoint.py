"""Sharded checkpoints, from which a run goes on, and their export to a Hugging Face folder.

A checkpoint holds the model, the optimizer, the position in schedule and data, and the random states. It is
written under a temporary name and renamed when it is complete, so that a folder named step-... can be trusted.
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
from omegaconf import OmegaConf
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from grpo.config import ConfigError
from workers.actor import ActorWorker
from workers.config import LoraConfig, ModelConfig
from workers.models.hub import local_folder, read_config, read_tokenizer
from workers.parallel.lora import adapter_name
from workers.parallel.mesh import is_controller
from workers.parallel.policy import PREFIX

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""What a checkpoint holds: frozen weights stay in the folder that the run started from."""


class Checkpoints:
    """Saves and loads the checkpoints of one run, in its folder `checkpoints`; the newest `keep` stay."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self.run_folder, self.keep = run_folder, keep

    def save(self, step: int, actor: ActorWorker, data: dict[str, Any] | None) -> None:
        """Write the checkpoint of `step`. Every rank must call it; `data` is the controller's state of the data."""
        final = self.run_folder / "checkpoints" / f"step-{step:08d}"
        partial = final.with_suffix(".partial")
        if is_controller():
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        actor.optimizer_offload.wait()
        model, optimizer = get_state_dict(actor.policy, actor.optimizer, options=TRAINED)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=partial)
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state()
        torch.save(states, partial / f"random-{dist.get_rank()}.pt")
        dist.barrier()
        if is_controller():
            progress = {"step": step, "updates": actor.updates, "version": actor.version, "data": data}
            progress["lora"] = asdict(actor.config.lora)
            (partial / "progress.json").write_text(json.dumps(progress))
            partial.rename(final)
            for old in list(complete_checkpoints(self.run_folder).values())[: -self.keep]:
                old.rename(old.with_suffix(".partial"))  # before its files go: a kill must not leave half of it
            for partial in final.parent.glob("*.partial"):
                shutil.rmtree(partial)
        dist.barrier()

    def load(self, checkpoint: Path, actor: ActorWorker) -> None:
        """Bring `actor` to `checkpoint`, whatever layout saved it; ConfigError where its actor.lora was another."""
        progress = read_progress(checkpoint)
        saved, present = LoraConfig(**progress.get("lora", {})), actor.config.lora
        if saved != present and (saved.rank or present.rank):
            raise ConfigError(
                f"{checkpoint} was trained with actor.lora={asdict(saved)} and cannot go on with "
                f"actor.lora={asdict(present)}: use the same settings, or start anew."
            )
        trained = (actor.policy, actor.optimizer)
        model, optimizer = get_state_dict(*trained, options=TRAINED)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=checkpoint)
        set_state_dict(*trained, model_state_dict=model, optim_state_dict=optimizer, options=TRAINED)
        actor.updates, actor.version = progress["updates"], progress["version"]
        saved_states = checkpoint / f"random-{dist.get_rank()}.pt"
        if saved_states.is_file():
            states = torch.load(saved_states)
            torch.set_rng_state(states["cpu"])
            if "cuda" in states and torch.cuda.is_available():
                torch.cuda.set_rng_state(states["cuda"])


def complete_checkpoints(run_folder: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by their step, oldest first."""
    return {int(path.name[5:]): path for path in sorted(run_folder.glob("checkpoints/step-" + "[0-9]" * 8))}


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """How far `checkpoint` is: `step`, `updates` and `version`, the state of the `data`, and the settings of `lora`."""
    return json.loads((checkpoint / "progress.json").read_text())


def export(run_folder: Path, out: Path, step: int | None = None) -> Path:
    """Write a run's checkpoint (the newest, or that of `step`) to `out` as a Hugging Face folder, in float32.

    Config and tokenizer, and the weights into which trained adapters are merged, are those of the model that the run
    started from. Needs no process group. Returns the checkpoint. Raises ConfigError where there is none.
    """
    saved = run_folder / "config.yaml"
    if not saved.is_file():
        raise ConfigError(f"{run_folder} is not the folder of a run: there is no {saved}.")
    model = ModelConfig(path=OmegaConf.load(saved).model.path)
    there = complete_checkpoints(run_folder)
    checkpoint = there.get(max(there, default=None) if step is None else step)
    if checkpoint is None:
        has = f"it has those of steps {', '.join(map(str, there))}" if there else "give the folder of a run with one"
        raise ConfigError(f"{run_folder} has no checkpoint{'' if step is None else f' of step {step}'}: {has}.")
    causal_lm = transformers.AutoModelForCausalLM.from_config(read_config(model), dtype=torch.float32)
    weights = dict(causal_lm.named_parameters())
    lora = LoraConfig(**read_progress(checkpoint).get("lora", {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be here
        if lora.rank:
            reader = dcp.HuggingFaceStorageReader(local_folder(model.path))
            dcp.load(weights, storage_reader=reader, no_dist=True)
            _add_adapters(checkpoint, lora, weights)
        else:
            weights = {f"{PREFIX}{name}": tensor for name, tensor in weights.items()}
            dcp.load({"model": weights}, checkpoint_id=checkpoint, no_dist=True)
    causal_lm.save_pretrained(out)
    read_tokenizer(model).save_pretrained(out)
    with contextlib.suppress(OSError):  # a model folder need not have one
        transformers.GenerationConfig.from_pretrained(model.path).save_pretrained(out)
    return checkpoint


def _add_adapters(checkpoint: Path, lora: LoraConfig, weights: dict[str, torch.Tensor]) -> None:
    A, B = {}, {}
    for name, weight in weights.items():
        if name.split(".")[-2] in lora.targets and name.endswith(".weight"):
            A[name], B[name] = torch.empty(lora.rank, weight.shape[1]), torch.empty(weight.shape[0], lora.rank)
    saved = {PREFIX + adapter_name(name, which): m[name] for which, m in (("A", A), ("B", B)) for name in m}
    dcp.load({"model": saved}, checkpoint_id=checkpoint, no_dist=True)
    for name in A:
        weights[name].data.addmm_(B[name], A[name], alpha=lora.scale)
