"""What the runs of run.sh and distillation.sh say about six lessons of small-scale GRPO; docs/lessons.md tells which.

    python -m examples.experiments.lessons gradient OUT key=value ...
    python -m examples.experiments.lessons figures OUT --docs docs
    python -m examples.experiments.lessons distillation OUT --docs docs

`gradient` samples once from the policy of model.path and writes OUT/gradient.json: how far the gradients of batches of
P prompts are apart. `figures` reads it and the runs' folders OUT/NAME-SEED, and writes DOCS/data/lessons.json and one
picture a lesson; `distillation` does so for lesson 6, whose runs distillation.sh makes. The file also holds the reward
`well_formed`, so what it imports at its top must be light: the processes that grade import it too.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from rewards import register
from rewards.countdown import countdown, evaluate

CONFIG = "examples/countdown_cpu.yaml"
SEEDS = (0, 1)
BATCHES = {f"batch-{size}": f"{size} prompts a step" for size in (4, 8, 16, 32)}
ENTROPIES = {
    "plain": "nothing added",
    "entropy-0.01": "entropy bonus 0.01",
    "entropy-0.05": "entropy bonus 0.05",
    "clip-0.28": "clip_high 0.28",
    "clip-0.4": "clip_high 0.4",
}
FORMATS = {"sparse": "sparse reward alone", "format": "with a format reward"}
WAYS = {"rewarded": "from rewards", "taught": "from a teacher", "both": "from both"}
FEW = {"few-rewarded": "from rewards, 4 prompts x 8", "few-taught": "from a teacher, 32 prompts x 1"}
COLOURS = ("#1f5fbf", "#b8500f", "#2a8c4a", "#8a3fa0", "#555555")
KEPT = {
    "reward": "reward/mean",
    "entropy": "entropy",
    "length": "response_length/mean",
    "norm": "grad_norm",
    "clipped": "clip/high",
    "well_formed": "reward/well_formed/mean",
    "accuracy": "eval/accuracy",
    "held_out_length": "eval/response_length/mean",
    "held_out_well_formed": "eval/reward/well_formed/mean",
}
"""The name of a curve in lessons.json -> the metric it is."""
KEPT_TAUGHT = {name: KEPT[name] for name in ("length", "accuracy")} | {"teacher_kl": "teacher/kl"}


@register("well_formed", needs=("numbers", "target"))
def well_formed(completion: str, row: dict) -> float:
    """1.0 for a closed `<answer>` with an expression of exactly these numbers, whatever its value; 0.0 otherwise."""
    return countdown(completion, row, valid=1.0, format=0.0)


# what a response does

TRY = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+) ([-+*/]) (\d+) = (\d+)(?: to (\d+) (yes|no)\b)?")
# The result is looked at and not taken: in "7 - 2 = 5 + 3 = 8" it begins the next one.
RESULT = re.compile(r"(\d+(?: [-+*/] \d+)+) = (?=(\d+))")


@dataclass(frozen=True)
class Reading:
    """What one response does."""

    well_formed: bool  # its answer is an expression of exactly the numbers
    right: bool  # and that makes the target
    first_right: bool  # its first try makes the target from the numbers; without a stated try, its answer does
    tries: int
    true: bool  # it states results, and all of them are true
    checks: bool  # it says yes or no after tries, and each time truly


def read_response(response: str, row: Mapping[str, Any]) -> Reading:
    """Read a response to the row's problem (numbers, target), from its text alone.

    A try is `a op b = r op c = v`, with or without `to TARGET yes|no` behind it. It makes the target if
    ( a op b ) op c does, whatever it states as r and v; a check is true if it says yes where v is the target it names,
    and that is the row's.
    """
    thinking = response.partition("</think>")[0]
    tries = [found.groups() for found in TRY.finditer(thinking)]
    right = countdown(response, dict(row)) == 1.0
    results = [(_value(left), Fraction(stated)) for left, stated in RESULT.findall(thinking)]
    checks = [
        int(target) == row["target"] and (int(value) == row["target"]) == (verdict == "yes")
        for *_, value, target, verdict in tries
        if verdict
    ]
    return Reading(
        well_formed=well_formed(response, dict(row)) == 1.0,
        right=right,
        first_right=_makes_target(tries[0], row) if tries else right,
        tries=len(tries),
        true=bool(results) and all(value == stated for value, stated in results),
        checks=bool(checks) and all(checks),
    )


def _value(expression: str) -> Fraction | None:
    return evaluate(expression.split())


def _makes_target(found: Sequence[str], row: Mapping[str, Any]) -> bool:
    a, first, b, _, second, c, *_ = found
    if sorted(map(int, (a, b, c))) != sorted(row["numbers"]):
        return False
    return _value(f"( {a} {first} {b} ) {second} {c}") == row["target"]


SHARES = {
    "well_formed": "answer is well-formed",
    "first_right": "right at the first try",
    "goes_on": "tries on after a wrong first try",
    "true": "stated results are all true",
    "checks": "checks are all true",
}


def shares(readings: Sequence[Reading]) -> dict[str, float]:
    """Which share of the responses does what; `goes_on` is a share of those whose first try is stated and wrong."""
    wrong = [reading for reading in readings if reading.tries and not reading.first_right]
    return {
        "well_formed": _mean(reading.well_formed for reading in readings),
        "first_right": _mean(reading.first_right for reading in readings),
        "goes_on": _mean(reading.tries > 1 for reading in wrong),
        "true": _mean(reading.true for reading in readings),
        "checks": _mean(reading.checks for reading in readings),
    }


def shares_by_step(rows: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """The shares of each step in the rows of a samples.jsonl."""
    steps: dict[int, list[Reading]] = {}
    for row in rows:
        if not row["held_out"]:
            steps.setdefault(row["step"], []).append(read_response(row["response"], row["row"]))
    return {step: shares(readings) for step, readings in sorted(steps.items())}


def _mean(values: Any) -> float:
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def smooth(values: Sequence[float], width: int = 3) -> list[float]:
    """The mean over `width` values around each, fewer at the ends; NaN is left out."""
    around = [values[max(0, i - width // 2) : i + width // 2 + 1] for i in range(len(values))]
    return [_mean(value for value in part if math.isfinite(value)) for part in around]


def halfway(steps: Sequence[int], values: Sequence[float]) -> float:
    """The step from which on a smoothed curve is past the middle of its ends for good; NaN for ends within 0.1."""
    curve = smooth(values)
    if not abs(curve[-1] - curve[0]) >= 0.1:
        return math.nan
    middle = (curve[0] + curve[-1]) / 2
    past = [(value > middle) == (curve[-1] > middle) for value in curve]
    return next((float(step) for i, step in enumerate(steps) if all(past[i:])), math.nan)


# the gradient


def spread(norms_square: Sequence[float], mean_norm_square: float) -> dict[str, float]:
    """Variance and squared mean of n >= 2 gradients from their squared norms and that of their mean, both unbiased."""
    count = len(norms_square)
    variance = (sum(norms_square) - count * mean_norm_square) / (count - 1)
    return {"variance": variance, "signal": mean_norm_square - variance / count}


def measure_gradient(out: Path, overrides: Sequence[str], prompts: int) -> None:
    """Sample `prompts` prompts from the policy once, and write the gradients of disjoint batches to gradient.json.

    A batch's gradient is read from AdamW: with a beta1 of 0 its first mean is the gradient. Its learning rate of 0
    leaves the policy where it is.
    """
    import dataclasses

    import torch

    from grpo.advantages import compute_advantages, weigh_tokens
    from grpo.batch import select
    from grpo.config import load
    from trainer.config import TrainConfig
    from trainer.runs import Run
    from trainer.trainer import Trainer
    from workers.parallel.mesh import join, leave, pick_device

    changed = [*overrides, f"batch.prompts_per_step={prompts}", "tracking.samples_every=0", "checkpoint.every=0"]
    config = load(TrainConfig, CONFIG, changed)
    config.check(1)
    still = {"betas": [0.0, 0.95], "learning_rate": 0.0, "max_grad_norm": 1e9}
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, eval=None),
        actor=dataclasses.replace(config.actor, **still),
    )
    device = pick_device(config.device)
    join(device, config.timeout_seconds)
    trainer = Trainer(config, device, Run(out / "gradient"))
    with trainer.stack:
        with trainer.sharding.serving():
            rounds = [trainer.sample(prompts)]
        batch, metrics = trainer.join(rounds)
        batch = compute_advantages(batch, config.algorithm)
        rows_of: dict[int, list[int]] = {}
        for row, group in enumerate(batch["group"].tolist()):
            rows_of.setdefault(group, []).append(row)
        groups, sizes = list(rows_of.values()), []
        size = 1
        while 2 * size <= len(groups):
            total, squares = 0.0, []
            for start in range(0, len(groups) - size + 1, size):
                rows = [row for group in groups[start : start + size] for row in group]
                trainer.actor.update_minibatch(weigh_tokens(select(batch, rows), config.algorithm))
                moments = [trainer.actor.optimizer.state[p]["exp_avg"] for p in trainer.actor.parameters]
                gradient = torch.cat([moment.full_tensor().flatten() for moment in moments]).double()
                squares.append(float(gradient.square().sum()))
                total = total + gradient
            mean_square = float((total / len(squares)).square().sum())
            norms = [square**0.5 for square in squares]
            found = spread(squares, mean_square)
            sizes.append({"prompts": size, "batches": len(norms), **found, "norms": [round(n, 5) for n in norms]})
            size *= 2
    leave()
    kept = {name: metrics[name] for name in ("reward/mean", "groups/no_signal", "response_length/mean")}
    samples = config.batch.samples_per_prompt
    result = {"prompts": prompts, "samples_per_prompt": samples, "policy": kept, "sizes": sizes}
    (out / "gradient.json").write_text(json.dumps(result))
    print(f"{out / 'gradient.json'} holds the gradients of batches of 1 to {sizes[-1]['prompts']} prompts.")


# the figures


def collect(out: Path) -> dict[str, Any]:
    """Everything the pictures and tables show, from the folder `out`; raises ConfigError for a run that is missing."""
    from trainer.record import read_metrics, read_rows

    runs: dict[str, dict[str, dict]] = {}
    for name in (*BATCHES, *ENTROPIES, *FORMATS):
        for seed in SEEDS:
            folder = out / f"{name}-{seed}"
            metrics = read_metrics(folder)
            curves = {curve: _curve(metrics, key) for curve, key in KEPT.items()}
            if name in FORMATS:
                steps = shares_by_step(read_rows(folder / "samples.jsonl"))
                curves["samples"] = {
                    "steps": list(steps),
                    **{share: [_short(values[share]) for values in steps.values()] for share in SHARES},
                }
            runs.setdefault(name, {})[str(seed)] = curves
    gradient = json.loads((out / "gradient.json").read_text())
    for size in gradient["sizes"]:
        norms = size.pop("norms")
        size |= {"norm_mean": _mean(norms), "norm_std": statistics.stdev(norms)}
    return {"gradient": gradient, "runs": runs}


def collect_taught(out: Path) -> dict[str, Any]:
    """The runs of lesson 6 below the folder `out`, and what its teacher came to."""
    from trainer.record import read_metrics

    def curves(name: str) -> dict[str, dict]:
        metrics = read_metrics(out / name)
        return {curve: _curve(metrics, key) for curve, key in KEPT_TAUGHT.items()}

    runs = {name: {str(seed): curves(f"{name}-{seed}") for seed in SEEDS} for name in (*WAYS, *FEW)}
    return {"teacher": curves("teacher-2")["accuracy"]["values"][-1], "runs": runs}


def _curve(metrics: Sequence[Mapping[str, float]], key: str) -> dict[str, list]:
    rows = [row for row in metrics if key in row]
    return {"steps": [row["step"] for row in rows], "values": [_short(row[key]) for row in rows]}


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def mean_curve(run: Mapping[str, Mapping], name: str) -> tuple[list[int], list[float]]:
    """The steps of a run's curve and its mean over the seeds; `name` may be samples/SHARE."""
    curves = []
    for seed in run.values():
        if name.startswith("samples/"):
            held = seed["samples"]
            curves.append((held["steps"], held[name.removeprefix("samples/")]))
        else:
            curves.append((seed[name]["steps"], seed[name]["values"]))
    columns = zip(*(values for _, values in curves), strict=True)
    return curves[0][0], [_mean(value for value in column if value is not None) for column in columns]


