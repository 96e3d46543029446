"""One row in every file format: the prompts, masks and answers of the row as it was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.data.chat import ChatOptions, PromptEncoder
from penstock.workers.data.row_sources import FileTaskSpec, HfTaskSpec
from penstock.workers.data.row_task import RowTask
from penstock.workers.data.sources import DemonstrationSource, PairSource
from penstock.workers.data.task import fingerprint
from penstock.workers.models.tokenizer import Tokenizer
from penstock.workers.verifiers.verifiers import BUILT_IN

from .chat_tokenizers import CHATML, WITH_TOOLS, chat_tokenizer

Rows = list[dict[str, Any]]


def _jsonl(folder: Path, rows: Rows) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _parquet(folder: Path, rows: Rows) -> Any:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def _file(write: Callable[[Path, Rows], Any]) -> Callable[..., RowTask]:
    def read(folder: Path, rows: Rows, **options: Any) -> RowTask:
        return FileTaskSpec(path=str(write(folder, rows)), **options).build()

    return read


def _hf(kind: str, write: Callable[[Path, Rows], Any], **more: Any) -> Callable[..., RowTask]:
    def read(folder: Path, rows: Rows, **options: Any) -> RowTask:
        files = (str(write(folder, rows)),)
        return HfTaskSpec(dataset=kind, data_files=files, **more, **options).build()

    return read


def _of_json_columns(folder: Path, rows: Rows) -> Any:
    """Write Parquet as `datasets` does: columns of different objects become JSON text."""
    from datasets import load_dataset

    loaded: Any = load_dataset("json", data_files=[str(_jsonl(folder, rows))], split="train")
    loaded.to_parquet(folder / "json.parquet")
    return folder / "json.parquet"


def _from_disk(folder: Path, rows: Rows, **options: Any) -> RowTask:
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(folder / "saved")
    return HfTaskSpec(dataset=str(folder / "saved"), **options).build()


FORMATS: dict[str, Callable[..., RowTask]] = {
    "jsonl": _file(_jsonl),
    "parquet": _file(_parquet),
    "parquet of datasets": _file(_of_json_columns),
    "hf json": _hf("json", _jsonl),
    "hf parquet": _hf("parquet", _parquet),
    "hf stream": _hf("parquet", _parquet, streaming=True, max_rows=9),
    "hf from disk": _from_disk,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _call(**arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


X = _tool("f", x={"type": "integer", "enum": [1, None]})
Y = _tool("g", y={"type": "string"})
CALLS = [_user("a"), _call(x=1), {"role": "tool", "name": "f", "content": "4"}]
OTHERS = [_user("b"), _call(y="k"), {"role": "tool", "name": "f", "content": "5"}]
TEXTS = {"prompt": "p", "response": "r", "answer": 4}
ASKED = {"answer_field": None, "response_field": "reply", "tools_field": "tools"}
CALLED = [_call(x=2)]
PAIRED = {"answer_field": None, "chosen_field": "good", "rejected_field": "bad"}

SHAPES: dict[str, tuple[Rows, dict[str, Any]]] = {
    "texts": ([TEXTS, {**TEXTS, "prompt": "q"}], {"response_field": "response"}),
    "tools": (
        [
            {"prompt": [_user("a")], "tools": [X], "reply": [_said("1")]},
            {"prompt": [_user("b")], "tools": [Y, X], "reply": [_said("2")]},
            {"prompt": [_user("c")], "tools": [], "reply": [_said("3")]},
        ],
        ASKED,
    ),
    "calls": (
        [
            {"prompt": CALLS, "tools": [X], "reply": [_call(x=2), CALLS[2], _said("1")]},
            {"prompt": OTHERS, "tools": [Y], "reply": [_call(y="m"), CALLS[2], _said("2")]},
        ],
        ASKED,
    ),
    "whole": (
        [
            {"messages": [*CALLS, _said("no", weight=0), _user("x"), _said("yes", weight=1)]},
            {"messages": [*OTHERS, _said("hm"), _user("y"), _said("ja")]},
        ],
        {"messages_field": "messages", "answer_field": None},
    ),
    "pairs": (
        [
            {"good": [*CALLS, _said("1")], "bad": [*CALLS, _call(x=3)]},
            {"good": [*OTHERS, _said("2")], "bad": [*OTHERS, _call(y="n")]},
        ],
        {**PAIRED, "prompt_field": None},
    ),
    "JSON text": (
        [
            {"prompt": json.dumps(CALLS), "tools": json.dumps([X]), "reply": json.dumps(CALLED)},
            {"prompt": json.dumps(OTHERS), "tools": "[]", "reply": "[1, 2] is no conversation"},
        ],
        ASKED,
    ),
}  # fmt: skip


def _read(text: Any) -> Any:
    return json.loads(text) if isinstance(text, str) and text[:2] in ("[{", "[]") else text


def _wanted(tokenizer: Tokenizer, row: dict[str, Any]) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of the prompt and of each whole conversation, of the row as written."""

    def tokens(messages: Any, begins: bool) -> list[int]:
        full = [{"content": "", **one} for one in messages]
        tools: Any = _read(row.get("tools")) or None
        return tokenizer.backend.apply_chat_template(
            full, tools=tools, add_generation_prompt=begins, return_dict=False
        )  # pyright: ignore[reportReturnType]

    prompt = _read(row.get("prompt") or row.get("messages", [None])[:-1] or row["good"][:-1])
    replies = [row[key] for key in ("reply", "good", "bad") if key in row]
    wholes: list[Any] = [row["messages"]] if "messages" in row else []
    for given in map(_read, replies):
        turns = [_said(given)] if isinstance(given, str) else given
        wholes.append(turns if "good" in row else [*prompt, *turns])
    return tokens(prompt, True), [tokens(whole, False) for whole in wholes]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_format_means_what_the_row_meant(tmp_path: Path, shape: str) -> None:
    rows, options = SHAPES[shape]
    tokenizer = chat_tokenizer(tmp_path / "model", WITH_TOOLS)
    found: dict[str, Any] = {}
    for name, read in FORMATS.items():
        (tmp_path / name).mkdir()
        task = read(tmp_path / name, rows, **options)
        assert dict(task.report.reasons) == {}, name
        source = PairSource if "good" in rows[0] else DemonstrationSource
        table = source(task, tokenizer, batch_size=len(rows), seed=0).batch(0)
        answers = [task.answer_text(index) for index in task.train]
        prompts = PromptEncoder(task, tokenizer, ChatOptions()).encode(task.train)
        found[name] = (prompts, table.tokens.tolist(), table.mask.tolist(), answers)
        assert found[name] == found["jsonl"], name
    if shape != "texts":
        prompts, tokens, _, _ = found["jsonl"]
        wanted = [_wanted(tokenizer, row) for row in rows]
        assert prompts == [prompt for prompt, _ in wanted]
        given = [[token for token in row if token >= 0] for row in tokens]
        assert sorted(given) == sorted(whole for _, wholes in wanted for whole in wholes)


