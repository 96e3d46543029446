"""How many loops help: what waits can wait together, what computes cannot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.planner.cost.overlapped_groups import (
    LEAST_GAIN,
    LoopTimes,
    choose_num_overlapped,
    round_s,
)

SLEEPS = LoopTimes(step_s=5e-3, step_cpu_s=1e-4, ask_s=1e-4, ask_cpu_s=1e-4)
COMPUTES = LoopTimes(step_s=5e-3, step_cpu_s=5e-3, ask_s=1e-4, ask_cpu_s=1e-4)
ASKS = LoopTimes(step_s=1e-3, step_cpu_s=1e-3, ask_s=1e-3, ask_cpu_s=1e-4)

TIMES = st.tuples(*[st.floats(1e-5, 1e-1) for _ in range(4)]).map(
    lambda found: LoopTimes(
        step_s=found[0], step_cpu_s=min(found[:2]), ask_s=found[2], ask_cpu_s=min(found[2:])
    )
)


@pytest.mark.parametrize(
    ("times", "num_groups", "expected"),
    [
        (SLEEPS, 1, 1),
        (SLEEPS, 2, 2),
        (SLEEPS, 4, 4),
        (SLEEPS, 5, 5),
        (COMPUTES, 4, 1),  # Nothing waits, so nothing is won.
        (ASKS, 4, 2),  # While one is answered, the other steps; a third would wait for its turn.
    ],
)
def test_as_many_are_overlapped_as_helps(times: LoopTimes, num_groups: int, expected: int) -> None:
    assert choose_num_overlapped(times, num_groups) == expected


def test_a_round_takes_what_the_formula_says() -> None:
    assert round_s(SLEEPS, 1, 4) == pytest.approx(4 * 5.1e-3)
    assert round_s(SLEEPS, 2, 4) == pytest.approx(2 * 5.2e-3)
    assert round_s(SLEEPS, 3, 4) == pytest.approx(2 * 5.2e-3)
    assert round_s(ASKS, 4, 4) == pytest.approx(4 * 1.2e-3)


@given(TIMES, st.integers(1, 20), st.integers(1, 20))
def test_no_other_size_is_much_faster(times: LoopTimes, num_groups: int, most: int) -> None:
    chosen = choose_num_overlapped(times, num_groups, most)
    assert 1 <= chosen <= min(num_groups, most)
    expected_s = round_s(times, chosen, num_groups)
    for size in range(1, min(num_groups, most) + 1):
        assert expected_s <= round_s(times, size, num_groups) * (1 + LEAST_GAIN) * (1 + 1e-9)
    for size in range(1, chosen):
        assert round_s(times, size, num_groups) > expected_s * (1 - 1e-9)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="step_s and ask_s are 0; expected measured seconds"):
        LoopTimes(step_s=0, step_cpu_s=0, ask_s=0, ask_cpu_s=0)
    with pytest.raises(ValueError, match="step_cpu_s is -1; expected at least 0"):
        LoopTimes(step_s=1, step_cpu_s=-1, ask_s=0, ask_cpu_s=0)
    with pytest.raises(ValueError, match="num_groups is 0; expected at least 1"):
        choose_num_overlapped(SLEEPS, 0)
