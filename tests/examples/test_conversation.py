"""examples/conversation.py and the environment guess: its rules, its demonstrations token by token, and a short run."""

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from environments.guess import Guess
from examples import conversation
from examples.conversation import TURNS, WIDTHS, demonstrations, rows, write
from examples.countdown import make_tokenizer
from grpo.batch import Ending, Trajectory
from grpo.config import load
from grpo.conversation import Dialogue
from grpo.data_config import DataConfig
from trainer.config import TrainConfig
from workers.conversation import Cast, Converser
from workers.engines.config import RolloutConfig
from workers.engines.protocol import Response

ROOT = Path(__file__).parents[2]


def bounds(row: dict) -> tuple[int, int]:
    return tuple(map(int, row["prompt"].split(" to ")))


@pytest.mark.parametrize("mute", [False, True])
@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12", ("yes", 1.0, True)),
        ("9 to 20 12", ("yes", 1.0, True)),
        ("11", ("+", 0.0, False)),
        ("12 11", ("+", 0.0, False)),
        ("13", ("-", 0.0, False)),
        ("-12", ("+", 0.0, False)),
        ("9 to", ("no", 0.0, False)),
        ("12 ?", ("no", 0.0, False)),
        ("", ("no", 0.0, False)),
        ("9" * 5000, ("no", 0.0, False)),
    ],
)
def test_the_last_word_of_a_turn_is_the_guess(text, answer, mute):
    game = Guess(mute)
    assert game.reset({"prompt": "9 to 20", "number": 12}) is None
    assert game.step("20") == ("+" if mute else "-", 0.0, False)
    assert game.step(text) == (("+", *answer[1:]) if mute and answer[0] == "-" else answer)


def test_rows_hold_each_number_and_no_prompt_is_trained_on_and_held_out():
    training, held_out = rows(seed=0)
    assert rows(seed=0) == (training, held_out)
    assert rows(seed=1) != (training, held_out)
    prompts, others = {row["prompt"] for row in training}, {row["prompt"] for row in held_out}
    assert not prompts & others
    assert (len(prompts), len(others), len(held_out)) == (131, 40, 80)
    for row in training + held_out:
        low, high = bounds(row)
        assert low < row["number"] < high
        assert high - low - 1 in WIDTHS
    assert (
        len({tuple(row.items()) for row in training})
        == len(training)
        == sum(high - low - 1 for low, high in map(bounds, [{"prompt": prompt} for prompt in prompts]))
    )


def test_demonstrations_are_games_that_were_played_and_few_players_listen():
    training, _ = rows(seed=0)
    shown = demonstrations(training, seed=0)
    assert demonstrations(training, seed=0) == shown
    won, heard = [], []
    for row in shown[:6000]:
        low, high = bounds(row)
        game, words = Guess(), re.split(r" <eos> ([-+]) ", row["response"])
        game.reset(row)
        turns = [[*map(int, turn.replace(" to ", " ").split())] for turn in words[::2]]
        answers = [game.step(turn) for turn in words[::2]]
        assert [said for said, _, _ in answers[:-1]] == words[1::2]
        assert [done for _, _, done in answers[:-1]] == [False] * (len(turns) - 1)
        assert answers[-1][2] or len(turns) == TURNS
        won.append(answers[-1][2])
        for place, (*written, guess) in enumerate(turns):
            if place:
                before = turns[place - 1][-1]
                assert written in ([before, high], [low, before])
                low, high = written
            assert low < guess < high or (guess in (low, high) and high - low < 2)
        if len(turns) > 1:
            heard.append((turns[1][0] == turns[0][0]) == (words[1] == "+"))
    # Of those who do not listen, half go to the right side.
    assert sum(heard) / len(heard) == pytest.approx((1 + conversation.LISTENS) / 2, abs=0.02)
    assert 0.3 <= sum(won) / len(won) <= 0.4


