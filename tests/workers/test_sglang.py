"""The real SGLang on a CPU: it samples what it says, from exactly the weights it was given, and fails with words.

bash tests/run.sh -m sglang
"""

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from examples.countdown import make_model
from grpo.config import ConfigError
from tests.workers import test_stop
from tests.workers.conftest import answers_of, buckets_of
from tests.workers.engine_probe import PROMPTS as PROBED
from tests.workers.engine_probe import assert_converses
from workers.config import ModelConfig
from workers.engines import sglang_requests
from workers.engines.config import RolloutConfig
from workers.engines.protocol import KV_CACHE, WEIGHTS, EngineFailure, Sampling
from workers.engines.sglang_process import SGLangError
from workers.engines.torch_engine import TorchEngine
from workers.rollout import make_engine

# Two engines that start at once on two slow cores import for minutes.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SIZES = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "feed_forward": 96}
PROMPTS = [[5, 6, 7], [9], [20, 30, 40, 50, 60, 70, 80], [5, 6], [100, 3, 100, 3]]
SAMPLING = Sampling(1.0, top_p=1.0, top_k=0, max_new_tokens=12, stop=(), seed=1)


@pytest.fixture(scope="module")
def qwen3_untied(tmp_path_factory):
    """A model and its folder."""
    folder = tmp_path_factory.mktemp("qwen3") / "model"
    model = make_model("qwen3", tied=False, vocab=117, seed=5, **SIZES)
    model.save_pretrained(folder)
    test_stop.make_tokenizer("bytes").save_pretrained(folder)
    return model.eval(), folder


@pytest.fixture(scope="module")
def started(engines, qwen3_untied):
    """The engine, and the environment variables that its start changed."""
    before = dict(os.environ)
    settings = {"engine": "sglang", "concurrent_samples": 16, "stall_seconds": 30.0, "sglang": {"page_size": 1}}
    config = RolloutConfig(**settings, stop=["</a>"])
    engine = make_engine(ModelConfig(path=str(qwen3_untied[1])), config, engines, seed=0)
    yield engine, {name for name in before | dict(os.environ) if before.get(name) != os.environ.get(name)}
    engine.shutdown()


@pytest.fixture
def engine(started, qwen3_untied) -> Iterator:
    """The engine, serving the weights of the model."""
    engine, _ = started
    engine.sleep(())
    engine.wake_weights()
    engine.update_weights(buckets_of(qwen3_untied[0].named_parameters()))
    engine.wake()
    return engine


def sampling(**changes) -> Sampling:
    return dataclasses.replace(SAMPLING, **changes)


