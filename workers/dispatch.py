"""How a batch gets from the controller to the workers and back: scatter, run, gather.

Every process runs the same loop. On the controller (rank 0) a batch is the global TensorDict, elsewhere it is
None. A `Worker` method marked `@dispatched` splits the rows of the batch over the data-parallel ranks, hands the
same rows to every tensor-parallel peer, runs, and puts the results back together in the order of the rows.
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

from grpo.batch import concatenate, lengths_of, make_batch, select
from grpo.config import ConfigError, unusable
from grpo.packing import balance
from workers.parallel.mesh import InferenceLayout, TrainingLayout, is_controller

CONTROLLER = 0


class WorkerGroup:
    """All processes of one role, and how rows, balanced by their `cost` (of so many tokens), travel between them."""

    def __init__(self, layout: TrainingLayout | InferenceLayout, cost: Callable[[int], float] = float) -> None:
        self.layout, self.cost = layout, cost
        mine = (layout.dp_rank, layout.tp_rank)
        self.places: list[tuple[int, int]] = [mine] * dist.get_world_size()  # (dp_rank, tp_rank) of every rank
        if dist.get_world_size() > 1:
            dist.all_gather_object(self.places, mine)

    def scatter(self, batch: TensorDict | None, fields: Sequence[str], what: str) -> TensorDict:
        """This rank's rows: the `fields`, and their numbers `row`. RuntimeError naming `what` at a timeout."""
        if not is_controller():
            return _unpack(_wait_for(CONTROLLER, f"its rows of {what} from the controller"))
        batch = batch.select(*fields, strict=False)
        batch["row"] = torch.arange(len(batch))
        if len(self.places) == 1:
            return batch
        plan = balance([self.cost(length) for length in lengths_of(batch["tokens"])], self.layout.dp_size)
        batch = select(batch, list(itertools.chain.from_iterable(plan)))
        ends = itertools.accumulate(map(len, plan), initial=0)
        shares = [_pack(batch, *place) for place in itertools.pairwise(ends)]
        for rank, (dp_rank, _) in enumerate(self.places):
            if rank != CONTROLLER:
                _send(shares[dp_rank], rank)
        return _unpack(shares[self.layout.dp_rank])

    def gather(self, result: TensorDict, what: str) -> TensorDict | None:
        """On the controller the rows of all data-parallel ranks in the order of their field `row`, elsewhere None."""
        if len(self.places) > 1:
            packed = self.collect(_pack(result), what)
            if packed is None:
                return None
            result = concatenate([_unpack(rows) for rows in packed])
            result = select(result, result["row"].argsort().tolist())
        return result.exclude("row")

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
    as a TensorDict. What it returns reaches the loop on the controller: a TensorDict is gathered in the order of the
    rows and is None elsewhere, anything else (already reduced over all ranks) is handed through.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def run(self: Worker, batch: TensorDict | None, *args: Any, **kwargs: Any) -> Any:
            what = f"{type(self).__name__}.{method.__name__}"
            rows = self.group.scatter(batch, fields, what)
            numbers = rows.pop("row")
            result = method(self, rows, *args, **kwargs)
            if not isinstance(result, TensorDict):
                return result
            return self.group.gather(result.copy().set("row", numbers), what)

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


def _pack(batch: TensorDict, first: int = 0, last: int | None = None) -> dict[str, list[np.ndarray]]:
    """The rows from `first` up to `last` as arrays: tensors pickle slowly, and nested ones not at all."""
    last, packed = len(batch) if last is None else last, {}
    for name, field in batch.items():
        if field.is_nested:
            ends = field.offsets()[first : last + 1].numpy()
            packed[name] = [field.values()[ends[0] : ends[-1]].numpy(), ends - ends[0]]
        else:
            packed[name] = [field[first:last].numpy()]
    return packed


def _unpack(packed: dict[str, list[np.ndarray]]) -> TensorDict:
    # A copy, since what was received is a view of memory that cannot be written.
    fields = {name: [torch.from_numpy(array.copy()) for array in arrays] for name, arrays in packed.items()}
    nested = torch.nested.nested_tensor_from_jagged
    return make_batch({name: nested(*ts) if len(ts) > 1 else ts[0] for name, ts in fields.items()})
