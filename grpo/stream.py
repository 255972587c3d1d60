"""The order in which prompts are given out: epoch after epoch, in an order that the seed decides and a resume keeps."""

import random
from collections.abc import Sequence

from grpo.config import ConfigError
from grpo.data import Prompt


class PromptStream:
    """Prompts without end: each epoch gives every prompt once, in an order of its own that depends on the seed alone.

    A step at the end of an epoch takes what it lacks from the next one, so it may hold a prompt twice. Raises
    ConfigError, naming the setting `key`, where a step takes more prompts than there are.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        prompts_per_step: int,
        seed: int = 0,
        shuffle: bool = True,
        key: str = "batch.prompts_per_step",
    ):
        if not 1 <= prompts_per_step <= len(prompts):
            raise ConfigError(
                f"{key}={prompts_per_step} does not fit a dataset of {len(prompts)} prompts (data.train); "
                f"set it between 1 and {len(prompts)}."
            )
        self.prompts, self.prompts_per_step, self.seed, self.shuffle = prompts, prompts_per_step, seed, shuffle
        self.given = 0  # prompts in all
        self._order = self._order_of(0)

    def next(self, count: int | None = None) -> list[Prompt]:
        """The next `count` prompts; None stands for `prompts_per_step`."""
        step = []
        for _ in range(self.prompts_per_step if count is None else count):
            step.append(self.prompts[self._order[self.given % len(self.prompts)]])
            self.given += 1
            if self.given % len(self.prompts) == 0:
                self._order = self._order_of(self.given // len(self.prompts))
        return step

    def state_dict(self) -> dict[str, int | bool]:
        """What `load_state_dict` needs to go on with the very next prompt; plain numbers, fit for JSON."""
        return {"given": self.given, "size": len(self.prompts), "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Go on where `state` was taken; raises ConfigError where it belongs to another order of prompts."""
        present = self.state_dict()
        settings = {"size": "data.train has {} prompts", "seed": "seed is {}", "shuffle": "data.shuffle is {}"}
        for name, says in settings.items():
            if state[name] != present[name]:
                raise ConfigError(
                    f"The checkpoint cannot be resumed: {says.format(present[name])} but it was {state[name]} when the "
                    "checkpoint was saved; set it back or start a new run."
                )
        self.given = int(state["given"])
        self._order = self._order_of(self.given // len(self.prompts))

    def _order_of(self, epoch: int) -> list[int]:
        order = list(range(len(self.prompts)))
        if self.shuffle:
            random.Random(f"prompts {self.seed} {epoch}").shuffle(order)
        return order
