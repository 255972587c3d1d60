"""Dynamic sampling: groups whose rewards are all equal are replaced by further prompts (DAPO, arXiv:2503.14476)."""

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from grpo.advantages import groups_with_signal
from grpo.batch import concatenate, select


def prompts_missing(rounds: Sequence[TensorDict], wanted: int) -> int:
    """How many further prompts should give the groups with signal that `rounds` lack of `wanted`; 0 where none do."""
    signal = torch.cat([groups_with_signal(batch["rewards"], batch["group"]) for batch in rounds])
    found = int(signal.sum())
    return min(wanted, math.ceil((wanted - found) * len(signal) / max(found, 1))) if found < wanted else 0


def join_rounds(rounds: Sequence[TensorDict]) -> TensorDict:
    """The rows of all rounds, whose groups get numbers of their own."""
    first = 0
    for batch in rounds:
        batch["group"] = batch["group"] + first
        first = int(batch["group"].max()) + 1
    return concatenate(rounds) if len(rounds) > 1 else rounds[0]


def keep_groups(batch: TensorDict, count: int) -> TensorDict:
    """The rows of `count` groups: the first with signal, and where those are too few the first of the others."""
    groups, group_B = batch["group"].unique(return_inverse=True)
    signal_G = groups_with_signal(batch["rewards"], group_B)
    kept = (~signal_G).int().argsort(stable=True)[:count]
    return select(batch, torch.isin(batch["group"], groups[kept]).nonzero()[:, 0].tolist())
