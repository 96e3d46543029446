"""Verdicts and lengths come as integers and booleans: results keep their fractions."""

from __future__ import annotations

import pytest
import torch
from penstock.algorithms.losses import kto_loss
from penstock.algorithms.ops.advantages import (
    batch_centered,
    batch_std_advantage,
    broadcast_over_tokens,
    group_advantage,
    leave_one_out,
    log_partition_advantage,
    remax_advantage,
)
from penstock.algorithms.ops.groups import floating
from penstock.algorithms.ops.reductions import aggregate
from penstock.algorithms.papers.pf_ppo import selection_weights
from torch import Tensor

VERDICTS = torch.tensor([1, 0, 0, 1, 1, 1, 1, 0])
PROMPT_ID = torch.tensor([3, 3, 3, 3, 5, 5, 5, 5])
MASK = torch.ones(8, 2, dtype=torch.bool)


@pytest.mark.parametrize("verdicts", [VERDICTS, VERDICTS.bool()], ids=["integers", "booleans"])
def test_advantages_of_whole_numbers_are_those_of_floats(verdicts: Tensor) -> None:
    exact = VERDICTS.float()
    for advantage in (group_advantage, leave_one_out, batch_std_advantage):
        assert torch.equal(advantage(verdicts, PROMPT_ID), advantage(exact, PROMPT_ID))
    soft = log_partition_advantage(verdicts, PROMPT_ID, tau=0.5)
    assert torch.equal(soft, log_partition_advantage(exact, PROMPT_ID, tau=0.5))
    assert torch.equal(batch_centered(verdicts), batch_centered(exact))
    greedy = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
    sampled = remax_advantage(verdicts, MASK, greedy_score=greedy.to(verdicts), discount=0.5)
    assert torch.equal(
        sampled, remax_advantage(exact, MASK, greedy_score=greedy.float(), discount=0.5)
    )


def test_group_advantages_of_verdicts_are_not_cut_off() -> None:
    expected = torch.tensor([2, -2, -2, 2]) / 3
    assert torch.allclose(leave_one_out(VERDICTS[:4], PROMPT_ID[:4]), expected)


def test_shares_and_weights_of_whole_numbers_keep_their_fractions() -> None:
    shares = selection_weights(torch.tensor([1, 0, 2]), torch.zeros(3).long(), strategy="power")
    assert torch.allclose(shares, torch.tensor([0.2, 0, 0.8]))
    weighed = kto_loss(
        torch.tensor([0, 0]), torch.tensor([True, False]), kl=0, desirable_weight=1.5
    )
    assert weighed.tolist() == [0.75, 0.5]


def test_a_mask_of_numbers_and_columns_of_another_shape_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"mask must be bool\[rows, T\].*write mask.bool\(\)"):
        broadcast_over_tokens(torch.zeros(8), MASK.long())
    with pytest.raises(ValueError, match=r"loss must be .* \[8, 2\], got float32\[1"):
        aggregate(torch.zeros(1, 2), MASK)


def test_floating_columns_keep_their_precision() -> None:
    assert floating(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
    assert floating(torch.zeros(1, dtype=torch.int64)).dtype == torch.float32
