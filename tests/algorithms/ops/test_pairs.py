"""Pairs of responses: chosen by score, mismatched for KTO, and found again by their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from penstock.algorithms.kto import reference_point
from penstock.algorithms.ops.kl import finished_score
from penstock.algorithms.ops.pairs import best_and_worst, mismatched, pair_rows
from penstock.algorithms.roles import Rollout
from torch import Tensor


def roll_of(prompt_id: list[int]) -> Rollout:
    rows = len(prompt_id)
    tokens = torch.arange(rows)[:, None] * 10 + torch.arange(3)
    return Rollout(
        prompt_id=torch.tensor(prompt_id),
        tokens=tokens,
        mask=torch.tensor([False, True, True]).expand(rows, 3),
        behavior_logprob=torch.zeros(rows, 3),
        finished=torch.ones(rows, dtype=torch.bool),
    )


def test_best_and_worst_of_each_prompt() -> None:
    """Three prompts of two responses: B wins, A wins, and a tie that goes to the first."""
    roll = roll_of([1, 1, 2, 2, 3, 3])
    score = torch.tensor([0.3, 0.7, 0.9, 0.2, 0.5, 0.5])
    pairs = best_and_worst(roll, score, ties="first")
    assert pairs.tokens[:, 0].tolist() == [10, 0, 20, 30, 40, 50]
    assert pairs.chosen.tolist() == [True, False] * 3
    margin = pairs.score[::2] - pairs.score[1::2]
    assert margin.tolist() == pytest.approx([0.4, 0.7, 0])
    assert pairs.mask.any(1).all()
    dropped = best_and_worst(roll, score)
    assert dropped.mask.any(1).tolist() == [True] * 4 + [False] * 2


def test_groups_of_many_may_be_interleaved() -> None:
    pairs = best_and_worst(roll_of([8, 5, 8, 5, 8]), torch.tensor([1.0, 4, 3, 2, 0]))
    assert pairs.pair_id.tolist() == [8, 8, 5, 5]
    assert pairs.tokens[:, 0].tolist() == [20, 40, 10, 30]


def test_scores_of_responses_that_were_cut_off_are_ruled_before_pairing() -> None:
    score, finished = torch.tensor([0.9, 0.2]), torch.tensor([False, True])
    rules: list[tuple[Any, list[float]]] = [
        ("replace", [-1, 0.2]),
        ("subtract", [-0.1, 0.2]),
        ("zero", [0, 0.2]),
        ("none", [0.9, 0.2]),
    ]
    for no_eos, expected in rules:
        ruled = finished_score(score, finished, no_eos=no_eos)
        assert ruled.tolist() == pytest.approx(expected)
    ruled = finished_score(score, finished, no_eos="replace")
    assert best_and_worst(roll_of([1, 1]), ruled).tokens[:, 0].tolist() == [10, 0]


def test_a_single_response_makes_no_pair() -> None:
    with pytest.raises(ValueError, match="prompt 4 has a single response"):
        best_and_worst(roll_of([4]), torch.ones(1))


TOKENS = torch.tensor([[5, 6, 7, -1], [5, 8, -1, -1], [9, 9, 1, 2], [9, 9, 3, -1]])
MASK = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 0]]).bool()


def test_prompts_get_responses_to_other_prompts() -> None:
    """Rows of one pair share a prompt, so the next row of another pair is taken."""
    other = mismatched(TOKENS, MASK, torch.tensor([1, 1, 4, 4]))
    assert other.tokens.tolist() == [[5, 1, 2, -1], [5, 1, 2, -1], [9, 9, 6, 7], [9, 9, 6, 7]]
    assert (
        other.mask.tolist() == [[False, True, True, False]] * 2 + [[False, False, True, True]] * 2
    )
    with pytest.raises(ValueError, match="all rows are of pair 1"):
        mismatched(TOKENS[:2], MASK[:2], torch.tensor([1, 1]))


def test_the_reference_point_is_one_number_for_all_rows() -> None:
    logprob = torch.where(MASK, 0.5, torch.nan)
    zeros = torch.zeros(4, 4)
    kl = reference_point(MASK, logprob=logprob, ref_logprob=zeros)
    assert kl.tolist() == pytest.approx([0.75] * 4)
    assert reference_point(MASK, logprob=-logprob, ref_logprob=zeros).tolist() == [0] * 4


def rows_of(pair_id: list[int], chosen: list[bool]) -> tuple[Tensor, Tensor]:
    return pair_rows(torch.tensor(pair_id), torch.tensor(chosen))


def test_rows_of_pairs_in_one_order() -> None:
    chosen, rejected = rows_of([7, 3, 7, 3], [True, False, False, True])
    assert (chosen.tolist(), rejected.tolist()) == ([3, 0], [1, 2])
    with pytest.raises(ValueError, match="pair 3 has 2 chosen and 0 rejected rows"):
        rows_of([3, 3], [True, True])
