"""examples/countdown.py: its files, the exactness of its traces, and its tokenizer and model as loaded again."""

import dataclasses
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import rewards
from examples.countdown import (
    Preset,
    Problem,
    candidates,
    demonstrate,
    demonstrations,
    make_model,
    make_tokenizer,
    presets,
    problems,
    write,
)
from workers.config import ModelConfig
from workers.models.hub import read_tokenizer

STEP = re.compile(r"(\d+) ([-+*]) (\d+) = (\d+) ([-+*]) (\d+) = (\d+) to (\d+) (yes|no)")


def exact(left: str, operator: str, right: str) -> Fraction:
    return Fraction(eval(f"{int(left)} {operator} {int(right)}", {"__builtins__": {}}))


def identity(problem: Problem) -> tuple:
    return (*sorted(problem.numbers), problem.target)


def problem_of(row: dict) -> tuple:
    return identity(Problem(tuple(row["numbers"]), row["target"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("countdown")
    write(out, dataclasses.replace(presets()["search"], demonstrations=3000), seed=0)
    return out


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("name", "total"), [("search", 460), ("direct", 846), ("hard", 811)])
def test_problems_are_all_there_once_and_the_held_out_ones_apart(name, total):
    preset = presets()[name]
    training, held_out = problems(preset, seed=0)
    assert len(held_out) == preset.held_out == 128
    assert len({identity(problem) for problem in training + held_out}) == len(training + held_out) == total
    assert problems(preset, seed=0) == (training, held_out)
    assert problems(preset, seed=1) != (training, held_out)
    for problem in training + held_out:
        assert all(1 <= number <= preset.largest_number for number in problem.numbers)
        assert 1 <= problem.target <= 30


@pytest.mark.parametrize("name", ["search", "direct", "hard"])
def test_every_trace_is_exact_and_its_verdicts_are_the_rewards(name):
    preset = dataclasses.replace(presets()[name], demonstrations=3000)
    training, _ = problems(preset, seed=0)
    reward, tokenizer = rewards.get("countdown"), make_tokenizer()
    known = {identity(problem) for problem in training}
    for row in demonstrations(training, preset, seed=0):
        assert problem_of(row) in known
        thinking, answer = row["response"].split(" </think> ")
        tries = list(STEP.finditer(thinking))
        assert " ".join(t.group() for t in tries) == thinking
        assert 1 <= len(tries) <= preset.most_tries
        for a, first, b, between, second, c, value, target, verdict in (t.groups() for t in tries):
            assert int(target) == row["target"]
            assert exact(a, first, b) == int(between)
            assert exact(between, second, c) == int(value)
            assert sorted(map(int, (a, b, c))) == sorted(row["numbers"])
            assert set(first + second) <= set(preset.operators)
            assert verdict == ("yes" if int(value) == row["target"] else "no")
        assert all(t.group(9) == "no" for t in tries[:-1])
        a, first, b, _, second, c, _, _, verdict = tries[-1].groups()
        assert answer == f"<answer> ( {a} {first} {b} ) {second} {c} </answer>"
        assert reward(row["response"], row) == (1.0 if verdict == "yes" else 0.1)
        assert tokenizer.decode(tokenizer(row["response"])["input_ids"]) == row["response"]


def expectation(problem: Problem, preset: Preset) -> tuple[float, float]:
    """The chance that a demonstration of `problem` solves it, and its mean number of tries, by the preset's rules."""
    values = len(candidates(tuple(sorted(problem.numbers)), preset.operators))
    solved = tries = 0.0
    for share, going_on in ((preset.patient, 1 - preset.give_up), (1 - preset.patient, 0.0)):
        reached = share
        for done in range(preset.most_tries):
            hit = preset.right + (1 - preset.right) / (values - (done > 0))
            solved, tries = solved + reached * hit, tries + reached
            reached *= (1 - hit) * going_on
    return solved, tries


@pytest.mark.parametrize("name", ["search", "direct", "hard"])
def test_demonstrations_are_as_good_as_the_preset_says(name):
    preset = dataclasses.replace(presets()[name], demonstrations=8000)
    training, _ = problems(preset, seed=0)
    rows = demonstrations(training, preset, seed=0)
    solved, tries = np.mean([expectation(problem, preset) for problem in training], axis=0)
    assert sum(" yes " in row["response"] for row in rows) / len(rows) == pytest.approx(solved, abs=0.02)
    assert sum(len(STEP.findall(row["response"])) for row in rows) / len(rows) == pytest.approx(tries, abs=0.04)
    assert name == "direct" or solved <= 0.4


def test_demonstrations_stop_at_a_hit_and_at_the_most_tries():
    problem, unsolvable = Problem((3, 7, 2), 12), Problem((9, 5, 2), 30)
    patient = dataclasses.replace(presets()["search"], patient=1.0, give_up=0.0, most_tries=3)
    assert demonstrate(problem, dataclasses.replace(patient, right=1.0), random.Random(0)).count("yes") == 1
    assert demonstrate(unsolvable, patient, random.Random(0)).count(" no") == 3
    careless = dataclasses.replace(patient, patient=0.0)
    assert demonstrate(unsolvable, careless, random.Random(0)).count(" no") == 1


def test_a_search_never_reaches_the_same_value_twice_in_a_row():
    patient = dataclasses.replace(presets()["search"], patient=1.0, give_up=0.0, most_tries=200)
    values = [t.group(7) for t in STEP.finditer(demonstrate(Problem((9, 5, 2), 30), patient, random.Random(0)))]
    assert len(values) == 200
    assert all(value != following for value, following in itertools.pairwise(values))
    assert set(values) == {"16", "12", "6", "2"}


def test_the_folder_holds_disjoint_problems_and_the_same_again(folder, tmp_path):
    training, held_out = rows_of(folder / "train.jsonl"), rows_of(folder / "heldout.jsonl")
    shown = rows_of(folder / "demonstrations.jsonl")
    assert (len(training), len(held_out), len(shown)) == (332, 128, 3000)
    assert set(training[0]) == {"prompt", "numbers", "target"}
    assert set(shown[0]) == {"prompt", "response", "numbers", "target"}
    assert not set(map(problem_of, held_out)) & set(map(problem_of, training + shown))
    for row in training + shown:
        assert row["prompt"] == f"{' '.join(map(str, row['numbers']))} to {row['target']} <think>"
    write(tmp_path, dataclasses.replace(presets()["search"], demonstrations=3000), seed=0)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert [path for path in files if (folder / path).read_bytes() != (tmp_path / path).read_bytes()] == []
    write(tmp_path, dataclasses.replace(presets()["search"], demonstrations=10), seed=1)
    assert len(rows_of(tmp_path / "demonstrations.jsonl")) == 10
    assert (tmp_path / "heldout.jsonl").read_bytes() != (folder / "heldout.jsonl").read_bytes()


def test_the_model_folder_loads_as_any_other(folder):
    tokenizer = read_tokenizer(ModelConfig(path=str(folder / "model")))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert len(tokenizer) == model.config.vocab_size == 118
    assert model.num_parameters() < 200_000
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.config.eos_token_id == tokenizer.eos_token_id
    expected = make_model(seed=0).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    drawn = model.generation_config
    assert (drawn.do_sample, drawn.temperature, drawn.top_k, drawn.top_p) == (True, 1.0, 0, 1.0)
    text = "3 7 2 to 12 <think> 7 - 2 = 5 + 3 = 8 to 12 no </think> <answer> ( 7 + 3 ) + 2 </answer>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.split())
    assert tokenizer.decode(ids) == text
    dense, spaced = tokenizer(["(7+3)*2</think>\n<answer>", "( 7 + 3 ) * 2 </think> <answer>"])["input_ids"]
    assert dense == spaced
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    with pytest.raises(Exception, match="UNK"):
        tokenizer("seven")


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_models_of_every_kind_depend_on_their_seed_alone(kind, tied):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sizes = {"hidden": 32, "layers": 1, "heads": 4, "kv_heads": 2, "feed_forward": 48, "vocab": 128}
    first, again, other = (make_model(kind, seed=seed, tied=tied, **sizes) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.config.model_type == kind
    assert (first.lm_head.weight is first.model.embed_tokens.weight) == tied
    assert first.model.layers[0].self_attn.k_proj.weight.shape == (32, 32)
    assert first(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 128)
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_command_line_fills_the_folder(tmp_path):
    script, out = Path(__file__).parents[2] / "examples" / "countdown.py", tmp_path / "direct"
    command = [sys.executable, str(script), str(out), "--preset", "direct", "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(rows_of(out / "demonstrations.jsonl")) == presets()["direct"].demonstrations
    assert subprocess.run([*command[:-3], "easy"], capture_output=True).returncode == 2


@pytest.mark.parametrize("script", ["run_countdown.sh", "run_conversation.sh"])
def test_the_script_begins_anew_or_goes_on_with_what_is_there(script, tmp_path):
    examples, python, calls = tmp_path / "examples", tmp_path / "bin/python", tmp_path / "calls"
    shutil.copytree(Path(__file__).parents[2] / "examples", examples, ignore=shutil.ignore_patterns("*.py"))
    (tmp_path / "setup.py").touch()
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')  # which only writes down what it is asked for
    python.chmod(0o755)
    environment = {"VIRTUAL_ENV": str(tmp_path), "PATH": f"{python.parent}:{os.environ['PATH']}", "NAME": "some"}

    def run(*arguments: str) -> list[str]:
        """The names of the files and runs that are made, each but the first with what becomes of an earlier one."""
        calls.unlink(missing_ok=True)
        command = ["bash", examples / script, "steps=2", *arguments]
        subprocess.run(command, check=True, env=environment, capture_output=True)
        asked = [line for line in calls.read_text().splitlines() if not line.startswith(("-c", "-m pip"))]
        assert all(argument in asked[-1].split() for argument in ("train", "steps=2", *arguments))
        return [
            " ".join(re.findall(r"runs/some/data(?= --)|some/\S+-start(?= )|some/grpo|overwrite=\w+", a)) for a in asked
        ]

    anew = ["runs/some/data", "some/warm-start overwrite=true", "some/grpo overwrite=true"]
    on = [*anew[:2], "some/grpo overwrite=false"]
    assert run() == anew
    for made, left in (("data/demonstrations.jsonl", on[1:]), ("warm-start/model/tokenizer.json", on[2:])):
        (tmp_path / "runs/some" / made).parent.mkdir(parents=True)
        (tmp_path / "runs/some" / made).touch()
        assert run("checkpoint.resume=true") == left
        assert run() == anew
