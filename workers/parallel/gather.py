"""Whole weights from their pieces: the actor's parameters, gathered in buckets with one collective each.

A parameter is cut twice: over the tensor mesh by rows or columns (or not at all), and what a tensor rank holds over the
shard mesh by rows. Replicas of the mesh hold the same, so a replica gathers alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from workers.engines.protocol import Bucket
from workers.parallel.mesh import Layout


@dataclass(frozen=True)
class _Cut:
    """How one parameter is cut: every rank holds `rows` x `columns`, the last ones fewer rows or none."""

    name: str
    shape: torch.Size
    rows: int
    columns: int
    tensor_dim: int | None  # which dimension the tensor mesh cuts


class Gatherer:
    """Buckets of whole weights in `dtype`, from `parameters` that lie on `layout` as the policy's do.

    At most `bucket_bytes` a bucket, but for a larger parameter alone. While it runs there are at most two buckets in
    memory beside the parameters: what the collective leaves, and what is handed out, which the next one overwrites.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], layout: Layout, dtype: torch.dtype, bucket_bytes: int
    ) -> None:
        self.parameters, self.layout, self.dtype = parameters, layout, dtype
        self.ranks = layout.shards * layout.slices
        self.place = dist.get_rank() % self.ranks
        self.group = layout.plane
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.plan: list[list[_Cut]] = [[]]
        size = 0
        for name, parameter in parameters.items():
            bytes_ = parameter.numel() * dtype.itemsize
            if self.plan[-1] and size + bytes_ > bucket_bytes:
                self.plan.append([])
                size = 0
            self.plan[-1].append(self._cut(name, parameter))
            size += bytes_
        self.bytes = sum(shape.numel() for shape in self.shapes.values()) * dtype.itemsize

    def _cut(self, name: str, parameter: torch.nn.Parameter) -> _Cut:
        last = parameter.placements[-1]
        dim = last.dim if self.layout.slices > 1 and isinstance(last, Shard) else None
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] //= self.layout.slices
        return _Cut(name, parameter.shape, -(-shape[0] // self.layout.shards), torch.Size(shape[1:]).numel(), dim)

    def buckets(self) -> Iterator[Bucket]:
        """All weights, each once; every rank must take part. A bucket is good until the next one is asked for."""
        most = max(sum(cut.shape.numel() for cut in cuts) for cuts in self.plan)
        flat = torch.empty(most, dtype=self.dtype, device=self.layout.device)
        received = None
        if self.ranks > 1:
            most = max(sum(cut.rows * cut.columns for cut in cuts) for cuts in self.plan)
            received = torch.empty(most * self.ranks, dtype=self.dtype, device=self.layout.device)
        for cuts in self.plan:
            bucket = Bucket(flat[: sum(cut.shape.numel() for cut in cuts)], {cut.name: cut.shape for cut in cuts})
            locals_ = [self._local(cut.name) for cut in cuts]
            whole = [tensor for _, tensor in bucket.items()]
            if received is None:
                torch._foreach_copy_(whole, locals_)
            else:
                self._gather(cuts, locals_, received, whole)
            yield bucket

    def _local(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        # A plain tensor here would be FSDP's gathered copy in the compute type, not the master weight.
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        return parameter.detach().to_local()

    def _gather(
        self, cuts: Sequence[_Cut], locals_: list[torch.Tensor], received: torch.Tensor, whole: list[torch.Tensor]
    ) -> None:
        sizes = [cut.rows * cut.columns for cut in cuts]
        received = received[: sum(sizes) * self.ranks].view(self.ranks, -1)
        mine = received[self.place]
        pieces = [piece[: local.numel()] for piece, local in zip(mine.split(sizes), locals_, strict=True)]
        torch._foreach_copy_(pieces, [local.reshape(-1) for local in locals_])
        dist.all_gather_into_tensor(received.view(-1), mine, group=self.group)
        sources, targets = [], []
        shards, slices = self.layout.shards, self.layout.slices
        for cut, piece, target in zip(cuts, received.split(sizes, dim=1), whole, strict=True):
            # [shard, slice, rows, columns]: shards are next to each other inside a slice of the tensor mesh.
            piece = piece.unflatten(0, (shards, slices)).unflatten(2, (cut.rows, cut.columns))
            if cut.tensor_dim is None:
                piece, target = piece[:, 0].unsqueeze(0), target.view(1, target.shape[0], -1)
            elif cut.tensor_dim == 0:
                piece, target = piece.transpose(0, 1), target.view(slices, target.shape[0] // slices, -1)
            else:
                # Columns: a row is whole once its slices stand side by side.
                piece = piece.transpose(1, 2)[None]
                target = target.view(1, target.shape[0], -1)
            if target.shape[1] == shards * cut.rows:
                sources.append(piece)
                targets.append(target.view(piece.shape))
                continue
            for shard in range(shards):
                # The last shards are short of rows: what they sent beyond is no weight.
                source = piece[:, shard, : max(0, target.shape[1] - shard * cut.rows)]
                part = target[:, shard * cut.rows :][:, : source.shape[1]]
                sources.append(source)
                targets.append(part.view(source.shape))
        torch._foreach_copy_(targets, sources)
