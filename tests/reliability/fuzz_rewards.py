"""Completions as by an enemy through every built-in reward: nothing may raise, be late or earn a 1.0 that is false.

    python -m tests.reliability.fuzz_rewards [COUNT] [--seed SEED] [--only NAME ...]

Of COUNT completions (100,000) a tenth is drawn by hypothesis, the others are put together from what breaks parsers. The
pool grades each with every reward; of `code` (a process each) and `judge` (a request each) only every 500th and 20th.
What is false is told by rules of their own below, which are exact; for `math`, `code` and where a text can be read in
several ways, by answers that are right or wrong by construction and stand in a nasty text.
"""

import argparse
import contextlib
import json
import math
import random
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import hypothesis
from hypothesis import strategies as st

from rewards import Grade, Group, RewardPool, RewardsConfig
from tests.rewards.test_countdown_reward import oracle as countdown_of

MEGABYTE = 1_000_000
SECONDS = 5.0  # the limit of a grade, which is the default; `code` and `judge` have their own
GROUP = 4
SIDE_BY_SIDE = 200  # completions in the pool at once
STALLS = {"math"}  # rewards whose libraries can be made to compute for long, which the limit is for
# fmt: off
CALLS = [
    "__import__('os').system('touch /tmp/reward-was-here')", "exec('while 1: pass')", "eval('9**9**9')", "import os",
    "open('/tmp/reward-was-here','w')", "(lambda f: f(f))(lambda f: f(f))", "{0.__class__}", "{numbers}", "%s%n%x",
    "[x for x in ().__class__.__base__.__subclasses__()]", "'a'*10**9", "[0]*10**10", "print('x'*10**9)",
]
MATHS = [
    "\\frac{1}{0}", "\\frac", "\\sqrt{-1}", "x^{1000}", "(x+1)^{30}", "0^0", "\\infty-\\infty", "1e400", "1e-400",
    "NaN", "inf", "-0", "+-+-4", "4\\pm2", "\\{1,2", "[1,2)", "\\begin{pmatrix}1&2\\\\3", "\\left(", "\\right)",
    "x=y=z", "1,2,3", "\\text{42}", "\\mathbb{R}", "\\emptyset", "|x|", "4!", "5!!", "\\sin^{-1}(2)", "\\log(0)",
    "\\sum_{i=1}^{9} i", "a_{b_{c}}", "1/3", "0.\\overline{3}", "42%", "\\$42", "42^\\circ", "4 2", "2^{-1}",
    "\\binom{4}{2}", "42 \\text{ or } 41", "${42}",
]
LONG_SUMS = ["10!!!!!", "9^{9^{9^{9}}}", "\\int_0^1 x^x dx", "(10^9)!", "(x+y+z)^{900}", "2^{2^{2^{42}}}"]
SIGNS = [
    "\x00", "\ud800", "\udfff", "\u202e", "\u202c", "\u200b", "\ufeff", "\x1b[2J", "\r", "\n", "\t", " ", "\u2028",
    "٤٢", "４２", "⁴²", "④②", "Ⅻ", "𝟒𝟐", "𝟘", "−", "–", "×", "÷", "∕", "＋", "ß", "İ", "ﬁ", "Ａ", "А", "🙂", "e\u0301",
]
TAGS = ["<think>", "</think>", "<answer>", "</answer>", "<ANSWER>", "<answer >", "\\boxed{", "}", "{", "####", "```"]
WORDS = ["The answer is ", "answer: ", "option ", "(B)", "(A)", "B", "B)", "Mark: 10", "def add(a, b):\n", "$", "="]
NUMBERS = ["42", "41", "-42", "42.0", "4,2", "$42", "042", "42.00", "1,000", "3", "4", "7", "9" * 400, "1" + "0" * 5000]
PARTS = CALLS + MATHS + SIGNS + TAGS + WORDS + NUMBERS
BRACKETS = [
    ("(", ")"), ("{", "}"), ("[", "]"), ("\\boxed{", "}"), ("\\frac{", "}{2}"), ("\\sqrt{", "}"),
    ("<think>", "</think>"), ("<answer>", "</answer>"), ("-", ""), ("2^{", "}"), ("\\left(", "\\right)"),
]
# fmt: on


