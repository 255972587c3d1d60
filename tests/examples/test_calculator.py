"""examples/calculator.py: its tool, its questions, a conversation as the policy shall learn it, and a step of a run."""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from examples.calculator import SHOWN, calculate, questions
from examples.countdown import make_model
from grpo.batch import Ending, Trajectory, batch_of
from grpo.config import load
from grpo.conversation import Dialogue
from grpo.data import load_prompts
from rewards.reasoning_gym import reasoning_gym
from tests.grpo.test_dialogue import HEADS, OPEN, tokenizer  # noqa: F401 - a fixture
from trainer.config import TrainConfig
from trainer.controller import batch_metrics
from workers.conversation import Cast, Converser, conversation_fields
from workers.engines.protocol import Response

ROOT = Path(__file__).parents[2]
TEMPLATE = HEADS + OPEN  # which knows nothing of tools, as that of SmolLM2


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("52907 + 8164", "61071"),
        ("7312 - 40958 + 615", "-33031"),
        ("2 * (3 + 4)", "14"),
        ("7 / 2", "3.5"),
        ("-4", "-4"),
    ],
)
def test_the_calculator_works_out(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["", "1 +", "1,000 + 1", "2 ** 99", "__import__('os')", "1 / 0", "1+" * 600 + "1"]
)
def test_what_is_no_arithmetic_is_an_error(expression):
    with pytest.raises((ValueError, ZeroDivisionError)):
        calculate(expression)


def test_the_questions_follow_worked_ones_and_none_is_trained_on_and_held_out():
    settings = {"min_terms": 2, "max_terms": 4, "min_digits": 4, "max_digits": 6, "size": 50}
    training, held_out = (list(questions(split, **settings)) for split in ("train", "test"))
    asked = {row["prompt"][-1]["content"] for row in training}
    assert len(asked) == 50
    assert not asked & {row["prompt"][-1]["content"] for row in held_out}
    for row in training:
        *shown, question = row["prompt"]
        assert [message["role"] for message in shown] == ["user", "assistant"] * 2 * len(SHOWN)
        assert calculate(question["content"].partition(": ")[2].removesuffix(" =")) == row["answer"]


@pytest.fixture
def config(tokenizer):  # noqa: F811
    tokenizer.chat_template = TEMPLATE
    loaded = load(TrainConfig, ROOT / "examples/calculator.yaml")
    loaded.environments.files = [str(ROOT / "examples/calculator.py")]
    source = f"{ROOT}/examples/calculator.py:questions"
    loaded.data = replace(loaded.data, train=source, options=loaded.data.options | {"size": 2}, max_prompt_tokens=4000)
    loaded.environments.max_turn_tokens = loaded.rollout.max_response_tokens = 1000  # of bytes
    return loaded


def hold(config, tokenizer, *turns: str) -> Trajectory:  # noqa: F811
    """The first question, answered by `turns` as the example has it."""
    dialogue = Dialogue(tokenizer, config.data, [tokenizer.eos_token_id])
    cast, said = Cast("calculator", None, dialogue), iter(turns)
    prompt = load_prompts(config.data, tokenizer, "train", tools=cast.tools_of)[0]
    trajectory = Trajectory(prompt.tokens, 0, False, prompt.row, prompt.text)

    async def ask(most: int) -> Response:
        ids = [*tokenizer(next(said))["input_ids"], tokenizer.eos_token_id]
        trajectory.add_sampled(ids, [-1.0] * len(ids), 1)
        trajectory.finish_reason = Ending.STOP
        return Response(ids, [-1.0] * len(ids), "stop")

    with Converser(cast, config.environments, config.rollout) as converser:
        asyncio.run(converser(trajectory, ask))
    return trajectory


def calls_fit(talk: Trajectory) -> float:
    return batch_metrics(batch_of([talk]).update(conversation_fields([talk])))["environment/calls_fit"]


def test_a_call_as_it_is_shown_brings_the_answer_and_one_that_does_not_fit_is_told(config, tokenizer):  # noqa: F811
    first = next(iter(questions("train", **config.data.options)))
    expression = first["prompt"][-1]["content"].partition(": ")[2].removesuffix(" =")
    call = first["prompt"][1]["content"].replace(SHOWN[0], expression)
    talk = hold(config, tokenizer, call, f"It is {first['answer']}")
    assert '"name": "calculate"' in talk.prompt.partition("<|im_end|>")[0]  # the system message tells of the tool
    assert [(turn.role, turn.content) for turn in talk.turns[1:2]] == [("tool", first["answer"])]
    options = config.rewards.options["reasoning_gym"]
    assert reasoning_gym(talk.response, talk.info, **options) == 1.0
    assert calls_fit(talk) == 1.0
    talk = hold(config, tokenizer, call.replace('"expression"', '"sum"'), call, "It is 1")
    assert "Error: calculate: missing a required argument" in talk.turns[1].content
    assert talk.turns[3].content == first["answer"]
    assert reasoning_gym(talk.response, talk.info, **options) == 0.0
    assert calls_fit(talk) == 0.5


def test_the_example_takes_a_step(tokenizer, tmp_path):  # noqa: F811
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    model = make_model(vocab=len(tokenizer))
    model.config.max_position_embeddings = 8192
    model.save_pretrained(tmp_path / "model")
    small = ["steps=1", "batch.prompts_per_step=2", "batch.samples_per_prompt=2", "data.eval_limit=2"]
    small += ["data.max_prompt_tokens=4000", "environments.max_turn_tokens=8", "rollout.engine=torch", "device=cpu"]
    where = [f"model.path={tmp_path / 'model'}", f"tracking.folder={tmp_path}", "tracking.samples_every=1"]
    words = [sys.executable, "-m", "trainer", "train", "examples/calculator.yaml", *small, *where]
    done = subprocess.run(words, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "calculator"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[1]["environment/turns"] >= 1
    assert rows[1]["reward/failed"] == 0
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {sample["held_out"] for sample in samples} == {True, False}
    assert all(sample["turns"][0]["role"] == "assistant" for sample in samples)
