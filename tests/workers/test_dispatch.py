"""Rows to the workers and back: nothing changed, nothing lost, in order; and a missing peer is an error."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from grpo.batch import select, with_values
from grpo.packing import balance
from tests.workers.collective_probe import FIELDS, PATIENCE, SOME_ROWS, Echo, every_dtype
from workers.parallel.mesh import Counters


def assert_same(batch, expected):
    assert set(batch.keys()) == set(expected.keys())
    assert len(batch) == len(expected)
    for name, field in expected.items():
        assert batch[name].dtype == field.dtype, name
        assert batch[name].is_nested == field.is_nested, name
        for ours, theirs in zip(batch[name].unbind(), field.unbind(), strict=True):
            assert torch.equal(ours, theirs), name


@pytest.fixture(scope="session")
def sent():
    """What travels of the batch."""
    batch = every_dtype()
    del batch["left_here"]
    assert set(batch.keys()) == set(FIELDS)
    return batch


@pytest.mark.parametrize("slices", [1, 2])
def test_every_type_comes_back_bit_for_bit_in_order_on_the_controller_alone(slices, four_processes, sent):
    first, *others = (results[slices]["once"] for results in four_processes["transport"])
    assert_same(first.exclude("left_here"), sent)
    assert others == [None] * 3


@pytest.mark.parametrize("slices", [1, 2])
def test_what_is_shared_reaches_every_rank_and_what_leading_ranks_answer_the_controller_alone(slices, four_processes):
    first, *others = (results[slices] for results in four_processes["transport"])
    rows = [{"row": i, "of": "the controller"} for i in range(11)]
    assert first["some"] == [rows[dp_rank :: 4 // slices][::-1] for dp_rank in range(4 // slices)]
    assert [rank["some"] for rank in others] == [None] * 3
    assert [rank["shared"] for rank in (first, *others)] == [rows] * 4


def test_what_a_slow_engine_has_not_begun_is_taken_by_the_others_and_by_one_alone(four_processes):
    taken = four_processes["stealing"]
    assert sorted(prompt for rank in taken for prompt in rank) == list(range(60))
    assert taken[1][0] == 1
    assert len(taken[1]) < 10
    # Each begins with its own share, in order, and takes nothing of it once it has turned to that of others.
    for rank, prompts in enumerate(taken):
        own = [prompt % 4 == rank for prompt in prompts]
        assert prompts[0] == rank
        assert own == sorted(own, reverse=True)
        assert prompts[: sum(own)] == sorted(prompts[: sum(own)])


@pytest.mark.parametrize("slices", [1, 2])
def test_ranks_are_token_balanced_and_tensor_parallel_peers_get_the_same_rows(slices, four_processes, sent):
    plan = balance(sent["tokens"].offsets().diff().tolist(), 4 // slices)
    for rank, results in enumerate(four_processes["transport"]):
        assert_same(results[slices]["given"], select(sent, plan[rank // slices]))
        assert results[slices]["part"] == {"dp_rank": rank // slices, "rows": len(plan[rank // slices])}


@pytest.mark.parametrize("slices", [1, 2])
def test_rows_that_ranks_hold_reach_those_that_work_on_them_and_come_back_bit_for_bit(slices, four_processes, sent):
    lengths = sent["tokens"].offsets().diff()
    plan = balance(lengths.tolist(), 4 // slices)
    some = [[SOME_ROWS[i] for i in part] for part in balance(lengths[list(SOME_ROWS)].tolist(), 4 // slices)]
    for rank, results in enumerate(results[slices] for results in four_processes["held"]):
        for name, rows in (("all", plan), ("some", some), ("again", plan)):
            assert_same(results[name], select(sent, rows[rank // slices]))
        assert set(plan[rank // slices]) <= set(results["held"])
        if rank:
            assert results["back"] is results["fetched"] is None
        else:
            assert not any(field.is_nested for field in results["back"].values())
            doubled = with_values(sent["tokens"], 2 * sent["tokens"].values())
            assert_same(results["fetched"].select(*FIELDS, "doubled"), sent.copy().set("doubled", doubled))
    if slices == 1:  # no row stays where it is not worked on
        assert sorted(row for results in four_processes["held"] for row in results[1]["held"]) == list(range(len(sent)))


def test_the_controller_names_the_method_and_the_rank_that_did_not_finish(four_processes):
    (error,) = four_processes["missing"][0]
    assert error.startswith("Rank 0 waited for rank 1 to finish Echo.silent")
    # It waited as long as the process group was told to, and no longer.
    assert f"{1000 * PATIENCE:.0f}ms" in error


def test_every_rank_names_the_method_whose_rows_did_not_come(four_processes):
    for rank in (1, 2, 3):
        error = four_processes["missing"][rank][-1]
        assert error.startswith(f"Rank {rank} waited for its rows of Echo.silent from the controller")


def test_counters_that_do_not_answer_are_waited_for_no_longer_than_the_store_allows(layout, monkeypatch):
    counters, cut = Counters(), threading.Event()
    assert [counters.add("here", amount) for amount in (1, 2)] == [1, 3]
    monkeypatch.setattr(counters, "store", SimpleNamespace(timeout=timedelta(seconds=0.2), add=lambda *_: cut.wait()))
    with pytest.raises(RuntimeError, match=r"Timed out waiting 0:00:00\.2"):
        counters.add("there", 1)
    cut.set()


def test_one_process_works_on_the_batch_itself(layout, sent):
    worker = Echo(layout)
    assert_same(worker.back(every_dtype()).exclude("left_here"), sent)
    assert set(worker.given.keys()) == set(FIELDS)
    assert worker.given["tokens"].values().dtype == torch.int64
    assert worker.part(every_dtype()) == {"dp_rank": 0, "rows": 11}


def test_a_field_that_the_batch_lacks_is_left_out(layout):
    batch = every_dtype()
    del batch["rewards"]
    worker = Echo(layout)
    worker.back(batch)
    assert set(worker.given.keys()) == set(FIELDS) - {"rewards"}
