"""Choosing responses to train on: the weights of worked examples, and what is sampled by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from penstock.algorithms.papers.pf_ppo import (
    draw_rows,
    filtered_batch,
    filtered_groups,
    selection_weights,
)
from penstock.algorithms.roles import Rollout

SCORE = torch.tensor([0.2, 0.9, -0.4, 0.5, 0.1]).double()
ONE = torch.zeros(5, dtype=torch.int64)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("best", [0, 1, 0, 0, 0]),
        ("best_random", [0.125, 0.5, 0.125, 0.125, 0.125]),
        ("best_worst", [0, 0.5, 0.5, 0, 0]),
        ("power", [0.031496, 0.637795, 0.125984, 0.19685, 0.007874]),
    ],
)
def test_weights(strategy: Any, expected: list[float]) -> None:
    weight = selection_weights(SCORE, ONE, strategy=strategy)
    assert weight.tolist() == pytest.approx(expected, abs=1e-6)


def test_weights_are_by_group_in_any_order() -> None:
    score = torch.tensor([1.0, 5, 2, 6, 3])
    group = torch.tensor([8, 2, 8, 2, 8])
    assert selection_weights(score, group, strategy="best").tolist() == [0, 0, 0, 1, 1]
    assert selection_weights(score, group).tolist() == [0.5, 0.5, 0, 0.5, 0.5]


@given(st.floats(0, 0.999))
def test_samples_are_as_even_as_they_can_be(offset: float) -> None:
    by = {s: selection_weights(SCORE, ONE, strategy=s) for s in ("best", "best_worst")}
    assert draw_rows(by["best"], 3, offset).tolist() == [1, 1, 1]
    assert draw_rows(by["best_worst"], 2, offset).tolist() == [1, 2]
    mixed = draw_rows(selection_weights(SCORE, ONE, strategy="best_random"), 2, offset).tolist()
    assert 1 in mixed
    assert len(set(mixed)) == 2
    counts = torch.bincount(draw_rows(torch.tensor([0.5, 0.0, 0.25, 0.25]), 8, offset), minlength=4)
    assert counts.tolist() == [4, 0, 2, 2]


def roll_of(prompt_id: list[int]) -> Rollout:
    rows = len(prompt_id)
    tokens = torch.arange(rows * 3).reshape(rows, 3)
    return Rollout(
        prompt_id=torch.tensor(prompt_id),
        tokens=tokens,
        mask=tokens % 3 > 0,
        behavior_logprob=-tokens.float(),
        finished=torch.ones(rows, dtype=torch.bool),
    )


def test_rows_come_with_all_their_columns() -> None:
    roll = roll_of([4, 4, 9, 9, 9])
    kept = filtered_groups(roll, SCORE.float(), count=2, strategy="best_worst")
    assert kept.prompt_id.tolist() == [4, 4, 9, 9]
    assert kept.score.tolist() == pytest.approx([0.2, 0.9, -0.4, 0.5])
    assert kept.tokens[:, 0].tolist() == [0, 3, 6, 9]
    assert torch.equal(kept.behavior_logprob, -kept.tokens.float())
    whole = filtered_batch(roll, SCORE.float(), count=1, strategy="best_worst")
    assert whole.score.tolist() == pytest.approx([0.9, -0.4])


def test_samples_repeat_and_do_not_depend_on_other_prompts() -> None:
    roll, score = roll_of([4] * 8 + [9] * 8), torch.arange(16.0) % 5
    kept = filtered_groups(roll, score, count=3, strategy="power")
    part = Rollout(**{name: column[8:] for name, column in vars(roll).items()})
    alone = filtered_groups(part, score[8:], count=3, strategy="power")
    assert torch.equal(kept.tokens[3:], alone.tokens)


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(ValueError, match="strategy 'all' is unknown; choose 'best'"):
        selection_weights(SCORE, ONE, strategy="all")  # pyright: ignore[reportArgumentType]