def test_the_tokens_of_a_demonstration_are_those_of_a_rollout_that_says_the_same():
    tokenizer = make_tokenizer()
    settings = load(TrainConfig, ROOT / "examples/conversation.yaml")
    dialogue = Dialogue(tokenizer, DataConfig(), [tokenizer.eos_token_id])
    training, _ = rows(seed=0)
    shown = random.Random(0).sample(demonstrations(training, seed=0), 100)
    rollout = RolloutConfig(max_response_tokens=settings.rollout.max_response_tokens)

    async def play(converser: Converser, row: dict) -> Trajectory:
        said = iter(re.split(r" <eos> [-+] ", row["response"]))
        trajectory = Trajectory(tokenizer(row["prompt"])["input_ids"], 0, False, row, row["prompt"])

        async def ask(most: int) -> Response:
            ids = [*tokenizer(next(said))["input_ids"], tokenizer.eos_token_id]
            assert len(ids) <= most
            trajectory.add_sampled(ids, [-1.0] * len(ids), 1)
            trajectory.finish_reason = Ending.STOP
            return Response(ids, [-1.0] * len(ids), "stop")

        await converser(trajectory, ask)
        assert next(said, None) is None
        return trajectory

    async def play_all(converser: Converser) -> list[Trajectory]:
        return await asyncio.gather(*(play(converser, row) for row in shown))

    with Converser(Cast("guess", None, dialogue), settings.environments, rollout) as converser:
        played = asyncio.run(play_all(converser))
    assert settings.environments.max_turns == TURNS
    assert {trajectory.finish_reason for trajectory in played} == {Ending.DONE, Ending.TURNS}
    for row, trajectory in zip(shown, played, strict=True):
        imitated = tokenizer(row["prompt"])["input_ids"] + tokenizer(row["response"])["input_ids"]
        assert trajectory.tokens.tolist() == [*imitated, tokenizer.eos_token_id]
        assert trajectory.errors == []


def test_the_folder_is_the_same_again(tmp_path, monkeypatch):
    monkeypatch.setattr(conversation, "DEMONSTRATIONS", 20)
    for name in "ab":
        write(tmp_path / name, seed=3)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert {"train.jsonl", "heldout.jsonl", "demonstrations.jsonl"} < set(map(str, files))
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


def test_the_example_runs_and_its_rows_are_games(tmp_path):
    folder = tmp_path / "data"
    write(folder, seed=0)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def trainer(command: str, config: str, *settings: str) -> None:
        words = [sys.executable, "-m", "trainer", command, str(ROOT / "examples" / config), "device=cpu", *settings]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    data = f"data.train={folder / 'demonstrations.jsonl'}"
    trainer("sft", "conversation_sft.yaml", "steps=40", f"model.path={folder / 'model'}", data, "tracking.name=warm")
    few = [
        "steps=2",
        "batch.prompts_per_step=4",
        "evaluation.every=2",
        "evaluation.samples_per_prompt=1",
        "tracking.samples_every=1",
        "tracking.samples_kept=32",
    ]
    files = [f"data.train={folder / 'train.jsonl'}", f"data.eval={folder / 'heldout.jsonl'}", "data.eval_limit=4"]
    trainer("train", "conversation.yaml", *few, *files, "model.path=runs/warm/model", "tracking.name=played")

    run = tmp_path / "runs" / "played"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len([sample for sample in samples if not sample["held_out"]]) == 2 * 4 * 8
    for sample in samples:
        game = Guess()
        game.reset(sample["row"])
        said, asked = sample["turns"][::2], sample["turns"][1::2]
        assert {turn["role"] for turn in said} == {"assistant"}
        answers = [game.step(turn["content"]) for turn in said]
        assert [turn["content"] for turn in asked] == [answer for answer, _, _ in answers[:-1]]
        assert sample["reward"] == sample["rewards/environment"] == answers[-1][1]
        assert len(said) == TURNS or answers[-1][2]
        assert sample["finish_reason"] == ("done" if answers[-1][2] else "turns")
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["environment/errors"] == 0
    counts = [len(s["turns"][::2]) for s in samples if s["step"] == 2 and not s["held_out"]]
    assert metrics[-1]["environment/turns"] == pytest.approx(sum(counts) / len(counts))
