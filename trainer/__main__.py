"""The command line: python -m trainer COMMAND; --help lists the commands."""

import argparse
import json
import os
import re
import sys
import time
import traceback
from pathlib import Path

try:
    from grpo.config import MAPPINGS, ConfigError, check_values, describe, load, unusable
    from trainer.config import RunConfig, SftConfig, TrainConfig
    from trainer.death import STOPPED, Notice, Stopped
    from trainer.pulse import Pulse
except ModuleNotFoundError as error:
    sys.exit(f"error: the package {error.name} is missing: run pip install -e . in this project's folder.")

COMMANDS = {
    "train": (TrainConfig, "reinforcement learning from rewards"),
    "sft": (SftConfig, "supervised training on demonstrations"),
    "data": (TrainConfig, "show the prompts of train or sft as the model will see them, and what is wrong with them"),
    "prove": (TrainConfig, "check that an update is the same however cut, and nothing moves at a learning rate of 0"),
    "eval": (TrainConfig, "accuracy, pass@k and majority@k of a model or a run on data.eval"),
}
"""Those that take settings."""

PAGE_HEAD = f"""# Settings

`python -m trainer settings > docs/config.md` writes this page. Settings come from one YAML file, then from
`key=value` on the command line; an unknown key is refused with the nearest known one.
{MAPPINGS}"""


def settings_help(schema: type) -> str:
    """Every setting of a command with its type, default and meaning, as --help shows it."""
    lines = ["settings (key=value on the command line, or in the YAML file):", MAPPINGS]
    for key, kind, default, doc in describe(schema):
        lines += [f"  {key} ({kind}, default {'null' if default is None else repr(default)})", f"      {doc}"]
    return "\n".join(lines)


