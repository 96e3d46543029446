"""The search tool: files, limits, and calls that cannot be made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.environment import Reply, ToolCall
from penstock.workers.agents.tasks.calculator import CalculatorTaskSpec
from penstock.workers.agents.tasks.tools_and_programs import TOOLBOXES, ToolTaskSpec
from penstock.workers.agents.tools.search_tool import NOTHING, SearchTools
from penstock.workers.agents.tools.tool import ToolEnvironment, ToolText

TEXTS = (
    "The mayor of Velden is Ana Koch.",
    "The river of Velden is the Arla.",
    "Ana Koch was born in 1954.",
)


def called(options: SearchTools, name: str = "search", **arguments: Any) -> ToolText:
    tool = options.build()
    assert tool.deterministic
    return asyncio.run(call(tool.open(0), name, arguments))


async def call(session: Any, name: str, arguments: Mapping[str, Any]) -> ToolText:
    try:
        return await session.call(name, arguments)
    finally:
        await session.close()


def test_the_best_texts_come_first() -> None:
    options = SearchTools(texts=TEXTS, num_results=2)
    assert called(options, query="mayor Velden").text == f"{TEXTS[0]}\n{TEXTS[1]}"
    assert called(options, query="born: Koch?").text == f"{TEXTS[2]}\n{TEXTS[0]}"
    assert called(SearchTools(texts=TEXTS, num_results=1), query="arla").text == TEXTS[1]


def test_nothing_found_is_no_error() -> None:
    assert called(SearchTools(texts=TEXTS), query="Zürich") == ToolText(NOTHING)


def test_long_texts_are_cut() -> None:
    assert called(SearchTools(texts=TEXTS, max_chars=9), query="arla").text == "The river..."
    assert called(SearchTools(texts=TEXTS, max_chars=32), query="arla").text == TEXTS[1]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("find", {"query": "a"}, "there is no tool 'find'"),
        ("search", {}, "search needs one argument, 'query', which is a text"),
        ("search", {"query": 7}, "search needs one argument, 'query', which is a text"),
        ("search", {"query": "a", "n": 2}, "search needs one argument, 'query', which is a text"),
        ("search", {"query": " \n"}, "the query is empty"),
        ("search", {"query": "a" * 1001}, "a query has at most 1000 characters, and this one 1001"),
    ],
)
def test_calls_that_cannot_be_made(name: str, arguments: dict[str, Any], text: str) -> None:
    assert called(SearchTools(texts=TEXTS), name, **arguments) == ToolText(text, error=True)


def test_a_file_of_titles_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "towns.jsonl"
    rows = [{"title": "Velden", "text": "A town."}, {"text": "A river.", "source": 3}]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = SearchTools(path=str(path))
    assert called(options, query="velden").text == "Velden: A town."
    assert called(options, query="river").text == "A river."


@pytest.mark.parametrize(
    "line", ['{"title": "Velden"}', '{"text": 3}', '{"text": "a", "title": 3}', '["a"]', "{"]
)
def test_rows_that_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "towns.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"towns.jsonl:2 is no text to search") as refused:
        SearchTools(path=str(path)).build()
    assert str(refused.value).endswith('in each row: {"title": ..., "text": ...}')


def test_options_that_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    for options, message in (
        (SearchTools(), "a search needs either a path or texts\n    give one of them"),
        (SearchTools(path="a.jsonl", texts=TEXTS), "a search needs either a path or texts\n"),
        (SearchTools(path=str(empty)), f"'{empty}' has no rows\n    name a file of texts"),
        (SearchTools(texts=TEXTS, name="a b"), "name 'a b' is no name\n    use letters"),
    ):
        with pytest.raises(ConfigError) as refused:
            options.build()
        assert str(refused.value).startswith(message)
    for wrong in ({"num_results": 0}, {"max_chars": 0}, {"k1": -1.0}, {"b": 2.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SearchTools(texts=TEXTS, **wrong)  # pyright: ignore[reportArgumentType] - wrong values


def test_is_a_kind_of_toolbox() -> None:
    assert TOOLBOXES["search"] is SearchTools
    problems = CalculatorTaskSpec(num_train=2, num_held_out=1)
    kind = {"kind": "search", "texts": list(TEXTS)}
    task = ToolTaskSpec(task=problems, tools={"books": kind}).build()
    (schema,) = [*(task.tools(0) or [])]
    assert schema["function"]["name"] == "search"
    environment = task.environment(0)
    assert isinstance(environment, ToolEnvironment)
    environment.reset(0, 0)
    reply = Reply(0, "", "", calls=(ToolCall("search", {"query": "arla"}),))
    (said,) = asyncio.run(environment.step(reply)).messages
    assert said == {"role": "tool", "name": "search", "content": "\n".join(TEXTS[1:2])}
