"""Conversations in the RolloutWorker: what ends them, what stands in the batch, what errors of environments do."""

import asyncio
import itertools
from pathlib import Path

import pytest
import torch

from environments import EnvironmentsConfig, registry
from examples.countdown import make_model, make_tokenizer
from grpo.algorithm import AlgorithmConfig
from grpo.batch import Ending, batch_of, lengths_of, with_values
from grpo.conversation import Dialogue
from grpo.data import Prompt
from grpo.data_config import DataConfig
from rewards import RewardsConfig, validate
from tests.grpo.test_dialogue import CHATML, tokenizer  # noqa: F401 - a fixture
from trainer.controller import batch_metrics
from workers.actor import ActorWorker
from workers.config import ActorConfig, ModelConfig
from workers.conversation import Cast, Converser, conversation_fields
from workers.engines.config import RolloutConfig
from workers.engines.protocol import Response
from workers.engines.torch_engine import TorchEngine
from workers.rollout import Grader, RolloutWorker
from workers.sharding import ShardingManager

FILE = '''
import os
import time
from pathlib import Path

from environments import register


@register("talk")
class Talk:
    """Does what the row says to each turn: (observation, reward, done), or an error."""

    def reset(self, row):
        self.script, self.log = iter(row["script"]), row.get("log")
        return row.get("first")

    def step(self, text):
        what = next(self.script)
        if what == "raise":
            raise LookupError("nothing is there")
        if what == "hang":
            time.sleep(60)
        if what == "die":
            os._exit(3)
        time.sleep(what[3] if len(what) > 3 else 0)
        return what[:3]

    def close(self):
        if self.log:
            Path(self.log).open("a").write("closed ")


@register("desk")
class Desk:
    def reset(self, log=None, **row):
        self.log, self.sum = log, 0

    def add(self, a: int, b: int = 1) -> int:
        """Add.

        Args:
            a: One.
            b: Other.
        """
        self.sum += a + b
        time.sleep(0.2 / a)  # what is called first comes back last
        return a + b

    def fail(self) -> str:
        """Fail."""
        raise LookupError("nothing is there")

    def get_reward(self) -> float:
        return self.sum / 10

    def close(self):
        if self.log:
            Path(self.log).open("a").write("closed ")
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "mine.py"
    path.write_text(FILE)
    return path


@pytest.fixture(autouse=True)
def loaded(file):
    registry.load_file(file)


class ScriptedEngine:
    """Says the turns that it was given, each ended by the token `stop`, cut at what it may say."""

    tokens_at_work = 0

    def __init__(self, turns, stop, concurrent_samples=None, seconds=0):
        self.turns, self.stop, self.concurrent_samples = itertools.cycle(turns), stop, concurrent_samples
        self.asked, self.seeds, self.limits = [], [], []
        self.seconds, self.at_work, self.most_at_work = seconds, 0, 0

    def run(self, work):
        return asyncio.run(work)

    async def sample(self, tokens, sampling):
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        await asyncio.sleep(self.seconds)
        self.at_work -= 1
        self.asked.append(tokens.tolist())
        self.seeds.append(sampling.seed)
        self.limits.append(sampling.max_new_tokens)
        said = [*next(self.turns), self.stop]
        cut = said[: sampling.max_new_tokens]
        return Response(cut, [-0.5] * len(cut), "stop" if cut == said else "length")

    def abort(self):
        pass


@pytest.fixture
def hold(tokenizer, engines, file):  # noqa: F811
    """hold(name, row, turns, **settings) has a conversation; returns its trajectory, the engine and the batch."""
    closing = []

    def run(
        name, row, turns, chat=True, longest=400, samples=1, rows=None, grade=None, limit=None, seconds=0, **settings
    ):
        tokenizer.chat_template = CHATML if chat else None
        data = DataConfig(chat=chat, max_prompt_tokens=200)
        config = EnvironmentsConfig(files=[str(file)], processes=1, **settings)
        cast = Cast(name, None, Dialogue(tokenizer, data, [tokenizer.eos_token_id]))
        rollout = RolloutConfig(max_response_tokens=longest)
        converser = Converser(cast, config, rollout)
        closing.append(converser)
        ids = [tokenizer(turn, add_special_tokens=False)["input_ids"] for turn in turns]
        engine = ScriptedEngine(ids, tokenizer.eos_token_id, limit, seconds)
        worker = RolloutWorker(rollout, engine, engines, (tokenizer.eos_token_id,), 3, grade, None, converser)
        worker.version = 7
        prompts = []
        for i, each in enumerate(rows or [row]):
            text = "start"
            if chat:
                text = tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
                )
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            prompts.append(Prompt(i, ids, text, {"prompt": "start", **each}))
        batch = worker.generate(prompts, samples)
        return worker.trajectories[0], engine, batch

    yield run
    for converser in closing:
        converser.pool.close()


def observed(tokenizer, trajectory):  # noqa: F811
    """The texts of the stretches that the policy did not sample, behind the prompt."""
    runs = itertools.groupby(zip(trajectory.mask, trajectory.tokens, strict=True), key=lambda pair: pair[0])
    texts = [tokenizer.decode([int(token) for _, token in run]) for mask, run in runs if not mask]
    return texts[1:]


def test_a_conversation_is_one_row_of_what_was_sampled_and_what_was_said(hold, tokenizer):  # noqa: F811
    row = {"script": [["higher", 0.25, False], ["lower", 0.0, False], ["yes", 1.0, True]]}
    talk, engine, batch = hold("talk", row, ["4", "8", "6"])
    assert talk.finish_reason == Ending.DONE
    assert observed(tokenizer, talk) == [
        f"\n<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n" for said in ("higher", "lower")
    ]
    assert tokenizer.decode(talk.tokens[talk.mask]) == "4<|im_end|>8<|im_end|>6<|im_end|>"
    # What the engine was asked, turn by turn, is how the row begins, to the token.
    assert [talk.tokens[: len(asked)].tolist() for asked in engine.asked] == engine.asked
    assert [len(asked) for asked in engine.asked] == [
        i for i in range(1, len(talk.tokens)) if talk.mask[i] > talk.mask[i - 1]
    ]
    assert batch["response_mask"].unbind()[0].tolist() == talk.mask.tolist()
    assert set(talk.versions[talk.mask]) == {7}
    assert set(talk.versions[~talk.mask]) == {-1}
    assert set(talk.logprobs[~talk.mask]) == {0.0}
    assert len(set(engine.seeds)) == 3
    assert [(turn.role, turn.content) for turn in talk.turns] == [
        ("assistant", "4"), ("user", "higher"), ("assistant", "8"), ("user", "lower"), ("assistant", "6"),
    ]  # fmt: skip
    assert [turn.tokens for turn in talk.turns if turn.role == "assistant"] == [2, 2, 2]
    assert talk.outcome["environment"] == {"reward": 1.25, "error": None}
    assert not batch["truncated"].any()


def test_without_a_template_only_what_was_said_stands_between_the_turns(hold, tokenizer):  # noqa: F811
    row = {"script": [["+", 0.0, False], ["yes", 1.0, True]], "first": ":"}
    talk, _, _ = hold("talk", row, ["4", "8"], chat=False)
    assert tokenizer.decode(talk.tokens) == "start:4<|im_end|>+8<|im_end|>"
    assert talk.prompt == "start:"


def test_what_reset_says_becomes_the_prompt(hold, tokenizer):  # noqa: F811
    row = {"script": [["", 1.0, True]], "first": [{"role": "user", "content": "another"}]}
    talk, engine, _ = hold("talk", row, ["4"])
    assert tokenizer.decode(engine.asked[0]) == "<|im_start|>user\nanother<|im_end|>\n<|im_start|>assistant\n"
    talk, _, _ = hold("talk", row | {"first": "more"}, ["4"])
    assert "start\n\nmore<|im_end|>" in talk.prompt
    talk, engine, _ = hold("talk", row | {"first": "m" * 300}, ["4"])
    assert talk.finish_reason == Ending.ERROR
    assert "data.max_prompt_tokens=200" in talk.outcome["environment"]["error"]
    assert engine.asked == []


@pytest.mark.parametrize(
    ("settings", "ending", "turns"),
    [({"max_turns": 2}, Ending.TURNS, 2), ({"longest": 45}, Ending.LENGTH, 2), ({"max_turns": 5}, Ending.DONE, 4)],
)
def test_limits_cut_a_conversation_and_are_told_from_its_end(hold, settings, ending, turns):
    row = {"script": [["no", 0.0, False]] * 3 + [["yes", 1.0, True]]}
    talk, engine, batch = hold("talk", row, ["4"], **settings)
    assert talk.finish_reason == ending
    assert len(engine.asked) == turns
    assert batch["truncated"].tolist() == [ending != Ending.DONE]
    assert len(talk.tokens) - len(engine.asked[0]) <= settings.get("longest", 400)


def test_a_turn_that_is_cut_goes_on_as_if_it_had_ended(hold, tokenizer):  # noqa: F811
    row = {"script": [["no", 0.0, False], ["yes", 1.0, True]]}
    talk, engine, batch = hold("talk", row, ["444444", "6"], max_turn_tokens=3)
    assert engine.limits == [3, 3]
    assert observed(tokenizer, talk)[0].startswith("<|im_end|>\n<|im_start|>user\nno")
    assert [turn.ending for turn in talk.turns if turn.role == "assistant"] == [Ending.LENGTH, Ending.STOP]
    assert talk.finish_reason == Ending.DONE
    assert not batch["truncated"].any()


def test_the_last_turn_may_only_say_what_is_left(hold):
    row = {"script": [["no", 0.0, False]] * 9}
    talk, engine, _ = hold("talk", row, ["4" * 30], longest=110)
    begun = len(engine.asked[0])
    assert engine.limits == [110 - (len(asked) - begun) for asked in engine.asked]
    assert len(talk.tokens) - begun <= 110
    assert talk.finish_reason == Ending.LENGTH


@pytest.mark.parametrize("what", ["raise", "hang", "die"])
@pytest.mark.parametrize("on_error", ["tell", "end"])
def test_a_step_that_fails_is_told_or_ends_the_conversation(hold, tokenizer, what, on_error):  # noqa: F811
    row = {"script": [what, ["yes", 1.0, True]]}
    talk, engine, batch = hold("talk", row, ["4"], timeout_seconds=1.5, on_error=on_error)
    kind, says = {
        "raise": ("exception", "nothing is there"),
        "hang": ("timeout", "longer than 1.5 s"),
        "die": ("crash", "code 3"),
    }[what]
    assert (talk.errors[0].kind, talk.errors[0].reward) == (kind, "talk")
    assert says in talk.errors[0].message
    if on_error == "tell":
        assert "<|im_start|>user\nError: " in observed(tokenizer, talk)[0]
        assert says in observed(tokenizer, talk)[0]
    assert len(engine.asked) == (2 if on_error == "tell" else 1)
    # Only an environment that is still there can go on.
    goes_on = what == "raise" and on_error == "tell"
    assert talk.finish_reason == (Ending.DONE if goes_on else Ending.ERROR)
    assert (says in (talk.outcome["environment"]["error"] or "")) != goes_on
    assert len(talk.errors) == 1
    assert not batch["truncated"].any()


def test_what_is_too_long_is_cut_and_counted(hold, tokenizer):  # noqa: F811
    row = {"script": [["x" * 50, 0.0, False], ["yes", 1.0, True]]}
    talk, _, _ = hold("talk", row, ["4"], max_observation_tokens=20)
    assert f"user\n{'x' * 20} [cut]<|im_end|>" in observed(tokenizer, talk)[0]
    assert [error.kind for error in talk.errors] == ["too long"]


def call(name, **arguments):
    return f'<tool_call>{{"name": "{name}", "arguments": {str(arguments).replace(chr(39), chr(34))}}}</tool_call>'


def test_tools_answer_in_the_order_of_their_calls_and_a_turn_without_one_ends_it(hold, tokenizer):  # noqa: F811
    turns = [call("add", a=1, b=2) + call("add", a=4), "It is 3 and 5."]
    talk, _, _ = hold("desk", {}, turns)
    assert [(turn.role, turn.content) for turn in talk.turns[1:]] == [
        ("tool", "3"), ("tool", "5"), ("assistant", "It is 3 and 5."),
    ]  # fmt: skip
    assert talk.finish_reason == Ending.STOP
    assert talk.turns[0].calls == 2
    assert talk.response == "It is 3 and 5."
    assert talk.outcome["environment"]["reward"] == 0.8
    assert talk.waited < 0.35  # 0.2 and 0.05 seconds side by side, and what the processes take


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        (call("ad", a=1), "Error: There is no tool 'ad': use add, fail."),
        (call("add", b=1), "Error: add: missing a required argument: 'a'"),
        (call("add", a=1, c=1), "Error: add: got an unexpected keyword argument 'c'"),
        (call("fail"), "Error: LookupError: nothing is there"),
        ('<tool_call>{"name": "add", "argu', "Error: The call is not JSON that ends"),
        (call("reset"), "Error: There is no tool 'reset'"),
    ],
)
def test_a_call_that_cannot_be_made_is_an_error_that_the_policy_reads(hold, turn, says):
    talk, _, _ = hold("desk", {}, [turn, "so"])
    assert talk.turns[1].content.startswith(says)
    assert talk.finish_reason == Ending.STOP
    assert len(talk.errors) == 1


def test_rewards_get_the_last_turn_and_the_messages(hold, tokenizer, tmp_path):  # noqa: F811
    (tmp_path / "last.py").write_text(
        "from rewards import register\n@register('last')\ndef last(completion, row):\n"
        "    return 1.0 if completion == '6' and [m['content'] for m in row['messages']] == ['4', 'no', '6'] else 0.0\n"
    )
    config = RewardsConfig(weights={"last": 1.0, "environment": 0.5}, files=[str(tmp_path / "last.py")], processes=1)
    row = {"script": [["no", 0.5, False], ["yes", 1.0, True]]}
    validate(config)
    with Grader(config, tokenizer, [tokenizer.eos_token_id]) as grade:
        talk, _, batch = hold("talk", row, ["4", "6"], grade=grade)
        assert talk.components == {"last": 1.0, "environment": 1.5}
        assert batch["rewards"].tolist() == [1.75]
        failed, _, batch = hold("talk", {"script": ["raise"]}, ["4"], grade=grade, on_error="end")
    assert [failure.reward for failure in failed.failures] == ["environment"]
    assert "nothing is there" in failed.failures[0].message
    assert batch["failures"].tolist() == [1]
    assert talk.info == {"prompt": "start", **row}  # what is kept of the data is the data


def test_every_environment_is_closed_whatever_ends_the_rollout(hold, tmp_path, monkeypatch):
    log = tmp_path / "log"
    hold("talk", {"script": [["yes", 1.0, True]], "log": str(log)}, ["4"])
    hold("talk", {"script": ["raise"], "log": str(log)}, ["4"], on_error="end")
    hold("desk", {"log": str(log)}, ["so"])
    assert wait_for(lambda: log.read_text() == "closed " * 3)

    async def fail(*_):
        raise RuntimeError("the engine fails")

    monkeypatch.setattr(ScriptedEngine, "sample", fail)
    with pytest.raises(RuntimeError, match="the engine fails"):
        hold("talk", {"script": [], "log": str(log)}, ["4"], samples=3)
    assert wait_for(lambda: log.read_text() == "closed " * 6)


def wait_for(what, seconds=20.0):
    async def look():
        for _ in range(int(seconds * 20)):
            if what():
                return True
            await asyncio.sleep(0.05)
        return what()

    return asyncio.run(look())


def test_while_one_waits_for_its_environment_others_have_its_room(hold):
    rows = [{"script": [["no", 0.0, False, 1.0], ["yes", 1.0, True]]} for _ in range(6)]
    _, engine, batch = hold("talk", None, ["4"], rows=rows, limit=1)
    assert len(batch) == 6
    assert len(engine.asked) == 12
    # All first turns came before the first second one, though only one may be with the engine at once.
    assert len({len(asked) for asked in engine.asked[:6]}) == 1


def test_the_engine_never_has_more_turns_at_once_than_it_has_room_for(hold):
    rows = [{"script": [["no", 0.0, False], ["no", 0.0, False], ["yes", 1.0, True]]} for _ in range(8)]
    _, engine, batch = hold("talk", None, ["4"], rows=rows, limit=2, seconds=0.05)
    assert len(batch) == 8
    assert len(engine.asked) == 24
    assert engine.most_at_work == 2


def test_a_conversation_counts_once_whatever_its_turns(hold):
    rows = [{"script": [["no", 0.0, False]] * more + [["yes", 1.0, True]]} for more in (0, 3)]
    _, _, batch = hold("talk", None, ["4"], rows=rows, max_turns=3)
    assert len(batch) == 2
    assert batch["truncated"].float().mean() == 0.5


def test_metrics_of_conversations(hold):
    rows = [{"script": [["no", 0.0, False]] * more + [["yes", 1.0, True]]} for more in (0, 3)]
    talk, _, _ = hold("talk", None, ["4"], rows=rows, max_turns=3)
    other, _, _ = hold("desk", {}, [call("add", a=1) + call("fail"), "so"])
    metrics = batch_metrics(batch_of([talk, other]).update(conversation_fields([talk, other])))
    assert metrics["environment/turns"] == 1.5
    assert metrics["environment/calls"] == 1.0
    assert metrics["environment/errors"] == 0.5
    assert metrics["environment/errors/exception"] == 0.5
    assert metrics["environment/ended/done"] == metrics["environment/ended/stop"] == 0.5
    sampled = sum(int(t.mask.sum()) for t in (talk, other))
    said = sum(len(t.tokens) for t in (talk, other)) - 2 * int((~talk.mask).sum())  # one turn: what it did not say
    assert metrics["environment/observed_share"] == pytest.approx((said - sampled) / said)
    assert metrics["time/environment"] > 0


# --- with a real engine and a real actor ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(layout, engines, file, tmp_path_factory):
    """Actor, sharding manager and a RolloutWorker that converses, of a tiny model."""
    folder, tokens = tmp_path_factory.mktemp("model"), make_tokenizer()
    make_model("qwen3", hidden=32, layers=2, feed_forward=64).save_pretrained(folder)
    tokens.save_pretrained(folder)
    model, stop = ModelConfig(path=str(folder)), (1,)
    actor = ActorWorker(model, ActorConfig(learning_rate=1e-3), AlgorithmConfig(), layout, 1.0, 10)
    engine = TorchEngine(model, layout.device, 64, 2**30)
    cast = Cast("talk", None, Dialogue(tokens, DataConfig(), stop))
    config, rollout = EnvironmentsConfig(files=[str(file)], processes=1, max_turn_tokens=6), RolloutConfig()
    with Converser(cast, config, rollout) as converser:
        worker = RolloutWorker(rollout, engine, engines, stop, 3, None, None, converser)
        yield actor, ShardingManager(actor, worker), worker, tokens


def converse(world):
    _, sharding, worker, tokens = world
    script = [["+ 3 -", 0.0, False], ["no", 0.0, False], ["- -", 0.5, False], ["yes", 1.0, True]]
    rows = [{"script": script[-turns:]} for turns in (1, 2, 3, 4)]
    prompts = [Prompt(i, tokens(f"{i} {i}")["input_ids"], f"{i} {i}", row) for i, row in enumerate(rows)]
    with sharding.serving():
        return worker.generate(prompts, 4)


def test_engine_and_trainer_agree_on_every_sampled_token_of_a_conversation(world):
    batch = converse(world)
    assert [t.finish_reason for t in world[2].trajectories] == [Ending.DONE] * 16
    assert [sum(turn.role == "assistant" for turn in t.turns) for t in world[2].trajectories] == [1] * 4 + [2] * 4 + [
        3
    ] * 4 + [4] * 4
    ours, mask = world[0].compute_logprobs(batch)["old_logprobs"].values(), batch["response_mask"].values()
    assert (ours - batch["rollout_logprobs"].values())[mask].abs().max() < 1e-5
    assert not ours[~mask].any()


def test_what_an_environment_said_carries_no_gradient(world):
    """The update with anything in the observed tokens' fields is the same, and one observed token more is not."""
    actor, _, _, _ = world
    batch = converse(world)
    mask = batch["response_mask"].values()
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(mask), generator=generator)

    def gradient(advantages, mask=mask):
        given = batch.clone()
        given["advantages"], given["loss_weights"] = (
            with_values(batch["tokens"], x) for x in (advantages, mask.float() / mask.sum())
        )
        given["response_mask"] = with_values(batch["tokens"], mask)
        before = [parameter.detach().clone() for parameter in actor.parameters]
        actor.update_minibatch(given)
        change = [
            now.detach().full_tensor() - was.full_tensor() for now, was in zip(actor.parameters, before, strict=True)
        ]
        with torch.no_grad():
            for parameter, was in zip(actor.parameters, before, strict=True):
                parameter.copy_(was)
        actor.optimizer.state.clear()
        return change

    plain = gradient(noise * mask)
    for mine, other in zip(plain, gradient(noise), strict=True):
        assert torch.equal(mine, other)
    first = int((~mask).nonzero()[lengths_of(batch["tokens"])[0] :][0])
    while mask[first] or not mask[first - 1]:
        first += 1
    wider = mask.clone()
    wider[first] = True  # an observed token behind a sampled one
    assert not all(torch.equal(a, b) for a, b in zip(plain, gradient(noise, wider), strict=True))