def reference(model, prompt, tokens, temperature):
    """log-probabilities [len(tokens), vocabulary] under a forward pass of transformers over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def assert_logprobs_are_right(model, answers, temperature):
    for prompt, responses in zip(PROMPTS, answers, strict=True):
        for response in responses:
            logp = reference(model, prompt, response.tokens, temperature)
            expected = logp[torch.arange(len(response.tokens)), response.tokens]
            torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=1e-5)


def test_starting_it_leaves_the_environment_as_it_was(started):
    assert started[1] == set()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_those_of_transformers_at_the_temperature(engine, qwen3_untied, temperature):
    stop = (1, *range(40, 60))  # with the model's own end of sequence, 1
    answers = answers_of(engine, PROMPTS, 12, sampling(temperature=temperature, stop=stop))
    assert_logprobs_are_right(qwen3_untied[0], answers, temperature)
    flat = [response for responses in answers for response in responses]
    assert len(flat) == 60
    assert {response.finish_reason for response in flat} == {"stop", "length"}
    for response in flat:
        assert not set(response.tokens[:-1]) & set(stop)
        assert (response.finish_reason == "stop") == (response.tokens[-1] in stop)
        assert len(response.tokens) == 12 or response.finish_reason == "stop"
    assert len({tuple(response.tokens) for response in flat}) > 40


def test_temperature_0_takes_the_most_likely_token(engine, qwen3_untied):
    for prompt, (answer,) in zip(PROMPTS, answers_of(engine, PROMPTS, 1, sampling(temperature=0)), strict=True):
        assert reference(qwen3_untied[0], prompt, answer.tokens, 1.0).argmax(-1).tolist() == answer.tokens


def test_a_stop_string_ends_a_request_where_the_embedded_engine_does(engine, engines, qwen3_untied, monkeypatch):
    model, folder = qwen3_untied
    embedded = TorchEngine(ModelConfig(path=str(folder)), torch.device("cpu"))
    embedded.update_weights(buckets_of(model.named_parameters()))
    embedded.wake()
    tokenizer, greedy = embedded.stops.tokenizer, sampling(temperature=0, max_new_tokens=60)
    free, cut = [row[0] for row in answers_of(engine, PROMPTS, 1, greedy)], 0
    for number, response in enumerate(free):
        # Of a text without characters in pieces.
        string = max(tokenizer.decode(response.tokens[4:40]).split("\ufffd"), key=len)[1:7]
        strings = dataclasses.replace(greedy, stop_strings=(string, "</a>"))
        answers = [row[0] for row in answers_of(engine, PROMPTS, 1, strings)]
        cut += test_stop.assert_cut(tokenizer, free, answers, strings.stop_strings)
        assert [a.tokens for a in answers] == [row[0].tokens for row in answers_of(embedded, PROMPTS, 1, strings)]
        # SGLang itself sampled no token more.
        sampled = engine.run(engine.requests.sample(PROMPTS[number], strings))
        assert (sampled.tokens, sampled.finish_reason) == (answers[number].tokens, "stop")
    assert cut >= len(PROMPTS)
    # And had it, what is beyond would be cut.
    make = engine.requests.make_parameters
    monkeypatch.setattr(engine.requests, "make_parameters", lambda custom_params, **others: make(**others))
    assert [row[0].tokens for row in answers_of(engine, PROMPTS, 1, strings)] == [a.tokens for a in answers]
    monkeypatch.undo()
    test_stop.assert_rollout_is_cut(engine, engines, tokenizer)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.2)])
def test_only_allowed_tokens_are_drawn_and_their_logprobs_are_not_renormalised(engine, qwen3_untied, top_k, top_p):
    prompt = PROMPTS[2]
    answers = answers_of(engine, [prompt], 100, sampling(top_k=top_k, top_p=top_p, max_new_tokens=1))[0]
    logp = reference(qwen3_untied[0], prompt, [0], 1.0)[0].sort(descending=True)
    count = top_k or int((logp.values.exp().cumsum(0) < top_p).sum()) + 1
    drawn = {response.tokens[0]: response.logprobs[0] for response in answers}
    assert 1 < len(drawn) <= count
    assert drawn.keys() <= set(logp.indices[:count].tolist())
    for token, logprob in drawn.items():
        assert logprob == pytest.approx(float(logp.values[logp.indices == token]), abs=1e-5)


def test_requests_of_one_moment_travel_together_and_each_is_answered_by_itself(engine, qwen3_untied, monkeypatch):
    manager, messages = engine.process.engine.tokenizer_manager, []
    dispatch = manager._dispatch_to_scheduler

    def counted(message):
        messages.append(len(getattr(message, "batch", [])))
        dispatch(message)

    monkeypatch.setattr(manager, "_dispatch_to_scheduler", counted)
    ends = []

    async def ask(length):
        answer = await engine.sample(PROMPTS[0], sampling(max_new_tokens=length))
        ends.append(len(answer.tokens))
        if length == 3:
            await ask(4)
        return answer

    async def ask_all():
        return await asyncio.gather(*(ask(length) for length in (300, 3, 3, 20)))

    answers = engine.run(ask_all())
    # First the prompt that the four share, then their samples; what two of them ask for next goes together or not.
    assert messages[:2] == [1, 4]
    assert sum(messages[2:]) in (2, 3)
    assert [len(answer.tokens) for answer in answers] == [300, 3, 3, 20]
    assert ends[:2] == [3, 3]
    assert ends[-1] == 300


def test_turns_that_follow_each_other_find_all_before_them_cached_and_their_logprobs_are_right(
    engine, qwen3_untied, monkeypatch
):
    manager, cached = engine.process.engine.tokenizer_manager, []
    receive = manager._handle_batch_output

    async def remember(output):
        cached.extend(
            known for known, reason in zip(output.cached_tokens, output.finished_reasons, strict=True) if reason
        )
        await receive(output)

    monkeypatch.setattr(manager, "_handle_batch_output", remember)

    async def talk(tokens, said):
        turns = []
        for _ in range(4):
            answer = await engine.sample(tokens, sampling(max_new_tokens=6))
            turns.append((tokens, answer))
            tokens = tokens + answer.tokens + said
        return turns

    async def talk_all():
        prompts = [PROMPTS[2], PROMPTS[2], PROMPTS[2], PROMPTS[4]]
        return await asyncio.gather(*(talk(prompt, [9, number]) for number, prompt in enumerate(prompts)))

    turns = [turn for talk in engine.run(talk_all()) for turn in talk]
    # Two tokens were said, and the last that was sampled may not have been fed yet.
    grown = sorted(len(tokens) for tokens, _ in turns if len(tokens) > len(PROMPTS[2]))
    found = sorted(cached)[-len(grown) :]
    assert all(length - 3 <= known < length for length, known in zip(grown, found, strict=True)), (grown, found)
    for tokens, answer in turns:
        logp = reference(qwen3_untied[0], tokens, answer.tokens, 1.0)
        expected = logp[torch.arange(6), answer.tokens]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-5)


def test_an_abort_answers_every_request_with_what_it_has_and_the_engine_lives_on(engine, qwen3_untied):
    async def ask_and_abort():
        requests = [asyncio.ensure_future(engine.sample(p, sampling(max_new_tokens=480))) for p in PROMPTS]
        await asyncio.sleep(0.3)
        late = asyncio.ensure_future(engine.sample(PROMPTS[0], SAMPLING))
        await asyncio.sleep(0)
        engine.abort()
        return await asyncio.gather(*requests), await late, await engine.sample(PROMPTS[0], SAMPLING)

    aborted, late, after = engine.run(ask_and_abort())
    assert {answer.finish_reason for answer in (*aborted, late)} == {"abort"}
    assert late.tokens == []
    assert all(0 < len(answer.tokens) == len(answer.logprobs) < 480 for answer in aborted)
    for prompt, answer in zip(PROMPTS, aborted, strict=True):
        logp = reference(qwen3_untied[0], prompt, answer.tokens, 1.0)
        expected = logp[torch.arange(len(answer.tokens)), answer.tokens]
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, rtol=0, atol=1e-5)
    assert (after.finish_reason, len(after.tokens)) == ("length", 12)


def test_what_is_asked_within_the_pause_travels_together(engine, monkeypatch):
    monkeypatch.setattr(sglang_requests, "PAUSE", 1.0)
    manager, messages = engine.process.engine.tokenizer_manager, []
    dispatch = manager._dispatch_to_scheduler

    def counted(message):
        messages.append(len(getattr(message, "batch", [])))
        dispatch(message)

    monkeypatch.setattr(manager, "_dispatch_to_scheduler", counted)

    async def ask_one_by_one():
        asked = []
        for number in range(10):
            asked.append(asyncio.ensure_future(engine.sample([number, 7, 8], sampling(max_new_tokens=2))))
            await asyncio.sleep(0.01)
        return await asyncio.gather(*asked)

    time.sleep(1.0)  # since the message before
    assert [len(answer.tokens) for answer in engine.run(ask_one_by_one())] == [2] * 10
    assert messages == [1, 9]


def test_samples_that_nobody_waits_for_any_more_are_ended_by_an_abort(engine, monkeypatch):
    end, kinds = engine.requests._end, []
    monkeypatch.setattr(engine.requests, "_end", lambda name, why: (kinds.append(why["type"]), end(name, why)))

    async def give_up():
        asked = [asyncio.ensure_future(engine.sample(p, sampling(max_new_tokens=480))) for p in PROMPTS]
        await asyncio.sleep(0.3)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        engine.abort()
        async with asyncio.timeout(5):
            while engine.requests.asked() is not None:
                await asyncio.sleep(0.01)

    engine.run(give_up())
    assert kinds == ["abort"] * len(PROMPTS)
    assert len(answers_of(engine, PROMPTS, 1, SAMPLING)) == 5


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ({"type": "abort", "status_code": 400, "message": "too long"}, "too long"),
        ({"type": "melted"}, "melted"),
        (None, "cannot be read"),
    ],
)
def test_an_answer_that_is_none_is_an_error_where_it_is_awaited(engine, monkeypatch, reason, says):
    requests = engine.requests
    output = types.SimpleNamespace(finished_reasons=[reason], output_token_logprobs_idx=None)

    def answer(message):  # in SGLang's place
        output.rids = [request.rid for request in message.batch]
        if reason is not None:
            output.output_token_logprobs_idx = output.output_token_logprobs_val = [[]]
        asyncio.get_running_loop().create_task(requests._receive(output))

    monkeypatch.setattr(requests.manager, "_dispatch_to_scheduler", answer)

    async def ask():
        with pytest.raises(SGLangError, match=says):
            await engine.sample(PROMPTS[0], SAMPLING)

    engine.run(ask())
    assert requests.asked() is None


def test_what_the_callers_coroutine_raises_passes_through_and_the_engine_lives_on(engine):
    async def fail():
        await engine.sample(PROMPTS[0], SAMPLING)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.run(fail())
    assert len(answers_of(engine, PROMPTS, 1, SAMPLING)) == 5


def test_asleep_it_does_not_generate_and_released_weights_must_come_again(engine, qwen3_untied):
    engine.sleep((KV_CACHE,))
    assert engine.asleep == {KV_CACHE}
    with pytest.raises(RuntimeError, match="asleep"):
        answers_of(engine, [[5]], 1, SAMPLING)
    engine.wake_weights()
    engine.wake()
    assert engine.holds_weights
    assert_logprobs_are_right(qwen3_untied[0], answers_of(engine, PROMPTS, 1, SAMPLING), 1.0)
    engine.sleep((KV_CACHE, WEIGHTS))
    engine.sleep((KV_CACHE, WEIGHTS))  # SGLang ends itself where what sleeps is put to sleep, or what wakes is woken
    engine.wake_weights()
    engine.wake_weights()
    engine.wake()
    with pytest.raises(RuntimeError, match="has no weights"):
        answers_of(engine, [[5]], 1, SAMPLING)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda n, w: [("model.layers.7.bias", torch.zeros(1))], "has no weight 'model.layers.7.bias'"),
        (lambda n, w: [(n, w.T)], r"'model.layers.1.mlp.up_proj.weight' has the shape \(96, 64\), not \(64, 96\)"),
        (lambda n, w: [], r"'model.layers.1.mlp.up_proj.weight' was not sent \(1 in all\)"),
        (lambda n, w: [(n, w), (n, w)], "'model.layers.1.mlp.up_proj.weight' was sent twice"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_and_the_engine_lives_on(engine, qwen3_untied, damage, says):
    weights = dict(qwen3_untied[0].named_parameters())
    name = "model.layers.1.mlp.up_proj.weight"
    wrong = damage(name, weights.pop(name))
    with pytest.raises(ValueError, match=says):
        engine.update_weights(buckets_of([*weights.items(), *wrong]))
    with pytest.raises(RuntimeError, match="has no weights"):
        answers_of(engine, [[5]], 1, SAMPLING)
    engine.update_weights(buckets_of(qwen3_untied[0].named_parameters()))
    assert_logprobs_are_right(qwen3_untied[0], answers_of(engine, PROMPTS, 1, SAMPLING), 1.0)


def test_one_element_that_differs_is_found_and_comparing_changes_nothing(engine, qwen3_untied):
    weights = {name: weight.detach().clone() for name, weight in qwen3_untied[0].named_parameters()}
    engine.verify(buckets_of(weights.items()))
    for name in ("model.layers.1.self_attn.k_proj.weight", "lm_head.weight", "model.norm.weight"):
        weights[name].view(-1)[7] += 1e-3
        held = re.escape(name.replace("k_proj", "qkv_proj"))
        with pytest.raises(RuntimeError, match=rf"1 of its \d+ parameters differ, '{held}' in 1 of"):
            engine.verify(buckets_of(weights.items(), each=3))
        weights[name].view(-1)[7] = dict(qwen3_untied[0].named_parameters())[name].view(-1)[7].detach()
    assert_logprobs_are_right(qwen3_untied[0], answers_of(engine, PROMPTS, 1, SAMPLING), 1.0)


def test_a_refusal_is_raised_with_its_message_and_the_engine_lives_on(engine, qwen3_untied, monkeypatch):
    async def refuse(*_):
        return False, "the moon is full"

    monkeypatch.setattr(engine.process.engine.tokenizer_manager, "update_weights_from_tensor", refuse)
    with pytest.raises(EngineFailure, match="was refused: the moon is full"):
        engine.update_weights(buckets_of(qwen3_untied[0].named_parameters()))
    monkeypatch.undo()
    assert not engine.holds_weights
    engine.update_weights(buckets_of(qwen3_untied[0].named_parameters()))
    assert_logprobs_are_right(qwen3_untied[0], answers_of(engine, PROMPTS, 1, SAMPLING), 1.0)


def test_a_model_with_other_weights_is_refused_before_anything_is_sent(engine, qwen3_untied, monkeypatch):
    monkeypatch.setattr(engine.transport, "names_agree", False)
    monkeypatch.setitem(engine.shapes, "model.layers.0.extra.weight", torch.Size([3]))
    with pytest.raises(EngineFailure, match=r"do not have the same weights: they differ in 'model.layers.0.extra"):
        engine.update_weights(buckets_of(qwen3_untied[0].named_parameters()))


def test_options_are_checked_by_name():
    RolloutConfig(engine="sglang", sglang={"attention_backend": "triton"}).check(1, 1)
    with pytest.raises(ConfigError, match=r"rollout.sglang.atention_backend .* did you mean attention_backend\?"):
        RolloutConfig(engine="sglang", sglang={"atention_backend": "triton"}).check(1, 1)
    with pytest.raises(ConfigError, match=r"rollout.sglang.tp_size is decided by the trainer"):
        RolloutConfig(engine="sglang", sglang={"tp_size": 2}).check(1, 1)


def environment(**more: str) -> dict[str, str]:
    """In which a process finds SGLang and this project."""
    return os.environ | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{ROOT}"} | more


SCHEDULER = """
import multiprocessing, sys, types
from multiprocessing import resource_tracker
import tqdm
from workers.engines.sglang_hooks import run_scheduler

