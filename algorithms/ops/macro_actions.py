"""Macro actions: runs of tokens that count as one action each.

Chai et al., "MA-RLHF: Reinforcement Learning from Human Feedback with Macro Actions", 2024. Every
sampled token belongs to one macro action of its row; macro actions are numbered from 0 and end at
the row's last sampled token. One token per macro action is PPO, one macro action per row a bandit.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from torch import Tensor

from ...dataflow.graph.axes import i64
from ...dataflow.graph.tracer import op
from ..roles.language_tables import (
    SAMPLE,
    TOKEN,
    PerRow,
    PerStep,
    PerToken,
    StepMask,
    TokenIds,
    TokenMask,
)
from .distributions import uniforms
from .reductions import check_token_columns, unknown, zero_where_masked_out
from .returns import GaeTargets, gae

MacroId = Annotated[Tensor, i64(SAMPLE, TOKEN)]
"""Number of a token's macro action in its row, from 0; -1 where the mask is False."""

Termination = Literal["fixed", "random", "perplexity"]
"""End of a macro action: after a fixed number of tokens, after a number sampled from a few, or
where the next token is no more likely than the one before it."""

MacroValue = Literal["equal", "unit", "position"]
"""Weights of tokens' values in that of a macro action: alike, the last one alone, or the
i-th with 1 / i."""

MacroReward = Literal["sum", "mean"]
"""A macro action's reward: the sum of its tokens' rewards, or their mean, weighed as values are."""


@op(scope="row")
def macro_actions(
    tokens: TokenIds,
    mask: TokenMask,
    behavior_logprob: PerToken,
    *,
    termination: Termination = "fixed",
    length: int | None = 5,
    lengths: tuple[int, ...] = (1, 2, 3, 5, 10),
) -> MacroId:
    """Cut responses into macro actions.

    Args:
        tokens: i64[rows, T], from which "random" samples.
        mask: bool[rows, T].
        behavior_logprob: f32[rows, T], for "perplexity".
        termination: See `Termination`.
        length: Tokens of a "fixed" macro action; None for one macro action per row.
        lengths: What "random" samples each macro action's length from.

    Returns:
        i64[rows, T].

    Raises:
        ValueError: If shapes differ, a length is below 1, or `termination` is unknown.
    """
    check_token_columns(mask, behavior_logprob=behavior_logprob)
    if (length is not None and length < 1) or not lengths or min(lengths) < 1:
        raise ValueError(f"a macro action has at least 1 token, got {length} and {lengths}")
    rank = mask.cumsum(dim=1) - 1
    match termination:
        case "fixed":
            index = rank // length if length is not None else torch.zeros_like(rank)
        case "random":
            index = _sampled(tokens, mask, lengths)
        case "perplexity":
            index = _where_rising(behavior_logprob, mask)
        case _:
            raise unknown("termination", termination, Termination)
    return torch.where(mask, index, -1)


def _sampled(tokens: Tensor, mask: Tensor, lengths: tuple[int, ...]) -> Tensor:
    index = torch.full_like(tokens, -1)
    for row in range(len(tokens)):
        places = mask[row].nonzero().flatten()
        ends: list[int] = []
        numbers = uniforms(0, tokens[row])
        while sum(ends) < len(places):
            ends.append(lengths[int(next(numbers) * len(lengths))])
        numbers = torch.arange(len(ends)).repeat_interleave(torch.tensor(ends, dtype=torch.int64))
        index[row, places] = numbers[: len(places)].to(index)
    return index


def _where_rising(logprob: Tensor, mask: Tensor) -> Tensor:
    """A macro action goes on while each token is likelier than the one before it."""
    index = torch.full(mask.shape, -1, dtype=torch.int64, device=mask.device)
    for row in range(len(mask)):
        own = logprob[row, mask[row]]
        starts = torch.zeros(len(own), dtype=torch.int64, device=mask.device)
        starts[1:] = (own[1:] <= own[:-1]).to(starts)
        index[row, mask[row]] = starts.cumsum(0)
    return index


