"""An engine that computes the prompt of several rows once has fewer tokens to compute."""

from __future__ import annotations

from dataclasses import replace

import pytest
from penstock.planner.cost.engine_model import EngineModel
from penstock.planner.cost.time_model import TimeModel
from penstock.planner.cost.time_parts import Work
from penstock.planner.inputs.calls import Call, CallKind, Lengths
from penstock.planner.inputs.layout import Layout

from .test_calibration import call
from .time_cases import IDEAL, mesh
from .time_cases import call as tiny

SHARING = EngineModel(name="sharing", shares_prompts=True)


def grouped(kind: CallKind, samples: int = 4, prompt: int = 32, updates: int = 1) -> Call:
    made = call(kind, 64, 16, updates=updates)
    return replace(made, samples_per_prompt=samples, prompt=Lengths.constant(prompt))


def test_a_prompt_counts_once_for_all_of_its_rows() -> None:
    work = Work.of(grouped("forward"), SHARING)
    assert work.tokens == 32 / 4 + 32
    # The prompt's own square once; every response token still looks back at the whole prompt.
    assert work.tokens_square == 32**2 / 4 + 2 * 32 * 32 + 32**2


@pytest.mark.parametrize(
    "alone",
    [
        grouped("forward", samples=1),
        grouped("forward", prompt=4),  # would save less than a fifth of the tokens
        grouped("generate"),  # has its own rule for prompts
    ],
)
def test_nothing_is_shared_where_the_engine_shares_nothing(alone: Call) -> None:
    assert Work.of(alone, SHARING) == Work.of(alone)


def test_a_random_half_of_the_rows_shares_less() -> None:
    # Of a prompt's 4 rows a half of the batch has at least one with probability 15/16.
    work = Work.of(grouped("train", prompt=64, updates=2), SHARING)
    assert work.tokens == pytest.approx(64 * (15 / 16) / (4 * 0.5) + 32)


def test_the_time_follows() -> None:
    made, on = tiny("train", rows=8, prompt=4, response=4, samples_per_prompt=4), mesh(1)
    whole = TimeModel(IDEAL).call_time(made, Layout(micro_batch=8), on)
    shared = TimeModel(IDEAL, SHARING).call_time(made, Layout(micro_batch=8), on)
    assert shared.matmul_s == pytest.approx(whole.matmul_s * 5 / 8)
