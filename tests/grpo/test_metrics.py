"""Metrics: what their types make of the pieces of an update, and of the updates of a step."""

import pytest
import torch

from grpo.metrics import Count, Line, Max, Mean, Sum, flat, merge, over_updates, read


def metrics_of(x, y):
    return {"sum": Sum(x.sum()), "mean": Mean(x.sum()), "most": Max.of(y.abs()), "line": Line.of(x, y)}


def test_the_pieces_of_an_update_make_what_the_whole_makes():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(200, generator=random, dtype=torch.float64)
    y = 0.3 * x + 0.1 * torch.randn(200, generator=random, dtype=torch.float64) + 2
    metrics = {}
    for piece in torch.arange(200).tensor_split([0, 7, 7, 150]):  # some are empty
        merge(metrics, metrics_of(x[piece], y[piece]))
    added, largest = (flat(metrics, kind).tolist() for kind in (False, True))
    assert (len(added), len(largest)) == (7, 1)
    found = over_updates([read(metrics, added, largest, tokens=200)])
    slope = torch.linalg.lstsq(torch.stack([torch.ones_like(x), x], 1), y[:, None]).solution[1]
    assert found == pytest.approx(
        {
            "sum": float(x.sum()),
            "mean": float(x.mean()),
            "most": float(y.abs().max()),
            "line_correlation": float(torch.corrcoef(torch.stack([x, y]))[0, 1]),
            "line_slope": float(slope),
        }
    )


def test_a_gap_that_is_the_same_everywhere_follows_nothing():
    metrics = {"line": Line.of(torch.linspace(-3, 0, 9), torch.full((9,), 0.5))}
    found = over_updates([read(metrics, flat(metrics, False).tolist(), [], tokens=9)])
    assert found == pytest.approx({"line_correlation": 0, "line_slope": 0}, abs=1e-6)


def test_a_step_has_the_mean_of_its_updates_the_largest_maximum_and_all_that_was_counted():
    updates = [
        {"sum": Sum(1.0), "mean": Mean(2.0), "most": Max(5.0), "count": Count(1), "once": Mean(7.0)},
        {"sum": Sum(2.0), "mean": Mean(6.0), "most": Max(3.0), "count": Count(1)},
    ]
    assert over_updates(updates) == {"sum": 1.5, "mean": 4.0, "most": 5.0, "count": 2, "once": 7.0}
