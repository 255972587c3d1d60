"""The embedded engine: it samples what it says it samples, from exactly the weights it was given."""

import asyncio
import dataclasses
import weakref

import pytest
import torch
import transformers

from tests.workers.conftest import answers_of, buckets_of
from workers.engines.protocol import Sampling
from workers.engines.torch_engine import Request, TorchEngine, _Cache, share_of_memory

PROMPTS = [[5, 6, 7], [9], [20, 30, 40, 50, 60, 70, 80], [5, 6], [100, 3, 100, 3]]
SAMPLING = Sampling(temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=12, stop=(), seed=1)


@pytest.fixture
def engine(hf_model, model_config):
    engine = TorchEngine(model_config, torch.device("cpu"))
    engine.wake_weights()
    engine.update_weights(buckets_of(hf_model.named_parameters()))
    engine.wake()
    return engine


def sampling(**changes):
    return dataclasses.replace(SAMPLING, **changes)


def truncated(response):
    return response.finish_reason == "length"


def tokens_of(answers):
    return [[response.tokens for response in responses] for responses in answers]


def transformers_logprobs(hf_model, prompt, tokens, temperature):
    """log-probabilities [len(tokens), vocabulary] under a forward pass over the whole sequence."""
    with torch.no_grad():
        logits = hf_model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return (logits.double() / temperature).log_softmax(-1)


def transformers_greedy(hf_model, prompt, stop, most):
    settings = transformers.GenerationConfig(do_sample=False, max_new_tokens=most, eos_token_id=stop, pad_token_id=0)
    # Beside the settings given, those of the model itself would count.
    assert hf_model.generation_config.top_k == 0
    ids = torch.tensor([prompt])
    return hf_model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[0, len(prompt) :]


def test_greedy_tokens_are_those_of_transformers_for_ragged_prompts_and_stops(engine, hf_model):
    free = [row[0] for row in tokens_of(answers_of(engine, PROMPTS, 1, sampling(temperature=0)))]
    stop = (free[0][4], free[2][7])
    answers = answers_of(engine, PROMPTS, 1, sampling(temperature=0, stop=stop))
    for prompt, unstopped, (answer,) in zip(PROMPTS, free, answers, strict=True):
        assert unstopped == transformers_greedy(hf_model, prompt, None, 12).tolist()
        assert answer.tokens == transformers_greedy(hf_model, prompt, list(stop), 12).tolist()
    assert len({len(answer.tokens) for (answer,) in answers}) > 2


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_those_of_a_forward_pass_at_the_temperature(engine, hf_model, temperature):
    answers = answers_of(engine, PROMPTS, 3, sampling(temperature=temperature, stop=tuple(range(40, 60))))
    assert len({len(response.tokens) for responses in answers for response in responses}) > 3
    for prompt, responses in zip(PROMPTS, answers, strict=True):
        assert len(responses) == 3
        for response in responses:
            logp = transformers_logprobs(hf_model, prompt, response.tokens, temperature)
            expected = logp[torch.arange(len(response.tokens)), response.tokens]
            torch.testing.assert_close(torch.tensor(response.logprobs).double(), expected, rtol=1e-5, atol=1e-5)


def test_greedy_logprobs_are_those_at_temperature_one(engine, hf_model):
    (response,) = answers_of(engine, PROMPTS[:1], 1, sampling(temperature=0))[0]
    logp = transformers_logprobs(hf_model, PROMPTS[0], response.tokens, 1.0)
    torch.testing.assert_close(torch.tensor(response.logprobs).double(), logp.max(-1).values, rtol=1e-5, atol=1e-5)