@pytest.mark.slow
def test_a_null_that_was_written_stays_in_lists_and_in_json(tmp_path: Path) -> None:
    default = _tool("g", y={"default": None, "enum": ["a", None]})
    rows = [{"prompt": [_user("a")], "tools": [default]}, {"prompt": [_user("b")], "tools": [X]}]
    options = {"answer_field": None, "tools_field": "tools"}
    for name, read in FORMATS.items():
        (tmp_path / name).mkdir()
        tools: Any = read(tmp_path / name, rows, **options).tools(0)
        given = tools[0]["function"]["parameters"]["properties"]["y"]
        in_structs = name in ("parquet", "hf parquet", "hf stream", "hf from disk")
        assert given == {**({} if in_structs else {"default": None}), "enum": ["a", None]}, name


NUMBERS = ("0.00001", "1e5", "1.50", "3.14159265358979323846", "12345678901234567890.5", "7")


def test_numbers_keep_the_text_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = (f'{{"prompt": "{i}", "answer": {n}, "id": {n}}}\n' for i, n in enumerate(NUMBERS))
    path.write_text("".join(lines))
    task = FileTaskSpec(path=str(path), id_field="id").build()
    assert [task.answer_text(index) for index in task.train] == [*NUMBERS]
    assert [task.score(index, NUMBERS[index]) for index in task.train] == [1.0] * 6
    assert not task.report.notes
    for reward in ("exact_match", "math_verify"):
        assert BUILT_IN[reward]("", "100000", "1e5") == float(reward == "math_verify")