def macro_mask(macro_id: Tensor) -> Tensor:
    """bool[rows, M]: which macro actions each row has, M those of the row with most."""
    if not macro_id.numel():
        return torch.zeros(len(macro_id), 0, dtype=torch.bool, device=macro_id.device)
    count = int(macro_id.max()) + 1
    return torch.arange(count, device=macro_id.device) <= macro_id.amax(dim=1, keepdim=True)


def sum_over_macros(column: Tensor, macro_id: Tensor) -> Tensor:
    """Sums of a token column over macro actions, differentiable.

    Args:
        column: f32[rows, T]; what stands outside macro actions is ignored.
        macro_id: i64[rows, T], see `MacroId`.

    Returns:
        f32[rows, M], M the macro actions of the row with most.
    """
    inside = macro_id >= 0
    table = column.new_zeros(len(column), macro_mask(macro_id).shape[1])
    if not table.numel():
        return column[:, :0]  # a loss over no macro action still has a gradient, of zeros
    return table.scatter_add(1, macro_id.clamp(min=0), zero_where_masked_out(column, inside))


def _weights(macro_id: Tensor, macro_value: MacroValue) -> Tensor:
    """f64[rows, T]: how much each token says of its macro action; they add up to 1."""
    inside = macro_id >= 0
    ones = inside.double()
    size = sum_over_macros(ones, macro_id)
    before = ones.cumsum(dim=1) - (size.cumsum(dim=1) - size).gather(1, macro_id.clamp(min=0))
    match macro_value:
        case "equal":
            weight = ones
        case "unit":
            weight = (before == size.gather(1, macro_id.clamp(min=0))).double()
        case "position":
            weight = 1 / before.clamp(min=1)
        case _:
            raise unknown("macro_value", macro_value, MacroValue)
    weight = zero_where_masked_out(weight, inside)
    total = sum_over_macros(weight, macro_id).gather(1, macro_id.clamp(min=0))
    return zero_where_masked_out(weight / torch.where(inside, total, 1.0), inside)


@op(scope="row")
def macro_gae(
    mask: StepMask,
    macro_id: MacroId,
    *,
    reward: PerStep,
    value: PerStep,
    bootstrap_value: PerRow | None = None,
    discount: float = 1.0,
    lam: float = 0.95,
    macro_value: MacroValue = "equal",
    macro_reward: MacroReward = "sum",
) -> GaeTargets:
    """Generalized advantage estimation with macro actions as steps; see `gae`.

    Args:
        mask: bool[rows, T].
        macro_id: i64[rows, T], see `macro_actions`.
        reward: f32[rows, T], per token.
        value: f32[rows, T], the critic at the state before each token.
        bootstrap_value: f32[rows], value of the state after the last macro action; see `gae`.
        discount: gamma, per macro action.
        lam: lambda, per macro action.
        macro_value: How tokens' values make a macro action's.
        macro_reward: How tokens' rewards become a macro action's.

    Returns:
        f32[rows, T] each: every token has its macro action's advantage and value target.

    Raises:
        ValueError: If shapes differ or a choice is unknown.
    """
    check_token_columns(mask, reward=reward, value=value)
    if macro_reward not in ("sum", "mean"):
        raise unknown("macro_reward", macro_reward, MacroReward)
    steps = macro_mask(macro_id)
    if not steps.shape[1]:
        return GaeTargets(advantage=torch.zeros_like(value), value_target=torch.zeros_like(value))
    weight = _weights(macro_id, macro_value)
    kept = zero_where_masked_out(reward, mask).double()
    of_macros = gae(
        steps,
        reward=sum_over_macros(kept * weight if macro_reward == "mean" else kept, macro_id),
        value=sum_over_macros(zero_where_masked_out(value, mask).double() * weight, macro_id),
        bootstrap_value=bootstrap_value,
        discount=discount,
        lam=lam,
    )
    index = macro_id.clamp(min=0)
    return GaeTargets(
        advantage=zero_where_masked_out(of_macros.advantage.gather(1, index), mask).to(value),
        value_target=zero_where_masked_out(of_macros.value_target.gather(1, index), mask).to(value),
    )
