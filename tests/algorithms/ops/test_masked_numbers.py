"""Numbers at the edges: double precision is kept, half precision added up, masked ones ignored."""

from __future__ import annotations

import pytest
import torch
from penstock.algorithms.losses.tokens import ClippedPolicyLoss
from penstock.algorithms.ops.advantages import log_partition_advantage
from penstock.algorithms.ops.kl import kl_penalized_reward, kl_shaped_reward
from penstock.algorithms.ops.rollout_correction import self_normalized
from penstock.algorithms.ops.value_transforms import percentile_scaled, two_hot

from ..samples import number_of

ONES = torch.ones(1, 2)
HALF = torch.tensor([[True, False]])
HOLE = torch.tensor([[1.0, torch.nan]])


def test_nothing_is_left_where_nothing_was_sampled() -> None:
    coef = torch.ones(1)
    penalized = kl_penalized_reward(HOLE, HALF, kl_coef=coef, logprob=ONES, ref_logprob=ONES)
    assert penalized.tolist() == [[1, 0]]
    assert self_normalized(HOLE, HALF).tolist() == [[1, 0]]
    scaled = percentile_scaled(HALF, advantage=HOLE, value_target=HOLE)
    assert scaled.advantage.tolist() == scaled.value_target.tolist() == [[1, 0]]
    never = -torch.inf * ONES
    shaped = kl_shaped_reward(torch.ones(1), HALF, kl_coef=0.0, logprob=never, ref_logprob=never)
    assert shaped.tolist() == [[1, 0]]


def test_options_without_a_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="tau is 0"):
        log_partition_advantage(torch.ones(2), torch.zeros(2, dtype=torch.int64), tau=0.0)
    with pytest.raises(ValueError, match="at least 2 bins, got 1"):
        two_hot(torch.ones(1), torch.ones(1))


@pytest.mark.slow
def test_many_numbers_have_percentiles() -> None:
    """`torch.quantile` takes at most 2^24 numbers."""
    column = torch.zeros(1, 2**24 + 1)
    mask = torch.ones_like(column).bool()
    assert not percentile_scaled(mask, advantage=column, value_target=column).advantage.any()


def test_a_loss_of_many_half_precision_tokens_is_a_number() -> None:
    column = torch.ones(1, 70_000, dtype=torch.float16)
    mask = column.bool()
    loss = number_of(ClippedPolicyLoss(), -column, -column, column, mask)
    assert float(loss) == pytest.approx(-1.0)
