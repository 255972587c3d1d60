"""python -m trainer eval: how right a model, or a run's checkpoint, is on held-out prompts. No actor is built."""

import argparse
import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Column, Table

from grpo.algorithm import BatchConfig
from grpo.batch import select
from grpo.config import ConfigError, without_secrets
from grpo.data import Prompt
from trainer.card import versions
from trainer.checkpoint import find_run, model_at
from trainer.config import TrainConfig
from trainer.controller import batch_metrics, describe_failures, load_sets, sample_row
from trainer.pulse import Pulse
from trainer.record import valid_json
from trainer.scores import answer_of, correct, mean_and_error, powers, score
from trainer.trainer import start_engine, start_processes
from workers.config import ActorConfig
from workers.dispatch import from_controller, on_controller
from workers.engines.files import serve_files
from workers.models.hub import check_weights, read_tokenizer, stop_tokens
from workers.parallel.mesh import make_inference_layout
from workers.rollout import RolloutWorker


def evaluate(given: argparse.Namespace, config: TrainConfig, device: torch.device, pulse: Pulse) -> None:
    """Print a table of scores and write them as JSON, as the command's arguments `given` ask for.

    pulse: what tells what is being done until samples are drawn. The process group must have been joined. Raises
    ConfigError for what cannot be evaluated.
    """
    begun, n, settings = time.monotonic(), config.evaluation.samples_per_prompt, without_secrets(config)
    out = on_controller(lambda: find_out(given))
    with ExitStack() as stack:
        pulse("reading the model and the data")
        found = on_controller(lambda: stack.enter_context(model_at(given.model, given.step)))
        config.model.path, step, version = from_controller(found)
        config.actor = ActorConfig(max_tokens_per_microbatch=sys.maxsize)  # nothing trains
        config.algorithm.teacher = None
        check_weights(config.model)
        config.check_longest()
        prompts, parts = on_controller(lambda: load_parts(config, given.by)) or (None, {})
        config.batch = BatchConfig(from_controller(prompts and len(prompts)), n)  # what the engine has room for
        pulse("starting the engine")
        engines = make_inference_layout(device, config.rollout.tensor_parallel)
        engine = start_engine(config, engines)
        stack.callback(engine.shutdown)
        serve_files(engine, config.model, device, verify=config.rollout.verify_every > 0)
        stop, grade, tell, converse = stop_tokens(config.model), None, None, None
        if engines.tp_rank == 0:
            grade, converse = start_processes(config, stop, stack)
        pulse.end()
        if prompts:
            progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
            task = progress.add_task("samples")
            tell = lambda done, total, _: progress.update(task, completed=done, total=total)  # noqa: E731
        rollout = RolloutWorker(config.rollout, engine, engines, stop, config.seed, grade, tell, converse)
        rollout.version = version  # it decides the draws, which are those of an evaluation in training
        batch = rollout.generate(prompts, n, config.evaluation.temperature, held_out=True)
    if batch is None:
        return
    samples, console = rollout.trajectories, Console(soft_wrap=True)
    answers = [answer_of(sample.response, config.evaluation.answer_pattern) for sample in samples]
    right, scores = correct(batch, config.accuracy_reward), {}
    for name, those in parts.items():
        rows = [prompt * n + i for prompt in those for i in range(n)]
        part = select(batch, rows)
        scores[name] = {"prompts": len(those), "samples": len(rows)}
        scores[name] |= score(right[rows].view(-1, n), given.k or powers(n), [answers[row] for row in rows])
        scores[name] |= batch_metrics(part) | {
            "response_length/median": float(part["response_length"].float().quantile(0.5))
        }
        scores[name]["reward/mean/error"] = mean_and_error(part["rewards"].view(-1, n).double().mean(1).tolist())[1]
    for sentence in describe_failures(rollout.failures, len(samples), held_out=True):
        console.print(sentence, markup=False)
    show(scores, f"{given.model}{f', step {step}' * (step is not None)}", console)
    report = {
        "model": given.model,
        "step": step,
        "correct": f"reward {config.accuracy_reward} = 1",
        "scores": scores,
        "engines": engines.dp_size,
        "device": str(device),
        "seed": config.seed,
        "versions": versions(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S%z"),
        "seconds": time.monotonic() - begun,
        **{group: settings[group] for group in ("data", "rollout", "rewards", "evaluation")},
    }
    out.write_text(json.dumps(valid_json(report), indent=2) + "\n")
    console.print(f"These numbers are in {out}.", markup=False)
    if given.samples:
        verdicts = ({"answer": a, "correct": r} for a, r in zip(answers, right.tolist(), strict=True))
        lines = (valid_json(sample_row(s) | verdict) for s, verdict in zip(samples, verdicts, strict=True))
        given.samples.write_text("".join(json.dumps(line) + "\n" for line in lines))


def find_out(given: argparse.Namespace) -> Path:
    """Where the report goes; raises OSError where it or the samples cannot be written. Leaves all as it was."""
    out = given.out or (find_run(given.model) or Path()) / "eval.json"
    for path in filter(None, (out, given.samples)):
        there = path.exists()
        path.open("a").close()
        if not there:
            path.unlink()
    return out


def load_parts(config: TrainConfig, by: str | None) -> tuple[list[Prompt], dict[str, list[int]]]:
    """All held-out prompts, and which of them are in each part: all, the named sets, the values of the column `by`."""
    sets, parts, values = load_sets(config, read_tokenizer(config.model)), {"all": []}, {}
    prompts = [prompt for those in sets.values() for prompt in those]
    for name, prompt in ((name, prompt) for name, those in sets.items() for prompt in those):
        i = len(parts["all"])
        parts["all"].append(i)
        if name:
            parts.setdefault(f"data.eval.{name}", []).append(i)
        if by and by not in prompt.row:
            raise ConfigError(f"--by={by} is not a column of data.eval, whose columns are {', '.join(prompt.row)}.")
        if by:
            values.setdefault(f"{by}={prompt.row[by]}", []).append(i)
    return prompts, parts | {value: values[value] for value in sorted(values, key=lambda value: (len(value), value))}


def show(parts: Mapping[str, Mapping[str, float]], title: str, console: Console) -> None:
    """Print tables of scores, with as many of `parts` side by side as fit."""
    names, most = list(parts), max(1, (console.width - 30) // 18)
    for some in (names[first : first + most] for first in range(0, len(names), most)):
        columns = (Column(escape(name), justify="right") for name in some)
        table = Table("", *columns, title=escape(title), title_justify="left", box=None, pad_edge=False)
        for key in parts["all"]:
            if not key.endswith(("/error", "/std", "no_signal", "tokens/total")):
                table.add_row(key, *(_cell(parts[name], key) for name in some))
        console.print(table)


def _cell(scores: Mapping[str, float], key: str) -> str:
    value, error = scores.get(key, math.nan), scores.get(f"{key}/error", math.nan)
    return f"{value:.4g}" if math.isnan(error) else f"{value:.3f} ± {error:.3f}"
