"""An environment for `--conversations` of soak.py: no conversation goes on before all have begun."""

import asyncio
import itertools

from environments import register

BEGUN = itertools.count(1)  # one step of it cannot be cut in two by another thread


@register("together")
class Together:
    """Adds up the numbers of a turn. at_once: conversations that the process has at once, in each step anew."""

    begun = 0

    def __init__(self, at_once: int, turns: int = 4) -> None:
        self.at_once, self.turns = at_once, turns

    def reset(self, row: dict) -> None:
        number = next(BEGUN)
        Together.begun, self.all = max(Together.begun, number), -(-number // self.at_once) * self.at_once

    async def step(self, text: str) -> tuple[str, float, bool]:
        while Together.begun < self.all:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)
        self.turns -= 1
        numbers = [int(word) for word in text.split() if word.isdigit()]
        return f"{sum(numbers) % 100} +", sum(n % 2 == 0 for n in numbers) / 10, self.turns == 0
