"""The environment `guess`: find a number, told after each guess on which side of it the number lies."""

from environments.registry import register


@register("guess")
class Guess:
    """Wants the row's column `number`. environments.max_turns is how often the policy may guess.

    mute: say the same to every wrong guess, which shows how often a policy wins that cannot learn anything from it.
    """

    def __init__(self, mute: bool = False) -> None:
        self.mute = mute

    def reset(self, row: dict) -> None:
        self.number = row["number"]

    def step(self, text: str) -> tuple[str, float, bool]:
        """yes to a turn whose last word is the number, + to one that is too low, - too high, no to what is no number.

        The reward is 1 for the number, which ends the conversation.
        """
        try:
            guess = int(text.split()[-1])
        except (IndexError, ValueError):
            return "no", 0.0, False
        if guess == self.number:
            return "yes", 1.0, True
        return "+" if guess < self.number or self.mute else "-", 0.0, False
