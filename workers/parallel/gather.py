"""Whole weights from their pieces: the actor's parameters, gathered in buckets with one collective each.

Tensor parallelism cuts a parameter by rows or by columns, or leaves it whole, and FSDP cuts what a tensor-parallel rank
holds by rows. With replicate > 1 each copy of the model gathers for itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from workers.engines.protocol import Bucket
from workers.parallel.lora import Adapter
from workers.parallel.mesh import TrainingLayout


@dataclass(frozen=True)
class _Cut:
    """How one parameter is cut: each rank sends a `piece`, but the last of dp_shard fill fewer of its rows or none."""

    name: str
    shape: torch.Size  # of the whole parameter
    piece: torch.Size  # [rows, columns]
    tp_dim: int | None  # the dimension that tensor parallelism cuts


class Gatherer:
    """Buckets of whole weights in `dtype`, from the policy's `parameters` on `layout`.

    A weight with one of `adapters` is sent with what its adapter adds, and the parameter stays as it is. Only one
    bucket's weights are merged at a time.

    A bucket holds at most `bucket_bytes`, or as much as the largest parameter where that is more. At most two buckets
    are in memory beside the parameters: the pieces that a collective brings, and the whole weights handed out. The
    pieces of the next bucket travel while the one before is read.
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
        self.group, self.group_size = layout.replica_group, layout.dp_shard * layout.tp_size
        self.group_rank = dist.get_rank(self.group)
        sizes = {name: parameter.numel() * dtype.itemsize for name, parameter in parameters.items()}
        self.bytes = sum(sizes.values())
        # The largest needs that much at any rate, and each bucket costs the engine a request.
        bucket_bytes = max(bucket_bytes, *sizes.values())
        self.plan: list[list[_Cut]] = []
        room = 0  # bytes left in the last bucket
        for name, parameter in parameters.items():
            if sizes[name] > room:
                self.plan.append([])
                room = bucket_bytes
            self.plan[-1].append(self._cut(name, parameter))
            room -= sizes[name]

    def _cut(self, name: str, parameter: torch.nn.Parameter) -> _Cut:
        last = parameter.placements[-1]
        tp_dim = last.dim if self.layout.tp_size > 1 and isinstance(last, Shard) else None
        shape = list(parameter.shape)
        if tp_dim is not None:
            shape[tp_dim] //= self.layout.tp_size
        piece = torch.Size([math.ceil(shape[0] / self.layout.dp_shard), math.prod(shape[1:])])
        return _Cut(name, parameter.shape, piece, tp_dim)

    def buckets(self) -> Iterator[Bucket]:
        """All weights, each once; every rank must take part. A bucket is overwritten when the next one is asked for."""
        most = max(sum(cut.shape.numel() for cut in cuts) for cuts in self.plan)
        flat = torch.empty(most, dtype=self.dtype, device=self.layout.device)
        if self.group_size > 1:
            most = max(sum(cut.piece.numel() for cut in cuts) for cuts in self.plan)
            received = torch.empty(most * self.group_size, dtype=self.dtype, device=self.layout.device)
            arrival, pieces = self._gather(self.plan[0], received)
        for cuts, following in zip(self.plan, [*self.plan[1:], None], strict=True):
            bucket = Bucket(flat[: sum(cut.shape.numel() for cut in cuts)], {cut.name: cut.shape for cut in cuts})
            weights = [tensor for _, tensor in bucket.items()]
            if self.group_size == 1:
                torch._foreach_copy_(weights, [self._local(cut.name) for cut in cuts])
            else:
                arrival.wait()
                self._assemble(cuts, pieces, weights)
                if following:
                    arrival, pieces = self._gather(following, received)
            yield bucket

    def _local(self, name: str) -> Tensor:
        parameter = self.parameters[name]
        # A plain tensor here would be FSDP's gathered copy in the compute type, not the master weight.
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        local = parameter.detach().to_local()
        return self.adapters[name].merged(local, self.dtype) if name in self.adapters else local

    def _gather(self, cuts: Sequence[_Cut], received: Tensor) -> tuple[dist.Work, tuple[Tensor, ...]]:
        """Begin to gather one bucket into `received`; returns also where each weight's pieces arrive, [ranks, size]."""
        sizes = [cut.piece.numel() for cut in cuts]
        rows = received[: sum(sizes) * self.group_size].view(self.group_size, -1)
        mine, locals_ = rows[self.group_rank], [self._local(cut.name).reshape(-1) for cut in cuts]
        sent = zip(mine.split(sizes), locals_, strict=True)
        torch._foreach_copy_([piece[: local.numel()] for piece, local in sent], locals_)
        work = dist.all_gather_into_tensor(rows.view(-1), mine, group=self.group, async_op=True)
        return work, rows.split(sizes, dim=1)

    def _assemble(self, cuts: Sequence[_Cut], pieces: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Copy the gathered pieces to where they belong in `weights`."""
        sources, targets = [], []
        dp_shard, tp_size = self.layout.dp_shard, self.layout.tp_size
        for cut, piece, target in zip(cuts, pieces, weights, strict=True):
            # Below, piece is [1 or tp_size, dp_shard, rows, ...], and target the same with dp_shard and rows as one.
            piece = piece.unflatten(0, (dp_shard, tp_size)).unflatten(2, cut.piece)
            if cut.tp_dim == 0:
                piece, target = piece.transpose(0, 1), target.view(tp_size, target.shape[0] // tp_size, -1)
            else:
                # A whole row is its tensor-parallel pieces side by side: [1, dp_shard, rows, tp_size, columns].
                piece = piece[:, 0][None] if cut.tp_dim is None else piece.transpose(1, 2)[None]
                target = target.view(1, target.shape[0], -1)
            rows = cut.piece[0]
            if target.shape[1] == dp_shard * rows:
                sources.append(piece)
                targets.append(target.view(piece.shape))
                continue
            for shard in range(dp_shard):
                # The last shards have fewer rows: what they sent beyond those is no weight.
                source = piece[:, shard, : max(0, target.shape[1] - shard * rows)]
                share = target[:, shard * rows :][:, : source.shape[1]]
                sources.append(source)
                targets.append(share.view(source.shape))
        torch._foreach_copy_(targets, sources)
