"""Deselects what this machine cannot run, and says so in pytest's closing line: `gpu` without a CUDA device, `sglang`
where SGLang is not installed (bash tests/run.sh -m sglang installs it for a CPU)."""

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from environments import registry as environments
from rewards import registry as rewards


@pytest.fixture(autouse=True)
def own_names() -> Iterator[None]:
    """What a test's own files register is gone after it: another test's may have rewards of the same names."""
    yield
    temporary, ours = Path(tempfile.gettempdir()), Path(__file__).parents[1]  # which may be in it as well
    for registry in (rewards.REGISTRY, environments.REGISTRY):
        for name, folders in [(name, each.file.parents) for name, each in registry.items()]:
            if temporary in folders and ours not in folders:
                del registry[name]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {"gpu"} if not torch.cuda.is_available() else set()
    missing |= {"sglang"} if find_spec("sglang") is None else set()
    out = [item for item in items if any(item.get_closest_marker(name) for name in missing)]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]
