"""Given responses as data to learn from: which are better than expected, and how often each counts.

Nothing here is sampled at random: a response is taken as often as its share of the batch comes to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...dataflow.graph.tracer import op
from ..roles.language import PerSample, PerToken, TokenIds, TokenMask
from .reductions import check_token_columns, zero_where_masked_out
from .reward_shaping import check_known


@dataclass(frozen=True, kw_only=True)
class WeighedResponses:
    """Prompts with responses, and how much better than expected each is."""

    tokens: TokenIds
    mask: TokenMask
    advantage: PerSample


@op(scope="row")
def first_token(mask: TokenMask) -> TokenMask:
    """True on each row's first masked token only: bool[rows, T].

    A critic's value there is of the state after the prompt.
    """
    return mask & (mask.long().cumsum(dim=1) == 1)


@op(scope="row")
def value_of_prompt(value: PerToken, first: TokenMask) -> PerSample:
    """The value at each row's first token: f32[rows] from f32[rows, T] and `first_token`."""
    check_token_columns(first, value=value)
    return zero_where_masked_out(value, first).sum(dim=1)


def priority(advantage: Tensor) -> Tensor:
    """Share of each row: its advantage over the sum of all that are positive, 0 if it is not.

    Baheti et al., "Leftover Lunch", 2023, section 3.3.

    Args:
        advantage: f32[rows].

    Returns:
        f32[rows], adding up to 1; equal shares where no advantage is positive.

    Raises:
        FloatingPointError: If an advantage is not finite.
    """
    check_known("advantage", advantage, finite=True)
    positive = advantage.clamp(min=0)
    total = positive.sum()
    even = torch.full_like(positive, 1 / max(len(positive), 1))
    return torch.where(total > 0, positive / torch.where(total > 0, total, 1.0), even)


def systematic_rows(share: Tensor, count: int) -> Tensor:
    """`count` row numbers, each row as often as `count * share`, rounded up or down.

    Systematic resampling with the offset in the middle, which needs no random number (Kitagawa,
    "Monte Carlo Filter and Smoother", 1996).

    Args:
        share: f32[rows], adding up to 1.
        count: Number of responses to take.

    Returns:
        i64[count], ascending.

    Raises:
        FloatingPointError: If a share is not finite.
    """
    check_known("share", share, finite=True)
    if not len(share):
        return torch.zeros(0, dtype=torch.int64)
    ends = share.double().cumsum(dim=0)
    points = (torch.arange(count, dtype=torch.float64) + 0.5) / count * ends[-1]
    return torch.searchsorted(ends, points, right=True).clamp(max=len(share) - 1)


@op(scope="batch", makes_rows=True)
def better_responses(
    tokens: TokenIds,
    mask: TokenMask,
    *,
    score: PerSample,
    value: PerSample,
    prioritized: bool = True,
) -> WeighedResponses:
    """The responses that score above `value`, with `advantage = score - value`.

    Args:
        tokens: i64[rows, T].
        mask: bool[rows, T].
        score: f32[rows]; a response without one has advantage 0.
        value: f32[rows], expected of each row's prompt.
        prioritized: Take responses in proportion to their advantage, and as many as there were
            rows. Otherwise take each row once, with advantage 0 if it scores below its value.

    Returns:
        As many rows as came in.

    Raises:
        FloatingPointError: If responses are sampled by advantages that are not finite.
    """
    advantage = torch.where(score.isnan(), 0.0, (score - value).clamp(min=0))
    rows = torch.arange(len(tokens))
    if prioritized:
        rows = systematic_rows(priority(advantage), len(tokens))
    return WeighedResponses(tokens=tokens[rows], mask=mask[rows], advantage=advantage[rows])