class Drawn(NamedTuple):
    """A completion, and what cases must give it by construction, NaN for anything but 1.0."""

    text: str
    known: dict[str, float]


def some(draw: random.Random, most: int = 8) -> str:
    return "".join(draw.choice(PARTS) for _ in range(draw.randint(0, most)))


def nested(draw: random.Random) -> str:
    (opened, closed), depth = draw.choice(BRACKETS), draw.choice([1, 2, 3, 4, 5, 20, 100, 1000])
    return opened * depth + draw.choice(NUMBERS) + closed * draw.choice([depth, depth, depth - 1, 0])


def countdown(draw: random.Random) -> str:
    numbers = [["3", "4", "7"], ["3", "4", "7"], ["3", "4"], ["9"] * 4, ["7", "7"], ["3", "4", "7", "0"]]
    numbers += [["３", "4", "7"], ["3", "٤", "7"], ["3", "4", "⁷"]]
    draw.shuffle(numbers := list(draw.choice(numbers)))
    signs = ["+", "-", "*", "/", "+", "-", "*", "**", "//", "×", "÷", "−", "%", "^", " ", "+-", "/(0)*", "=", "\n+"]
    text = "".join(number + draw.choice(signs) for number in numbers[:-1]) + numbers[-1]
    if draw.random() < 0.4:
        cut = sorted(draw.sample(range(len(text) + 1), 2))
        text = f"{text[: cut[0]]}({text[cut[0] : cut[1]]}){text[cut[1] :]}"
    text += draw.choice(["", "", "", " = 14", "=", *SIGNS[:4]])
    return f"{draw.choice(['', some(draw, 3)])}<answer>{text}</answer>{draw.choice(['', '', some(draw, 2)])}"


def constructed(draw: random.Random) -> Drawn:
    """An answer that is right or wrong in a nasty text."""
    before, right = some(draw).replace("\\boxed{", "").replace("```", ""), draw.random() < 0.5
    number = draw.choice(
        ["42", "42.0", "$42", "42.00"] if right else ["41", "-42", "420", "42.5", "4.2", "-\\frac{84}{2}"]
    )
    tail = draw.choice(["", ".", " ", "\n", "\n\x00", " \ud800", "\u202e"])
    match draw.choice(["math", "gsm8k", "choice", "code"]):
        case "math":
            number = number.replace("$", "")
            return Drawn(f"{before}\n\\boxed{{{number}}}{tail}", {"math": float(right)})
        case "gsm8k" if "frac" not in number:
            return Drawn(f"{before}\n#### {number}{tail}", {"gsm8k": float(right)})
        case "choice":
            letter, before = "B" if right else draw.choice("ACD"), before.replace("<answer>", "")
            form = draw.choice(["\\boxed{X}", "\\boxed{\\text{X}}", "\\boxed{(X)}"])
            return Drawn(f"{before}\n{form.replace('X', letter)}{tail}", {"multiple_choice": float(right)})
        case _:
            body = "return a + b" if right else draw.choice(["return a - b", *CALLS[:7], "import sys; sys.exit(0)"])
            return Drawn(f"{before}\n```python\ndef add(a, b):\n    {body}\n```{tail}", {"code": float(right)})


