"""Requests: what is asked of SGLang one by one travels to it together, and each is answered by itself."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from workers.engines.protocol import Response, Sampling
from workers.engines.sglang_hooks import STOP_STRINGS
from workers.engines.sglang_process import SGLangError

REPORT_TOKENS = 256


class Requests:
    """Requests in flight to a `sglang.Engine`, on whose loop this runs; deterministic: a seed decides its sample."""

    def __init__(self, engine: Any, deterministic: bool) -> None:
        self.engine, self.deterministic = engine, deterministic
        self.pending: list[tuple[list[int], Sampling, asyncio.Future]] = []  # to be sent with the next message
        self.in_flight: set[asyncio.Future] = set()
        self.asked_at = 0.0  # on time.time's clock, as SGLang's own
        engine.tokenizer_manager._stream_batch_responses = as_they_come

    def asked(self) -> float | None:
        """When SGLang was last asked for a sample, None while it owes none."""
        return self.asked_at if self.in_flight else None

    async def sample(self, tokens: Sequence[int], sampling: Sampling) -> Response:
        """As Engine.sample; raises SGLangError."""
        answer = asyncio.get_running_loop().create_future()
        if not self.pending:
            # What others ask for in the same turn of the loop goes along: what comes to SGLang one by one makes it
            # begin anew each time, while those that run wait.
            self.sending = asyncio.create_task(self._send())
        self.pending.append((list(tokens), sampling, answer))
        self.in_flight.add(answer)
        self.asked_at = time.time()
        try:
            return await answer
        finally:
            self.in_flight.discard(answer)

    def abort(self) -> None:
        """As Engine.abort."""
        for *_, answer in self.pending:
            if not answer.done():
                answer.set_result(Response([], [], "abort"))
        self.pending = []
        if self.in_flight:
            self.engine.tokenizer_manager.abort_request(abort_all=True)

    async def _send(self) -> None:
        """Send all that is pending, and answer each request when it is done."""
        sent, self.pending = self.pending, []
        prompts = [tokens for tokens, *_ in sent]
        answers = [answer for *_, answer in sent]
        try:
            if not sent:
                return
            # Several samples of one prompt find it in the prefix cache.
            shared = [list(prompt) for prompt, count in Counter(map(tuple, prompts)).items() if count > 1]
            if shared:
                await self.engine.async_generate(input_ids=shared, sampling_params={"max_new_tokens": 0})
            outputs = await self.engine.async_generate(
                input_ids=prompts,
                sampling_params=[self._parameters(sampling) for _, sampling, _ in sent],
                return_logprob=True,
                stream=True,
            )
            async for output in outputs:
                if output["meta_info"]["finish_reason"] is not None and not answers[output["index"]].done():
                    _, sampling, answer = sent[output["index"]]
                    answer.set_result(_response(output["meta_info"], sampling))
        except Exception as error:  # noqa: BLE001 - raised where the answers are awaited
            for answer in answers:
                if not answer.done():
                    answer.set_exception(SGLangError(str(error)))

    def _parameters(self, sampling: Sampling) -> dict[str, Any]:
        """What SGLang is told of one request."""
        parameters = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": not sampling.stop,
            "stream_interval": REPORT_TOKENS,
        }
        if sampling.stop_strings:
            parameters["custom_params"] = {STOP_STRINGS: list(sampling.stop_strings)}
        return parameters | ({"sampling_seed": sampling.seed} if self.deterministic else {})


def _response(meta: dict[str, Any], sampling: Sampling) -> Response:
    reason = meta["finish_reason"]["type"]
    if reason not in ("stop", "length", "abort") or (reason == "abort" and meta["finish_reason"].get("status_code")):
        raise RuntimeError(f"a response ended with {meta['finish_reason']}")
    found = meta["output_token_logprobs"]
    logprobs, tokens, *_ = zip(*found, strict=True) if found else ((), ())
    # A stop token at the last place counts as reached length in some versions.
    if reason == "length" and tokens[-1] in sampling.stop:
        reason = "stop"
    return Response(list(tokens), list(logprobs), reason)


async def as_they_come(streams: Sequence[AsyncIterator[dict[str, Any]]], ids: Sequence[str]) -> AsyncIterator[dict]:
    """The outputs of all requests of a message, each with its request's place as "index", as SGLang's own gives them.

    Its own waits for all requests that are left anew with each output, which was two fifths of this thread's work in a
    profile of a thousand short ones.
    """
    places, outputs = {name: place for place, name in enumerate(ids)}, asyncio.Queue()

    async def pass_on(stream: AsyncIterator[dict[str, Any]]) -> None:
        try:
            async for output in stream:
                outputs.put_nowait(output | {"index": places[output["meta_info"]["id"]]})
            outputs.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised below
            outputs.put_nowait(error)

    tasks, ended = [asyncio.create_task(pass_on(stream)) for stream in streams], 0
    try:
        while ended < len(tasks):
            output = await outputs.get()
            if isinstance(output, Exception):
                raise output
            if output is None:
                ended += 1
            else:
                yield output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
