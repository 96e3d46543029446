"""Rewards from tests of programs: forms of tests, what counts as passed, and cheats."""

from __future__ import annotations

import json
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.verifiers.code_tests import code_tests, program_in
from penstock.workers.verifiers.code_tests import tests_of as read_tests

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
    named = {"setup": "Z = 5", "asserts": ["assert add(Z, 1) == 6"]}
    assert scored(ADD, named, run_asserts=True) == 1


def test_a_wrong_program_scores_its_share_or_nothing() -> None:
    wrong = "def add(a, b):\n    return a - b if a == 1 else a + b"
    assert scored(wrong, CALLS) == 0
    assert scored(wrong, CALLS, score="share") == pytest.approx(2 / 3)
    streams = [{"stdin": "1", "stdout": "1"}, {"stdin": "2", "stdout": "3"}]
    assert scored("print(input())", streams, score="share") == 0.5
    assert scored("print(input())", streams) == 0
    assert scored("I do not know.", CALLS) == 0
    assert scored("def add(a, b):\n    return True", [{**CALLS[0], "expected": 1}]) == 0


@pytest.mark.slow
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
    assert scored(cheat, ["assert add(1, 2) == 3"], time_s=0.5) == 0


def test_the_last_python_block_is_the_program() -> None:
    assert program_in("```python\na\n```\n```text\nb\n```\n```py\nc\n```") == "c\n"
    assert program_in("x = 1") == "x = 1"
    assert program_in("```\nunclosed") == "unclosed"


FORGED = """
import json, os, sys
frame = sys._getframe()
while "work" not in frame.f_locals:
    frame = frame.f_back
seen = frame.f_locals
forged = {"value": True, "token": seen["work"]["token"]}
for _ in range(3):
    print(json.dumps(forged), file=seen["results"], flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "cheat",
    [
        FORGED,
        "class Same:\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return Same()",
        "class Same(int):\n    __eq__ = lambda *_: True\ndef add(a, b):\n    return Same()",
    ],
)
def test_a_response_cannot_forge_an_assertion(cheat: str) -> None:
    assert scored(cheat, ["assert add(1, 2) == 3", "assert add(3, 4) == 7"], score="share") == 0


def test_assertions_keep_the_types_of_python() -> None:
    echo = "def echo(a, *, b=None):\n    return [a, b]"
    values = ["(1, 2.5)", "{1, 2}", "{(1,): [b'x'], None: {}}", "'\\n'", "-3", "True", "[(), []]"]
    held = [f"assert echo({v}, b={v}) == [{v}, {v}], 'why'" for v in values]
    assert scored(echo, held, score="share") == 1
    same = "def same(a):\n    return a"
    pairs = [
        ("(1,)", "[1]"),
        ("1", "True"),
        ("4.0", "4"),
        ("'1'", "1"),
        ("{1}", "[1]"),
        ("b'1'", "'1'"),
    ]
    assert scored(same, [f"assert same({a}) == {b}" for a, b in pairs], score="share") == 0


@pytest.mark.parametrize(
    "text",
    [
        "assert False", "assert f(x) == 1", "assert not f(1)", "assert set(f(1)) == set([1])",
        "assert f(1) == f(2)", "assert f(1) == 1 == 1", "assert f(*[1]) == 1", "assert f(1) == 1j",
        "x = 1", "assert f(1) == 1; f(2)", "assert (",
    ],
)  # fmt: skip
def test_assertions_that_could_be_forged_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"could forge that it holds\n .*run_asserts=true"):
        read_tests([text], run_asserts=False)
    assert read_tests([text], run_asserts=True).asserts == [text]


@pytest.mark.parametrize("answer", ["[]", "3", '{"asserts": []}', '[{"stdin": "1"}]', "[1]"])
def test_answers_without_tests_are_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="the answer must list tests as JSON, such as"):
        read_tests(answer, run_asserts=False)
