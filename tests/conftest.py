"""Deselects the tests marked `gpu` where torch sees no CUDA device, and says so in pytest's closing line."""

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    out = [item for item in items if item.get_closest_marker("gpu")]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
