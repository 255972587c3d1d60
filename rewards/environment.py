"""What the environment of a conversation gave: the sum of its steps' rewards, or its get_reward()."""

from rewards.registry import register


@register(
    "environment",
    examples=[
        ("4", {"environment": {"reward": 0.5, "error": None}}, 0.5),
        ("4", {"environment": {"reward": None, "error": None}}, None),
    ],
)
def environment(completion: str, row: dict) -> float | None:
    """None where it gives no reward; raises RuntimeError where it failed, so that this counts as not graded."""
    outcome = row["environment"]
    if outcome["error"]:
        raise RuntimeError(outcome["error"])
    return outcome["reward"]
