"""How a batch gets from the controller to the workers and back: split, repeat, run, collect.

Every process runs the same loop. On the controller (rank 0) a batch is the global TensorDict, elsewhere it is
None. A `Worker` method marked `@dispatched` splits the rows of the batch over the data-parallel parts, hands the
same rows to every tensor-parallel peer, runs, and puts the results back together in the order of the rows.
Tensors travel as raw bytes over gloo; only their names, types and sizes are pickled.
"""

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from grpo.batch import concatenate, lengths_of, make_batch, select
from grpo.config import ConfigError
from grpo.packing import balance
from workers.parallel.mesh import InferenceLayout, TrainingLayout

CONTROLLER = 0


class WorkerGroup:
    """All processes that play one role: which part of a batch each works on, and how rows travel between them.

    cost: of a row of so many tokens, which is what is balanced over the parts.
    """

    def __init__(self, layout: TrainingLayout | InferenceLayout, cost: Callable[[int], float]) -> None:
        self.layout, self.cost = layout, cost
        self.rank = dist.get_rank()
        mine = (layout.dp_rank, layout.tp_rank == 0)
        self.places: list[tuple[int, bool]] = [mine] * dist.get_world_size()
        if dist.get_world_size() > 1:
            dist.all_gather_object(self.places, mine)

    def scatter(self, batch: TensorDict | None, fields: Sequence[str], what: str) -> tuple[TensorDict, list[list[int]]]:
        """This rank's rows of the controller's batch, and (on the controller) which rows each part got.

        Rows are balanced by their costs. Raises RuntimeError naming `what` where the controller does not send
        within the process group's timeout.
        """
        plan: list[list[int]] = []
        if self.rank == CONTROLLER:
            batch = TensorDict({name: batch[name] for name in fields if name in batch}, batch_size=batch.batch_size)
            plan = balance([self.cost(length) for length in lengths_of(batch["tokens"])], self.layout.dp_size)
            if self.layout.dp_size == 1 and len(self.places) == 1:
                return batch, plan
            shards = [select(batch, rows) for rows in plan]
            for rank, (part, _) in enumerate(self.places):
                if rank != CONTROLLER:
                    _send(shards[part], rank)
            return shards[self.places[CONTROLLER][0]], plan
        return _wait_for(CONTROLLER, f"its rows of {what} from the controller"), plan

    def share(self, batch: TensorDict | None, fields: Sequence[str], what: str) -> TensorDict:
        """The `fields` of all rows of the controller's batch, on every rank; raises RuntimeError as `scatter` does."""
        if self.rank != CONTROLLER:
            return _wait_for(CONTROLLER, f"the rows of {what} from the controller")
        batch = make_batch({name: batch[name] for name in fields})
        for rank in range(1, len(self.places)):
            _send(batch, rank)
        return batch

    def gather(self, result: TensorDict | None, what: str) -> TensorDict | None:
        """On the controller the results of all leading ranks in the order of their field `row`, elsewhere None."""
        if self.rank != CONTROLLER:
            if self.layout.tp_rank == 0:
                _send(result, CONTROLLER)
            return None
        leaders = [rank for rank, (_, leads) in enumerate(self.places) if leads and rank != CONTROLLER]
        results = [result, *(_wait_for(rank, f"rank {rank} to finish {what}") for rank in leaders)]
        whole = result
        if leaders:
            whole = concatenate(results)
            whole = select(whole, whole["row"].argsort(stable=True).tolist())
        del whole["row"]
        return whole

    def collect(self, result: TensorDict, plan: list[list[int]], what: str) -> TensorDict | None:
        """On the controller the results of all parts in the order of the batch's rows, elsewhere None."""
        if self.rank != CONTROLLER:
            if self.layout.tp_rank == 0:
                _send(result, CONTROLLER)
            return None
        if self.layout.dp_size == 1:
            return result
        results = [result] * self.layout.dp_size
        for rank, (part, leads) in enumerate(self.places):
            if leads and rank != CONTROLLER:
                results[part] = _wait_for(rank, f"rank {rank} to finish {what}")
        back = torch.tensor([row for rows in plan for row in rows]).argsort().tolist()
        return select(concatenate(results), back)


class Worker:
    """A role in one process. `group` says where this process stands among those of the same role."""

    def __init__(self, layout: TrainingLayout | InferenceLayout, cost: Callable[[int], float] = float) -> None:
        self.layout = layout
        self.group = WorkerGroup(layout, cost)


def on_controller(work: Callable[[], Any]) -> Any:
    """What `work` returns on the controller, and None elsewhere. A ConfigError it raises is raised everywhere."""
    result, refusal = None, [None]
    if dist.get_rank() == CONTROLLER:
        try:
            result = work()
        except ConfigError as error:
            refusal = [error]
    dist.broadcast_object_list(refusal, CONTROLLER)
    if refusal[0] is not None:
        raise refusal[0]
    return result


def dispatched(*fields: str) -> Callable:
    """Mark a Worker method as run by all processes on parts of the controller's batch.

    `fields` are the fields that travel to the workers (those of them that the batch has). The method gets its rows
    as a TensorDict. What it returns reaches the loop on the controller: a TensorDict is collected in row order and
    is None elsewhere, a dict of numbers (already reduced over all ranks) is handed through.
    """

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def run(self: Worker, batch: TensorDict | None, *args: Any, **kwargs: Any) -> Any:
            what = f"{type(self).__name__}.{method.__name__}"
            rows, plan = self.group.scatter(batch, fields, what)
            result = method(self, rows, *args, **kwargs)
            return self.group.collect(result, plan, what) if isinstance(result, TensorDict) else result

        return run

    return decorate


def _send(batch: TensorDict, rank: int) -> None:
    header, tensors = [], []
    for name, field in batch.items():
        parts = [field.values(), field.offsets()] if field.is_nested else [field]
        header.append((name, [(part.dtype, part.shape) for part in parts]))
        tensors += [part.contiguous().cpu().reshape(-1).view(torch.uint8) for part in parts]
    pickled = torch.frombuffer(bytearray(pickle.dumps((header, [len(t) for t in tensors]))), dtype=torch.uint8)
    payload = torch.cat([pickled, *tensors])
    dist.send(torch.tensor([len(pickled), len(payload)]), rank)
    dist.send(payload, rank)


def _wait_for(rank: int, what: str) -> TensorDict:
    try:
        return _receive(rank)
    except RuntimeError as error:
        raise RuntimeError(f"Rank {dist.get_rank()} waited for {what}: {error}") from error


def _receive(rank: int) -> TensorDict:
    lengths = torch.empty(2, dtype=torch.int64)
    dist.recv(lengths, rank)
    payload = torch.empty(int(lengths[1]), dtype=torch.uint8)
    dist.recv(payload, rank)
    header, sizes = pickle.loads(payload[: int(lengths[0])].numpy().tobytes())
    pieces = iter(payload[int(lengths[0]) :].split(sizes))
    fields = {}
    for name, parts in header:
        # A piece may begin at any byte; a copy is aligned for its own type.
        tensors = [next(pieces).clone().view(dtype).reshape(shape) for dtype, shape in parts]
        fields[name] = tensors[0] if len(tensors) == 1 else torch.nested.nested_tensor_from_jagged(*tensors)
    return make_batch(fields)
