"""Sharded checkpoints, from which a run goes on, and their export to a Hugging Face folder.

A checkpoint holds the model, the optimizer, the position in schedule and data, and the random states. It is
written under a temporary name and renamed when it is complete, so that a folder named step-... can be trusted.
"""

import contextlib
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from omegaconf import OmegaConf
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from grpo.config import ConfigError
from trainer.card import model_card
from workers.actor import ActorWorker
from workers.config import LoraConfig, ModelConfig
from workers.models.hub import local_folder, read_config, read_tokenizer, refuse_other_formats
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


def find_run(place: str, step: int | None = None) -> Path | None:
    """The folder of the run that `place` is, None where it is a model; ConfigError where it is neither."""
    folder = Path(place)
    if (folder / "config.yaml").is_file():
        return folder
    if step is not None:
        raise ConfigError(f"--step={step} is for a run, and {place} is none: there is no {folder / 'config.yaml'}.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        refuse_other_formats(place)
        raise ConfigError(f"{place} is neither a model nor a run: it has no config.json and no config.yaml.")
    return None


@contextlib.contextmanager
def model_at(place: str, step: int | None = None) -> Iterator[tuple[str, int | None, int]]:
    """The path of the model that `place` is or that a run's checkpoint is made into, its step, its policy's version."""
    if (run := find_run(place, step)) is None:
        yield place, None, 0
        return
    with tempfile.TemporaryDirectory(prefix="model-", dir=run) as out:
        progress = read_progress(export(run, Path(out), step))
        yield out, progress["step"], progress["version"]


def export(
    run_folder: Path,
    out: Path,
    step: int | None = None,
    dtype: str = "float32",
    shard_size: str = "50GB",
    adapters: bool = False,
) -> Path:
    """Write a run's checkpoint (the newest, or that of `step`) to `out` as a Hugging Face folder, in `dtype`.

    Config and tokenizer, and the weights into which trained adapters are merged, are those of the model that the run
    started from. shard_size: the largest file, such as 5GB. adapters: write the adapters alone, as peft reads them.
    Needs no process group. Returns the checkpoint. Raises ConfigError where there is none, or no adapters.
    """
    saved = run_folder / "config.yaml"
    if not saved.is_file():
        raise ConfigError(f"{run_folder} is not the folder of a run: there is no {saved}.")
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", shard_size):
        raise ConfigError(f"--shard-size={shard_size} is no size: write it as 5GB or 500MB.")
    model = ModelConfig(path=OmegaConf.load(saved).model.path)
    there = complete_checkpoints(run_folder)
    checkpoint = there.get(max(there, default=None) if step is None else step)
    if checkpoint is None:
        has = f"it has those of steps {', '.join(map(str, there))}" if there else "give the folder of a run with one"
        raise ConfigError(f"{run_folder} has no checkpoint{'' if step is None else f' of step {step}'}: {has}.")
    lora = LoraConfig(**read_progress(checkpoint).get("lora", {}))
    if adapters and not lora.rank:
        raise ConfigError(f"{checkpoint} has no adapters, as all weights were trained: leave out --adapters.")
    with torch.device("meta" if adapters else "cpu"):
        causal_lm = transformers.AutoModelForCausalLM.from_config(read_config(model), dtype=torch.float32)
    weights = dict(causal_lm.named_parameters())
    library, what = "transformers", f"LoRA adapters of rank {lora.rank}, merged" if lora.rank else "all trained"
    trained = _read_adapters(checkpoint, lora, weights) if lora.rank else {}
    if adapters:
        library, what = "peft", f"LoRA adapters of rank {lora.rank}"
        _save_adapters(out, model.path, lora, {name: m.to(getattr(torch, dtype)) for name, m in trained.items()})
    elif lora.rank:
        reader = dcp.HuggingFaceStorageReader(local_folder(model.path))
        dcp.load(weights, storage_reader=reader, no_dist=True)
        for name in weights:
            A, B = (trained.get(adapter_name(name, which)) for which in "AB")
            if A is not None:
                weights[name].data.addmm_(B, A, alpha=lora.scale)
    else:
        weights = {f"{PREFIX}{name}": tensor for name, tensor in weights.items()}
        dcp.load({"model": weights}, checkpoint_id=checkpoint, no_dist=True)
    if not adapters:
        causal_lm.to(getattr(torch, dtype)).save_pretrained(out, max_shard_size=shard_size)
        read_tokenizer(model).save_pretrained(out)
        with contextlib.suppress(OSError):  # a model folder need not have one
            transformers.GenerationConfig.from_pretrained(model.path).save_pretrained(out)
    (out / "README.md").write_text(model_card(run_folder, checkpoint, f"{what}, in {dtype}", library))
    return checkpoint


def _read_adapters(checkpoint: Path, lora: LoraConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A [rank, columns] and B [rows, rank] by their names, of each of the `weights` [rows, columns] that has them."""
    found = {}
    for name, weight in weights.items():
        if name.split(".")[-2] in lora.targets and name.endswith(".weight"):
            found[adapter_name(name, "A")] = torch.empty(lora.rank, weight.shape[1])
            found[adapter_name(name, "B")] = torch.empty(weight.shape[0], lora.rank)
    dcp.load({"model": {PREFIX + name: m for name, m in found.items()}}, checkpoint_id=checkpoint, no_dist=True)
    return found


def _save_adapters(out: Path, model: str, lora: LoraConfig, adapters: dict[str, torch.Tensor]) -> None:
    """Write `adapters` as the folder that peft.PeftModel.from_pretrained puts on `model`."""
    import peft

    base = {"base_model_name_or_path": str(Path(model).resolve()) if Path(model).is_dir() else model}
    about = base | {"target_modules": list(lora.targets), "task_type": "CAUSAL_LM", "inference_mode": True}
    peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, **about).save_pretrained(out)
    named = {f"base_model.model.{name.replace('.default.', '.')}": m.contiguous() for name, m in adapters.items()}
    save_file(named, out / "adapter_model.safetensors", metadata={"format": "pt"})
