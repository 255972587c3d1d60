"""Run by conftest.py under torchrun on four processes: what needs peers, without any model.

    torchrun --nproc-per-node 4 collective_probe.py OUT

leaves OUT/NAME-RANK.pt for each of the functions in `main`.
"""

import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from grpo.batch import jagged, lengths_of, make_batch, select, with_values
from workers.dispatch import HELD, Worker, dispatched
from workers.parallel.gather import Gatherer
from workers.parallel.logprobs import Head, head_logprobs, head_loss
from workers.parallel.mesh import Counters, join, make_training_layout, pick_device
from workers.rollout import WorkStealing

FIELDS = ("tokens", "response_mask", "old_logprobs", "exact", "group", "rewards", "precise", "truncated")
PATIENCE = 3.0


def head_problem(count: int = 37, hidden: int = 16, vocab: int = 48, seed: int = 0) -> dict[str, torch.Tensor]:
    """Hidden states, a head, targets all over the vocabulary, and a random weight of every result."""
    random = torch.Generator().manual_seed(seed)
    given = {"hidden": torch.randn(count, hidden, generator=random)}
    given["weight"] = 0.3 * torch.randn(vocab, hidden, generator=random)
    given["targets"] = torch.randint(0, vocab, (count,), generator=random)
    return given | {name: torch.randn(count, generator=random) for name in ("of_logprobs", "of_entropy")}


def every_dtype() -> TensorDict:
    """Eleven rows with jagged and dense fields of every type; odd numbers of bytes lie before each wide field."""
    random = torch.Generator().manual_seed(3)
    lengths = [5, 1, 3, 8, 2, 7, 1, 4, 9, 6, 3]
    fields = {
        "truncated": torch.rand(11, generator=random) < 0.5,
        "precise": torch.rand(11, generator=random, dtype=torch.float64),
        "response_mask": jagged([torch.rand(n, generator=random) < 0.5 for n in lengths]),
        "tokens": jagged([torch.randint(-(2**62), 2**62, (n,), generator=random) for n in lengths]),
        "group": torch.arange(11) + 2**40,
        "old_logprobs": jagged([torch.randn(n, generator=random) for n in lengths]),
        "rewards": torch.randn(11, generator=random),
        "exact": jagged([torch.randn(n, generator=random, dtype=torch.float64) for n in lengths]),
        "left_here": torch.arange(11),
    }
    return make_batch(fields)


class Echo(Worker):
    """Answers with what it was given."""

    @dispatched(*FIELDS)
    def back(self, batch):
        self.given = batch
        return batch

    def some(self, rows):
        """All rows go to every rank, and each leading rank answers with its own, the last one first."""
        self.shared = self.group.share(rows, "the rows of Echo.some")
        mine = list(range(self.layout.dp_rank, len(self.shared), self.layout.dp_size))[::-1]
        return self.group.collect([self.shared[i] for i in mine], "Echo.some")

    @dispatched("tokens")
    def doubled(self, batch):
        return make_batch({"doubled": with_values(batch["tokens"], 2 * batch["tokens"].values())})

    @dispatched("tokens")
    def part(self, batch):
        return {"dp_rank": self.layout.dp_rank, "rows": len(batch)}

    @dispatched("tokens")
    def silent(self, batch, who: int):
        if dist.get_rank() == who:
            time.sleep(1.5 * PATIENCE)
            raise TimeoutError("never answers")
        return batch


def leaves(given: dict, temperature: float, rows: slice, settings: dict) -> tuple[torch.Tensor, Head]:
    """The hidden states, and a head of `rows` of the weight, that gather gradients."""
    weight = given["weight"][rows].clone().requires_grad_()
    head = Head(weight, given["targets"], temperature, rows.start or 0, **settings)
    return given["hidden"].clone().requires_grad_(), head


def plain_head(given: dict, temperature: float, rows: slice = slice(None), **settings) -> dict[str, torch.Tensor]:
    """What head_logprobs answers with `rows` of the head, and the gradients of a weighted sum of its answers."""
    hidden, head = leaves(given, temperature, rows, settings)
    logprobs, entropy = head_logprobs(hidden, head)
    (logprobs @ given["of_logprobs"] + entropy @ given["of_entropy"]).backward()
    answers = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    return answers | {"hidden": hidden.grad, "weight": head.weight.grad}


def head_with_loss_inside(given: dict, temperature: float, rows: slice = slice(None), **settings) -> dict:
    """The same of head_loss, whose sum is scaled as a trainer does."""
    (hidden, head), seen = leaves(given, temperature, rows, settings), []

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, chunk: slice) -> torch.Tensor:
        seen.append((logprobs.detach(), entropy.detach()))
        return logprobs @ given["of_logprobs"][chunk] + entropy @ given["of_entropy"][chunk]

    total = head_loss(hidden, head, loss)
    (total * 3).backward()
    logprobs, entropy = (torch.cat(parts) for parts in zip(*seen, strict=True))
    expected = logprobs @ given["of_logprobs"] + entropy @ given["of_entropy"]
    torch.testing.assert_close(total.detach(), expected, rtol=1e-5, atol=1e-5)
    return {"logprobs": logprobs, "entropy": entropy, "hidden": hidden.grad / 3, "weight": head.weight.grad / 3}


