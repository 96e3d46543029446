"""What the turns of a conversation earn, as rewards of their tokens.

For advantages a conversation's turns are macro actions: `macro_gae(mask, turn, ...)` estimates one
advantage per turn, `gae` one per token.
"""

from __future__ import annotations

import torch

from ...dataflow.graph.tracer import op
from ..roles.agents import TurnIndex, TurnNumber
from ..roles.language import PerSample, PerToken, TokenMask
from .kl import KLEstimator, kl_estimate
from .macro_actions import macro_mask
from .reductions import check_token_columns, zero_where_masked_out

__all__ = ["branch_turn", "discounted_outcome", "turn_rewards"]


@op(scope="row")
def turn_rewards(
    mask: TokenMask,
    reward: PerToken,
    *,
    logprob: PerToken,
    ref_logprob: PerToken,
    kl_coef: float,
    kl_estimator: KLEstimator = "k1",
) -> PerToken:
    """Token rewards: what each turn earned on its last token, less the KL to a reference.

    Args:
        mask: bool[rows, T].
        reward: f32[rows, T], of `Conversations`.
        logprob: f32[rows, T], under the policy that sampled the tokens.
        ref_logprob: f32[rows, T], under the reference.
        kl_coef: Reward taken per nat.
        kl_estimator: Which estimate of the KL.

    Returns:
        f32[rows, T], without gradient.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(mask, reward=reward)
    kl = kl_estimate(mask, logprob=logprob, ref_logprob=ref_logprob, estimator=kl_estimator)
    return zero_where_masked_out(reward - kl_coef * kl, mask).detach()


@op(scope="row")
def discounted_outcome(
    mask: TokenMask, turn: TurnIndex, score: PerSample, *, discount: float
) -> PerToken:
    """The score of a conversation, discounted for each turn that was still to come.

    `discount^(K - 1 - k) * score` for all tokens of turn k of K.

    Args:
        mask: bool[rows, T].
        turn: i64[rows, T].
        score: f32[rows].
        discount: gamma, per turn.

    Returns:
        f32[rows, T]; 0 where the mask is False.

    Raises:
        ValueError: If shapes differ.
    """
    check_token_columns(mask, turn=turn)
    last = macro_mask(turn).sum(1, keepdim=True) - 1
    to_come = (last - turn).clamp(min=0)
    factor = torch.pow(torch.tensor(discount, dtype=torch.float64), to_come)
    return zero_where_masked_out(factor * score[:, None].double(), mask).to(torch.float32)


@op(scope="row")
def branch_turn(mask: TokenMask, turn: TurnIndex, branch: TurnNumber) -> TokenMask:
    """The tokens of the turn in which a conversation parts from its partner: bool[rows, T].

    Args:
        mask: bool[rows, T].
        turn: i64[rows, T].
        branch: i64[rows], of `Conversations`.
    """
    return mask & (turn == branch[:, None])
