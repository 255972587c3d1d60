"""From rewards to advantages: what a response is worth beside the others of its group."""

import torch
from tensordict import TensorDict

from grpo.batch import lengths_of, with_values


def groups_with_signal(rewards_B: torch.Tensor, group_B: torch.Tensor) -> torch.Tensor:
    """[groups] bool, in ascending order of the group's number: whether its rewards are not all equal."""
    _, group_B = group_B.unique(return_inverse=True)
    count = int(group_B.max()) + 1
    highest_G = rewards_B.new_full((count,), -torch.inf).scatter_reduce_(0, group_B, rewards_B, "amax")
    lowest_G = rewards_B.new_full((count,), torch.inf).scatter_reduce_(0, group_B, rewards_B, "amin")
    return highest_G > lowest_G


def group_advantages(rewards_B: torch.Tensor, group_B: torch.Tensor, scale: bool = True) -> torch.Tensor:
    """(reward - group mean) / group standard deviation, [B] float32 (GRPO, arXiv:2402.03300, section 4.1.2).

    A group whose rewards are all equal has no signal: its advantages are exactly 0. Without `scale` the
    mean alone is taken off (Dr. GRPO, arXiv:2503.20783). The deviation is that of a sample (n - 1).
    """
    _, group_B = group_B.unique(return_inverse=True)
    count_G = torch.bincount(group_B).float()
    rewards_B = rewards_B.double()
    mean_G = torch.zeros_like(count_G, dtype=torch.double).index_add_(0, group_B, rewards_B) / count_G
    centred_B = rewards_B - mean_G[group_B]
    signal_B = groups_with_signal(rewards_B, group_B)[group_B]
    if scale:
        variance_G = torch.zeros_like(mean_G).index_add_(0, group_B, centred_B**2) / (count_G - 1).clamp(min=1)
        centred_B = centred_B / (variance_G.sqrt()[group_B] + 1e-6)
    return centred_B.where(signal_B, 0.0).float()


def compute_advantages(batch: TensorDict | None, scale: bool = True) -> TensorDict | None:
    """Add the field `advantages` [B, *]: the group advantage of a sample at each token it sampled."""
    if batch is None:
        return None
    advantages_B = group_advantages(batch["rewards"], batch["group"], scale)
    mask = batch["response_mask"]
    spread = advantages_B.repeat_interleave(torch.tensor(lengths_of(mask)))
    batch["advantages"] = with_values(mask, spread * mask.values())
    return batch
