"""Rewards: one file per reward in this folder, found by itself; a registry; a pool of processes that grades.

To add one, drop a .py file into this folder (or list it under rewards.files) that holds

    from rewards import register

    @register("polite", needs=("question",))
    def polite(completion: str, row: dict, *, bonus: float = 1.0) -> float:
        return bonus if "please" in completion else 0.0

This package stands alone: it imports nothing of the trainer and no torch, so that a worker starts fast.
"""

from rewards.pool import Failure, Grade, RewardPool
from rewards.registry import RewardsConfig, get, missing_columns, names, register, validate

__all__ = ["Failure", "Grade", "RewardPool", "RewardsConfig", "get", "missing_columns", "names", "register", "validate"]
