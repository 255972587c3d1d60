"""What tests of rewards share."""

import pytest

import rewards
from rewards import registry


@pytest.fixture
def registered():
    """The registry, put back afterwards as it was."""
    rewards.names()
    before = dict(registry.REGISTRY)
    yield registry.REGISTRY
    registry.REGISTRY.clear()
    registry.REGISTRY.update(before)
