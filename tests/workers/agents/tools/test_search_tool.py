"""The search tool: files, limits, and BM25 against numbers worked out by hand."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.errors import ConfigError
from penstock.workers.agents.environment import Reply, ToolCall
from penstock.workers.agents.tasks.calculator import CalculatorTaskSpec
from penstock.workers.agents.tasks.tools_and_programs import TOOLBOXES, ToolTaskSpec
from penstock.workers.agents.tools.search_tool import NOTHING, Bm25, SearchTools, words_of
from penstock.workers.agents.tools.tool import ToolEnvironment, ToolText

from .calling import Loop

TEXTS = (
    "The mayor of Velden is Ana Koch.",
    "The river of Velden is the Arla.",
    "Ana Koch was born in 1954.",
)


def called(options: SearchTools, name: str = "search", **arguments: Any) -> ToolText:
    with closing(Loop(options)) as loop:
        assert loop.tool.deterministic
        return loop.call(name, **arguments)


@pytest.mark.parametrize(
    ("options", "query", "found"),
    [
        ({"num_results": 2}, "mayor Velden", f"{TEXTS[0]}\n{TEXTS[1]}"),
        ({"num_results": 2}, "born: Koch?", f"{TEXTS[2]}\n{TEXTS[0]}"),
        ({"num_results": 1}, "arla", TEXTS[1]),
        ({}, "Zürich", NOTHING),
        ({"max_chars": 9}, "arla", "The river..."),
        ({"max_chars": 32}, "arla", TEXTS[1]),
    ],
)
def test_the_best_texts_come_first(options: dict[str, Any], query: str, found: str) -> None:
    assert called(SearchTools(texts=TEXTS, **options), query=query) == ToolText(found)


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


LETTERS = ["a b", "a a c", "d"]
"""Three texts of 2, 3 and 1 words, so of 2 in the mean."""


def found(query: str, most: int = 3, **options: float) -> list[tuple[int, float]]:
    return Bm25(LETTERS, **options).find(query, most)


@pytest.mark.parametrize(
    ("query", "options", "scores"),
    [
        # idf = ln(1 + 1.5 / 2.5); 1 / (1 + 1.2) and 2 / (2 + 1.2 * (0.25 + 0.75 * 1.5))
        ("a", {}, [(1, 0.257536), (0, 0.213638)]),
        # idf = ln(1 + 2.5 / 1.5); 1 / (1 + 1.2 * (0.25 + 0.75 * 0.5)) and 1 / (1 + 1.65)
        ("d c", {}, [(2, 0.560474), (1, 0.370124)]),
        ("a", {"k1": 0}, [(0, 0.470004), (1, 0.470004)]),  # a word counts once
        ("a", {"b": 0}, [(1, 0.293752), (0, 0.213638)]),  # 1 / 2.2 and 2 / 3.2 of ln 1.6
    ],
)
def test_scores(query: str, options: dict[str, Any], scores: list[tuple[int, float]]) -> None:
    assert found(query, **options) == [(n, pytest.approx(score, abs=1e-6)) for n, score in scores]


def test_a_word_that_is_asked_for_twice_counts_once() -> None:
    assert found("a a") == found("A") == found("a")


def test_only_what_has_a_word_is_found_and_no_more_than_asked_for() -> None:
    assert found("x") == found("") == found("?!") == []
    assert [place for place, _ in found("a d", most=1)] == [2]
    assert Bm25([]).find("a", 3) == []
    assert Bm25(["", "!"]).find("a", 3) == []


def test_equal_texts_stand_in_their_order() -> None:
    same = Bm25(["b", "a", "a", "a"])
    assert [place for place, _ in same.find("a", 2)] == [1, 2]


def test_words() -> None:
    assert words_of("Who's Ana-Koch, in 1954?") == ["who", "s", "ana", "koch", "in", "1954"]


@pytest.mark.parametrize("options", [{"k1": -1.0}, {"b": 1.5}, {"b": -0.1}])
def test_numbers_that_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        SearchTools(texts=LETTERS, **options)  # pyright: ignore[reportArgumentType] - one or the other


@given(st.lists(st.text("abc ")), st.text("abcd "))
def test_scores_fall_and_are_above_zero(texts: list[str], query: str) -> None:
    scores = [score for _, score in Bm25(texts).find(query, len(texts))]
    assert scores == sorted(scores, reverse=True)
    assert all(score > 0 for score in scores)
    places = {place for place, _ in Bm25(texts).find(query, len(texts))}
    asked = set(words_of(query))
    assert places == {place for place, text in enumerate(texts) if asked & set(words_of(text))}
