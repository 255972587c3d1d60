"""How a batch gets from the controller to the workers and back: scatter, run, gather.

Every process runs the same loop. On the controller (rank 0) a batch is the global TensorDict, elsewhere it is
None. A `Worker` method marked `@dispatched` splits the rows of the batch over the data-parallel ranks, hands the
same rows to every tensor-parallel peer, runs, and puts the results back together in the order of the rows.

With several processes the tokens of what was sampled, and all that is computed for each of them, do not pass through
the controller: they are held where they were made, and go from there to the ranks that work on them next (`Held`).
"""

import functools
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict

from grpo.batch import concatenate, jagged, lengths_of, make_batch, select
from grpo.config import ConfigError, unusable
from grpo.packing import balance
from workers.parallel.mesh import InferenceLayout, TrainingLayout, is_controller

CONTROLLER = 0
Packed = dict[str, list[np.ndarray]]
"""Fields as arrays: of one that is jagged its values and where its rows end."""


class Held:
    """Fields [B, *] of rows that stay with a process, so that tokens need not pass through the controller.

    The controller has the rest of each row: reward, group, lengths, and in the field `held` its number, by which every
    process finds what it holds. A row is held by one rank, which on the controller stands in `holders`, by number.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.rows: dict[int, dict[str, torch.Tensor]] = {}
        self.holders = torch.zeros(0, dtype=torch.int64)

    def begin(self, count: int) -> int:
        """Make room for `count` further rows; returns the number of the first."""
        self.holders = torch.cat([self.holders, torch.full((count,), -1)])
        return len(self.holders) - count

    def put(self, numbers: Sequence[int], fields: TensorDict) -> None:
        for name, field in fields.items():
            if field.is_nested:
                for number, values in zip(numbers, field.values().split(lengths_of(field)), strict=True):
                    self.rows.setdefault(number, {})[name] = values

    def take(self, numbers: Sequence[int]) -> TensorDict:
        """All that is held of these rows, which have the same fields, and their numbers as the field `held`."""
        rows = [self.rows[number] for number in numbers]
        return make_batch(
            {"held": torch.tensor(numbers)} | {name: jagged([row[name] for row in rows]) for name in rows[0]}
        )


HELD = Held()
"""What this process holds."""


class WorkerGroup:
    """All processes of one role, and how rows, balanced by their `cost` (of so many tokens), travel between them."""

    def __init__(self, layout: TrainingLayout | InferenceLayout, cost: Callable[[int], float] = float) -> None:
        self.layout, self.cost = layout, cost
        mine = (layout.dp_rank, layout.tp_rank)
        self.places: list[tuple[int, int]] = [mine] * dist.get_world_size()  # (dp_rank, tp_rank) of every rank
        if dist.get_world_size() > 1:
            dist.all_gather_object(self.places, mine)
        self.ranks: list[list[int]] = [[] for _ in range(layout.dp_size)]  # of each dp_rank, by tp_rank
        for rank, (dp_rank, _) in sorted(enumerate(self.places), key=lambda place: place[1]):
            self.ranks[dp_rank].append(rank)

    def scatter(self, batch: TensorDict | None, fields: Sequence[str], what: str) -> TensorDict:
        """This rank's rows: the `fields`, and their places `row`. RuntimeError naming `what` at a timeout.

        Rows that ranks hold go straight from one to the other; they have their number `held` and no `row`.
        """
        if len(self.places) == 1:
            return batch.select(*fields, strict=False).set("row", torch.arange(len(batch)))
        what, moves = f"its rows of {what}", None
        if batch is not None and "held" in batch:
            moves = self._plan_moves(batch.select("held", "length", *fields, strict=False))
        moves = self.share(moves, what)
        if moves is not None:
            return self._hand_over(*moves, what).select("held", *fields, strict=False)
        if batch is None:
            return unpack(_wait_for(CONTROLLER, f"{what} from the controller"))
        batch = batch.select(*fields, strict=False).set("row", torch.arange(len(batch)))
        batch, ends = self._arrange(batch, lengths_of(batch["tokens"]))
        shares = [pack(batch, *place) for place in itertools.pairwise(ends)]
        for rank, (dp_rank, _) in enumerate(self.places):
            if rank != CONTROLLER:
                _send(shares[dp_rank], rank)
        return unpack(shares[self.layout.dp_rank])

    def _arrange(self, batch: TensorDict, lengths: list[int]) -> tuple[TensorDict, list[int]]:
        """The rows by who works on them: dp_rank d on those from ends[d] to ends[d + 1]."""
        plan = balance([self.cost(length) for length in lengths], self.layout.dp_size)
        return select(batch, list(itertools.chain(*plan))), [0, *itertools.accumulate(map(len, plan))]

    def _plan_moves(self, batch: TensorDict) -> tuple[Packed, np.ndarray, list[int]]:
        """For `_hand_over`; from then on each row is held by the first of those that work on it."""
        batch, ends = self._arrange(batch, batch["length"].tolist())
        holders = HELD.holders[batch["held"]]
        leading = torch.tensor([ranks[0] for ranks in self.ranks])
        HELD.holders[batch["held"]] = leading.repeat_interleave(torch.tensor(ends).diff())
        return pack(batch.exclude("length")), holders.numpy(), ends

    def _hand_over(self, packed: Packed, holders: np.ndarray, ends: list[int], what: str) -> TensorDict:
        """This rank's rows of those packed, which lie as `_arrange` left them, from the ranks that hold them."""
        me, numbers = dist.get_rank(), packed["held"][0]
        mine = slice(*ends[self.layout.dp_rank :][:2])
        parts: dict[int, Any] = {}
        for d in np.unique(np.searchsorted(ends, np.flatnonzero(holders == me), side="right") - 1):
            there = slice(*ends[d:][:2])
            leaving = numbers[there][holders[there] == me].tolist()
            parts |= dict.fromkeys((rank for rank in self.ranks[d] if rank != me), pack(HELD.take(leaving)))
            if d != self.layout.dp_rank:
                for number in leaving:
                    del HELD.rows[number]
        for part in _exchange(parts, what):
            rows = unpack(part)
            HELD.put(rows["held"].tolist(), rows)
        rows = HELD.take(numbers[mine].tolist())
        return rows.update(unpack({name: [column[mine] for column in columns] for name, columns in packed.items()}))

    def fetch(self, batch: TensorDict | None, what: str) -> TensorDict | None:
        """The controller's batch with what ranks hold of its rows, as if it had never been elsewhere; else None."""
        if len(self.places) == 1:
            return batch
        held = batch is not None and "held" in batch
        where = self.share((batch["held"].numpy(), HELD.holders[batch["held"]].numpy()) if held else None, what)
        if where is None:
            return batch
        numbers, holders = where
        mine = numbers[holders == dist.get_rank()].tolist()
        parts = _exchange({CONTROLLER: pack(HELD.take(mine))} if mine else {}, what)
        if batch is None:
            return None
        rows = concatenate([unpack(part) for part in parts])
        rows = select(rows, rows["held"].argsort()[batch["held"].argsort().argsort()].tolist())
        return batch.copy().update(rows).exclude("held")

    def gather(self, result: TensorDict, rows: TensorDict, what: str) -> TensorDict | None:
        """On the controller the `result` of all data-parallel ranks in the order of their `rows`, elsewhere None.

        None for rows that are held as well: what is found for them is held with them.
        """
        if len(self.places) == 1:
            return result
        if "held" in rows:
            HELD.put(rows["held"].tolist(), result)
            return None
        packed = self.collect(pack(result.copy().set("row", rows["row"])), what)
        if packed is None:
            return None
        result = concatenate([unpack(rows) for rows in packed])
        return select(result, result["row"].argsort().tolist()).exclude("row")

    def share(self, value: Any, what: str) -> Any:
        """The controller's `value` on every rank; raises RuntimeError as `scatter` does."""
        try:
            return from_controller(value)  # which travels along a tree: the controller sends it to a few ranks
        except RuntimeError as error:
            raise RuntimeError(f"Rank {dist.get_rank()} waited for {what} from the controller: {error}") from error

    def collect(self, value: Any, what: str) -> list[Any] | None:
        """On the controller the values of all ranks whose tp_rank is 0, its own first, elsewhere None."""
        if not is_controller():
            if self.layout.tp_rank == 0:
                _send(value, CONTROLLER)
            return None
        others = [rank for rank, (_, tp_rank) in enumerate(self.places) if tp_rank == 0 and rank != CONTROLLER]
        return [value, *(_wait_for(rank, f"rank {rank} to finish {what}") for rank in others)]


