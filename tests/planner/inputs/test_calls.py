"""The steady state of rows that go on in later steps, against rows that are followed one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.inputs.calls import Lengths, begun_before, stretches

ROWS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def lengths(rows: list[int]) -> Lengths:
    tokens = sorted(set(rows))
    return Lengths(tokens=tuple(tokens), weights=tuple(float(rows.count(t)) for t in tokens))


def followed(rows: list[int], segment: int) -> tuple[dict[int, int], list[list[int]]]:
    """Of a step that comes late enough: rows that go on, by what they have; and for each token of
    the step, what every row has before it that grows by it."""
    going: list[tuple[int, int]] = []
    begun: dict[int, int] = {}
    grown: list[list[int]] = []
    for _ in range(-(-max(rows) // segment) + 1):
        going = [(has, ends) for has, ends in going if has < ends]
        begun = {has: sum(1 for other, _ in going if other == has) for has, _ in going}
        going += [(0, ends) for ends in rows]
        grown = [[has for has, ends in going if has + token < ends] for token in range(segment)]
        going = [(min(has + segment, ends), ends) for has, ends in going]
    return begun, grown


@given(ROWS, st.integers(1, 50))
def test_a_step_runs_what_its_rows_would_run(rows: list[int], segment: int) -> None:
    begun, grown = followed(rows, segment)
    found = begun_before(lengths(rows), segment)
    assert {one.tokens: round(one.rows * len(rows), 6) for one in found} == begun
    steady = stretches(lengths(rows), segment)
    for one in steady:
        for token in range(one.begin, one.end):
            assert one.rows * len(rows) == pytest.approx(len(grown[token]))
            assert one.before == pytest.approx(sum(grown[token]) / len(grown[token]))
    assert [one.begin for one in steady] == [0, *(one.end for one in steady[:-1])]
    assert steady[-1].end == min(segment, max(rows))


@given(ROWS, st.integers(1, 50))
def test_segments_sample_as_many_tokens_as_whole_rows(rows: list[int], segment: int) -> None:
    tokens = sum(one.rows * (one.end - one.begin) for one in stretches(lengths(rows), segment))
    assert tokens == pytest.approx(lengths(rows).mean)


def test_without_segments_every_row_ends() -> None:
    found = stretches(lengths([2, 8, 8, 8]))
    assert [(one.begin, one.end, one.rows, one.before) for one in found] == [
        (0, 2, 1.0, 0.0),
        (2, 8, 0.75, 0.0),
    ]
    assert begun_before(lengths([2, 8])) == ()
