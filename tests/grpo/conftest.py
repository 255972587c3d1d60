"""What the tests of settings share."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def yaml(tmp_path) -> Callable[[str], Path]:
    """A function that writes a text into a file of settings and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "settings.yaml"
        path.write_text(text)
        return path

    return write
