"""What conversations and their turns earn, as advantages and as rewards of tokens.

For advantages a conversation's turns are macro actions: `macro_gae(mask, turn, ...)` estimates one
advantage per turn, `gae` one per token.
"""

from __future__ import annotations

from ...dataflow.graph.tracer import op
from ..roles.agents import PieceNumber, TurnIndex, TurnNumber
from ..roles.language import PerSample, PerToken, PromptId, TokenMask
from .advantages import group_advantage
from .kl import KLEstimator, kl_estimate
from .reductions import Variance, check_token_columns, zero_where_masked_out


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


@op(scope="group")
def conversation_advantage(
    score: PerSample,
    prompt_id: PromptId,
    piece: PieceNumber,
    *,
    divide_by_std: bool = True,
    variance: Variance = "unbiased",
    eps: float = 1e-6,
) -> PerSample:
    """`group_advantage` of conversations: each counts once in its group, however many rows it has.

    Args:
        score: f32[rows]; the rows of a conversation have the same.
        prompt_id: i64[rows], the group of each row.
        piece: i64[rows], of `Conversations`: a row with 0 begins a conversation.
        divide_by_std: See `group_advantage`, as for the rest.
        variance: As there.
        eps: As there.

    Returns:
        f32[rows].

    Raises:
        ValueError: As `group_advantage`.
    """
    first = piece == 0
    advantage = group_advantage(
        score[first], prompt_id[first], divide_by_std=divide_by_std, variance=variance, eps=eps
    )
    return advantage[first.long().cumsum(0) - 1]


@op(scope="row")
def branch_turn(mask: TokenMask, turn: TurnIndex, branch: TurnNumber) -> TokenMask:
    """The tokens of the turn in which a conversation parts from its partner: bool[rows, T].

    Args:
        mask: bool[rows, T].
        turn: i64[rows, T].
        branch: i64[rows], of `Conversations`.
    """
    return mask & (turn == branch[:, None])
