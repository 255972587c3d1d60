"""The length reward: a punishment that rises as a completion nears the longest wanted, in characters or words.

A reward sees text, not tokens. What keeps responses within rollout.max_response_tokens is algorithm.overlong_share, the
same slope in tokens (DAPO, https://arxiv.org/abs/2503.14476, equation 13). This is for a length that readers want.
"""

from rewards.registry import register

EXAMPLES = [("one two three", {}, 0.0), ("one two three", {}, -0.5, {"limit": 4, "buffer": 2, "unit": "words"})]


def check(*, limit: int = 2000, buffer: int = 500, unit: str = "characters") -> None:
    if unit not in ("characters", "words") or not 0 < buffer <= limit:
        ranges = "unit is characters or words, and buffer above 0 and at most limit"
        raise ValueError(f"In rewards.options.length, {ranges}, not {unit!r}, {buffer} and {limit}.")


@register("length", check=check, examples=EXAMPLES)
def length(completion: str, row: dict, *, limit: int = 2000, buffer: int = 500, unit: str = "characters") -> float:
    """0.0 up to `limit` - `buffer` characters (or words), falling evenly to -1.0 at `limit` and staying there."""
    size = len(completion if unit == "characters" else completion.split())
    return -min(1.0, max(0, size - (limit - buffer)) / buffer)
