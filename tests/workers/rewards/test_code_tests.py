"""Rewards from tests of programs: forms of tests, what counts as passed, and cheats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from penstock.workers.rewards.code_tests import code_tests, program_in
from penstock.workers.rewards.code_tests import tests_of as read_tests

ADD = "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
CALLS = [
    {"function": "add", "args": [1, 2], "expected": 3},
    {"function": "add", "args": [[1], [2]], "expected": [1, 2]},
    {"function": "add", "args": [0.1, 0.2], "expected": 0.3},
]


def scored(response: str, tests: Any, **options: Any) -> float:
    return code_tests("", response, json.dumps(tests), **options)


def test_functions_programs_and_assertions() -> None:
    assert scored(ADD, CALLS) == 1
    assert scored(ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]) == 1
    echo = "```\nfor _ in range(int(input())):\n    print(input(), end=' \\n')\n```"
    assert scored(echo, [{"stdin": "2\na\nb\n", "stdout": "a\nb"}]) == 1
    assert scored(echo, {"inputs": ["1\nx"], "outputs": ["x\n"]}) == 1
    assert scored(ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}) == 1
    assert scored(ADD, {"setup": "Z = 5", "asserts": ["assert add(Z, 1) == 6"]}) == 1


def test_a_wrong_program_scores_its_share_or_nothing() -> None:
    wrong = "def add(a, b):\n    return a - b if a == 1 else a + b"
    assert scored(wrong, CALLS) == 0
    assert scored(wrong, CALLS, score="share") == pytest.approx(2 / 3)
    streams = [{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "3"}]
    assert scored("print(input())", streams, score="share") == 0.5
    assert scored("print(input())", streams) == 0
    assert scored("I do not know.", CALLS) == 0
    assert scored("def add(a, b):\n    return True", [{**CALLS[0], "expected": 1}]) == 0


@pytest.mark.parametrize(
    "cheat",
    [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "class Any:\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return Any()",
        "while True: pass",
        "import os\nos.kill(os.getppid(), 9)",
    ],
)
def test_cheats_score_nothing(cheat: str) -> None:
    assert scored(cheat, CALLS, time_s=0.5) == 0
    assert scored(cheat, [{"stdin": "", "stdout": "3"}], time_s=0.5) == 0
    assert scored(cheat, ["assert False"], time_s=0.5) == 0


def test_the_last_python_block_is_the_program() -> None:
    assert program_in("```python\na\n```\n```text\nb\n```\n```py\nc\n```") == "c\n"
    assert program_in("x = 1") == "x = 1"
    assert program_in("```\nunclosed") == "unclosed"


@pytest.mark.parametrize("answer", ["[]", "3", '{"asserts": []}', '[{"stdin": "1"}]', "[1]"])
def test_answers_without_tests_are_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="the answer must list tests as JSON, such as"):
        read_tests(answer)