class Worker:
    """A role in one process. `group` says where this process stands among those of the same role."""

    def __init__(self, layout: TrainingLayout | InferenceLayout, cost: Callable[[int], float] = float) -> None:
        self.layout = layout
        self.group = WorkerGroup(layout, cost)


def on_controller(work: Callable[[], Any]) -> Any:
    """What `work` returns on the controller, and None elsewhere. A ConfigError is raised everywhere."""
    result, refusal = None, [None]
    if is_controller():
        try:
            result = work()
        except ConfigError as error:
            refusal = [error]
        except OSError as error:
            if not error.filename:
                raise
            refusal = [unusable(error)]
    dist.broadcast_object_list(refusal, CONTROLLER)
    if refusal[0] is not None:
        raise refusal[0]
    return result


def from_controller(value: Any) -> Any:
    """The controller's `value`, on every rank."""
    shared = [value]
    dist.broadcast_object_list(shared, CONTROLLER)
    return shared[0]


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Whether the `flag` of any rank is set, the same on every rank."""
    flags = torch.tensor(int(flag))
    dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    return bool(flags)


def dispatched(*fields: str) -> Callable:
    """Mark a Worker method as run by all processes on rows of the controller's batch.

    `fields` are the fields that travel to the workers (those of them that the batch has). The method gets its rows
    as a TensorDict. What it returns reaches the loop on the controller: the batch with the fields of a TensorDict, in
    the order of the rows, and None elsewhere; anything else (already reduced over all ranks) is handed through.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def run(self: Worker, batch: TensorDict | None, *args: Any, **kwargs: Any) -> Any:
            what = f"{type(self).__name__}.{method.__name__}"
            rows = self.group.scatter(batch, fields, what)
            result = method(self, rows.exclude("row", "held"), *args, **kwargs)
            if not isinstance(result, TensorDict):
                return result
            found = self.group.gather(result, rows, what)
            return batch if found is None else batch.copy().update(found)

        return run

    return decorate


