"""Micro-batches: the samples of a rank, packed into rows without padding, the same number on every rank.

This is the one place where samples are cut up for a forward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict

from grpo.batch import lengths_of
from grpo.packing import pack
from workers.dispatch import WorkerGroup
from workers.parallel.mesh import to_device


@dataclass
class MicroBatch:
    """Samples side by side without padding, on the device: T tokens, N of them in responses."""

    rows: list[int]
    lengths: list[int]
    tokens: torch.Tensor  # [T] int64
    wanted: torch.Tensor  # [N] int64, where in T the response tokens stand
    fields: dict[str, torch.Tensor]  # [N], of the response tokens; `owner`, int64, numbers the samples
    last: bool  # of this rank's


def microbatches(batch: TensorDict, max_tokens: int, group: WorkerGroup) -> Iterator[MicroBatch]:
    """Cut this part's rows into packed micro-batches, as many on every part of `group`, the most costly first.

    FSDP's collectives need every rank to make the same number of passes. A rank with fewer samples than passes
    repeats its first one without response tokens, which adds nothing to any sum.
    """
    lengths = lengths_of(batch["tokens"])
    plan, layout = pack(lengths, max_tokens, cost=group.cost), group.layout
    count = torch.tensor(len(plan))
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=layout.sum_group)
    if count > len(plan):
        plan = pack(lengths, max_tokens, at_least=int(count), cost=group.cost)
    # Not unbind, which for nested tensors is Python, row by row.
    columns = {name: field.values().split(lengths) for name, field in batch.items() if field.is_nested}
    for number, rows in enumerate(plan, 1):
        used = rows or [0]
        packed = {name: torch.cat([column[row] for row in used]) for name, column in columns.items()}
        tokens, mask = packed.pop("tokens"), packed.pop("response_mask")
        # Counted here, on the host: counting on the device would make it wait.
        wanted = mask.nonzero()[:, 0] if rows else mask.new_zeros(0, dtype=torch.int64)
        packed["owner"] = torch.arange(len(used)).repeat_interleave(torch.tensor([lengths[row] for row in used]))
        fields = {name: to_device(field[wanted], layout.device) for name, field in packed.items()}
        tokens, wanted = to_device(tokens, layout.device), to_device(wanted, layout.device)
        yield MicroBatch(rows, [lengths[row] for row in used], tokens, wanted, fields, last=number == len(plan))
