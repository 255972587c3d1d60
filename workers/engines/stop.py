"""Stop strings: which token of a response completes one, found as the response grows."""

import functools
from collections.abc import Sequence

import transformers

from workers.config import ModelConfig
from workers.engines.protocol import Response
from workers.models.hub import read_tokenizer

UNDECIDED = "\ufffd"
"""What decoding makes of bytes that are no character, or not yet one."""


class StopStrings:
    """What the tokenizer of `model`, read when it is needed, makes of tokens, and which may complete a stop string."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self._may_complete: dict[tuple[int, tuple[str, ...]], bool] = {}

    @functools.cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        return read_tokenizer(self.model)

    def may_complete(self, token: int, strings: tuple[str, ...]) -> bool:
        """False where `token` has no string's last character, so that all that came before it need not be decoded."""
        key = token, strings
        if key not in self._may_complete:
            # It may end a character that others began, and some decoders write the space between two tokens.
            text, lasts = self.tokenizer.decode([token]), [string[-1] for string in strings]
            self._may_complete[key] = UNDECIDED in text or any(last in text or last.isspace() for last in lasts)
        return self._may_complete[key]

    def cut(self, response: Response, strings: tuple[str, ...]) -> Response:
        """The response up to the token that completes one of `strings`; as it is where none does."""
        end = StopSearch(self, strings).end(response.tokens)
        return response if end is None else Response(response.tokens[:end], response.logprobs[:end], "stop")


class StopSearch:
    """The search of one response for the first of `strings` that its text has."""

    def __init__(self, stops: StopStrings, strings: tuple[str, ...]) -> None:
        self.stops, self.strings = stops, strings
        # Characters before the last token that may matter, and some more, as decoders treat what comes first otherwise.
        self.enough = max(map(len, strings)) + 8
        self.start = self.seen = 0  # tokens from `start` on are decoded; `seen` were searched

    def end(self, tokens: Sequence[int]) -> int | None:
        """How many of `tokens`, those of the call before and more, a response has that ends with the completing one."""
        while self.seen < len(tokens):
            self.seen, token = self.seen + 1, tokens[self.seen]
            if self.stops.may_complete(token, self.strings) and self._found(list(tokens[self.start : self.seen])):
                return self.seen
        return None

    def _found(self, tokens: list[int]) -> bool:
        decode = self.stops.tokenizer.decode
        text = decode(tokens)
        if any(string in text for string in self.strings):
            return True
        while not text.endswith(UNDECIDED):
            half = (len(tokens) + 1) // 2
            rest = decode(tokens[half:])
            # Not in the middle of a character, which would look otherwise ever after.
            if len(rest) < self.enough or not text.endswith(rest):
                break
            self.start, tokens, text = self.start + half, tokens[half:], rest
        return False
