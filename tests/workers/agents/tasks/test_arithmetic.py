"""Expressions: their values, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.workers.agents.tasks.calculator import BadExpression, evaluate


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("83*47-1289", 2612),
        (" 12 * 7 ", 84),
        ("-(3-5)*+2", 4),
        ("7//2", 3),
        ("-7//2", -4),
        ("2*(3+4)", 14),
        ("999999999999999", 999999999999999),
    ],
)
def test_values(text: str, value: int) -> None:
    assert evaluate(text) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("1+" * 40 + "1", "too long"),
        ("__import__('os')", "bad character"),
        ("1.5+2", "bad character"),
        ("1e9", "bad character"),
        ("\u0661+1", "bad character"),
        ("1_000", "bad character"),
        ("1+1\n+1", "bad character"),
        ("1+", "syntax"),
        ("(1", "syntax"),
        ("007", "syntax"),
        ("1 2", "syntax"),
        ("()", "bad operator"),
        ("9**9", "bad operator"),
        ("1/2", "bad operator"),
        ("1(2)", "bad operator"),
        ("1//0", "division by zero"),
        ("5//(2-2)", "division by zero"),
        ("9999999999999999", "too large"),
        ("99999999*99999999", "too large"),
    ],
)
def test_what_is_refused(text: str, why: str) -> None:
    with pytest.raises(BadExpression) as refused:
        evaluate(text)
    assert str(refused.value) == why


@given(st.text("0123456789+-*/() ", max_size=70))
def test_any_text_has_a_value_or_a_reason(text: str) -> None:
    try:
        value = evaluate(text)
    except BadExpression:
        return
    assert abs(value) <= 10**15