def settings_page() -> str:
    """docs/config.md: the settings of both commands as Markdown tables."""
    sections = {"`train` and `sft`": RunConfig, "`train` alone": TrainConfig, "`sft` alone": SftConfig}
    lines, shared = [PAGE_HEAD], {key for key, *_ in describe(RunConfig)}
    for title, schema in sections.items():
        lines.append(f"\n## {title}\n\n| setting | type | default | meaning |\n|---|---|---|---|")
        for key, kind, default, doc in describe(schema):
            if schema is RunConfig or key not in shared:
                shown = "null" if default is None else repr(default)
                lines.append(f"| `{key}` | {kind.replace('|', 'or')} | `{shown}` | {doc.replace('|', 'or')} |")
    return "\n".join(lines)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        """What argparse says in several lines, as one sentence."""
        raise ConfigError(f"{self.prog}: {message}; {self.prog} --help tells what it takes.")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command and its arguments; raises ConfigError where they do not fit."""
    raw = argparse.RawDescriptionHelpFormatter
    about = "GRPO for language models, in one process or in N: torchrun --nproc-per-node N -m trainer ..."
    epilog = f"{settings_help(TrainConfig)}\n\nThose of sft: python -m trainer sft --help"
    parser = Parser("python -m trainer", description=about, epilog=epilog, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    step = {"type": number_or_best, "help": "the run's checkpoint, or best; the newest otherwise"}
    model = "a run's folder, or a model: a Hugging Face folder or hub name"
    for name, (schema, about) in COMMANDS.items():
        texts = {"help": about, "description": about, "epilog": settings_help(schema)}
        command = commands.add_parser(name, **texts, formatter_class=raw)
        own = "; a run's own where it is left out" * (name == "eval")
        if name == "eval":
            command.add_argument("model", help=model)
        command.add_argument("config", nargs="?", help=f"YAML file of settings{own}")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    command.add_argument("--step", **step)  # of eval
    command.add_argument("--k", type=int, action="append", help="of pass@k, or several so; otherwise powers of two")
    command.add_argument("--by", metavar="COLUMN", help="scores for each value of a column of the data as well")
    command.add_argument("--out", type=Path, help="the JSON to write; otherwise eval.json in the run's folder, or here")
    command.add_argument("--samples", type=Path, metavar="FILE", help="write the graded samples as jsonl")
    command = commands.add_parser("export", help="write a run's checkpoint as a Hugging Face folder")
    command.add_argument("folder", metavar="run", type=Path, help="the run's folder")
    command.add_argument("out", type=Path, help="the folder to write")
    command.add_argument("--step", **step)
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    command.add_argument("--shard-size", default="50GB", metavar="SIZE", help="the largest file, such as 5GB")
    command.add_argument("--adapters", action="store_true", help="write a LoRA run's adapters alone, as a PEFT folder")
    about = "one answer of a model or a run, or a chat where no prompt is given"
    command = commands.add_parser("generate", help=about, description=about)
    command.add_argument("model", help=model)
    command.add_argument("prompt", nargs="?", help="what to answer; otherwise standard input, or a chat in a terminal")
    command.add_argument("--step", **step)
    command.add_argument("--temperature", type=float, default=1.0, help="divides the logits; 0: greedy (default 1)")
    command.add_argument("--max-tokens", type=int, default=1024, help="longest answer (default 1024)")
    command.add_argument("--system", help="the system message, for models with a chat template")
    command.add_argument("--seed", type=int, default=0)
    command = commands.add_parser("plot", help="draw learning curves")
    command.add_argument("runs", type=Path, nargs="+", help="the runs' folders, such as one a seed")
    command.add_argument("--out", type=Path, default=Path("curve.png"), help="the PNG to write")
    command = commands.add_parser("algorithms", help="list the algorithms, or print the formula and choices of one")
    command.add_argument("name", nargs="?", help="one of the list")
    command = commands.add_parser("rewards", help="list the rewards, or test them by their own examples")
    command.add_argument("action", nargs="?", choices=["test"], help="run the examples; exit code 1 if one fails")
    command.add_argument("names", nargs="*", metavar="name", help="rewards to test; all otherwise")
    command.add_argument("--file", action="append", default=[], help="a Python file outside rewards/, or several so")
    commands.add_parser("doctor", help="what is installed, what of it fits together, and what mends the rest")
    commands.add_parser("settings", help="print all settings as Markdown")
    given, rest = parser.parse_known_args(arguments)
    # What stands behind an option, argparse leaves over: settings of eval, the prompt of generate.
    if "overrides" in given and all(re.match("[^-].*=", text) for text in rest):
        given.overrides += rest
    elif len(rest) == 1 and getattr(given, "prompt", "") is None and not rest[0].startswith("--"):
        given.prompt = rest[0]
    elif rest:
        form = ", settings are written as key=value" * ("overrides" in given)
        parser.error(f"unrecognized arguments: {' '.join(rest)}{form}")
    if "overrides" in given and "=" in (given.config or ""):  # a setting in the place of the file
        given.config, given.overrides = None, [given.config, *given.overrides]
    return given


def number_or_best(text: str) -> int | str:
    """What --step may be."""
    return text if text == "best" else int(text)


def run(given: argparse.Namespace) -> bool:
    """Run a command; returns whether what it checked holds."""
    # Nothing that takes seconds to import comes before the arguments have been read.
    match given.command:
        case "data":
            show_data(given.config, given.overrides)
        case "eval":
            evaluate(given)
        case "generate":
            generate(given)
        case "export":
            from trainer.checkpoint import export

            quiet()
            form = given.dtype, given.shard_size, given.adapters
            print(f"{given.out} holds the policy of {export(given.folder, given.out, given.step, *form)}.")
        case "plot":
            from trainer.report import plot

            plot(given.runs, given.out)
            print(f"{given.out} shows {len(given.runs)} run(s).")
        case "algorithms":
            from trainer.algorithms import describe_algorithm, list_algorithms

            print(describe_algorithm(given.name) if given.name else list_algorithms())
        case "rewards":
            from trainer.rewards_report import report_rewards

            return report_rewards(given.names, given.file, test=given.action == "test")
        case "doctor":
            from trainer.doctor import doctor

            return doctor()
        case "settings":
            print(settings_page())
        case command:
            config = load(COMMANDS[command][0], given.config, given.overrides)
            with Notice(config.checkpoint.grace_seconds, config.timeout_seconds) as notice:
                return train_on(command, config, notice)
    return True


def train_on(command: str, config: SftConfig | TrainConfig, notice: Notice) -> bool:
    """Run `train`, `sft` or `prove` on the processes that torchrun started, if it did; False for a proof that fails."""
    with Pulse("importing torch and transformers") as pulse:
        from workers.dispatch import from_controller, on_controller
        from workers.models import family_of
        from workers.models.hub import check_weights, read_config
        from workers.parallel.mesh import is_controller, join, leave, pick_device, read_world, take_threads

        quiet()
        pulse("checking the settings against the model and the device")
        config.check(read_world())
        check_weights(config.model)
        device = pick_device(config.device)
        flops = family_of(read_config(config.model)).flops()
        said = take_threads(flops.token + flops.head) if device.type == "cpu" else ""
        if said and is_controller():
            print(said)
        pulse("waiting for all processes to join")
        join(device, config.timeout_seconds)
    holds = True
    if command == "prove":
        from trainer.prove import prove
        from trainer.runs import run_folder

        config.tracking.name = config.tracking.name or "proof"
        holds = prove(config, device, run_folder(config.tracking))
    else:
        from trainer.runs import open_run

        run = from_controller(on_controller(lambda: open_run(config)))
        notice.folder = run.folder
        if command == "sft":
            from trainer.sft import run_sft

            run_sft(config, device, run, notice)
        else:
            from trainer.trainer import Trainer

            Trainer(config, device, run, notice).run()
    leave()
    return holds


def show_data(config_path: str | None, overrides: list[str]) -> None:
    """Report on the data of a config of `train` or, where its settings are not those, of `sft`."""
    try:
        config = load(TrainConfig, config_path, overrides)
    except ConfigError as error:
        try:
            config = load(SftConfig, config_path, overrides)
        except ConfigError:
            raise error from None
    from trainer.data_report import report_data

    quiet()
    report_data(config)


def evaluate(given: argparse.Namespace) -> None:
    """Evaluate a model or a run's checkpoint on held-out prompts."""
    config_path, overrides = given.config, given.overrides
    if config_path is None and (Path(given.model) / "config.yaml").is_file():
        config_path = Path(given.model) / "config.yaml"
        if "\nrewards:" not in config_path.read_text():
            raise ConfigError(f"{given.model} is of sft and says nothing of rewards: name a CONFIG of train behind it.")
    config = load(TrainConfig, config_path, overrides)
    samples, ks = config.evaluation.samples_per_prompt, given.k or [1]
    if not 1 <= min(ks) <= max(ks) <= samples:
        way_out = f"give --k from 1 to {samples}, or raise evaluation.samples_per_prompt to {max(ks)}"
        raise ConfigError(f"--k={max(ks)} does not go with {samples} sample(s) of each prompt: {way_out}.")
    if not config.data.eval:
        raise ConfigError("data.eval is not set, and there is nothing to evaluate on: name a CONFIG that has it.")
    for path in filter(None, (given.out, given.samples)):
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"Cannot write {path}: give the name of a file, in a folder that is there.")
    with Pulse("importing torch and transformers") as pulse:
        from trainer.evaluate import evaluate
        from workers.parallel.mesh import join, leave, pick_device, read_world

        quiet()
        check_values(config)
        config.check_sampling(read_world())
        device = pick_device(config.device)
        join(device, config.timeout_seconds)
        evaluate(given, config, device, pulse)
    leave()


