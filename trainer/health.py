"""What a run says of itself while it runs: signs that nothing is learned, each told once, with cause and way out."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from tensordict import TensorDict

from grpo.config import ConfigError
from trainer.record import valid_json
from trainer.tracking import Tracker

KEPT = 3  # batches of skipped updates

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Sign:
    """Something bad, told once it has been there for `steps` steps in a row; 0: for actor.skipped_limit of them."""

    label: str  # in the line of each step at which it is there
    bad: Callable[[Metrics], bool]
    steps: int = 1
    says: str = ""  # the sentence, in which {NAME} is a metric's value, with _ for what is no letter
    ends: bool = False  # the run, with the sentence as its error


def _no_signal(m: Metrics) -> bool:
    return m.get("groups/no_signal") == 1 and "teacher/kl" not in m  # nor a teacher to learn from


def _skipped(m: Metrics) -> bool:
    return m.get("update/skipped", 0) > 0


SIGNS = (
    Sign(
        "not graded",
        lambda m: m.get("reward/ungraded") == 1 and _no_signal(m),
        3,
        "No completion could be graded for {steps} steps, so that nothing can be learned: the reward itself fails, as "
        "its first failure says above. Mend it (`python -m trainer rewards test` runs its examples) and start again.",
        ends=True,
    ),
    Sign("update skipped", _skipped, 1, "An update was skipped: its loss or gradient is not finite. See {folder}."),
    Sign(
        "update skipped",
        _skipped,
        0,
        "Updates were skipped in {steps} steps in a row, as loss or gradient was not a finite number, and nothing is "
        "learned any more. Lower actor.learning_rate, or a reward that is far too large, and begin again or go on from "
        "a checkpoint of before; the last such batches are in {folder}.",
        ends=True,
    ),
    Sign(
        "all cut",
        lambda m: m.get("response_length/truncated") == 1,
        3,
        "All responses were cut at their longest length for {steps} steps: the policy does not come to an end. Raise "
        "rollout.max_response_tokens; set rollout.stop for a base model, or data.chat=true for one made to chat.",
    ),
    Sign(
        "no signal",
        _no_signal,
        10,
        "The rewards of every group were all equal for {steps} steps (their mean is {reward_mean:.3g}): nothing can be "
        "learned from them. Look at what the policy writes (tracking.show_every=1) and at its prompts (`python -m "
        "trainer data`). All wrong: easier prompts, a reward for parts of the answer, or demonstrations first (sft); "
        "all right: harder prompts.",
    ),
    Sign(
        "entropy gone",
        lambda m: m.get("entropy", math.inf) < 0.01,
        10,
        "The policy's entropy was below 0.01 for {steps} steps: it writes the same each time and tries nothing new. "
        "Raise algorithm.clip_high or algorithm.entropy_coefficient, or lower actor.learning_rate; if the held-out "
        "accuracy is what you want, it is done.",
    ),
    Sign("gap", lambda m: m.get("rollout/logprob_gap", 0) > m.get("rollout/gap_bound", math.inf)),  # judge_gap tells it
)


class Health:
    """Logs steps with `tracker`, and tells of signs; skipped_limit: steps with a skipped update that end the run.

    The batches of such steps are kept in the folder `skipped` of the run's `folder`, the last KEPT of them.
    """

    def __init__(self, tracker: Tracker, folder: Path, skipped_limit: int) -> None:
        self.tracker, self.folder, self.skipped_limit = tracker, folder / "skipped", skipped_limit
        self.lasted: Counter[Sign] = Counter()
        self.told: set[Sign] = set()

    def record(self, step: int, metrics: Metrics, batch: TensorDict | None = None) -> None:
        """Log a step that learned from `batch`; raises ConfigError where its metrics are a sign that ends the run."""
        if metrics.get("update/skipped") and batch is not None:
            keep_batch(self.folder, step, batch, metrics)
        seen = [sign for sign in SIGNS if sign.bad(metrics)]
        self.tracker.log(step, metrics, list(dict.fromkeys(sign.label for sign in seen)))
        self.lasted = Counter({sign: self.lasted[sign] + 1 for sign in seen})
        for sign in seen:
            steps = sign.steps or self.skipped_limit
            if not sign.says or sign in self.told or self.lasted[sign] < steps:
                continue
            self.told.add(sign)
            known = {"".join(c if c.isalnum() else "_" for c in name): value for name, value in metrics.items()}
            sentence = sign.says.format(**known | {"steps": steps, "folder": self.folder})
            if sign.ends:
                raise ConfigError(sentence)
            self.tracker.say(f"warning: {sentence}")


def keep_batch(folder: Path, step: int, batch: TensorDict, metrics: Metrics) -> None:
    """Write `batch` to folder/step-N.safetensors, its metrics as JSON in the file's metadata; the last KEPT stay.

    A field [B, *] is there as its values, the rows of all behind one another; `offsets` [B + 1] says where each begins.
    """
    folder.mkdir(exist_ok=True)
    parts = {name: (field.values() if field.is_nested else field).clone() for name, field in batch.items()}
    parts["offsets"] = batch["tokens"].offsets().clone()
    about = {"step": str(step), "metrics": json.dumps(valid_json(metrics))}
    save_file(parts, folder / f"step-{step:08d}.safetensors", metadata=about)
    for old in sorted(folder.glob("step-*.safetensors"))[:-KEPT]:
        old.unlink()