def heads() -> dict[tuple[int, str], dict[str, torch.Tensor]]:
    """The head cut over 2 and over 4 processes: results of this rank, its gradients, and where its slice begins."""
    results, given = {}, head_problem()
    for size in (2, 4):
        group, _ = dist.new_subgroups(size)
        count, place = len(given["weight"]) // size, dist.get_rank() % size
        rows = slice(place * count, (place + 1) * count)
        for name, way in (("plain", plain_head), ("loss inside", head_with_loss_inside)):
            results[size, name] = way(given, 0.7, rows, group=group, chunk_size=8) | {"first": rows.start}
    return results


def transport() -> dict[int, dict]:
    """An echo on four parts, and on two parts of two peers each."""
    results = {}
    for slices in (1, 2):
        worker = Echo(make_training_layout(pick_device("cpu"), 1, slices))
        batch = every_dtype() if dist.get_rank() == 0 else None
        results[slices] = {"once": worker.back(batch), "given": worker.given}
        rows = [{"row": i, "of": "the controller"} for i in range(11)] if batch is not None else None
        results[slices] |= {"some": worker.some(rows), "shared": worker.shared, "part": worker.part(batch)}
    return results


HOLDERS = (3, 1, 1, 2, 1, 3, 2, 2, 1, 3, 3)
"""Which rank holds each row of every_dtype; the controller none."""
SOME_ROWS = (9, 2, 4, 7, 0)


def held() -> dict[int, dict]:
    """Rows whose tokens are with other ranks than the controller: all of them, some of them, all again, and back."""
    results, whole, rank = {}, every_dtype(), dist.get_rank()
    for slices in (1, 2):
        HELD.clear()
        worker, batch = Echo(make_training_layout(pick_device("cpu"), 1, slices)), None
        if rank == 0:
            assert HELD.begin(len(whole)) == 0
            HELD.holders = torch.tensor(HOLDERS)
            batch = whole.exclude(*(name for name, field in whole.items() if field.is_nested))
            batch["length"], batch["held"] = torch.tensor(lengths_of(whole["tokens"])), torch.arange(len(whole))
        elif mine := [row for row, holder in enumerate(HOLDERS) if holder == rank]:
            HELD.put(mine, select(whole, mine))
        results[slices] = {"back": worker.back(batch), "all": worker.given}
        worker.back(select(batch, SOME_ROWS) if batch is not None else None)
        results[slices]["some"] = worker.given
        batch = worker.doubled(batch)
        worker.back(batch)
        results[slices] |= {"again": worker.given, "held": sorted(HELD.rows)}
        results[slices]["fetched"] = worker.group.fetch(batch, "the tokens of the test")
    return results


def gathered() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Parameters whose rows no number of shards divides: as the Gatherer gives them, and as full_tensor does."""
    results = {}
    for slices in (1, 2):
        layout = make_training_layout(pick_device("cpu"), 1, slices)
        torch.manual_seed(0)
        # The last has fewer rows than there are four shards.
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 5), torch.nn.Linear(3, 2))
        if slices > 1:
            plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()}
            parallelize_module(model, layout.tp_mesh, plan)
        fully_shard(model, mesh=layout.fsdp_mesh)
        parameters = dict(model.named_parameters())
        gatherer = Gatherer(parameters, layout, torch.float32, bucket_bytes=100)
        assert len(gatherer.plan) > 2
        for name, tensor in (weight for bucket in gatherer.buckets() for weight in bucket.items()):
            results[f"{slices}/{name}"] = tensor.clone(), parameters[name].detach().full_tensor()
    return results


def stealing() -> list[int]:
    """Which of 60 prompts this rank took, where rank 1 is slow."""
    store, taken = Counters(), []
    dist.barrier()
    for prompt in WorkStealing([list(range(part, 60, 4)) for part in range(4)], dist.get_rank(), store):
        taken.append(prompt)
        time.sleep(0.2 if dist.get_rank() == 1 else 0.01)
    dist.barrier()  # the controller hosts the store
    return taken


def missing() -> list[str]:
    """This rank's errors where first rank 1 does not answer, and then the controller does not send."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = torch.tensor(free.getsockname()[1])
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    # The store of the first group still holds its addresses.
    os.environ |= {"MASTER_PORT": str(int(port)), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    join(pick_device("cpu"), PATIENCE)
    worker = Echo(make_training_layout(pick_device("cpu")))
    batch = every_dtype() if dist.get_rank() == 0 else None
    errors = []
    for silent in (1, 0):
        try:
            if dist.get_rank() == silent == 0:
                time.sleep(PATIENCE)
            else:
                worker.silent(batch, silent)
        except (RuntimeError, TimeoutError) as error:
            errors.append(str(error))
    return errors


def main() -> None:
    out = Path(sys.argv[1])
    join(pick_device("cpu"), 60.0)
    rank = dist.get_rank()
    for look in (heads, transport, held, gathered, stealing, missing):
        torch.save(look(), out / f"{look.__name__}-{rank}.pt")


if __name__ == "__main__":
    main()
