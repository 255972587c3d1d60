"""python -m trainer rewards [test]: which rewards there are, and whether they give what their examples say."""

import os
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

import rewards
from grpo.config import ConfigError
from rewards.registry import RewardsConfig, find, load_file
from rewards.testing import run_examples


def report_rewards(names: Sequence[str], files: Sequence[str], test: bool) -> bool:
    """Print the rewards `names` (all, if empty), those of `files` as well; with `test` whether their examples pass.

    Returns False where one fails. Raises ConfigError for a file that cannot be used and for an unknown name.
    """
    try:
        for file in files:
            load_file(file)
        chosen = [find(name) for name in names or rewards.names()]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    able, outcomes, failed = [r.name for r in chosen if test and r.examples and not r.missing_imports()], {}, []
    if able:
        with rewards.RewardPool(RewardsConfig(dict.fromkeys(able, 1.0), files=list(files))) as pool:
            outcomes = run_examples(pool, able)
    where = Column("where", overflow="fold")
    table = Table("reward", "form", where, "examples passed" if test else "examples", box=None)
    for reward in chosen:
        said, missing = f"{len(reward.examples)}" if reward.examples else "none", reward.missing_imports()
        if outcome := outcomes.get(reward.name):
            said = f"{sum(each.passed for each in outcome)} of {said}"
            failed += [f"{reward.name}: {each.said}" for each in outcome if not each.passed][:1]
        said += f", needs {', '.join(missing)}" if missing else ""
        form = f"{'async ' * reward.is_async}{reward.form}{' (group)' * (reward.sees == 'group')}"
        place = f"{min(os.path.relpath(reward.file), str(reward.file), key=len)}:{reward.line}"
        table.add_row(*map(escape, (reward.name, form, place, said)))
    console = Console(soft_wrap=True)
    console.print(table)
    for sentence in failed:
        console.print(escape(sentence), style="red")
    return not failed
