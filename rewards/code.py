"""The code reward: unit tests, or what a program prints, in a process with limits (rewards/sandbox.py).

- Only what follows the last `</think>` is read: its last ```python block, else its last block without a language, else,
  where there is no block, all of it.
- A row has `tests`, Python texts (a list, or one) that pass if they raise nothing: a test finds the program's names,
  can import them from `solution`, and its functions `test_*` are called. Or it has `input_output`, a dict or its JSON,
  {"inputs": [...], "outputs": [...]}: what is typed in, and what must be printed then, as text, spaces aside.
- Each test runs the program anew, with the standard library alone; `if __name__ == "__main__":` holds only with
  `input_output`. What is not done after `seconds`, of all tests together, has failed.

It is off by default, as it runs what a model wrote. With `network: blocked` (needs user namespaces, which most
containers refuse) a program reaches no network, and no process or file of yours. With `network: open` it has all your
rights: limits of memory, time, the size of a file and (unless you are root) processes are all that holds it, and one
that kills the sandbox's process can stay behind. Neither is a security boundary against a determined attacker.

Ending early, printing, changed builtins and an object that equals everything earn nothing. But tests run in the
program's process, so one that sets out to can find the test in memory, or redefine a builtin that the test uses at its
own top level. With `input_output` nothing is compared within its reach.
"""

import ast
import json
import re
from typing import Any

from rewards import sandbox
from rewards.registry import register

# What equals an object that nobody has seen before equals everything.
EQUAL = "def _equal_(a, b):\n    assert not (a == object() or b == object())\n    return a == b\n"
SUM, SUM_TESTS = "```python\ndef add(a, b):\n    return a + b\n```", {"tests": ["assert add(1, 2) == 3"]}


def check(**options: Any) -> None:
    """Raise ValueError where the reward is not allowed, or cannot work with these options on this system."""
    if code(SUM, SUM_TESTS, **options) != 1.0:
        raise ValueError("In rewards.options.code, seconds or memory_megabytes are too few for a program of two lines.")


@register("code", seconds=60.0, check=check, examples=[(SUM, SUM_TESTS, 1.0, {"allow": True, "network": "open"})])
def code(
    completion: str,
    row: dict,
    *,
    allow: bool = False,
    network: str = "blocked",
    share: bool = False,
    seconds: float = 10.0,
    memory_megabytes: int = 1024,
    processes: int = 16,
) -> float:
    """1.0 if every test passes, else 0.0, or with `share` the share of tests that pass.

    memory_megabytes is of each process. Raises ValueError for a row without tests, where it is not allowed, and where
    the system refuses the sandbox. rewards.timeouts.code (60) must be above `seconds`.
    """
    if allow is not True:
        raise ValueError(
            "The reward 'code' runs programs that a model wrote on this machine, in a sandbox that is no security "
            "boundary against a determined attacker: rewards.options.code.allow=true allows that."
        )
    if network not in ("blocked", "open") or not min(seconds, memory_megabytes, processes) > 0:
        wanted = "network is blocked or open, and seconds, memory_megabytes and processes are positive"
        given = f"{network!r}, {seconds}, {memory_megabytes} and {processes}"
        raise ValueError(f"In rewards.options.code, {wanted}, not {given}.")
    settings = {"megabytes": memory_megabytes, "processes": processes, "blocked": network == "blocked"}
    try:
        passed = sandbox.run(_program(completion), _tests(row), seconds=seconds, all_or_nothing=not share, **settings)
    except RuntimeError as error:
        raise ValueError(
            f"The system refuses the sandbox of the reward 'code' ({error}): rewards.options.code.network=open does "
            "without namespaces, where programs reach the network, your files and your processes."
        ) from error
    return sum(passed) / len(passed) if share else float(all(passed))


def _program(completion: str) -> str:
    text = completion.rpartition("</think>")[2]
    blocks = re.findall(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", text, re.DOTALL | re.MULTILINE)
    python = [block for language, block in blocks if language.lower() in ("python", "py", "python3")]
    return ((python or [block for language, block in blocks if not language]) or ["" if "```" in text else text])[-1]


def _tests(row: dict) -> list[tuple[str | None, str]]:
    tests = row.get("tests")
    if tests:
        return [(None, _prepare(test)) for test in ([tests] if isinstance(tests, str) else tests)]
    pairs = row.get("input_output") or {}
    pairs = json.loads(pairs) if isinstance(pairs, str) else pairs
    given, expected = pairs.get("inputs", []), pairs.get("outputs", [])
    if not given or len(given) != len(expected) or pairs.get("fn_name"):
        raise ValueError(
            "code needs the column 'tests', or 'input_output' with as many inputs as outputs of whole programs (no "
            f"fn_name), and the row has {str(row)[:200]}."
        )
    joined = ([text if isinstance(text, str) else "\n".join(map(str, text)) for text in x] for x in (given, expected))
    return list(zip(*joined, strict=True))


def _prepare(test: str) -> str:
    """The test with its == watched and its functions called; ValueError where it is no Python or tests nothing."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"A test of the row is no Python ({error}): {test[:200]}") from error
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    calls = [f"{f.name}()" for f in functions if f.name.startswith("test_") and isinstance(f, ast.FunctionDef)]
    done = [part for node in tree.body if node not in functions for part in ast.walk(node)]
    if not calls and not any(isinstance(part, ast.Assert | ast.Call | ast.Raise) for part in done):
        raise ValueError(f"A test of the row calls and asserts nothing, so that all would pass: {test[:200]}")
    return "\n".join([EQUAL, ast.unparse(_WatchEquality().visit(tree)), *calls])


class _WatchEquality(ast.NodeTransformer):
    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if len(node.ops) > 1 or not isinstance(node.ops[0], ast.Eq):
            return node
        return ast.Call(ast.Name("_equal_"), [node.left, *node.comparators], [])
