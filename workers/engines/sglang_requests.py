"""Requests: what is asked of SGLang one by one travels to it together, and each is answered by itself."""

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workers.engines.protocol import Response, Sampling
from workers.engines.sglang_hooks import STOP_STRINGS
from workers.engines.sglang_process import SGLangError

PREFIX = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=0, stop=(), seed=0)
"""Has SGLang put a prompt into its prefix cache."""

PAUSE = 0.02
"""Seconds between two messages: each has SGLang begin a prefill, while those that run wait."""


@dataclass(eq=False)
class _Request:
    name: str
    prompt: bytes  # of int64
    sampling: Sampling
    answer: asyncio.Future
    sent: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def end(self, reason: dict[str, Any]) -> None:
        """Answer it with what came, and SGLang's `reason` why that is all."""
        kind = reason["type"]
        # A stop token at the last place counts as reached length in some versions.
        if kind == "length" and self.tokens and self.tokens[-1] in self.sampling.stop:
            kind = "stop"
        if self.answer.done():  # nobody waits for it
            pass
        elif kind not in ("stop", "length", "abort") or (kind == "abort" and reason.get("status_code")):
            self.answer.set_exception(SGLangError(f"a response ended with {reason}"))
        else:
            self.answer.set_result(Response(self.tokens, self.logprobs, kind))


class Requests:
    """Requests in flight to a `sglang.Engine`, on whose loop this runs; deterministic: a seed decides its sample.

    They go to SGLang's scheduler and come from it past what stands before it for servers, whose tasks and records of
    each request took as long as all else that this process does for a turn of a conversation.
    """

    def __init__(self, engine: Any, deterministic: bool) -> None:
        from sglang.srt.managers import io_struct
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.io_struct, self.make_parameters = io_struct, SamplingParams
        self.manager, self.deterministic = engine.tokenizer_manager, deterministic
        self.pending: list[_Request] = []  # to be sent with the next message
        self.unanswered: dict[str, _Request] = {}
        self.count = 0
        self.asked_at = 0.0  # on time.time's clock, as SGLang's own
        self.sent_at = 0.0  # the last message, on time.monotonic's
        self.manager._handle_batch_output = self._receive
        self.receive_other, self.manager._result_dispatcher = self.manager._result_dispatcher, self._receive_other

    def asked(self) -> float | None:
        """When SGLang was last asked for a sample, None while it owes none."""
        return self.asked_at if self.unanswered else None

    async def sample(self, tokens: Sequence[int] | np.ndarray, sampling: Sampling) -> Response:
        """As Engine.sample; raises SGLangError."""
        if not self.pending:  # what others ask for until it is sent goes along
            self.sending = asyncio.create_task(self._send_pending())
        request = self._make(np.asarray(tokens, np.int64).tobytes(), sampling)
        self.pending.append(request)
        self.asked_at = time.time()
        return await request.answer

    def abort(self) -> None:
        """As Engine.abort."""
        for request in list(self.unanswered.values()):
            if not request.sent:
                self._end(request.name, {"type": "abort"})
        if self.unanswered:
            self.manager.abort_request(abort_all=True)

    def _make(self, prompt: bytes, sampling: Sampling) -> _Request:
        self.count += 1
        request = _Request(str(self.count), prompt, sampling, asyncio.get_running_loop().create_future())
        self.unanswered[request.name] = request
        return request

    async def _send_pending(self) -> None:
        await asyncio.sleep(max(0.0, self.sent_at + PAUSE - time.monotonic()))
        going, self.pending = self.pending, []
        # Several samples of one prompt find it in the prefix cache.
        counts = Counter(request.prompt for request in going)
        prefixes = [self._make(prompt, PREFIX) for prompt, count in counts.items() if count > 1]
        try:
            if prefixes:
                self._send(prefixes)
                await asyncio.gather(*(prefix.answer for prefix in prefixes))
            self._send(going)
        except Exception as error:  # noqa: BLE001 - raised where the answers are awaited
            for request in going:
                if not request.answer.done():
                    request.answer.set_exception(SGLangError(str(error)))
                self.unanswered.pop(request.name, None)

    def _send(self, requests: Sequence[_Request]) -> None:
        wanted = [request for request in requests if not request.answer.done()]
        for request in requests:
            request.sent = True
            if request.answer.done():
                self.unanswered.pop(request.name, None)
        if wanted:
            self.manager.auto_create_handle_loop()
            message = self.io_struct.BatchTokenizedGenerateReqInput(batch=[self._written(each) for each in wanted])
            self.manager._dispatch_to_scheduler(message)
            self.sent_at = time.monotonic()

    def _written(self, request: _Request) -> Any:
        """What SGLang is told of one request."""
        sampling = request.sampling
        parameters = self.make_parameters(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=set(sampling.stop),
            ignore_eos=not sampling.stop,
            sampling_seed=sampling.seed if self.deterministic else None,
            custom_params={STOP_STRINGS: list(sampling.stop_strings)} if sampling.stop_strings else None,
        )
        parameters.normalize(None)
        return self.io_struct.TokenizedGenerateReqInput(
            rid=request.name,
            input_text=None,
            input_ids=array("q", request.prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=parameters,
            return_logprob=sampling is not PREFIX,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )

    async def _receive(self, output: Any) -> None:
        """Take what some requests have sampled since the last time: SGLang reports long ones before they end."""
        for place, (name, reason) in enumerate(zip(output.rids, output.finished_reasons, strict=True)):
            if (request := self.unanswered.get(name)) is not None and request.sampling is not PREFIX:
                try:
                    request.tokens += output.output_token_logprobs_idx[place]
                    request.logprobs += output.output_token_logprobs_val[place]
                except Exception as error:  # noqa: BLE001 - SGLang ends this process for one that it sees
                    reason = {"type": "an answer that cannot be read", "message": repr(error)}
            if reason is not None:
                self._end(name, reason)

    def _receive_other(self, message: Any) -> None:
        """Take what SGLang says beside samples: of those that it had not begun when all were aborted, and answers."""
        if isinstance(message, self.io_struct.AbortReq):
            self._end(message.rid, message.finished_reason or {"type": "abort"})
        else:
            self.receive_other(message)

    def _end(self, name: str, reason: dict[str, Any]) -> None:
        if (request := self.unanswered.pop(name, None)) is not None:
            request.end(reason)
