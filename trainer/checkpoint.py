"""Sharded checkpoints, from which a run goes on, and their export to a Hugging Face folder.

A checkpoint holds the model, the optimizer, the position in schedule and data, and the random states. It is
written under a temporary name and renamed when it is complete and on the disk, so that a folder named step-... can be
trusted; what happens to it later is seen from the sizes and checksums of its files, which progress.json holds.
"""

import contextlib
import errno
import json
import math
import os
import pickle
import re
import shutil
import sys
import tempfile
import traceback
import zlib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from omegaconf import OmegaConf
from rich.filesize import decimal as in_units
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata as saved_as
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from grpo.config import ConfigError, parse
from trainer.card import model_card
from trainer.config import RunConfig
from trainer.death import Notice, Stopped
from workers.actor import ActorWorker
from workers.config import LoraConfig, ModelConfig
from workers.dispatch import any_rank, on_controller
from workers.models.hub import local_folder, read_config, read_tokenizer, refuse_other_formats
from workers.parallel.lora import adapter_name
from workers.parallel.mesh import is_controller
from workers.parallel.policy import PREFIX

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""What a checkpoint holds: frozen weights stay in the folder that the run started from."""

_KINDS = (saved_as.Metadata, saved_as.TensorStorageMetadata, saved_as.TensorProperties, saved_as.ChunkStorageMetadata)
_KINDS += (saved_as.BytesStorageMetadata, saved_as.MetadataIndex, saved_as.StorageMeta, saved_as._MEM_FORMAT_ENCODING)
_KINDS += (_StorageInfo, torch.serialization._get_layout, torch.Size)
INDEXED = {(kind.__module__, kind.__qualname__): kind for kind in _KINDS}
INDEXED |= {("torch", name): kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
INDEXED |= {(module, "PosixPath"): Path for module in ("pathlib", "pathlib._local")}  # by the version of Python
"""What the index of a checkpoint, which is a pickle, may name."""


class Checkpoints:
    """Saves and loads the checkpoints of one run, in its folder `checkpoints`, as config.checkpoint says.

    notice: what a signal sets, after which the next step is saved and is the last one.
    """

    def __init__(self, run_folder: Path, config: RunConfig, notice: Notice | None = None) -> None:
        self.run_folder, self.config, self.notice = run_folder, config, notice or Notice()
        self.ending, self.score, self.needed = False, None, 0
        self.group: dist.ProcessGroup | None = None
        self.pending: Future | None = None
        if config.checkpoint.background:  # whose collectives must not meet those of the main thread
            self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout_seconds))
            self.thread = ThreadPoolExecutor(1, "checkpoint")

    def begin(self, actor: ActorWorker) -> str | None:
        """What to say of the room that checkpoints of `actor` need; ConfigError where there is none for the first."""
        config, trained = self.config.checkpoint, [p for p in actor.parameters if p.requires_grad]
        # With AdamW's two moments and its count, and what stands beside each of the four tensors in a file.
        self.needed = sum(3 * p.numel() * p.element_size() + 10_000 for p in trained)
        copies, folder = config.keep + 1 + config.keep_best, self.run_folder

        def check() -> str:
            free, all_of_them = shutil.disk_usage(folder).free, copies * self.needed
            needed = f"{in_units(self.needed)} of disk each, {in_units(all_of_them)} for {copies} at once"
            said = f"Checkpoints need {needed}; {folder} has {in_units(free)} free"
            if free < self.needed and config.on_full_disk == "stop":
                way_out = "choose another tracking.folder, or leave them out by checkpoint.on_full_disk=skip"
                raise ConfigError(f"{said}, too little for the first: make room, {way_out}.")
            if free + sum(file.stat().st_size for file in folder.glob("checkpoints/step-*/*")) < all_of_them:
                return f"warning: {said}: make room, or lower checkpoint.keep={config.keep}."
            return f"{said}."

        return on_controller(check)

    def wanted(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether to save `step`, the same on every rank: it is due, the best so far, or the last for a signal.

        metrics: those of the step, on the controller.
        """
        self.ending = step < self.config.steps and any_rank(self.notice.asked)
        self.score = metrics.get("eval/accuracy", -metrics["eval/loss"] if "eval/loss" in metrics else None)
        best = False
        if self.config.checkpoint.keep_best:
            # The files of earlier ones are read where there is something to compare alone.
            rated = is_controller() and self.score is not None
            best = any_rank(rated and self.score > max(scores(self.run_folder).values(), default=-math.inf))
        return self.ending or best or self.config.is_due(step, self.config.checkpoint.every)

    def save(self, step: int, actor: ActorWorker, data: dict[str, Any] | None) -> None:
        """Write the checkpoint of `step`. Every rank must call it; `data` is the controller's state of the data.

        Raises ConfigError where the disk is full and that is to end the run, and Stopped where a signal did.
        """
        self.wait()
        actor.optimizer_offload.wait()
        model, optimizer = get_state_dict(actor.policy, actor.optimizer, options=TRAINED)
        state, random = {"model": model, "optimizer": optimizer}, {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        progress = {"step": step, "updates": actor.updates, "version": actor.version, "data": data}
        progress |= {"lora": asdict(actor.config.lora), "score": self.score}
        if self.config.checkpoint.background and not self.ending and step < self.config.steps:
            state = DefaultStager(StagingOptions(False, False, False, False)).stage(state)
            self.pending = self.thread.submit(self._write, step, state, random, progress)
            return
        self._write(step, state, random, progress)
        if self.ending:
            newest = [*complete_checkpoints(self.run_folder).values()][-1:]
            saved = f"go on from {newest[0]} by checkpoint.resume=true" if newest else "it has no checkpoint"
            raise Stopped(f"A signal ended the run after step {step} of {self.config.steps}: {saved}.")

    def wait(self) -> None:
        """Wait for the checkpoint that is written in the background; raises as `save`."""
        if self.pending is not None:
            pending, self.pending = self.pending, None
            pending.result()

    def _write(self, step: int, state: dict, random: dict[str, torch.Tensor], progress: dict[str, Any]) -> None:
        final = self.run_folder / "checkpoints" / f"step-{step:08d}"
        partial, sums = final.with_suffix(".partial"), {}

        def make_room() -> None:
            if is_controller():
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                if shutil.disk_usage(partial).free < self.needed:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def write() -> None:
            dcp.save(state, checkpoint_id=partial, process_group=self.group)
            torch.save(random, states := partial / f"random-{dist.get_rank()}.pt")
            _flush(states)
            sums.update({path.name: _checksum(path) for path in (states, *partial.glob(f"__{dist.get_rank()}_*"))})

        def finish() -> None:
            everyones = [sums] * dist.get_world_size()
            dist.all_gather_object(everyones, sums, self.group)
            if is_controller():
                progress["files"] = {path.name: path.stat().st_size for path in partial.iterdir()}
                progress["sums"] = {".metadata": _checksum(partial / ".metadata")} | dict(ChainMap(*everyones))
                (partial / "progress.json").write_text(json.dumps(progress))
                # A checkpoint with a name is whole, and the rows up to it are there, even if the power fails now.
                for path in (*self.run_folder.glob("*.jsonl"), partial / "progress.json", partial):
                    _flush(path)
                partial.rename(final)
                _flush(final.parent)
                self._prune(final.parent)

        for stage in (make_room, write, finish):
            error = None
            try:
                stage()
            except (Exception, CheckpointException) as caught:  # noqa: BLE001 - which all ranks must learn of
                error = caught
            if any_rank(error is not None, self.group):
                self._fail(step, partial, error)
                return

    def _prune(self, folder: Path) -> None:
        """Remove what is neither among the newest nor the best, and let `best` name that one."""
        there, kept = complete_checkpoints(self.run_folder), self.config.checkpoint.keep
        spared = set(list(there)[-kept:])
        if self.config.checkpoint.keep_best and (rated := scores(self.run_folder)):
            spared.add(best := max(rated, key=rated.get))
            (folder / "best.new").unlink(missing_ok=True)
            (folder / "best.new").symlink_to(there[best].name)
            (folder / "best.new").replace(folder / "best")
        for step in there.keys() - spared:
            there[step].rename(there[step].with_suffix(".partial"))  # before its files go: a kill must not leave half
        for partial in folder.glob("*.partial"):
            shutil.rmtree(partial)

    def _fail(self, step: int, partial: Path, error: BaseException | None) -> None:
        """Remove what was written, and end the run or say that step `step` was left out, where the disk is full."""
        text = "".join(traceback.format_exception(error)) if error else ""
        full = any_rank(any(os.strerror(number) in text for number in (errno.ENOSPC, errno.EDQUOT)), self.group)
        if is_controller():
            shutil.rmtree(partial, ignore_errors=True)
        if not full:
            raise error or RuntimeError(f"Another rank could not write {partial}.")
        free = in_units(shutil.disk_usage(self.run_folder).free)
        needs = f"step {step} needs {in_units(self.needed)}, and {self.run_folder} has {free} free"
        said = f"The disk is full: the checkpoint of {needs}. Earlier checkpoints are whole"
        if self.config.checkpoint.on_full_disk == "stop":
            raise ConfigError(f"{said}: make room, and go on with checkpoint.resume=true.")
        if is_controller():
            self.notice.say(f"warning: {said}, and this one is left out.")

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
        read_state({"model": model, "optimizer": optimizer}, checkpoint)
        set_state_dict(*trained, model_state_dict=model, optim_state_dict=optimizer, options=TRAINED)
        actor.updates, actor.version = progress["updates"], progress["version"]
        saved_states = checkpoint / f"random-{dist.get_rank()}.pt"
        if saved_states.is_file():
            with _refuse_code(checkpoint):
                states = torch.load(saved_states, weights_only=True)
            torch.set_rng_state(states["cpu"])
            if "cuda" in states and torch.cuda.is_available():
                torch.cuda.set_rng_state(states["cuda"])


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in INDEXED:
            raise pickle.UnpicklingError(f"its .metadata names {module}.{name}")
        return INDEXED[module, name]


class _Reader(dcp.FileSystemReader):
    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        with (checkpoint / ".metadata").open("rb") as file:
            self._index = _Index(file).load()

    def read_metadata(self, *_: Any, **__: Any) -> saved_as.Metadata:
        return self._index


class _Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: Any) -> None:
        torch.load(value, weights_only=True)  # raises for what torch's own method would run
        value.seek(0)
        super().load_bytes(read_item, value)


