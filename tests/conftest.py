"""Deselects what this machine cannot run, and says so in pytest's closing line: `gpu` without a CUDA device, `sglang`
where SGLang is not installed (bash tests/run.sh -m sglang installs it for a CPU)."""

from importlib.util import find_spec

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {"gpu"} if not torch.cuda.is_available() else set()
    missing |= {"sglang"} if find_spec("sglang") is None else set()
    out = [item for item in items if any(item.get_closest_marker(name) for name in missing)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
