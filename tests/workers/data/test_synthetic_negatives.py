"""Wrong answers are wrong, repeatable and varied."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.workers.data.sources import wrong_answer


@settings(max_examples=40)
@given(st.integers(-(10**6), 10**6), st.integers(-99, 99), st.integers(0, 10**6))
def test_a_wrong_number_is_another_number(answer: int, other: int, seed: int) -> None:
    made = wrong_answer(str(answer), str(other), random.Random(seed))
    assert made == wrong_answer(str(answer), str(other), random.Random(seed))
    try:
        assert int(made) != answer
    except ValueError:
        assert made != str(answer)


@settings(max_examples=40)
@given(st.text("ab 1é", min_size=1, max_size=8).filter(str.strip), st.integers(0, 10**6))
def test_a_wrong_text_is_another_text(answer: str, seed: int) -> None:
    assert wrong_answer(answer, answer, random.Random(seed)).strip() != answer.strip()


def test_mistakes_are_of_many_kinds() -> None:
    made = {wrong_answer("42", "7", random.Random(seed)) for seed in range(400)}
    assert {"7", "43", "41", "-42", "4", "2", "442", "24"} <= made
    assert len(made) > 20


def test_what_is_never_accepted_becomes_the_empty_text() -> None:
    assert wrong_answer("42", "7", random.Random(0), lambda _: False) == ""