def run_scheduler_process():
    multiprocessing.set_start_method("spawn")  # as SGLang does
    list(tqdm.tqdm(range(3)))
    print("tracked by", resource_tracker._resource_tracker._fd)

sys.modules["sglang.srt.managers.scheduler"] = types.SimpleNamespace(
    run_scheduler_process=run_scheduler_process, Scheduler=type("Scheduler", (), {})
)
run_scheduler()
"""


def test_a_progress_bar_of_sglang_leaves_nothing_behind_where_it_is_killed(tmp_path):
    log = tmp_path / "log"
    more = environment(GRPO_ENGINE_LOG=str(log))
    subprocess.run([sys.executable, "-c", SCHEDULER], check=True, timeout=120, env=more, cwd=ROOT)
    assert "3/3" in log.read_text()
    assert "tracked by None" in log.read_text()


# --- many processes ------------------------------------------------------------------------------------------------


def torchrun(processes: int, probe: str, *arguments: object, timeout: float, check: bool = True):
    """The finished process of a probe beside this file."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*command, str(Path(__file__).with_name(probe)), *map(str, arguments)],
        check=check,
        timeout=timeout,
        env=environment(OMP_NUM_THREADS="1"),
        cwd=ROOT,
        capture_output=not check,
        text=True,
    )


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> Path:
    """What engine_probe.py saw on two processes: engines of one and of two, actors under FSDP and tensor-parallel."""
    folder = tmp_path_factory.mktemp("probe")
    make_model("qwen2", tied=True, vocab=120, seed=5, **SIZES).save_pretrained(folder / "model")
    torchrun(2, "engine_probe.py", folder / "model", folder, "cpu", "float32", "1,2", "1-1,1-2", timeout=560)
    return folder


