"""BM25 against numbers worked out by hand, and what order and words mean for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.workers.agents.tools.search_tool import Bm25, SearchTools, words_of

TEXTS = ["a b", "a a c", "d"]
"""Three texts of 2, 3 and 1 words, so of 2 in the mean."""


def found(query: str, most: int = 3, **options: float) -> list[tuple[int, float]]:
    return Bm25(TEXTS, **options).find(query, most)


def test_a_word_of_two_texts() -> None:
    # idf = ln(1 + 1.5 / 2.5); 1 / (1 + 1.2) and 2 / (2 + 1.2 * (0.25 + 0.75 * 1.5))
    assert found("a") == [
        (1, pytest.approx(0.257536, abs=1e-6)),
        (0, pytest.approx(0.213638, abs=1e-6)),
    ]


def test_two_rare_words() -> None:
    # idf = ln(1 + 2.5 / 1.5); 1 / (1 + 1.2 * (0.25 + 0.75 * 0.5)) and 1 / (1 + 1.65)
    assert found("d c") == [
        (2, pytest.approx(0.560474, abs=1e-6)),
        (1, pytest.approx(0.370124, abs=1e-6)),
    ]


def test_without_k1_a_word_counts_once() -> None:
    assert found("a", k1=0) == [
        (0, pytest.approx(0.470004, abs=1e-6)),
        (1, pytest.approx(0.470004, abs=1e-6)),
    ]


def test_without_b_long_texts_lose_nothing() -> None:
    # 1 / 2.2 and 2 / 3.2 of ln 1.6
    assert found("a", b=0) == [
        (1, pytest.approx(0.293752, abs=1e-6)),
        (0, pytest.approx(0.213638, abs=1e-6)),
    ]


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
        SearchTools(texts=TEXTS, **options)  # pyright: ignore[reportArgumentType] - one or the other


@given(st.lists(st.text("abc ")), st.text("abcd "))
def test_scores_fall_and_are_above_zero(texts: list[str], query: str) -> None:
    scores = [score for _, score in Bm25(texts).find(query, len(texts))]
    assert scores == sorted(scores, reverse=True)
    assert all(score > 0 for score in scores)
    places = {place for place, _ in Bm25(texts).find(query, len(texts))}
    asked = set(words_of(query))
    assert places == {place for place, text in enumerate(texts) if asked & set(words_of(text))}
