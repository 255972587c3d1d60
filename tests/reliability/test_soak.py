"""A short soak: `python -m tests.reliability.soak` does 1,000 steps."""

import pytest

from tests.reliability.soak import CALM, CONVERSATIONS, WIDER, grown, soak, table
from tests.trainer.conftest import rows_of

pytestmark = pytest.mark.reliability


def test_nothing_grows_from_step_to_step(tmp_path):
    found = soak(tmp_path, steps=150, engine="torch", first=50)
    assert [row["step"] for row in found] == [50, 100, 150]
    assert found[0]["processes"] == 2
    assert grown(found) == [], table(found)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_nothing_is_left_of_a_thousand_conversations_at_once(tmp_path):
    found = soak(tmp_path, steps=8, engine="torch", first=2, every=3, more=CONVERSATIONS, within=CALM)
    for row in rows_of(tmp_path / "run")[1:]:
        assert (row["environment/turns"], row["environment/errors"]) == (4, 0)
    assert found[0]["processes"] == 4
    assert grown(found, WIDER) == [], table(found)
