"""The judge, against a chat endpoint of its own on the loopback address."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import rewards
from rewards import RewardPool, RewardsConfig
from rewards import judge as judge_file

ROW = {"question": "What is 6 * 7?", "answer": "42"}


class Endpoint:
    """A server whose `answer(request)` gives (status, text of the answer); `requests` are the bodies it was sent."""

    def __init__(self):
        self.requests, self.keys, self.answer = [], [], lambda request: (200, "Mark: 7")
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                known = self.headers.get("Authorization") in (None, "Bearer right")
                self.reply(200 if known else 401, {"data": []})

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append(request)
                endpoint.keys.append(self.headers.get("Authorization"))
                status, text = endpoint.answer(request)
                usage = {"prompt_tokens": 100, "completion_tokens": 10}
                body = {"choices": [{"message": {"content": text}}], "usage": usage}
                self.reply(status, text if isinstance(text, dict) else body)

            def reply(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args): ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, args=[0.01], daemon=True).start()


@pytest.fixture
def endpoint(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(judge_file.random, "random", lambda: 0.01)  # pauses of a hundredth
    monkeypatch.setattr(judge_file, "REPORT_SECONDS", 3600.0)
    judge_file.SPENT.clear()
    endpoint = Endpoint()
    yield endpoint
    endpoint.server.shutdown()
    endpoint.server.server_close()


def grade(endpoint: Endpoint, completion: str = "It is 42.", row: dict = ROW, **options) -> float:
    return asyncio.run(rewards.get("judge", url=endpoint.url, model="m", **options)(completion, row))


MARKS = [
    ("Mark: 7", 0.7), ("7", 0.7), ("7/10", 0.7), ("7.5 / 10", 0.75), ("8 out of 10", 0.8), ("10", 1.0), ("0", 0.0),
    ("At first a 3, but then: Mark: 9.", 0.9), ('{"score": 4}', 0.4), ("<think>2, or 3</think>5", 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("said", "value"), MARKS)
def test_the_mark_is_the_last_number(endpoint, said, value):
    endpoint.answer = lambda request: (200, said)
    assert grade(endpoint) == pytest.approx(value)


def test_a_pattern_and_a_scale_of_ones_own(endpoint):
    endpoint.answer = lambda request: (200, '{"score": 3, "confidence": 0.9}')
    assert grade(endpoint, pattern='"score": *([0-9]+)', scale=5) == pytest.approx(0.6)
    assert grade(endpoint, pattern="[0-9]", scale=9.0) == pytest.approx(1.0)


@pytest.mark.parametrize("said", ["", "Very good!", "11", "Mark: -1", None, "100/10"])
def test_an_answer_without_a_mark_is_an_error_and_not_0(endpoint, said):
    endpoint.answer = lambda request: (200, said)
    with pytest.raises(ValueError, match="gave no mark of 0 to 10: "):
        grade(endpoint)


@pytest.mark.parametrize("body", [{}, {"choices": []}, {"choices": [{"text": "7"}]}])
def test_what_is_no_chat_completion_is_an_error(endpoint, body):
    endpoint.answer = lambda request: (200, body)
    with pytest.raises(ValueError, match="answered with no chat completion: "):
        grade(endpoint)


def test_the_prompt_holds_the_texts_of_the_row_and_braces_of_a_completion_stay(endpoint):
    completion = "<think>hm {question}</think>{answer} {0} {{x}} %s {question"
    grade(endpoint, completion, prompt='{question}|{answer}|{completion}|{"json": 1}|{}', body={"max_tokens": 5})
    [request] = endpoint.requests
    content = 'What is 6 * 7?|42|{answer} {0} {{x}} %s {question|{"json": 1}|{}'
    assert request == {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 5}
    with pytest.raises(ValueError, match=r"names \['rubric'\], and the row has \['answer', 'question'\]"):
        grade(endpoint, prompt="{rubric} {completion}")


def test_requests_are_side_by_side_up_to_the_limit(endpoint):
    together, active, peak, lock = threading.Barrier(4), 0, 0, threading.Lock()

    def answer(request):
        nonlocal active, peak
        with lock:
            active += 1
            peak = max(peak, active)
        together.wait(timeout=20)  # only four at once go on
        time.sleep(0.05)
        with lock:
            active -= 1
        return 200, "7"

    async def many():
        judge = rewards.get("judge", url=endpoint.url, model="m", concurrency=4, retries=0)
        return await asyncio.gather(*(judge(f"answer {number}", ROW) for number in range(12)))

    endpoint.answer = answer
    assert asyncio.run(many()) == [0.7] * 12
    assert peak == 4
    assert judge_file.SPENT == {"calls": 12, "in": 1200, "out": 120}


def test_what_passes_is_tried_again(endpoint):
    statuses = [429, 500, 503, 200]
    endpoint.answer = lambda request: (statuses.pop(0), "7")
    assert grade(endpoint, retries=3) == 0.7
    assert judge_file.SPENT["retries"] == 3


def test_what_does_not_pass_is_an_error_after_the_last_try(endpoint):
    endpoint.answer = lambda request: (500, "7")
    with pytest.raises(RuntimeError, match=r"no answer in 3 tries; the last: status 500"):
        grade(endpoint, retries=2)
    assert len(endpoint.requests) == 3


def test_a_request_that_is_wrong_is_not_repeated(endpoint):
    endpoint.answer = lambda request: (404, "no such model")
    with pytest.raises(RuntimeError, match=r"no answer in 1 tries; the last: status 404.*no such model"):
        grade(endpoint)
    assert len(endpoint.requests) == 1


def test_an_endpoint_that_is_silent_is_an_error_after_the_last_try(endpoint):
    endpoint.answer = lambda request: time.sleep(1.5) or (200, "7")
    with pytest.raises(RuntimeError, match="no answer in 2 tries; the last: ReadTimeout"):
        grade(endpoint, retries=1, seconds=0.2)


def validate(**options) -> None:
    rewards.validate(RewardsConfig(weights={"judge": 1.0}, options={"judge": {"model": "m", **options}}))


def test_the_key_comes_from_the_environment(endpoint, monkeypatch):
    monkeypatch.setenv("MY_KEY", "right")
    validate(url=endpoint.url, key_variable="MY_KEY")
    grade(endpoint, key_variable="MY_KEY")
    grade(endpoint)
    assert endpoint.keys == ["Bearer right", None]
    monkeypatch.setenv("MY_KEY", "wrong")
    with pytest.raises(ValueError, match=r"refuses the key: put one that it takes into \$MY_KEY"):
        validate(url=endpoint.url, key_variable="MY_KEY")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/v1", "127.0.0.1:1", "http://no.such.host.invalid/v1", "http://[", "x"]
)
def test_an_endpoint_that_cannot_be_reached_is_refused_before_a_run(url):
    with pytest.raises(ValueError, match="cannot be reached") as error:
        validate(url=url)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [{}, {"url": "http://127.0.0.1:1", "model": ""}, {"url": "x", "prompt": "{answer}"}]
)
def test_settings_that_lack_something_are_refused_before_a_run(options):
    with pytest.raises(ValueError, match=r"rewards.options.judge needs url.*{completion}"):
        validate(**options)


def test_in_the_pool_an_answer_without_a_mark_is_a_failure(endpoint):
    def answer(request):
        return 200, "no mark" if "bad" in request["messages"][0]["content"] else "5"

    endpoint.answer = answer
    config = RewardsConfig(weights={"judge": 1.0}, options={"judge": {"url": endpoint.url, "model": "m"}}, processes=1)
    rewards.validate(config)
    with RewardPool(config) as pool:
        good, bad = [pool.submit(text, ROW).result() for text in ("good", "bad")]
    assert (good.total, good.failures) == (0.5, [])
    [failure] = bad.failures
    assert (bad.total, failure.kind) == (0.0, "exception")
    assert "gave no mark of 0 to 10: 'no mark'" in failure.message


def test_what_was_spent_is_told(endpoint, monkeypatch, capsys):
    monkeypatch.setattr(judge_file, "REPORT_SECONDS", 0.01)
    statuses = [200, 429, 200]
    endpoint.answer = lambda request: (statuses.pop(0), "7")
    grade(endpoint), grade(endpoint)
    told, deadline = "", time.monotonic() + 10
    while "judge: 2 calls, 200 + 20 tokens, 1 retries\n" not in told and time.monotonic() < deadline:
        time.sleep(0.01)
        told += capsys.readouterr().err
    assert "judge: 2 calls, 200 + 20 tokens, 1 retries\n" in told