def test_numbers_without_a_text_are_noted_once(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "answer": float(i)} for i in range(3)]
    task = FORMATS["parquet"](tmp_path, rows)
    assert task.answer_text(1) == "1.0"
    assert dict(task.report.notes) == {
        "'answer' holds numbers as floats, which are read as Python writes them: 5.0 for 5, 1e-05 "
        "for 0.00001; to have them otherwise, store text or integers": 3
    }


CODE = [{"function": "f", "args": [1], "expected": 2}, {"stdin": "1", "stdout": "2"}]
KEPT = [
    {"id": "length_constraints:number_words", "kwargs": {"num_words": 2, "relation": "at least"}},
    {"id": "keywords:existence", "kwargs": {"keywords": ["tea"]}},
]


@pytest.mark.parametrize(
    "name", ["jsonl", *(pytest.param(n, marks=pytest.mark.slow) for n in FORMATS if n != "jsonl")]
)
def test_answers_of_rewards_that_read_json_may_be_objects(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "a", "answer": [CODE[0]]}, {"prompt": "b", "answer": [CODE[1]]}]
    task = FORMATS[name](tmp_path, rows, reward="code_tests")
    assert [json.loads(task.answer_text(i) or "") for i in task.train] == [[c] for c in CODE]
    rows = [{"prompt": "a", "answer": [KEPT[0]]}, {"prompt": "b", "answer": [KEPT[1]]}]
    task = FORMATS[name](tmp_path, rows, reward="instructions")
    assert [task.score(index, "green tea") for index in task.train] == [1.0, 1.0]
    with pytest.raises(ConfigError, match="expected text, got a list; code_tests and instruc"):
        FORMATS[name](tmp_path, rows)


def test_whole_options_of_instructions_may_be_floats() -> None:
    answer = json.dumps([{"id": "startend:end_checker"} | KEPT[0] | {"kwargs": {
        "num_words": 2.0, "relation": "at least", "keywords": None}}])  # fmt: skip
    assert BUILT_IN["instructions"]("", "green tea", answer) == 1.0


def test_instructions_that_cannot_be_checked_are_left_out(tmp_path: Path) -> None:
    wrong = [{"id": "keywords:nope"}, {**KEPT[1], "kwargs": {"words": ["tea"]}}]
    rows = [{"prompt": str(i), "answer": [answer]} for i, answer in enumerate([*wrong, KEPT[1]])]
    task = FORMATS["jsonl"](tmp_path, rows, reward="instructions", max_bad_fraction=1.0)
    assert dict(task.report.reasons) == {"instructions that cannot be checked": 2}
    first, second = (bad.split(": ", 2)[2] for bad in task.report.examples)
    assert first.startswith("there is no instruction 'keywords:nope'")
    assert second.startswith("instruction 'keywords:existence' with options ['words']")


def test_that_rewards_read_the_last_turn_alone_is_noted(tmp_path: Path) -> None:
    asked = [_user("What is 2+3?"), _said("In words?"), _user("Ten.")]
    rows = [{"prompt": asked, "answer": "five"}, {"prompt": [_user("a")], "answer": "b"}]
    assert dict(FORMATS["jsonl"](tmp_path, rows).report.notes) == {
        "a prompt has several turns, of which judges, and rewards that do not name `messages`, "
        "read the last text of the user alone": 1
    }
    task = FORMATS["jsonl"](tmp_path, rows, response_field="answer")
    assert not task.report.notes


