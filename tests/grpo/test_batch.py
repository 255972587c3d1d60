"""The batch: jagged fields, choosing and joining rows, and how trajectories become one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo.batch import Trajectory, batch_of, concatenate, jagged, lengths_of, make_batch, select, with_values

ROWS = [[5, 6, 7], [], [8], [9, 10]]


def rows_of(field):
    return [row.tolist() for row in field.unbind()]


def make(rows):
    """A batch whose fields all tell from which row they are."""
    return make_batch(
        {
            "tokens": jagged([torch.tensor(row, dtype=torch.int64) for row in rows]),
            "response_mask": jagged(
                [torch.tensor([token % 2 == 0 for token in row], dtype=torch.bool) for row in rows]
            ),
            "old_logprobs": jagged([-torch.tensor(row, dtype=torch.float32) for row in rows]),
            "group": torch.arange(len(rows)),
            "rewards": torch.tensor([float(sum(row)) for row in rows]),
        }
    )


def content(batch):
    """Every field as plain lists, with its type."""
    return {name: (field.dtype, rows_of(field) if field.is_nested else field.tolist()) for name, field in batch.items()}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float64, torch.bool])
def test_jagged_keeps_rows_and_type_empty_rows_included(dtype):
    rows = [torch.tensor(row, dtype=dtype) for row in ROWS]
    field = jagged(rows)
    assert field.dtype == dtype
    assert lengths_of(field) == [3, 0, 1, 2]
    assert all(torch.equal(ours, row) for ours, row in zip(field.unbind(), rows, strict=True))


def test_with_values_keeps_the_row_lengths():
    field = with_values(jagged([torch.tensor(row) for row in ROWS]), torch.arange(6) * 0.5)
    assert rows_of(field) == [[0.0, 0.5, 1.0], [], [1.5], [2.0, 2.5]]


def test_a_batch_has_one_row_a_sample():
    batch = make(ROWS)
    assert batch.batch_size == torch.Size([4])
    assert len(batch) == 4


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=6), st.data())
def test_select_takes_rows_in_the_given_order_repeats_included(rows, data):
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=8))
    batch = make(rows)
    taken = select(batch, chosen)
    assert content(taken) == {
        name: (dtype, [values[i] for i in chosen]) for name, (dtype, values) in content(batch).items()
    }


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=3), min_size=1, max_size=4))
def test_concatenate_puts_the_rows_one_after_the_other(parts):
    batches = [make(rows) for rows in parts]
    joined = concatenate(batches)
    assert len(joined) == sum(map(len, parts))
    assert content(joined) == {
        name: (dtype, [row for batch in batches for row in content(batch)[name][1]])
        for name, (dtype, _) in content(batches[0]).items()
    }


def test_a_cut_batch_is_put_together_again():
    batch = make(ROWS)
    joined = concatenate([select(batch, [3, 1]), select(batch, [0, 2])])
    assert content(select(joined, [2, 1, 3, 0])) == content(batch)


def test_selecting_leaves_the_batch_as_it_was():
    batch = make(ROWS)
    before = content(batch)
    taken = select(batch, [0, 0, 2])
    taken["old_logprobs"].values().zero_()
    taken["rewards"].zero_()
    assert content(batch) == before


def test_trajectories_become_a_batch_with_a_version_for_each_token():
    first, second = Trajectory([5, 6], group=0, finish_reason="length"), Trajectory(np.array([7]), group=1)
    first.add_sampled([8, 9], [-0.5, -1.5], version=3)
    first.add_sampled([1], [-0.25], version=4)
    second.add_sampled([1], [-2.0], version=4)
    first.reward, first.components = 1.5, {"right": 1.0, "short": 0.5}
    second.held_out, second.components, second.failures = True, {"right": 0.0, "short": 0.0}, ["late"]
    batch = batch_of([first, second])
    jagged_fields = {
        "tokens": [[5, 6, 8, 9, 1], [7, 1]],
        "response_mask": [[False, False, True, True, True], [False, True]],
        "rollout_logprobs": [[0, 0, -0.5, -1.5, -0.25], [0, -2.0]],
        "versions": [[-1, -1, 3, 3, 4], [-1, 4]],
    }
    assert {name: rows_of(batch[name]) for name in jagged_fields} == jagged_fields
    flat = {name: batch[name].tolist() for name in batch.keys() - jagged_fields}
    assert flat == {
        "length": [5, 2],
        "response_length": [3, 1],
        "oldest_version": [3, 4],
        "newest_version": [4, 4],
        "group": [0, 1],
        "held_out": [False, True],
        "truncated": [True, False],
        "failures": [0, 1],
        "rewards": [1.5, 0.0],
        "rewards/right": [1.0, 0.0],
        "rewards/short": [0.5, 0.0],
    }
    assert [batch[name].dtype for name in ("tokens", "rollout_logprobs", "rewards")] == [torch.int64] + [
        torch.float32
    ] * 2
