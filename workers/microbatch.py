"""Micro-batches: a rank's samples packed side by side without padding, in as many passes on every rank.

This is the one place where samples are cut up for a forward pass, and put together again after it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from grpo.batch import lengths_of
from grpo.packing import pack
from workers.dispatch import WorkerGroup
from workers.parallel.attention import PackedSequences
from workers.parallel.mesh import to_device


@dataclass
class MicroBatch:
    """What a forward pass needs of its samples: T tokens, N of them in responses, on the device."""

    rows: list[int]  # of the rank's batch; none in a pass that only keeps step with other ranks
    last: bool  # of the rank's micro-batches
    response_mask: Tensor  # [T] bool, on the host
    sequences: PackedSequences
    tokens: Tensor  # [T] int64
    predictors: Tensor  # [N] int64, the places in T just before the response tokens
    targets: Tensor  # [N] int64, the response tokens
    fields: dict[str, Tensor]  # [N] each, of the response tokens; seq_id (int64) numbers the sequences

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return self.sequences.lengths

    @classmethod
    def of(
        cls, packed: dict[str, Tensor], lengths: list[int], device: torch.device, rows: list[int], last: bool = True
    ) -> "MicroBatch":
        """From fields [T] on the host. No sequence's first token may be in a response; none is without `rows`."""
        fields = packed | {"seq_id": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))}
        tokens, mask = fields.pop("tokens"), fields.pop("response_mask") & bool(rows)
        places = mask.nonzero()[:, 0]  # on the host: to count on the device would make the host wait
        fields = {name: to_device(field[places], device) for name, field in fields.items()}
        sequences = PackedSequences.of(lengths, device)
        on_device = (to_device(x, device) for x in (tokens, places - 1, tokens[places]))
        return cls(rows, last, mask, sequences, *on_device, fields)

    def unpack(self, values_N: Tensor) -> dict[int, Tensor]:
        """Values of the response tokens by row, on the host: [length] each, 0 outside the response."""
        values_T = torch.zeros(len(self.response_mask)).masked_scatter(self.response_mask, values_N.cpu())
        return dict(zip(self.rows, values_T.split(self.lengths), strict=False))


def microbatches(batch: TensorDict, max_tokens: int, group: WorkerGroup) -> Iterator[MicroBatch]:
    """Cut this rank's samples into micro-batches of at most `max_tokens`, the most costly first.

    FSDP's collectives need every rank to make the same number of passes, so the ranks of the layout's sum_group agree
    on it. A rank with fewer samples than passes repeats its first one without response tokens, which adds nothing to
    any sum.
    """
    lengths = lengths_of(batch["tokens"])
    plan, layout = pack(lengths, max_tokens, cost=group.cost), group.layout
    count = torch.tensor(len(plan))
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=layout.sum_group)
    if count > len(plan):
        plan = pack(lengths, max_tokens, at_least=int(count), cost=group.cost)
    count_B, columns = torch.tensor(lengths), {}
    for name, field in batch.items():  # of which one that is [B] has for each token of a sample the same
        values = field.values() if field.is_nested else field.repeat_interleave(count_B)
        columns[name] = values.split(lengths)  # not unbind, which for nested tensors is Python, row by row
    for number, rows in enumerate(plan, 1):
        used = rows or [0]
        packed = {name: torch.cat([column[row] for row in used]) for name, column in columns.items()}
        yield MicroBatch.of(packed, [lengths[row] for row in used], layout.device, rows, last=number == len(plan))
