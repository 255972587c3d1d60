"""Environments: what a policy converses with, one file each in this folder, found by itself; they run in a pool.

To add one, drop a .py file into this folder (or list it under environments.files) that holds one of

    from environments import register

    @register("guess")
    class Guess:  # a text environment: it has a method step
        def reset(self, row: dict) -> str | None: ...
        def step(self, text: str) -> tuple[str, float, bool]: ...  # observation, reward, done

    @register("desk")
    class Desk:  # tools: all its other public methods, which need type hints and a docstring
        def add(self, a: int, b: int) -> int:
            '''Add two numbers.

            Args:
                a: The first.
                b: The second.
            '''
            return a + b

`register` tells the rest. This package stands alone, as rewards does: a process of the pool imports no torch.
"""

from environments.pool import EnvironmentPool, Failed, Session, rehearse
from environments.registry import EnvironmentsConfig, find, register, validate

__all__ = ["EnvironmentPool", "EnvironmentsConfig", "Failed", "Session", "find", "register", "rehearse", "validate"]