def allowed_tokens(probabilities, top_k, top_p):
    """The tokens that may be drawn, found one by one from the most likely on."""
    allowed, mass = set(), 0.0
    for token in sorted(range(len(probabilities)), key=lambda token: -probabilities[token]):
        if (top_k and len(allowed) == top_k) or mass >= top_p:
            break
        allowed.add(token)
        mass += probabilities[token]
    return allowed


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (3, 1.0), (0, 0.3), (0, 1e-6), (4, 0.5), (50, 0.2)])
def test_only_allowed_tokens_are_drawn_and_their_logprobs_are_not_renormalised(engine, hf_model, top_k, top_p):
    prompt = PROMPTS[2]
    answers = answers_of(engine, [prompt], 400, sampling(top_k=top_k, top_p=top_p, max_new_tokens=1))[0]
    logp = transformers_logprobs(hf_model, prompt, [0], 0.7)[0]
    allowed = allowed_tokens(logp.exp().tolist(), top_k, top_p)
    drawn = {response.tokens[0]: response.logprobs[0] for response in answers}
    assert drawn.keys() == allowed
    assert len(allowed) < 20
    for token, logprob in drawn.items():
        assert logprob == pytest.approx(float(logp[token]), abs=1e-5)


def test_a_stop_token_ends_its_row_alone_and_is_part_of_the_response(engine):
    free = answers_of(engine, PROMPTS, 2, sampling())
    stop = tuple(range(2, 60, 4))
    answers = answers_of(engine, PROMPTS, 2, sampling(stop=stop))
    flat = [response for responses in answers for response in responses]
    assert {truncated(response) for response in flat} == {True, False}
    for response in flat:
        assert len(response.tokens) == len(response.logprobs)
        assert not set(response.tokens[:-1]) & set(stop)
        assert truncated(response) == (response.tokens[-1] not in stop)
        assert len(response.tokens) == 12 or not truncated(response)
    assert all(len(response.tokens) == 12 and truncated(response) for row in free for response in row)


def test_a_row_that_stops_with_its_last_token_is_not_truncated(engine):
    (free,) = answers_of(engine, PROMPTS[:1], 1, sampling(temperature=0))[0]
    last = free.tokens.index(free.tokens[3]) + 1
    (answer,) = answers_of(
        engine, PROMPTS[:1], 1, sampling(temperature=0, stop=(free.tokens[3],), max_new_tokens=last)
    )[0]
    assert len(answer.tokens) == last
    assert not truncated(answer)


def test_verify_finds_one_element(engine, hf_model):
    engine.verify(buckets_of(hf_model.named_parameters()))
    engine.weights["model.norm.weight"].data[3] += 1e-3
    with pytest.raises(RuntimeError, match=r"not the actor's: 'model.norm.weight' differs"):
        engine.verify(buckets_of(hf_model.named_parameters()))


def test_one_seed_one_rollout(engine):
    first, again, other = (tokens_of(answers_of(engine, PROMPTS, 4, sampling(seed=seed))) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert all(len({tuple(tokens) for tokens in row}) == 4 for row in first)


def test_sampling_leaves_the_global_random_state_alone(engine):
    before = torch.get_rng_state()
    answers_of(engine, PROMPTS, 2, SAMPLING)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 1.0), (0, 0.6)])
def test_the_first_token_is_distributed_as_the_softmax(engine, hf_model, top_k, top_p):
    draws, prompt = 4000, PROMPTS[0]
    answers = answers_of(engine, [prompt], draws, sampling(top_k=top_k, top_p=top_p, max_new_tokens=1))[0]
    counts = torch.bincount(torch.tensor([response.tokens[0] for response in answers]), minlength=117)
    probabilities = transformers_logprobs(hf_model, prompt, [0], 0.7)[0].exp()
    allowed = allowed_tokens(probabilities.tolist(), top_k, top_p)
    kept = torch.tensor([token in allowed for token in range(117)])
    expected = draws * probabilities * kept / probabilities[kept].sum()
    # Tokens expected fewer than 5 times share one bin.
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    bins = expected > 0
    chi_square = ((counts - expected)[bins] ** 2 / expected[bins]).sum()
    freedom = int(bins.sum()) - 1
    assert freedom >= 3
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def damaged(weights, damage):
    """The weights, wrong in one way, and the weight that is wrong."""
    name = "model.layers.1.mlp.up_proj.weight"
    match damage:
        case "unknown":
            return [*weights, ("model.layers.7.bias", torch.zeros(1))], "model.layers.7.bias"
        case "shape":
            return [(n, w.T if n == name else w) for n, w in weights], name
        case "missing":
            return [(n, w) for n, w in weights if n != name], name
        case "twice":
            return [*weights, *[(n, w) for n, w in weights if n == name]], name


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("unknown", "has no weight"),
        ("shape", r"has the shape \(48, 32\), not \(32, 48\)"),
        ("missing", r"was not sent \(1 in all\)"),
        ("twice", "was sent twice"),
    ],
)
def test_an_update_that_does_not_fit_names_the_weight(hf_model, model_config, damage, says):
    engine = TorchEngine(model_config, torch.device("cpu"))
    weights, name = damaged(list(hf_model.named_parameters()), damage)
    with pytest.raises(ValueError, match=says) as error:
        engine.update_weights(buckets_of(weights))
    assert repr(name) in str(error.value)


