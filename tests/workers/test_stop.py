"""Stop strings: a response ends with the very token that completes one, whatever the tokenizer makes of tokens."""

import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models

from tests.workers.conftest import answers_of, buckets_of, prompts_of
from workers.config import ModelConfig
from workers.engines.config import RolloutConfig
from workers.engines.protocol import Response, Sampling
from workers.engines.stop import StopSearch, StopStrings
from workers.engines.torch_engine import TorchEngine
from workers.rollout import RolloutWorker

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=60, stop=(), seed=1)
PROMPTS = [[5, 6, 7], [9], [20, 30, 40, 50, 60, 70, 80]]

# Characters alone, cut into bytes, and with others in one token.
LONGER = [b"</", b"a>", b"b<", b" a", b"> b\n", "é<".encode(), b"/a>\xe2\x82", b"\xacb", b"\xac>", "€€".encode()]
PIECES = [*(bytes([b]) for b in "</a>b é€𝄞\n".encode()), *LONGER, "𝄞".encode()[1:], "a 𝄞 b>".encode()]
PIECES = list(dict.fromkeys(PIECES))


def make_tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """110 tokens, as Qwen writes them (bytes) or as Llama 2 does (a sign for the space, and bytes as a way out)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    if kind == "bytes":
        words = ["".join(chr(b if b in printable else 256 + others.index(b)) for b in piece) for piece in PIECES]
        decoder = decoders.ByteLevel()
    else:
        words = [f"<0x{piece[0]:02X}>" for piece in PIECES if len(piece) == 1]
        words += ["▁", "▁a", "é", "a>", "</", "a▁b", "€€", "▁𝄞"]
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        decoder = decoders.Sequence(steps)
    words += ["".join(letters) for letters in itertools.product("ab<>/", repeat=3)][: 110 - 2 - len(words)]
    backend = Tokenizer(models.WordLevel({word: id for id, word in enumerate(["<pad>", "<eos>", *words])}))
    backend.decoder = decoder
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "clean_up_tokenization_spaces": False}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def end_by_prefixes(tokenizer, tokens, strings) -> int | None:
    """The same by decoding all prefixes, one by one."""
    texts = ((count, tokenizer.decode(tokens[:count])) for count in range(1, len(tokens) + 1))
    return next((count for count, text in texts if any(string in text for string in strings)), None)


def strings_of(rng, tokenizer, tokens) -> list[str]:
    """One or two pieces of the text of `tokens`."""
    text, strings = tokenizer.decode(tokens), []
    for _ in range(rng.randint(1, 2)):
        begin = rng.randrange(len(text) + 1)
        strings.append(text[begin : begin + rng.choice([1, 2, 3, 5, 9, 20])].partition("\ufffd")[0] or "no such text")
    return strings


@pytest.mark.parametrize("kind", ["bytes", "sign"])
@pytest.mark.parametrize("length", [10, 400])
def test_the_completing_token_is_the_one_that_decoding_all_prefixes_finds(kind, length):
    tokenizer, rng, ends, decoded = make_tokenizer(kind), random.Random(length), [], []
    stops, few, searched = StopStrings(ModelConfig()), range(2, 40), 0
    count = lambda tokens: decoded.append(len(tokens)) or tokenizer.decode(tokens)  # noqa: E731
    stops.tokenizer = SimpleNamespace(decode=count)
    characters = [[2 + PIECES.index(bytes([byte])) for byte in character.encode()] for character in "ééé€€€𝄞𝄞ab"]
    for number in range(2000 // length + 100):
        # Some of the 117 ids of the model are beyond the tokenizer.
        tokens = rng.choices(few if number % 2 else range(117), k=length)
        if number % 3 == 0:  # runs of whole characters in bytes, which Llama 2's decoder takes as one
            tokens = [token for character in rng.choices(characters, k=length) for token in character][:length]
        strings = strings_of(rng, tokenizer, tokens[rng.randrange(length) :])
        search = StopSearch(stops, tuple(strings))
        steps = sorted(rng.sample(range(length + 1), length // 2))  # of one token and of several
        ends.append(next((end for count in [*steps, length] if (end := search.end(tokens[:count]))), None))
        assert ends[-1] == end_by_prefixes(tokenizer, tokens, strings), (tokens, strings)
        searched += search.seen
    assert len(set(ends)) > 8
    assert None in ends
    assert sum(decoded) < 60 * searched + 1000  # however long they get
    decoded.clear()
    for _ in range(2):
        assert StopSearch(stops, ("?",)).end([2, 4] * 100) is None
    assert len(decoded) == 2  # each token once: they have not the last character


def assert_cut(tokenizer, free: list[Response], stopped: list[Response], strings) -> int:
    """`stopped` is `free` up to the completing token; how many were cut."""
    ends = [end_by_prefixes(tokenizer, response.tokens, strings) for response in free]
    for end, before, after in zip(ends, free, stopped, strict=True):
        assert after.tokens == before.tokens[:end]
        assert after.logprobs == pytest.approx(before.logprobs[:end], abs=1e-5)
        assert after.finish_reason == ("length" if end is None else "stop")
    return len(ends) - ends.count(None)


def assert_rollout_is_cut(engine, engines, tokenizer) -> None:
    """Mask and log-probabilities of a greedy rollout are of what is left of it."""

    def roll_out(*stop: str):
        worker = RolloutWorker(RolloutConfig(stop=[*stop], max_response_tokens=24), engine, engines, (), 3)
        return worker.generate(prompts_of(*PROMPTS), 1, temperature=0)

    free, prompt = roll_out(), len(PROMPTS[0])
    row = free["tokens"].unbind()[0].tolist()
    string = tokenizer.decode(row[prompt:])[5:8]
    end = end_by_prefixes(tokenizer, row[prompt:], [string])
    batch = roll_out(string)
    assert 1 < end < 24
    assert batch["tokens"].unbind()[0].tolist() == row[: prompt + end]
    assert batch["response_mask"].unbind()[0].tolist() == [False] * prompt + [True] * end
    expected = free["rollout_logprobs"].unbind()[0][: prompt + end]
    torch.testing.assert_close(batch["rollout_logprobs"].unbind()[0], expected, rtol=0, atol=1e-5)
    assert not batch["truncated"][0]


@pytest.mark.parametrize("kind", ["bytes", "sign"])
def test_the_embedded_engine_keeps_what_was_sampled_up_to_the_completing_token(kind, hf_model, engines, tmp_path):
    tokenizer, rng, cut = make_tokenizer(kind), random.Random(0), 0
    for what in (hf_model, tokenizer):
        what.save_pretrained(tmp_path)
    engine = TorchEngine(ModelConfig(path=str(tmp_path)), torch.device("cpu"))
    engine.update_weights(buckets_of(hf_model.named_parameters()))
    engine.wake()
    free = [response for row in answers_of(engine, PROMPTS, 6, SAMPLING) for response in row]
    for number in range(6):
        strings = strings_of(rng, tokenizer, rng.choice(free).tokens)
        if number == 0:  # across the end of the first prompt, which is not searched
            strings = [tokenizer.decode(PROMPTS[0])[-1] + tokenizer.decode(free[0].tokens)[0]]
        sampling = dataclasses.replace(SAMPLING, stop_strings=tuple(strings))
        stopped = [response for row in answers_of(engine, PROMPTS, 6, sampling) for response in row]
        cut += assert_cut(tokenizer, free, stopped, strings)
    assert 6 * 18 > cut > 6
    # The last token that there is room for may complete it.
    end = end_by_prefixes(tokenizer, free[0].tokens, strings := strings_of(rng, tokenizer, free[0].tokens))
    last = dataclasses.replace(SAMPLING, max_new_tokens=end, stop_strings=tuple(strings))
    assert answers_of(engine, PROMPTS, 1, last)[0][0].finish_reason == "stop"
    assert_rollout_is_cut(engine, engines, tokenizer)
