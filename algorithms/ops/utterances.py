"""Values of whole turns: where a critic is asked for them, and what they should be.

Zhou et al., "ArCHer", 2024, section 3. One action is one turn. V(s) is asked before a turn's first
token, Q(s, a) after its last one: a critic's value at t is of what stands before token t, so Q is
asked in the slot after the turn. One critic says both, because it has read where it is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from ...dataflow.graph.tracer import op
from ..roles.agents import Conversations, TurnIndex
from ..roles.language import PerToken, TokenMask
from .final_state import lengthened
from .groups import scored_tokens
from .macro_actions import sum_over_macros
from .reductions import check_token_columns, zero_where_masked_out

ActionValue = Literal["critic", "backup"]
"""What Q(s, a) is in an advantage: what the critic says of the turn, or the target that it learns
this from, `r + discount * V(s')`, with what the environment answered."""


@dataclass(frozen=True, kw_only=True)
class Utterances(Conversations):
    """Conversations with one token more in every row, and where a critic is asked about turns.

    Example:
        Prompt `[5]`, a turn `[8, 2]`, the answer `[9]`, a turn `[7, 2]`:
        `tokens = [[5, 8, 2, 9, 7, 2, 2]]`, `turn = [[-1, 0, 0, -1, 1, 1, -1]]`,
        `states = [[F, T, F, T, T, F, T]]`: V at 1 and 4, Q at 3 and 6.
    """

    states: TokenMask
    """True on the first token of each turn and on the slot after its last one."""


@op(scope="row", makes_rows=True)
def utterances(held: Conversations) -> Utterances:
    """Lengthen every row by one token, a copy of its last one, and find where turns begin and end.

    A conversation without a score has neither tokens nor states to learn from.

    Args:
        held: Token columns [rows, T].

    Returns:
        Token columns [rows, T + 1].
    """
    longer = lengthened(held)
    states = _first(longer["turn"]) | _after(longer["turn"])
    longer["mask"] = scored_tokens(longer["mask"], held.score)
    return Utterances(**longer, states=scored_tokens(states, held.score))


@op(scope="row")
def bellman_targets(
    turn: TurnIndex, *, reward: PerToken, value: PerToken, discount: float
) -> PerToken:
    """What a critic's values of turns should be, by those of its slower copy.

    `Q(s, a) <- r + discount * V(s')` after a turn, `V(s) <- Q(s, a)` before it. After the last turn
    comes nothing. Where nothing was shown after a turn, its slot is the next turn's first token:
    there V is asked, and Q is `r + discount * V(s')` itself.

    Args:
        turn: i64[rows, T], of `Utterances`.
        reward: f32[rows, T].
        value: f32[rows, T], the slower copy's at `states`.
        discount: gamma, per turn.

    Returns:
        f32[rows, T]; 0 outside `states`.

    Raises:
        ValueError: If shapes differ.
    """
    _, q, backup = _of_turns(turn, reward, value, discount)
    first, after = _first(turn), _after(turn)
    toward_v, toward_q = _over_tokens(q, turn), _over_tokens(backup, turn).roll(1, dims=1)
    return torch.where(first, toward_v, zero_where_masked_out(toward_q, after))


@op(scope="row")
def utterance_advantage(
    turn: TurnIndex,
    *,
    reward: PerToken,
    value: PerToken,
    discount: float,
    action_value: ActionValue = "critic",
) -> PerToken:
    """`A(s, a) = Q(s, a) - V(s)` of each turn, for all of its tokens.

    Args:
        turn: i64[rows, T], of `Utterances`.
        reward: f32[rows, T]; "critic" reads it only where nothing was shown after a turn.
        value: f32[rows, T], the critic's at `states`.
        discount: gamma, per turn.
        action_value: What Q(s, a) is.

    Returns:
        f32[rows, T]; 0 outside turns.

    Raises:
        ValueError: If shapes differ or `action_value` is unknown.
    """
    if action_value not in ("critic", "backup"):
        raise ValueError(f"action_value {action_value!r} is unknown; choose 'critic' or 'backup'")
    v, q, backup = _of_turns(turn, reward, value, discount)
    return _over_tokens((q if action_value == "critic" else backup) - v, turn)


def _first(turn: Tensor) -> Tensor:
    """bool[rows, T]: the first token of each turn."""
    return (turn >= 0) & (turn != F.pad(turn, (1, 0), value=-1)[:, : turn.shape[1]])


def _after(turn: Tensor) -> Tensor:
    """bool[rows, T]: the slot after each turn's last token."""
    before = F.pad(turn, (1, 0), value=-1)[:, : turn.shape[1]]
    return (before >= 0) & (turn != before)


def _of_turns(
    turn: Tensor, reward: Tensor, value: Tensor, discount: float
) -> tuple[Tensor, Tensor, Tensor]:
    """f32[rows, K] each: V and Q of turns, and `r + discount * V` of the turn that comes next."""
    check_token_columns(turn >= 0, reward=reward, value=value)
    first, after = _first(turn), _after(turn)
    v = sum_over_macros(zero_where_masked_out(value, first), turn)
    next_v = F.pad(v, (0, 1))[:, 1:]
    backup = sum_over_macros(reward, turn) + discount * next_v
    asked = zero_where_masked_out(value, after & ~first).roll(-1, dims=1)
    shown = (after & ~first).to(value).roll(-1, dims=1)
    q = torch.where(sum_over_macros(shown, turn) > 0, sum_over_macros(asked, turn), backup)
    return v, q, backup


def _over_tokens(of_turns: Tensor, turn: Tensor) -> Tensor:
    """f32[rows, T]: each turn's number on all of its tokens, 0 outside turns."""
    if not of_turns.shape[1]:
        return torch.zeros_like(turn, dtype=of_turns.dtype)
    return zero_where_masked_out(of_turns.gather(1, turn.clamp(min=0)), turn >= 0)