def test_new_weights_are_copied_not_shared(engine, hf_model):
    name, given = next(iter(hf_model.named_parameters()))
    kept = given.detach().clone()
    engine.weights[name].data.zero_()
    assert torch.equal(given, kept)
    engine.update_weights(buckets_of(hf_model.named_parameters()))
    assert torch.equal(engine.weights[name], kept)


def test_an_engine_asleep_does_not_generate(hf_model, model_config):
    engine = TorchEngine(model_config, torch.device("cpu"))
    for step in (lambda: None, engine.wake_weights, engine.wake, lambda: engine.sleep(())):
        step()
        if step == engine.wake:
            assert len(answers_of(engine, PROMPTS, 1, SAMPLING)) == len(PROMPTS)
            continue
        with pytest.raises(RuntimeError, match="asleep"):
            answers_of(engine, PROMPTS, 1, SAMPLING)


def lengths_asked(engine, lengths, memory=None, most_rows=512):
    """What greedy requests of these lengths get, and in which order they were answered, passes so far beside each."""
    engine.batch.most_rows, engine.batch.passes = most_rows, 0
    engine.batch.memory = engine.batch.memory if memory is None else memory
    ends = []

    async def ask(index, length):
        answer = await engine.sample(PROMPTS[index % 5], sampling(temperature=0, max_new_tokens=length))
        ends.append((index, engine.batch.passes))
        return answer.tokens

    async def ask_all():
        return await asyncio.gather(*(ask(*request) for request in enumerate(lengths)))

    return engine.run(ask_all()), ends


def test_a_request_joins_as_soon_as_there_is_room_and_none_waits_for_the_longest(engine):
    lengths = [40, 3, 3, 3, 3, 3, 3, 3, 3]
    free, _ = lengths_asked(engine, lengths)
    for settings in ({"most_rows": 2}, {"memory": engine.batch.most_bytes(2, 43, PROMPTS[2:3]) + 1000}):
        answers, ends = lengths_asked(engine, lengths, **settings)
        assert [index for index, _ in ends] == [1, 2, 3, 4, 5, 6, 7, 8, 0]
        # Beside the long one, in its 40 tokens, the others come and go; each reads its prompt and makes 2 passes more.
        assert ends[-2][1] < ends[-1][1] <= 40 + len(lengths)
        assert answers == free
    _, ends = lengths_asked(engine, lengths, memory=1)
    assert [index for index, _ in ends] == list(range(9))  # one at a time where there is no memory for two
    assert len(engine.batch) == engine.batch.cache.rows == 0


@pytest.mark.parametrize("most_rows", [1, 3, 8])
def test_a_seed_decides_a_response_whatever_it_shares_the_batch_with(engine, most_rows):
    together = tokens_of(answers_of(engine, PROMPTS, 4, sampling(stop=tuple(range(30)))))
    engine.batch.most_rows = most_rows
    assert tokens_of(answers_of(engine, PROMPTS, 4, sampling(stop=tuple(range(30))))) == together


