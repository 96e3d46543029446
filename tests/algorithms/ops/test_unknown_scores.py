"""A rate, length or weight that is no number is refused wherever something is chosen by it.

A score may be missing: `test_score_columns` says what such a row gets. Comparisons with nan are
false, and `argmax` takes nan for the highest number, so without a check the choice would be made
all the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from penstock.algorithms.ops.rewards import (
    length_reward,
)
from penstock.algorithms.ops.rollout_correction import self_normalized
from penstock.algorithms.ops.value_transforms import percentile_scaled
from penstock.algorithms.papers.a_lol import priority, systematic_rows
from penstock.algorithms.papers.cgpo import best_passing
from penstock.algorithms.papers.pf_ppo import draw_rows, selection_weights
from penstock.algorithms.papers.safe_rlhf import CostModelLoss
from penstock.algorithms.roles import Rollout, ScoredPairs, ScoreOutput
from torch import Tensor

IDS = torch.tensor([4, 4, 9])
ONES = torch.ones(3)
MASK = torch.ones(3, 2, dtype=torch.bool)
ROLL = Rollout(
    prompt_id=IDS,
    tokens=torch.arange(6).reshape(3, 2),
    mask=MASK,
    behavior_logprob=torch.zeros(3, 2),
    finished=MASK[:, 0],
)

CHOICES: dict[str, tuple[str, Callable[[Tensor], object]]] = {
    "length_reward by length": (
        "length",
        lambda x: length_reward(x, IDS, correct=MASK[:, 0]),
    ),
    "best_passing by KL": ("KL", lambda x: passing(kl=x)),
    "draw_rows": ("weight", lambda x: draw_rows(x, 2, 0.5)),
    "priority": ("advantage", priority),
    "systematic_rows": ("share", lambda x: systematic_rows(x, 2)),
}


def passing(**columns: Tensor) -> object:
    rows = {name: ONES for name in ("score", "passed", "kl", "fallback_passed")}
    return best_passing(ROLL, ROLL, **(rows | columns))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", CHOICES)
def test_nothing_is_chosen_by_what_is_no_number(name: str) -> None:
    what, choose = CHOICES[name]
    message = f"the {what} of row 1 is nan, by which nothing can be chosen; give every row a number"
    with pytest.raises(FloatingPointError, match=f"^{re.escape(message)}$"):
        choose(torch.tensor([1.0, torch.nan, 0.5]))


@pytest.mark.parametrize(
    "choose",
    [priority, lambda x: selection_weights(x, IDS, strategy="power")],  # pyright: ignore[reportUnknownLambdaType]
)
def test_shares_of_an_infinite_whole_are_refused(choose: Callable[[Tensor], Tensor]) -> None:
    what = "advantage" if choose is priority else "score"
    with pytest.raises(FloatingPointError, match=f"^the {what} of row 2 is inf, by which nothing"):
        choose(torch.tensor([1.0, 0.5, torch.inf]))


def test_what_is_not_chosen_by_may_be_unknown() -> None:
    """The best of all may be infinitely good."""
    endless = torch.tensor([-torch.inf, torch.inf, 0])
    assert selection_weights(endless, IDS, strategy="best").tolist() == [0, 1, 1]


def test_a_response_without_a_label_is_not_taken_for_a_safe_one() -> None:
    """The optimizer refuses the gradient on every rank, which an error on one would not stop."""
    batch = ScoredPairs(
        pair_id=IDS[:2],
        tokens=ROLL.tokens[:2],
        mask=MASK[:2],
        chosen=torch.tensor([True, False]),
        score=torch.tensor([1.0, torch.nan]),
    )
    cost = torch.zeros(2, requires_grad=True)
    loss = CostModelLoss()
    total = loss(ScoreOutput(cost), batch, loss.totals(batch)).total
    assert torch.autograd.grad(total, cost)[0].isnan().tolist() == [False, True]


def test_an_unknown_scale_is_not_a_scale_of_one() -> None:
    """Nothing finite comes of it, for the optimizer to refuse."""
    nothing, unknown = torch.zeros(1, 3), torch.tensor([[0.0, torch.nan, 100.0]])
    everywhere = torch.ones(1, 3, dtype=torch.bool)
    scaled = percentile_scaled(everywhere, advantage=nothing, value_target=unknown)
    assert scaled.advantage.isnan().all()
    assert self_normalized(unknown, everywhere).isnan().all()
