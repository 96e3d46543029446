"""What `benchmarks/asynchrony.py` compares schedules with, and the lengths that it gives them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
SECONDS = st.floats(0.0, 9.0)


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[Any, Any]]:
    sys.path.insert(0, BENCHMARKS)
    yield importlib.import_module("asynchrony"), importlib.import_module("asynchrony_case")
    sys.path.remove(BENCHMARKS)


def test_the_ideal_of_three_steps(scripts: tuple[Any, Any]) -> None:
    ideal = scripts[0].ideal
    assert ideal([2, 2, 2], [1, 3, 1], 0) == [3, 8, 11]
    # Step 2 begins to generate when step 0 has been trained, at 3, though step 1 ended at 4.
    assert ideal([2, 2, 2], [1, 3, 1], 1) == [3, 7, 8]
    assert ideal([2, 2, 2], [9, 9, 9], 0) == [11, 22, 33]
    assert ideal([2, 2, 2], [9, 9, 9], 1) == [11, 20, 29]


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=12), st.integers(0, 12))
def test_the_ideal_is_between_one_stage_and_both(
    scripts: tuple[Any, Any], steps: list[tuple[float, float]], max_lag: int
) -> None:
    generate_s, train_s = zip(*steps, strict=True)
    end = scripts[0].ideal(generate_s, train_s, max_lag)[-1]
    assert end <= sum(generate_s) + sum(train_s) + 1e-9
    assert end >= max(sum(generate_s) + train_s[-1], generate_s[0] + sum(train_s)) - 1e-9
    assert end <= scripts[0].ideal(generate_s, train_s, max(max_lag - 1, 0))[-1] + 1e-9


def test_the_longest_of_a_step_is_eight_times_the_mean(scripts: tuple[Any, Any]) -> None:
    case, mean = scripts[1], 1000
    rows = case.lengths(torch.arange(400 * case.NUM_PROMPTS), case.NUM_SAMPLES, mean)
    steps = rows.view(400, -1).float()
    assert steps.shape[1] == 128
    assert float(steps.mean()) == pytest.approx(mean, rel=0.02)
    longest = steps.log().amax(1).mean().exp()  # the middle one, as its spread is wide
    assert float(longest) == pytest.approx(8 * mean, rel=0.1)
    assert float(steps.max()) == case.LONGEST * mean
    again = case.lengths(torch.arange(32, 64), case.NUM_SAMPLES, mean)
    assert torch.equal(again, rows[128:256])