def drawn(count: int, seed: int) -> Iterator[Drawn]:
    """`count` completions, the same for the same `seed`."""
    texts, draw = [], random.Random(seed)
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(hypothesis.HealthCheck)}
    kinds = st.text(max_size=200) | st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=20).map("".join)
    kinds |= st.from_regex(r"(?s)(<think>.*</think>)?\s*<answer>[-0-9+*/() ]{0,30}</answer>", fullmatch=True)

    @hypothesis.seed(seed)
    @hypothesis.settings(max_examples=count // 10, phases=[hypothesis.Phase.generate], **quiet)
    @hypothesis.given(kinds)
    def collect(text: str) -> None:
        texts.append(text)

    collect()
    for number in range(count):
        if number % 10 == 0 and texts:
            yield Drawn(texts.pop(), {})
            continue
        kind = draw.random()
        if kind < 0.3:
            yield constructed(draw)
        elif kind < 0.55:
            yield Drawn(countdown(draw), {})
        elif kind < 0.7:
            yield Drawn(
                some(draw, 3) + draw.choice(["", "\\boxed{", "<answer>", "$"]) + nested(draw) + some(draw, 3), {}
            )
        elif kind < 0.7006:
            first, last = (draw.choice(["", "", *TAGS, *WORDS]) for _ in range(2))
            part = draw.choice(["\n", " ", "*", "(", *PARTS])
            yield Drawn(first + part * (MEGABYTE // len(part)) + last, {})
        elif kind < 0.7011:
            yield Drawn(f"\\boxed{{{draw.choice(LONG_SUMS)}}}", {"math": math.nan})
        else:
            yield Drawn(some(draw, 12), {})


def last_tag(text: str) -> str | None:
    """What stands in the last closed <answer>, up to its first end, after the last </think>."""
    closed = text.split("</think>")[-1].split("</answer>")
    opened = [number for number, part in enumerate(closed[:-1]) if "<answer>" in part]
    return closed[opened[-1]].split("<answer>")[-1] if opened else None


def countdown_oracle(text: str) -> float:
    if (answer := last_tag(text)) is None:
        return 0.0
    answer = answer.split("=")[0]
    if len(answer) > 1000:
        return 0.05
    plain = "".join(" " if c.isspace() else {"×": "*", "÷": "/", "−": "-"}.get(c, c) for c in answer)
    return countdown_of(plain, [3, 4, 7], 14)


def gsm8k_oracle(text: str) -> float | None:
    answers = [part.lstrip() for part in text.split("</think>")[-1].split("####")[1:]]
    starts = [a[a[:1] in ("-", "−") :].removeprefix("$").removeprefix(".")[:1] for a in answers]
    numbers = [answer for answer, start in zip(answers, starts, strict=True) if start and start in "0123456789"]
    return None if numbers and {"4", "2"} <= set(numbers[-1]) else 0.0


def format_oracle(text: str) -> float:
    parts = re.split("(</?(?:think|answer)>)", text.strip())
    whole = parts[1::2] == ["<think>", "</think>", "<answer>", "</answer>"]
    return float(whole and not (parts[0] or parts[-1] or parts[4].strip()))


@dataclass
class Case:
    """A reward as it is fuzzed; `oracle` gives a completion's value, NaN for anything but 1.0, None where it cannot."""

    reward: str
    row: dict
    options: dict = field(default_factory=dict)
    oracle: Callable[[str], float | None] = lambda text: None
    every: int = 1


def is_long(size: int) -> float:
    return -min(1.0, max(0.0, (size - 1500) / 500))


TASK = {"task": "chain_sum", "options": {}, "question": "3 + 4 = ?", "answer": "7", "metadata": {}}
TEST = {"tests": "assert add(1, 2) == 3"}
OPEN = {"allow": True, "network": "open", "seconds": 5.0}
CASES = {
    "countdown": Case("countdown", {"numbers": [3, 4, 7], "target": 14}, oracle=countdown_oracle),
    "math": Case("math", {"answer": "42"}),
    "gsm8k": Case("gsm8k", {"answer": "#### 42"}, oracle=gsm8k_oracle),
    "gsm8k, flexible": Case(
        "gsm8k", {"answer": "42"}, {"flexible": True}, lambda text: None if "4" in text and "2" in text else 0.0
    ),
    "exact_match": Case(
        "exact_match", {"answer": "42"}, oracle=lambda text: float(text.split("</think>")[-1].split() == ["42"])
    ),
    "multiple_choice": Case("multiple_choice", {"answer": "B"}, oracle=lambda text: None if "B" in text else 0.0),
    "format": Case("format", {}, oracle=format_oracle),
    "length": Case("length", {}, oracle=lambda text: is_long(len(text))),
    "length, words": Case("length", {}, {"unit": "words"}, lambda text: is_long(len(text.split()))),
    "distinct": Case("distinct", {}, {"tag": "answer"}, lambda text: None if (last_tag(text) or "").split() else 0.0),
    "reasoning_gym": Case(
        "reasoning_gym", {"entry": repr(TASK)}, oracle=lambda text: 1.0 if text.strip() == "7" else math.nan
    ),
    "code": Case("code", TEST, OPEN, every=500),
    "judge": Case("judge", {"question": "?"}, {"model": "fake"}, lambda text: 0.5, every=20),
}


@contextlib.contextmanager
def judge() -> Iterator[str]:
    """The address of a judge whose mark is always 5."""
    body = json.dumps({"choices": [{"message": {"content": "Mark: 5"}}]}).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_): ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@dataclass
class Found:
    """Of a case: how many completions it was given, failures and false values, by kind, with the first of each."""

    graded: int = 0
    kinds: Counter = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, text: str, said: object) -> None:
        self.kinds[kind] += 1
        self.examples.setdefault(kind, f"{ascii(text)[:100]} ({len(text):,} characters): {ascii(str(said))[:300]}")


def fuzz(count: int, seed: int, only: Collection[str] = ()) -> dict[str, Found]:
    """What came of `count` completions drawn with `seed`, by case: all of them, or `only` those."""
    cases = {name: case for name, case in CASES.items() if not only or name in only}
    found, waiting = {name: Found() for name in cases}, deque()
    config = RewardsConfig({case.reward: 1.0 for case in cases.values()}, timeout_seconds=SECONDS)
    with judge() as url, RewardPool(config) as pool:
        for turn, given in enumerate(drawn(count, seed)):
            if turn % GROUP == 0:
                group = Group(min(GROUP, count - turn))
            for name, case in cases.items():
                if turn % case.every == 0 or (name in given.known and turn % 20 == 1):
                    sample, together = (given.text, case.row, ""), group if name == "distinct" else Group()
                    options = case.options | ({"url": url} if name == "judge" else {})
                    waiting.append((name, given, pool._submit(sample, together, {case.reward: 1.0}, options)))
            while len(waiting) > SIDE_BY_SIDE * len(cases):
                note(found, *waiting.popleft())
        for each in waiting:
            note(found, *each)
    return found


def note(found: dict[str, Found], name: str, given: Drawn, future: Future[Grade]) -> None:
    """Wait for a grade and add what is wrong with it."""
    grade, case, mine = future.result(timeout=600), CASES[name], found[name]
    value = grade.components[case.reward]
    mine.graded += 1
    failures = [failure for failure in grade.failures if failure.kind != "none applies"]
    for failure in failures:
        mine.add(failure.kind, given.text, failure.message)
    wanted = given.known.get(name, case.oracle(given.text))
    if failures or wanted is None or value is None:
        return
    if (value == 1.0) if math.isnan(wanted) else not math.isclose(value, wanted, abs_tol=1e-9):
        mine.add("false 1.0" if value == 1.0 else "another value", given.text, f"{value}, and not {wanted}")


def bad(found: dict[str, Found]) -> list[str]:
    """What must not be: anything but timeouts of rewards that may have them."""
    named = [(name, kind, example) for name, mine in found.items() for kind, example in mine.examples.items()]
    return [f"{name}: {kind}: {e}" for name, kind, e in named if kind != "timeout" or CASES[name].reward not in STALLS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], choices=CASES)
    given = parser.parse_args()
    begun, found = time.monotonic(), fuzz(given.count, given.seed, given.only)
    for name, mine in found.items():
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in mine.kinds.items()) or "nothing"
        print(f"| `{name}` | {mine.graded:,} | {kinds} | {next(iter(mine.examples.values()), '')} |")
    print(f"{given.count:,} completions, seed {given.seed}, {time.monotonic() - begun:.0f} s", *bad(found), sep="\n")
    sys.exit(bool(bad(found)))


if __name__ == "__main__":
    main()