@pytest.mark.slow
def test_a_file_that_changed_within_its_time_is_read_again(tmp_path: Path) -> None:
    import os

    rows = [{"prompt": f"a{i}", "answer": "1"} for i in range(2)]
    first = _jsonl(tmp_path, rows)
    options: dict[str, Any] = {"dataset": "json", "data_files": (str(first),)}
    before, times = HfTaskSpec(**options).build(), first.stat()
    _jsonl(tmp_path, [{"prompt": f"longer {i}", "answer": "1"} for i in range(6)])
    os.utime(first, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = HfTaskSpec(**options).build()
    assert [after.prompt_text(i) for i in after.train] == [f"longer {i}" for i in range(6)]
    assert fingerprint(before) != fingerprint(after)


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS], ids=["prefixes", "marks"])
def test_a_weight_of_0_is_read_and_not_imitated(tmp_path: Path, template: str) -> None:
    whole = [_user("a"), _said("no", weight=0), _user("b"), _said("yes", weight=1), _user("c")]
    rows = [
        {"messages": [*whole, _said("ja")]},
        {"messages": [*whole, _said("nein", weight=0)]},
        {"messages": [_user("a"), _said("no", weight=0)]},
    ]
    tokenizer = chat_tokenizer(tmp_path / "model", template)
    options = {"messages_field": "messages", "answer_field": None, "max_bad_fraction": 0.5}
    task = FORMATS["jsonl"](tmp_path, rows, **options)
    assert dict(task.report.reasons) == {"nothing to imitate in 'messages'": 1}
    table = DemonstrationSource(task, tokenizer, batch_size=2, seed=0).batch(0)
    pairs = zip(table.tokens.tolist(), table.mask.tolist(), strict=True)
    said = [tokenizer.decode([t for t, kept in zip(*pair, strict=True) if kept]) for pair in pairs]
    assert sorted(said) == ["yes<|im_end|>", "yes<|im_end|>ja<|im_end|>"]


REFUSED: dict[str, dict[str, Any]] = {
    "message 2, the assistant's, has the weight 0.5": _said("x", weight=0.5),
    "message 2, the assistant's, has the weight True": _said("x", weight=True),
    "message 2, the user's, has the weight 1": {**_user("x"), "weight": 1},
    "message 2 has 'function_call', which is not read; give the call as tool_calls": _said(
        "x", function_call={"name": "f", "arguments": "{}"}
    ),
    "message 2 has 'refusal', which is not read; give the text as content": _said("", refusal="x"),
    "the content of message 2 has a part of type 'image_url', not text": {
        "role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
}  # fmt: skip


@pytest.mark.parametrize(("said", "message"), REFUSED.items())
def test_fields_that_would_change_what_is_trained_on_are_refused(
    tmp_path: Path, said: str, message: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        FORMATS["jsonl"](tmp_path, [{"prompt": [_user("a"), message]}], answer_field=None)
    assert said in str(caught.value)


def test_a_developer_and_parts_of_text_are_read(tmp_path: Path) -> None:
    def parts(*texts: str) -> Rows:
        return [{"type": "text", "text": text} for text in texts]

    asked = {"role": "user", "content": parts("Say ", "hi")}
    rows: Rows = [{"prompt": [{"role": "developer", "content": parts("Be brief.")}, asked]}]
    system = [{"role": "system", "content": "Be brief."}, _user("Say hi")]
    developer = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{# developer #}"
    for number, (template, first) in enumerate([(WITH_TOOLS, "system"), (developer, "developer")]):
        tokenizer = chat_tokenizer(tmp_path / str(number), template)
        for name, read in FORMATS.items():
            (folder := tmp_path / f"{number} {name}").mkdir()
            encoder = PromptEncoder(read(folder, rows, answer_field=None), tokenizer, ChatOptions())
            wanted = tokenizer.render([{**system[0], "role": first}, system[1]])
            assert encoder.encode([0]) == [tokenizer.encode(wanted)], name


def test_what_a_conversation_is_read_without_is_noted(tmp_path: Path) -> None:
    rows = [
        {"messages": [_user("a"), _said("")], "tools": [X]},
        {"messages": [_user("a"), _said("b")], "tools": []},
    ]
    task = FORMATS["jsonl"](tmp_path, rows, messages_field="messages", answer_field=None)
    assert dict(task.report.notes) == {
        "'tools' is not read, so conversations are without it; to read it: "
        "task.tools_field=tools": 1,
        "a turn of the assistant is empty, which teaches to say nothing; to leave it out, give it "
        "weight: 0": 1,
    }  # fmt: skip
