"""Weights from a model's files into an engine, where no actor holds them: to evaluate a model, or to talk to one."""

from collections.abc import Iterator

import torch
import torch.distributed.checkpoint as dcp

from workers.config import ModelConfig
from workers.engines.protocol import Bucket, Engine
from workers.models import family_of
from workers.models.hub import local_folder, read_config
from workers.parallel.mesh import take_threads


def serve_files(engine: Engine, model: ModelConfig, device: torch.device, verify: bool = False) -> None:
    """Wake `engine` with the weights of `model`; every rank of it must take part. verify: compare them afterwards."""
    if device.type == "cpu":
        flops = family_of(read_config(model)).flops()
        take_threads(flops.token + flops.head)
    engine.wake_weights()
    engine.update_weights(_buckets(engine, model, device))
    if verify:
        engine.verify(_buckets(engine, model, device))
    engine.wake()


def _buckets(engine: Engine, model: ModelConfig, device: torch.device, each: int = 16) -> Iterator[Bucket]:
    family, folder, shapes = family_of(read_config(model)), local_folder(model.path), list(engine.shapes.items())
    for part in (dict(shapes[i : i + each]) for i in range(0, len(shapes), each)):
        flat = torch.empty(sum(shape.numel() for shape in part.values()), dtype=engine.dtype, device=device)
        weights = {family.file_name(name): tensor for name, tensor in Bucket(flat, part).items()}
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
        yield Bucket(flat, part)
