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
from workers.parallel.lora import Adapter
from workers.parallel.mesh import TrainingLayout


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

    A weight of `adapters` is sent with what its adapter adds; the parameter itself stays as it is. The merged pieces
    of this rank are one bucket's at a time.

    A bucket holds at most `bucket_bytes`, or as much as the largest parameter where that is more. While it runs there
    are at most two buckets in memory beside the parameters: what the collective leaves, and what is handed out. The
    next bucket is on its way while the one before is being read.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        layout: TrainingLayout,
        dtype: torch.dtype,
        bucket_bytes: int,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.parameters, self.layout, self.dtype, self.adapters = parameters, layout, dtype, adapters or {}
        self.ranks = layout.dp_shard * layout.tp_size
        self.place = dist.get_rank() % self.ranks
        self.group = layout.replica_group
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.plan: list[list[_Cut]] = [[]]
        size = 0
        # The largest needs that much at any rate, and each bucket costs the engine a request.
        bucket_bytes = max(bucket_bytes, *(shape.numel() * dtype.itemsize for shape in self.shapes.values()))
        for name, parameter in parameters.items():
            bytes_ = parameter.numel() * dtype.itemsize
            if size + bytes_ > bucket_bytes:
                self.plan.append([])
                size = 0
            self.plan[-1].append(self._cut(name, parameter))
            size += bytes_
        self.bytes = sum(shape.numel() for shape in self.shapes.values()) * dtype.itemsize

    def _cut(self, name: str, parameter: torch.nn.Parameter) -> _Cut:
        last = parameter.placements[-1]
        dim = last.dim if self.layout.tp_size > 1 and isinstance(last, Shard) else None
        shape = list(parameter.shape)
        if dim is not None:
            shape[dim] //= self.layout.tp_size
        return _Cut(name, parameter.shape, -(-shape[0] // self.layout.dp_shard), torch.Size(shape[1:]).numel(), dim)

    def buckets(self) -> Iterator[Bucket]:
        """All weights, each once; every rank must take part. A bucket is good until the next one is asked for."""
        most = max(sum(cut.shape.numel() for cut in cuts) for cuts in self.plan)
        flat = torch.empty(most, dtype=self.dtype, device=self.layout.device)
        received = None
        if self.ranks > 1:
            most = max(sum(cut.rows * cut.columns for cut in cuts) for cuts in self.plan)
            received = torch.empty(most * self.ranks, dtype=self.dtype, device=self.layout.device)
            arrival = self._gather(self.plan[0], received)
        for cuts, following in zip(self.plan, [*self.plan[1:], None], strict=True):
            bucket = Bucket(flat[: sum(cut.shape.numel() for cut in cuts)], {cut.name: cut.shape for cut in cuts})
            whole = [tensor for _, tensor in bucket.items()]
            if received is None:
                torch._foreach_copy_(whole, [self._local(cut.name) for cut in cuts])
            else:
                arrival.wait()
                self._put_together(cuts, received, whole)
                if following:
                    arrival = self._gather(following, received)
            yield bucket

    def _local(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        # A plain tensor here would be FSDP's gathered copy in the compute type, not the master weight.
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        local = parameter.detach().to_local()
        return self.adapters[name].merged(local, self.dtype) if name in self.adapters else local

    def _gather(self, cuts: Sequence[_Cut], received: torch.Tensor) -> dist.Work:
        """Begin to gather the pieces of one bucket, those of each rank in a row of `received`."""
        rows = self._rows(cuts, received)
        locals_ = [self._local(cut.name).reshape(-1) for cut in cuts]
        pieces = rows[self.place].split([cut.rows * cut.columns for cut in cuts])
        torch._foreach_copy_([piece[: local.numel()] for piece, local in zip(pieces, locals_, strict=True)], locals_)
        return dist.all_gather_into_tensor(rows.view(-1), rows[self.place], group=self.group, async_op=True)

    def _rows(self, cuts: Sequence[_Cut], received: torch.Tensor) -> torch.Tensor:
        size = sum(cut.rows * cut.columns for cut in cuts)
        return received[: size * self.ranks].view(self.ranks, size)

    def _put_together(self, cuts: Sequence[_Cut], received: torch.Tensor, whole: list[torch.Tensor]) -> None:
        """Copy what was gathered to where it belongs in the tensors of `whole`."""
        pieces = self._rows(cuts, received).split([cut.rows * cut.columns for cut in cuts], dim=1)
        sources, targets = [], []
        shards, slices = self.layout.dp_shard, self.layout.tp_size
        for cut, piece, target in zip(cuts, pieces, whole, strict=True):
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
