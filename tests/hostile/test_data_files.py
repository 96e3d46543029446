"""Files of problems, and rewards named beside them, that cannot be used."""

from __future__ import annotations

import json

import pytest

from .conftest import SMALL, Refused

pytestmark = pytest.mark.slow

GOOD = "".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(64))
_FIRST = GOOD.splitlines(keepends=True)[0]

FILES: dict[str, str | bytes] = {
    "empty": "",
    "blank": "\n\n",
    "not UTF-8": b"\xff\xfe" * 100,
    "nulls": "null\n" * 10,
    "lists": "[]\n" * 10,
    "numbers": "3\n" * 10,
    "half bad": GOOD + "{\n" * 400,
    "deep": "[" * 100_000 + "\n",
    "one huge row": json.dumps({"prompt": "x" * 10**8, "answer": "1"}) + "\n",
    "half a surrogate": '{"prompt": "\\ud800", "answer": "1"}\n' * 10,
    "one row": _FIRST,
    "prompt is a list": '{"prompt": [1], "answer": "1"}\n' * 10,
    "prompt is blank": '{"prompt": " ", "answer": "1"}\n' * 10,
    "no answer": '{"prompt": "1"}\n' * 10,
    "huge number": '{"prompt": "a", "answer": ' + "9" * 5000 + "}\n",
    "control characters": '{"prompt": "\\u001b[31m"}\n' * 10,
    "one line": GOOD.replace("\n", "\r"),
}


@pytest.mark.parametrize("name", FILES)
def test_jsonl(name: str, refused: Refused) -> None:
    words = ["task=file", "task.path=d.jsonl", "task.answer_field=answer"]
    refused(["run", *SMALL[:-2], *words], {"d.jsonl": FILES[name]})


@pytest.mark.parametrize(
    ("file", "content"),
    [("d.parquet", b"PAR1" * 20), ("d.parquet", b""), ("d.csv", b"a"), ("d", b"a"),
     ("d.json", b"[1]")],
    ids=["parquet", "empty parquet", "csv", "no ending", "json"],
)  # fmt: skip
def test_other_files(file: str, content: bytes, refused: Refused) -> None:
    words = ["task=file", f"task.path={file}", "task.answer_field=answer"]
    refused(["run", *SMALL[:-2], *words], {file: content})


LINES = """\
task.prompt_field=nope
task.chosen_field=a
task.chosen_score_field=a
task.num_held_out=-1
task.num_held_out=64
task.num_held_out=1000000000000
task.held_out_path=/nope
task.held_out_path=/proc
task.reward=nope
task.reward=os:system
task.reward=os:nope
task.reward=nope:x
task.reward=/nope.py:f
task.reward=3
task.correct_score=.inf
task.correct_score=nan
task.max_bad_fraction=2
task.max_prompt_tokens=0
task.max_prompt_tokens=1
task.max_response_tokens=1000000000
task.path=/proc/self/mem
task.path=3
task.path=null
task.bogus=1
"""


@pytest.mark.parametrize("line", LINES.splitlines())
def test_keys(line: str, refused: Refused) -> None:
    words = ["task=file", "task.path=d.jsonl", "task.answer_field=answer", *line.split(" ")]
    refused(["run", *SMALL[:-2], *words], {"d.jsonl": GOOD})


REWARDS = {
    "exit at import": "import sys\nsys.exit(0)",
    "end at import": "import os\nos._exit(0)",
    "raise at import": "1 / 0",
    "no syntax": "def f(:",
    "no such function": "x = 1",
    "no function": "f = 3",
    "other arguments": "def f(a): return 1",
}


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("in_process", ["true", "false"])
def test_rewards(name: str, in_process: str, refused: Refused) -> None:
    words = ["task=file", "task.path=d.jsonl", "task.answer_field=answer"]
    words += ["task.reward=mine.py:f", f"task.reward_in_process={in_process}"]
    files = {"d.jsonl": GOOD, "mine.py": f"{REWARDS[name]}\n"}
    refused(["run", *SMALL[:-2], *words], files)
