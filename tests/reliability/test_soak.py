"""A short soak: `python -m tests.reliability.soak` does 1,000 steps."""

import pytest

from tests.reliability.soak import grown, soak, table

pytestmark = pytest.mark.reliability


def test_nothing_grows_from_step_to_step(tmp_path):
    found = soak(tmp_path, steps=150, engine="torch", first=50)
    assert [row["step"] for row in found] == [50, 100, 150]
    assert found[0]["processes"] == 2
    assert grown(found) == [], table(found)
