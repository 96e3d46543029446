"""Lower bounds: below every schedule, monotone, and tight where it matters."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.planner.search.bounds import StepBound
from penstock.planner.search.options import CallNode
from penstock.planner.search.step_time import StepTimer

from .graphs import PPO, groups_of, steps, units_of


def durations(rng: random.Random, count: int) -> list[float]:
    return [rng.choice([0.0, 0.3, 1.0, 1.0, 4.0]) * rng.random() for _ in range(count)]


@pytest.mark.slow
@settings(max_examples=300)
@given(steps(max_calls=8, min_calls=3), st.integers(0, 3), st.data())
def test_no_schedule_is_faster_even_if_calls_take_longer(
    calls: tuple[CallNode, ...], max_lag: int, data: st.DataObject
) -> None:
    group_of = groups_of(calls, data)
    groups = [group_of[call.call_group] for call in calls]
    rng = random.Random(data.draw(st.integers(0, 10_000), "seed"))
    least = durations(rng, len(calls))
    more = [a + b for a, b in zip(least, durations(rng, len(calls)), strict=True)]
    bounds_s = StepBound(calls, groups, max_lag)(np.array([least, more]).T)
    timer = StepTimer(calls, groups, max_lag)
    assert bounds_s[0] <= timer.seconds(least) * (1 + 1e-12)
    assert bounds_s[0] <= timer.seconds(more) * (1 + 1e-12)
    assert bounds_s[0] <= bounds_s[1] * (1 + 1e-12)
    assert bounds_s[1] <= timer.seconds(more) * (1 + 1e-12)


@pytest.mark.parametrize(("max_lag", "share"), [(0, 1.0), (1, 0.75)])
def test_ppo_takes_just_what_the_bound_says(max_lag: int, share: float) -> None:
    rng, exact, num = random.Random(0), 0, 300
    for _ in range(num):
        group_of = {call_group: rng.randrange(4) for call_group in units_of(PPO)}
        groups = [group_of[call.call_group] for call in PPO]
        seconds = [rng.random() for _ in PPO]
        bound_s = StepBound(PPO, groups, max_lag)(np.array(seconds)[:, None])[0]
        exact += bool(bound_s >= StepTimer(PPO, groups, max_lag).seconds(seconds) * (1 - 1e-12))
    assert exact >= share * num


def test_a_critical_cycle_binds_where_no_group_is_full() -> None:
    """With max_lag=1 the critic's own version still goes round in every step."""
    calls = (
        CallNode("value", "critic", (), "critic"),
        CallNode("judge", "judge", ("value",), "judge"),
        CallNode("train", "critic", ("value", "judge"), "critic", trains=True),
    )
    bound = StepBound(calls, [0, 1, 0], 1)
    assert bound(np.array([[1.0], [5.0], [2.0]]))[0] == 8.0