def _send(value: Any, rank: int) -> None:
    payload = torch.frombuffer(bytearray(pickle.dumps(value, protocol=5)), dtype=torch.uint8)
    dist.send(torch.tensor(len(payload)), rank)
    dist.send(payload, rank)


def _wait_for(rank: int, what: str) -> Any:
    length = torch.zeros((), dtype=torch.int64)
    try:
        dist.recv(length, rank)
        payload = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(payload, rank)
    except RuntimeError as error:
        raise RuntimeError(f"Rank {dist.get_rank()} waited for {what}: {error}") from error
    return pickle.loads(payload.numpy())


def _exchange(parts: dict[int, Any], what: str) -> list[Any]:
    """What the ranks have for this one, in their order, given what it has for others, by rank: `parts`."""
    payloads = [pickle.dumps(parts[r], protocol=5) if r in parts else b"" for r in range(dist.get_world_size())]
    sizes = torch.tensor([len(payload) for payload in payloads])
    coming = torch.zeros_like(sizes)
    sent = torch.from_numpy(np.frombuffer(b"".join(payloads), np.uint8).copy())
    try:
        dist.all_to_all_single(coming, sizes)
        received = torch.empty(int(coming.sum()), dtype=torch.uint8)
        dist.all_to_all_single(received, sent, coming.tolist(), sizes.tolist())
    except RuntimeError as error:
        raise RuntimeError(f"Rank {dist.get_rank()} waited for {what} from the other ranks: {error}") from error
    return [pickle.loads(part.numpy()) for part in received.split(coming.tolist()) if len(part)]


def pack(batch: TensorDict, first: int = 0, last: int | None = None) -> Packed:
    """The rows from `first` up to `last` as arrays: tensors pickle slowly, and nested ones not at all."""
    last, packed = len(batch) if last is None else last, {}
    for name, field in batch.items():
        if field.is_nested:
            ends = field.offsets()[first : last + 1].numpy()
            packed[name] = [field.values()[ends[0] : ends[-1]].numpy(), ends - ends[0]]
        else:
            packed[name] = [field[first:last].numpy()]
    return packed


def unpack(packed: Packed) -> TensorDict:
    # A copy, since what was received is a view of memory that cannot be written.
    fields = {name: [torch.from_numpy(array.copy()) for array in arrays] for name, arrays in packed.items()}
    nested = torch.nested.nested_tensor_from_jagged
    return make_batch({name: nested(*ts) if len(ts) > 1 else ts[0] for name, ts in fields.items()})
