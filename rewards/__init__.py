"""Rewards: one file per reward in this folder, found by itself; a registry; a pool of processes that grades.

To add one, drop a .py file into this folder (or list it under rewards.files) that holds

    from rewards import register

    @register("polite", examples=[("please", {}, 1.0), ("no", {}, 0.0)])
    def polite(completion: str, row: dict, *, bonus: float = 1.0) -> float:
        return bonus if "please" in completion else 0.0

`register` tells the other forms: many completions at once, a whole group, async, TRL's; None where a reward does not
apply; a limit of its own; and examples, which `python -m trainer rewards test` runs.

This package stands alone: it imports nothing of the trainer and no torch, so that a worker starts fast.
"""

from rewards.pool import Failure, Grade, Group, RewardPool
from rewards.registry import RewardsConfig, get, missing_columns, names, register, validate
from rewards.testing import check_examples

__all__ = ["Failure", "Grade", "Group", "RewardPool", "RewardsConfig", "check_examples", "get", "missing_columns"]
__all__ += ["names", "register", "validate"]