def test_an_abort_answers_every_request_with_what_it_has(engine):
    engine.batch.most_rows = 2

    async def ask_and_abort():
        requests = [asyncio.ensure_future(engine.sample(prompt, sampling())) for prompt in PROMPTS]
        while engine.batch.passes < 5:
            await asyncio.sleep(0)
        engine.abort()
        after = await engine.sample(PROMPTS[0], sampling())
        return await asyncio.gather(*requests), after

    aborted, after = engine.run(ask_and_abort())
    assert [answer.finish_reason for answer in aborted] == ["abort"] * 5
    counts = [len(answer.tokens) for answer in aborted]
    assert counts[0] == counts[1] > 0 == counts[2] == counts[3] == counts[4]
    assert [len(answer.logprobs) for answer in aborted] == counts
    assert (after.finish_reason, len(after.tokens)) == ("length", 12)


def test_the_cache_stays_within_the_memory_and_answers_are_those_of_plenty(engine, monkeypatch):
    lengths = [3 + 5 * (index % 7) for index in range(40)]
    plenty, _ = lengths_asked(engine, lengths)
    engine.batch.row_bytes, engine.batch.read_bytes = 0, engine.batch.cell_bytes  # nothing but caches
    room = engine.batch.most_bytes(4, 42, PROMPTS)
    seen, alive = [], weakref.WeakSet([engine.batch.cache])
    make, resize = _Cache.__init__, torch.Tensor.new_zeros

    def made(cache, *arguments):
        make(cache, *arguments)
        alive.add(cache)
        seen.append(sum(other.nbytes for other in alive))

    def resized(tensor, *shape):
        fresh = resize(tensor, *shape)
        # Beside the caches as they are: the new tensor, and of the old one what is copied.
        seen.append(sum(cache.nbytes for cache in alive) + fresh.nbytes + min(tensor.nbytes, fresh.nbytes))
        return fresh

    monkeypatch.setattr(_Cache, "__init__", made)
    monkeypatch.setattr(torch.Tensor, "new_zeros", resized)
    answers, _ = lengths_asked(engine, lengths, memory=room)
    assert answers == plenty
    assert 0.5 * room < max(seen) <= room


def test_requests_wait_in_line_where_reading_their_prompts_would_take_more_than_there_is(engine):
    engine.batch.waiting.extend(
        Request([index] * 100, sampling(max_new_tokens=1), asyncio.Future(loop=asyncio.new_event_loop()))
        for index in range(8)
    )
    engine.batch.read_bytes = 10**9
    engine.batch.memory = 3 * 100 * 10**9 + 10**9  # all of their rows take far less than the rest
    assert len(engine.batch._choose()) == 3


def test_free_memory_counts_and_a_control_group_limits_it(monkeypatch):
    files = {"/proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 64 kB\n", "/sys/fs/cgroup/memory.max": "max\n"}
    files |= {"/sys/fs/cgroup/memory.current": "9216\n", "/sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 1024\n"}
    monkeypatch.setattr("pathlib.Path.read_text", lambda path: files[str(path)])
    monkeypatch.setattr("pathlib.Path.is_file", lambda path: str(path) in files)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert share_of_memory(torch.device("cpu"), 0.5) == 64 * 1024 // 4
    files["/sys/fs/cgroup/memory.max"] = "40960\n"
    assert share_of_memory(torch.device("cpu"), 0.5) == (40960 - 9216 + 1024) // 4


def test_logits_that_are_no_numbers_end_no_rollout(engine, hf_model):
    next(iter(engine.weights.values())).data.fill_(float("nan"))
    (responses,) = answers_of(engine, [PROMPTS[0]], 3, SAMPLING)
    for response in responses:
        assert len(response.tokens) == SAMPLING.max_new_tokens
        assert all(0 <= token < hf_model.config.vocab_size for token in response.tokens)
        assert response.logprobs[0] != response.logprobs[0]  # the update's loss is NaN then, and the run says so
