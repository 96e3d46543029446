"""The state after a response's last token, as one more slot of its row.

A critic's entry t is the value *before* token t, so nothing says what a critic expects after the
last token. A row that is one token longer has a slot for it: what that token is does not matter,
since a value looks only at what came before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ...dataflow.graph.tracer import op
from ..roles.language import ENDINGS, Conversations
from ..roles.language_tables import PerSample, PerToken, Rollout, SampleFlag, TokenMask
from .reductions import check_token_columns


@dataclass(frozen=True, kw_only=True)
class RolloutWithFinalState(Rollout):
    """A rollout with one token more in every row, which is not trained on.

    Example:
        Prompt `[5, 6]`, response `[8, 2]`: `tokens = [[5, 6, 8, 2, 2]]`,
        `mask = [[F, F, T, T, F]]`, `states = [[F, F, T, T, T]]`.
    """

    states: TokenMask
    """`mask`, and True as well on the slot after the last sampled token."""


@op(scope="row", makes_rows=True)
def with_final_state(roll: Rollout) -> RolloutWithFinalState:
    """Lengthen every row by one token, a copy of its last one.

    Args:
        roll: Token columns [rows, T].

    Returns:
        Token columns [rows, T + 1]. A row without sampled tokens has no state of its own.
    """
    lengths = (roll.tokens >= 0).sum(dim=1, keepdim=True)
    tokens, version = (F.pad(ids, (0, 1), value=-1) for ids in (roll.tokens, roll.version))
    if roll.tokens.shape[1]:
        last = roll.tokens.gather(1, (lengths - 1).clamp(min=0))
        tokens, version = tokens.scatter(1, lengths, last), version.scatter(1, lengths, 0)
    mask = F.pad(roll.mask, (0, 1))
    place = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, place, -1).amax(dim=1, keepdim=True)
    return RolloutWithFinalState(
        prompt_id=roll.prompt_id,
        tokens=tokens,
        mask=mask,
        behavior_logprob=F.pad(roll.behavior_logprob, (0, 1)),
        finished=roll.finished,
        version=version,
        states=mask | ((place == last + 1) & (last >= 0)),
    )


@dataclass(frozen=True, kw_only=True)
class ConversationsWithFinalState(Conversations):
    """Conversations with one token more in every row, which is not trained on.

    Example:
        Prompt `[5]`, a last turn `[8, 2]`, the answer `[9]`: `tokens = [[5, 8, 2, 9, 9]]`,
        `states = [[F, T, T, F, T]]`: a next turn would begin in the last slot.
    """

    states: TokenMask
    """`mask` with True added on the slot after the row's last token."""
    ended: SampleFlag
    """False where the conversation ran out of turns or tokens, and would have gone on."""


@op(scope="row", makes_rows=True)
def with_next_turn(held: Conversations) -> ConversationsWithFinalState:
    """Lengthen every row by one token, a copy of its last one, where a next turn would begin.

    Token columns [rows, T] become [rows, T + 1], as in `with_final_state`.
    """
    lengths = (held.tokens >= 0).sum(dim=1, keepdim=True)
    longer = lengthened(held)
    cut_off = (ENDINGS.index("last turn"), ENDINGS.index("out of tokens"))
    return ConversationsWithFinalState(
        **longer,
        states=longer["mask"].scatter(1, lengths, value=True),
        ended=~torch.isin(held.ending, held.ending.new_tensor(cut_off)),
    )


def lengthened(held: Conversations) -> dict[str, Any]:
    """Return the columns of conversations, every row longer by a copy of its last token."""
    longer = vars(with_final_state(held))
    own = {name: column for name, column in vars(held).items() if name not in longer}
    own["turn"] = F.pad(held.turn, (0, 1), value=-1)
    own["reward"] = F.pad(held.reward, (0, 1))
    return {name: column for name, column in longer.items() if name != "states"} | own


@op(scope="row")
def bootstrap_of(
    value: PerToken, mask: TokenMask, states: TokenMask, finished: SampleFlag
) -> PerSample:
    """A critic's value of the final state of responses that were cut off; 0 after finished ones.

    Args:
        value: f32[rows, T], the critic's values of `states`.
        mask: bool[rows, T], True on sampled tokens.
        states: bool[rows, T], see `RolloutWithFinalState`.
        finished: bool[rows].

    Returns:
        f32[rows].

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(mask, value=value)
    after = torch.where(states & ~mask, value, torch.zeros_like(value)).sum(dim=1)
    return torch.where(finished, torch.zeros_like(after), after)