def generate(given: argparse.Namespace) -> None:
    """Answer a prompt with a model or a run's checkpoint, or chat."""
    if not given.temperature >= 0 or given.max_tokens < 1:
        raise ConfigError("--temperature must be at least 0, and --max-tokens at least 1.")
    with Pulse("importing torch and transformers", lambda text: print(text, file=sys.stderr, flush=True)) as pulse:
        from trainer.generate import generate
        from workers.parallel.mesh import pick_device

        quiet()
        generate(given, pick_device("auto"), pulse)


def quiet() -> None:
    """No progress bars of libraries, nor warnings of torch and FlashAttention that are none."""
    import logging
    import warnings

    import datasets
    import transformers

    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    for name in ("torch.fx._symbolic_trace", "torch.distributed.tensor._redistribute"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("datasets").setLevel(logging.CRITICAL)  # its errors are told in our own sentence
    warnings.filterwarnings("ignore", category=UserWarning, module="cutlass")
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # where one process reads a checkpoint


def main() -> None:
    """Run a command; what the user can mend is printed as one sentence, with exit code 2."""
    try:
        if not run(parse(sys.argv[1:])):
            sys.exit(1)
    except ConfigError as error:
        fail(error)
    except Stopped as stopped:
        stop(stopped)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read what was printed has seen enough, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        import torch.distributed as dist

        if not error.filename or (dist.is_initialized() and os.environ.get("RANK", "0") != "0"):
            raise  # it may be of this rank alone, and another one says nothing
        fail(unusable(error))
    except RuntimeError as error:
        if not (said := out_of_memory(error)):
            tell_torchrun(" ".join((str(error).split("\n")[0], *getattr(error, "__notes__", ())[:1])))
            raise
        traceback.print_exc()
        tell_torchrun(f"error: {said}")
        sys.exit(f"error: {said}")


def out_of_memory(error: RuntimeError) -> str:
    """One sentence on what lacked memory and which settings help; empty for another error."""
    found = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)  # as torch says on any device
    if not found:
        return ""
    phase = next(iter(getattr(error, "__notes__", ())), "").removeprefix("In the phase ").rstrip(".")
    where = f"in the phase {phase} of rank {os.environ.get('RANK', 0)}" if phase else "before the first step"
    way_out = "lower actor.max_tokens_per_microbatch, or set actor.recompute=full or actor.offload=[optimizer]"
    if phase in ("engine_start", "rollout", "evaluation", "step"):
        way_out = "lower rollout.concurrent_samples, rollout.memory_fraction or rollout.max_response_tokens"
    elif phase in ("actor_start", ""):
        way_out = "start more processes, which share the weights, or use a smaller model or actor.lora.rank"
    return f"There is not enough memory {where}, which asked for {found[1]}: {way_out}."


def stop(stopped: Stopped) -> None:
    """End with the sentence of `stopped`, said by rank 0 alone, when all ranks are here: torchrun ends the others."""
    import torch.distributed as dist

    from workers.parallel.mesh import leave

    if os.environ.get("RANK", "0") == "0":
        print(stopped, file=sys.stderr, flush=True)
    tell_torchrun(str(stopped))
    dist.barrier()
    leave()
    sys.exit(STOPPED)


def tell_torchrun(sentence: str) -> None:
    """Leave `sentence` for torchrun's own report, which comes behind what is printed here, to end with."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        Path(file).write_text(json.dumps({"message": sentence, "timestamp": int(time.time())}))


def fail(error: ConfigError) -> None:
    """End with the sentence of `error`, said by rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {error}", file=sys.stderr, flush=True)
        tell_torchrun(f"error: {error}")
    else:
        time.sleep(10)  # torchrun ends all of them as soon as one has ended, which must be the one that speaks
    if "torch" in sys.modules:
        import torch.distributed as dist

        from workers.parallel.mesh import leave

        if dist.is_initialized():
            leave()
    sys.exit(2)


if __name__ == "__main__":
    main()
