"""What the policy writes, for its user to read: which completions tell most, and how they are shown."""

import re
from collections.abc import Sequence
from itertools import groupby

from grpo.batch import CUT, Ending, Trajectory

LONGEST = 600
"""Characters that are shown of a text."""


def pick(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The best and the worst completion of the prompt whose rewards differ most; of all prompts, if all have but one.

    The samples of a prompt stand side by side.
    """
    groups = [sorted(group, key=lambda t: -t.reward) for _, group in groupby(trajectories, lambda t: t.group)]
    several = [group for group in groups if len(group) > 1] or [sorted(trajectories, key=lambda t: -t.reward)]
    *others, worst = max(several, key=lambda group: group[0].reward - group[-1].reward)
    return [*others[:1], worst]


def render(step: int, trajectories: Sequence[Trajectory]) -> str:
    """The completions of `trajectories` with their rewards, each prompt once before them, as plain text."""
    lines, prompt = [f"--- step {step}: what the policy writes{' (held out)' * trajectories[0].held_out}"], None
    for trajectory in trajectories:
        if trajectory.prompt != prompt:
            prompt = trajectory.prompt
            lines += ["prompt:", _readable(prompt)]
        about = f"completion, reward {trajectory.reward:.3f}"
        if len(trajectory.components) > 1:
            shown = {name: "none" if value is None else f"{value:.3f}" for name, value in trajectory.components.items()}
            about += f" ({', '.join(map(' '.join, shown.items()))})"
        if (ending := trajectory.finish_reason) != Ending.STOP:
            about += f", cut ({ending})" if ending in CUT else f" ({ending})"
        said = "\n".join(f"{turn.role}: {turn.content}" for turn in trajectory.turns)
        lines += [f"{about}:", _readable(said or trajectory.response)]
    return "\n".join([*lines, "---"])


def _readable(text: str) -> str:
    """Indented, shortened in the middle, with anything but printable characters and line ends as an escape."""
    if (left_out := len(text) - LONGEST) > 0:
        text = f"{text[: LONGEST // 2]} [... {left_out} characters ...] {text[-LONGEST // 2 :]}"
    text = re.sub(r"\n{4,}", lambda ends: f"\n[... {len(ends[0])} line ends ...]\n", text)
    shown = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return "    " + "".join(shown).replace("\n", "\n    ")