def read_state(state: dict[str, Any], checkpoint: Path, no_dist: bool = False) -> None:
    """Fill `state` from `checkpoint`, as dcp.load does, but for code: ConfigError where the checkpoint holds some."""
    with _refuse_code(checkpoint):
        dcp.load(state, storage_reader=_Reader(checkpoint), planner=_Planner(), no_dist=no_dist)


@contextlib.contextmanager
def _refuse_code(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, pickle.UnpicklingError) as error:
        for failure, _ in getattr(error, "failures", {0: (error, "")}).values():
            if isinstance(failure, pickle.UnpicklingError):
                named = re.search(r"(?:GLOBAL|names) ([\w.]+)", str(failure))
                found = f"holds code, {named[1]}, that reading it would run" if named else "cannot be read safely"
                raise ConfigError(f"{checkpoint} {found}: no run wrote it so; use another checkpoint.") from error
        raise


def complete_checkpoints(run_folder: Path) -> dict[int, Path]:
    """The complete checkpoints of a run by their step, oldest first."""
    return {int(path.name[5:]): path for path in sorted(run_folder.glob("checkpoints/step-" + "[0-9]" * 8))}


def newest_whole(run_folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, if any, and a clause about each newer one that is passed over."""
    passed = []
    for path in reversed(complete_checkpoints(run_folder).values()):
        if (what := damage(path)) is None:
            return path, passed
        passed.append(f"{path} is damaged ({what}) and is passed over.")
    return None, passed


def damage(checkpoint: Path, read: bool = True) -> str | None:
    """What is wrong with a checkpoint, by the sizes and, where its files are `read`, checksums that were noted when it
    was saved; None: it is whole."""
    try:
        progress = read_progress(checkpoint)
    except (OSError, ValueError):
        return "its progress.json cannot be read"
    for name, size in progress.get("files", {}).items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            return f"its {name} is missing" if found is None else f"its {name} has {found} bytes of {size}"
    sums = progress.get("sums", {}) if read else {}
    with ThreadPoolExecutor() as threads:
        for name, found in zip(sums, threads.map(lambda name: _checksum(checkpoint / name), sums), strict=True):
            if found != sums[name]:
                return f"its {name} is not what was written"
    return None


def scores(run_folder: Path) -> dict[int, float]:
    """By its step, what each whole checkpoint that was evaluated is worth: accuracy, or the negative loss."""
    whole = [path for path in complete_checkpoints(run_folder).values() if damage(path, read=False) is None]
    found = {progress["step"]: progress.get("score") for progress in map(read_progress, whole)}
    return {step: score for step, score in found.items() if score is not None}


def _checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found = zlib.crc32(block, found)
    return found


def _flush(path: Path) -> None:
    """Wait until what was written to a file or a folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What stands beside the weights: `step`, `updates`, `version`, `score`, the `data`, `lora`, `files`, `sums`."""
    return json.loads((checkpoint / "progress.json").read_text())


def find_run(place: str, step: int | str | None = None) -> Path | None:
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


def find_checkpoint(run_folder: Path, step: int | str | None) -> Path:
    """The checkpoint of `step`, of the best, or the newest whole one (None); ConfigError where there is none."""
    there, passed = complete_checkpoints(run_folder), []
    if step is None:
        checkpoint, passed = newest_whole(run_folder)
    elif step == "best":
        rated = scores(run_folder)
        checkpoint = there[max(rated, key=rated.get)] if rated else None
    else:
        checkpoint = there.get(step)
    if step is not None and checkpoint is not None and (what := damage(checkpoint)):
        raise ConfigError(f"{checkpoint} is damaged ({what}): choose another --step.")
    for sentence in passed:
        print(sentence, file=sys.stderr)
    if checkpoint is None:
        which = {None: "checkpoint", "best": "evaluated checkpoint"}.get(step, f"checkpoint of step {step}")
        whole = [str(number) for number, path in there.items() if damage(path, read=False) is None]
        has = f"it has those of steps {', '.join(whole)}" if whole else "give the folder of a run with one"
        raise ConfigError(f"{run_folder} has no {which}: {has}.")
    return checkpoint


@contextlib.contextmanager
def model_at(place: str, step: int | str | None = None) -> Iterator[tuple[str, int | None, int]]:
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
    step: int | str | None = None,
    dtype: str = "float32",
    shard_size: str = "50GB",
    adapters: bool = False,
) -> Path:
    """Write a run's checkpoint (as `find_checkpoint` finds it) to `out` as a Hugging Face folder, in `dtype`.

    Config and tokenizer, and the weights into which trained adapters are merged, are those of the model that the run
    started from. shard_size: the largest file, such as 5GB. adapters: write the adapters alone, as peft reads them.
    Needs no process group. Returns the checkpoint. Raises ConfigError where there is none, or no adapters.
    """
    saved = run_folder / "config.yaml"
    if not saved.is_file():
        raise ConfigError(f"{run_folder} is not the folder of a run: there is no {saved}.")
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB|TB)", shard_size):
        raise ConfigError(f"--shard-size={shard_size} is no size: write it as 5GB or 500MB.")
    model = ModelConfig(path=parse(saved, OmegaConf.load, saved).model.path)
    if out.is_file() or out.resolve() in (run_folder.resolve(), Path(model.path).resolve()):
        what = "a file" if out.is_file() else "the run, or the model that it started from"
        raise ConfigError(f"{out} is {what}: choose another folder to write to.")
    checkpoint = find_checkpoint(run_folder, step)
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
        read_state({"model": weights}, checkpoint, no_dist=True)
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
    read_state({"model": {PREFIX + name: m for name, m in found.items()}}, checkpoint, no_dist=True)
    return found


def _save_adapters(out: Path, model: str, lora: LoraConfig, adapters: dict[str, torch.Tensor]) -> None:
    """Write `adapters` as the folder that peft.PeftModel.from_pretrained puts on `model`."""
    import peft

    base = {"base_model_name_or_path": str(Path(model).resolve()) if Path(model).is_dir() else model}
    about = base | {"target_modules": list(lora.targets), "task_type": "CAUSAL_LM", "inference_mode": True}
    peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, **about).save_pretrained(out)
    named = {f"base_model.model.{name.replace('.default.', '.')}": m.contiguous() for name, m in adapters.items()}
    save_file(named, out / "adapter_model.safetensors", metadata={"format": "pt"})