def draw(data: Mapping[str, Any], docs: Path) -> list[Path]:
    """Write one picture a lesson to the folder `docs`, from what `collect` or `collect_taught` returns."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs, written = data["runs"], []

    def save(name: str, panels: Sequence[Callable], height: float = 4.0) -> None:
        # A white ground of its own, so that dark pages show it too.
        figure = Figure(figsize=(9.0, height), dpi=150, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        shown: dict[str, Any] = {}
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            panel(axes)
            axes.grid(color="#dddddd", lw=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            shown |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        # One for all panels and beside none of the curves.
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        figure.savefig(docs / name)
        written.append(docs / name)

    def curves(
        names: Mapping[str, str],
        curve: str,
        title: str,
        unit: str,
        smoothed: bool = True,
        per: str = "step",
        first: int = 0,
    ):
        def panel(axes: Any) -> None:
            for (name, label), colour in zip(names.items(), COLOURS[first:], strict=False):
                steps, mean = mean_curve(runs[name], curve)
                if not steps:
                    continue
                scale = (
                    int(name.removeprefix("batch-")) * data["gradient"]["samples_per_prompt"] if per != "step" else 1
                )
                places, few = [step * scale for step in steps], len(steps) <= 5
                for seed in runs[name]:
                    _, values = mean_curve({seed: runs[name][seed]}, curve)
                    axes.plot(places, smooth(values) if smoothed else values, color=colour, alpha=0.3, lw=0.8)
                shown = smooth(mean) if smoothed else mean
                axes.plot(places, shown, color=colour, lw=2, marker="o" if few else None, ms=4, label=label)
            axes.set_title(title, loc="left", weight="bold", size=10)
            axes.set_xlabel("training step" if per == "step" else per)
            axes.set_ylabel(unit)
            axes.set_ylim(bottom=0)

        return panel

    if "teacher" in data:

        def accuracy(names: Mapping[str, str], responses: int, first: int) -> Callable:
            def panel(axes: Any) -> None:
                title = f"Accuracy, {responses} responses a step"
                curves(names, "accuracy", title, "share right, held out", False, first=first)(axes)
                axes.axhline(data["teacher"], color="#222222", ls="--", lw=1, label="the teacher")
                axes.set_ylim(0, 1)

            return panel

        taught = {name: (WAYS | FEW)[name] for name in ("taught", "both", "few-rewarded", "few-taught")}
        distance = curves(taught, "teacher_kl", "KL to the teacher", "nats a token, over 3 steps", first=1)
        save("lesson_6_distillation.png", [accuracy(WAYS, 256, 0), accuracy(FEW, 32, 3), distance])
        return written

    gradient = data["gradient"]
    sizes = [row["prompts"] for row in gradient["sizes"]]

    def over_sizes(axes: Any) -> None:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, map(str, sizes))
        axes.set_xlabel("prompts in the batch")

    def variance(axes: Any) -> None:
        ratio = [row["variance"] / row["signal"] if row["signal"] > 0 else math.nan for row in gradient["sizes"]]
        axes.loglog(sizes, ratio, marker="o", ms=4, color="#222222", lw=2, label="measured")
        axes.loglog(sizes, [ratio[0] / size for size in sizes], color="#999999", ls="--", label="as 1 / prompts")
        axes.set_title("Noise of the gradient", loc="left", weight="bold", size=10)
        axes.set_ylabel("variance / squared mean")
        over_sizes(axes)

    def norms(axes: Any) -> None:
        mean = [row["norm_mean"] for row in gradient["sizes"]]
        deviation = [row["norm_std"] for row in gradient["sizes"]]
        axes.errorbar(
            sizes, mean, deviation, marker="o", ms=4, capsize=3, color="#222222", lw=2, label="mean, 1 deviation"
        )
        expected = [math.sqrt(max(row["signal"], 0) + row["variance"]) for row in gradient["sizes"]]
        axes.plot(sizes, expected, color="#999999", ls="--", label="root of squared mean + variance")
        axes.set_title("Norm of the gradient, one policy", loc="left", weight="bold", size=10)
        axes.set_ylabel("norm")
        axes.set_ylim(bottom=0)
        over_sizes(axes)

    save(
        "lesson_1_batch_size.png",
        [
            variance,
            curves(BATCHES, "reward", "Training reward", "mean reward, over 3 steps"),
            curves(BATCHES, "accuracy", "Held-out accuracy", "share right", False, "responses sampled so far"),
        ],
    )
    save(
        "lesson_2_gradient_norm.png",
        [norms, curves(BATCHES, "norm", "Norm of the gradient, training", "norm", False)],
    )
    save(
        "lesson_3_entropy.png",
        [
            curves(ENTROPIES, "entropy", "Entropy", "nats a token, over 3 steps"),
            curves(ENTROPIES, "length", "Response length", "tokens, over 3 steps"),
            curves(ENTROPIES, "accuracy", "Held-out accuracy", "share right", False),
        ],
    )
    save(
        "lesson_4_format.png",
        [
            curves(FORMATS, "well_formed", "Well-formed answers", "share of the samples, over 3 steps"),
            curves(FORMATS, "accuracy", "Held-out accuracy", "share right", False),
        ],
    )

    def order(name: str) -> Callable:
        def panel(axes: Any) -> None:
            for (share, label), colour in zip(SHARES.items(), COLOURS, strict=True):
                steps, mean = mean_curve(runs[name], f"samples/{share}")
                axes.plot(steps, smooth(mean), color=colour, lw=2, label=label)
            axes.set_title(FORMATS[name].capitalize(), loc="left", weight="bold", size=10)
            axes.set_xlabel("training step")
            axes.set_ylabel("share of the samples, over 3 steps")
            axes.set_ylim(0, 1.02)

        return panel

    save("lesson_5_order.png", [order(name) for name in FORMATS], height=4.6)
    return written


def taught_table(data: Mapping[str, Any]) -> str:
    """The numbers of lesson 6 as a Markdown table."""
    steps = mean_curve(data["runs"]["few-taught"], "accuracy")[0]
    steps = [step for step in steps if step in (0, 3, 6, 9, 12, 18, 24, steps[-1])]
    heads = [
        "learning",
        *(f"step {step}" for step in steps),
        "at the end, by seed",
        "KL to the teacher, first and last",
    ]
    lines = [f"the teacher: {data['teacher']:.3f}", "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, label in (WAYS | FEW).items():
        run = data["runs"][name]
        right, apart = dict(zip(*mean_curve(run, "accuracy"), strict=True)), mean_curve(run, "teacher_kl")[1]
        seeds = ", ".join(f"{curves['accuracy']['values'][-1]:.3f}" for curves in run.values())
        cells = [label, *(f"{right[step]:.3f}" for step in steps), seeds]
        lines.append(f"| {' | '.join(cells)} | {f'{apart[0]:.3f}, {apart[-1]:.3f}' if apart else '-'} |")
    return "\n".join(lines)


def tables(data: Mapping[str, Any]) -> str:
    """The numbers of docs/lessons.md as Markdown tables, one a lesson."""
    gradient, runs = data["gradient"], data["runs"]
    lines = [f"policy: {', '.join(f'{name} {value:.3f}' for name, value in gradient['policy'].items())}"]

    def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        cells = [[_cell(cell) for cell in row] for row in rows]
        lines.extend(["", title, "", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)])
        lines.extend(f"| {' | '.join(row)} |" for row in cells)

    def last(name: str, curve: str, width: int = 3) -> float:
        return _mean(mean_curve(runs[name], curve)[1][-width:])

    def first(name: str, curve: str, width: int = 3) -> float:
        return _mean(mean_curve(runs[name], curve)[1][:width])

    def seeds(name: str, curve: str) -> str:
        return ", ".join(f"{_mean(mean_curve({s: run}, curve)[1][-1:]):.3f}" for s, run in runs[name].items())

    def accuracies(name: str) -> str:
        return ", ".join(f"{value:.3f}" for value in mean_curve(runs[name], "accuracy")[1])

    table(
        "Lessons 1 and 2: the gradient of one policy",
        ["prompts", "batches", "variance / squared mean", "the same x prompts", "norm", "deviation", "of the norm"],
        [
            [
                row["prompts"],
                row["batches"],
                row["variance"] / row["signal"] if row["signal"] > 0 else math.nan,
                row["prompts"] * row["variance"] / row["signal"] if row["signal"] > 0 else math.nan,
                row["norm_mean"],
                row["norm_std"],
                f"{row['norm_std'] / row['norm_mean']:.0%}",
            ]
            for row in gradient["sizes"]
        ],
    )
    logs = [(math.log(row["prompts"]), math.log(row["variance"])) for row in gradient["sizes"]]
    slope = statistics.linear_regression(*zip(*logs, strict=True)).slope
    lines += ["", f"log variance over log prompts: slope {slope:.2f}, where 1 / prompts has -1"]

    def accuracy(name: str) -> str:
        return f"held-out accuracy at steps {', '.join(map(str, mean_curve(runs[name], 'accuracy')[0]))}"

    table(
        "Lesson 1: training",
        [
            "prompts a step",
            accuracy("plain"),
            "at the end, by seed",
            "reward, last 3 steps",
            "norm, all steps: mean, deviation",
        ],
        [
            [
                name.removeprefix("batch-"),
                accuracies(name),
                seeds(name, "accuracy"),
                last(name, "reward"),
                ", ".join(f"{value:.3g}" for value in _norms(runs[name])),
            ]
            for name in BATCHES
        ],
    )
    table(
        "Lesson 3: entropy (first and last 3 steps)",
        ["run", "entropy", "length", "share of tokens clipped above", accuracy("plain"), "at the end, by seed"],
        [
            [
                label,
                f"{first(name, 'entropy'):.3f} to {last(name, 'entropy'):.3f}",
                f"{first(name, 'length'):.1f} to {last(name, 'length'):.1f}",
                f"{_mean(mean_curve(runs[name], 'clipped')[1]):.2%}",
                accuracies(name),
                seeds(name, "accuracy"),
            ]
            for name, label in ENTROPIES.items()
        ],
    )
    table(
        "Lesson 4: format (first and last 3 steps)",
        ["run", "well-formed", "held out, well-formed, at the end by seed", accuracy("sparse"), "at the end, by seed"],
        [
            [
                label,
                f"{first(name, 'well_formed'):.3f} to {last(name, 'well_formed'):.3f}",
                seeds(name, "held_out_well_formed"),
                accuracies(name),
                seeds(name, "accuracy"),
            ]
            for name, label in FORMATS.items()
        ],
    )
    for name, about in FORMATS.items():
        table(
            f"Lesson 5: order, {about} (first and last 3 steps)",
            ["share of the samples", "first", "last", "halfway there for good at step, by seed"],
            [
                [
                    label,
                    first(name, f"samples/{share}"),
                    last(name, f"samples/{share}"),
                    ", ".join(
                        f"{_cell(halfway(*mean_curve({s: r}, f'samples/{share}')))}" for s, r in runs[name].items()
                    ),
                ]
                for share, label in SHARES.items()
            ],
        )
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if math.isfinite(value) else "-"
    return str(value)


def _norms(run: Mapping[str, Mapping]) -> tuple[float, float]:
    """Mean of a run's gradient norms over its steps and seeds, and the mean of their deviations over the steps."""
    means, deviations = [], []
    for seed in run.values():
        values = seed["norm"]["values"]
        means.append(_mean(values))
        deviations.append(statistics.pstdev(values))
    return _mean(means), _mean(deviations)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("gradient", help="measure the gradient's noise at a fixed policy")
    command.add_argument("out", type=Path, help="the folder of the experiments")
    command.add_argument("overrides", nargs="*", metavar="key=value", help=f"settings that win over {CONFIG}")
    command.add_argument("--prompts", type=int, default=256, help="how many prompts are sampled once")
    command = commands.add_parser("figures", help="draw the pictures and print the tables")
    command.add_argument("out", type=Path, help="the folder of the experiments")
    command.add_argument("--docs", type=Path, default=Path("docs"), help="where the pictures and the data go")
    command = commands.add_parser("distillation", help="draw the picture of lesson 6 and print its table")
    command.add_argument("out", type=Path, help="the folder of the experiments")
    command.add_argument("--docs", type=Path, default=Path("docs"), help="where the picture and the data go")
    arguments = parser.parse_args()

    from grpo.config import ConfigError

    try:
        if arguments.command == "gradient":
            measure_gradient(arguments.out, arguments.overrides, arguments.prompts)
            return
        taught = arguments.command == "distillation"
        data = (collect_taught if taught else collect)(arguments.out)
        record = arguments.docs / "data" / ("lesson_6.json" if taught else "lessons.json")
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(data, separators=(",", ":")) + "\n")
        written = draw(data, arguments.docs)
        print((taught_table if taught else tables)(data))
        print(f"\nwritten: {', '.join(map(str, [record, *written]))}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