@pytest.mark.parametrize("engine_size", [1, 2])
@pytest.mark.parametrize("layout", ["2-1-r1", "1-2-r1"])
def test_every_engine_holds_and_uses_the_weights_of_every_layout(probed, layout, engine_size):
    result = torch.load(probed / f"{layout}-e{engine_size}.pt", weights_only=False)
    for version, rollout in enumerate((result["first"], result["second"])):
        assert rollout["versions"] == [version]
        assert rollout["gap"] <= 1e-5
        assert rollout["prompts"] == [prompt for prompt in PROBED for _ in range(4)]
        assert rollout["sync"]["sync/bytes"] > 0
        assert "time/sync/verify" in rollout["sync"]
    assert result["verified"] == 1
    assert "The engine's weights are not the actor's" in result["verify_of_old_weights"]


@pytest.mark.parametrize(("layout", "engine_size"), [("2-1-r1", 1), ("1-2-r1", 2)])
def test_every_engine_converses_from_the_very_ids_of_the_batch(probed, layout, engine_size):
    result = torch.load(probed / f"{layout}-e{engine_size}-turns.pt", weights_only=False)
    assert_converses(result, 2 // engine_size, 1e-5)


def test_the_end_of_every_engine_spares_what_others_started(probed):
    for rank in range(2):
        bystander = (probed / f"bystander-{rank}").read_text()
        assert Path(f"/proc/{bystander}/cmdline").read_bytes() == b"sleep\x0060\x00"


def orphans(log: Path) -> list[int]:
    """Processes whose engine writes to `log`."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if str(log).encode() in environment.read_bytes():
                found.append(int(environment.parent.name))
        except OSError:
            continue
    return found


def hang(*_, **__) -> None:
    time.sleep(600)


HANGING_START = """
import sys
from pathlib import Path
import torch
from tests.workers.test_sglang import hang
from workers.engines import sglang_process
from workers.parallel.mesh import join, make_inference_layout
from workers.config import ModelConfig
from workers.engines import sglang_requests
from workers.engines.config import RolloutConfig
from workers.rollout import make_engine

folder, log = sys.argv[1:]
sglang_process.run_scheduler, sglang_process.START_SECONDS = hang, 40
device = torch.device("cpu")
join(device, 60.0)
config = RolloutConfig(engine="sglang", concurrent_samples=4)
make_engine(ModelConfig(path=folder), config, make_inference_layout(device), seed=0, log=Path(log))
"""


def test_a_start_that_hangs_ends_with_words_and_leaves_nothing(qwen3_untied, tmp_path):
    command = [sys.executable, "-c", HANGING_START, str(qwen3_untied[1]), str(tmp_path / "log")]
    ended = subprocess.run(command, timeout=120, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "SGLang's start did not answer within 40 s" in ended.stderr
    assert orphans(tmp_path / "log") == []


@pytest.mark.parametrize(("harm", "engine_size"), [("kill", 2), ("stop", 1)])
def test_an_engine_that_dies_or_hangs_ends_every_rank_with_words_and_leaves_nothing(tmp_path, harm, engine_size):
    make_model("llama", tied=False, vocab=120, seed=5, **SIZES).save_pretrained(tmp_path / "model")
    log = tmp_path / "engine"
    probe = "engine_failure_probe.py"
    ended = torchrun(2, probe, tmp_path / "model", log, harm, engine_size, timeout=560, check=False)
    took = time.time() - float(re.search(r"HURT ([\d.]+)", ended.stdout)[1])
    assert ended.returncode != 0
    assert "finished without" not in ended.stdout
    assert took < 60
    says = {
        "kill": "SGLang's generation failed: its process ended with exit code -9",
        "stop": "SGLang's generation has been silent for 10 s",
    }[harm]
    assert says in ended.stderr
    assert f"Its last words ({log}-{2 - engine_size})" in ended.stderr
    assert "Memory of cpu" in ended.stderr
    assert "actor: optimizer" in ended.stderr
    assert orphans(log) == []
