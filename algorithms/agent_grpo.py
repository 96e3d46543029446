"""GRPO on conversations: a conversation is as good as it beats the others about the same problem.

The same advantage and loss as `grpo`, over all turns of the policy: what it was shown in between is
not trained on. Each turn's tokens get the advantage of the whole conversation, as in Cao et al.,
"SkyRL-Agent", 2025, and Jin et al., "Search-R1", 2025, section 3.
"""

from __future__ import annotations

from ..dataflow.graph.tracer import op
from ..dataflow.options import option_class
from .grpo import GRPO
from .ops.advantages import broadcast_over_tokens, group_advantage
from .ops.reductions import Variance
from .options import train_policy
from .roles import Agent, Policy, Prompts, Sampling, TrainMetrics
from .roles.language import PieceNumber
from .roles.language_tables import PerSample, PromptId


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


@option_class
class AgentGRPO(GRPO):
    """Options of GRPO on conversations."""

    sampling: Sampling = Sampling(num_samples=8, max_new_tokens=256, max_total_tokens=2048)
    """Sampling of turns; see `Policy.converse` for its lengths."""
    max_turns: int = 8
    """Most turns of the policy in a conversation."""


def agent_grpo_step(prompts: Prompts, actor: Policy, agent: Agent, cfg: AgentGRPO) -> TrainMetrics:
    """Hold groups of conversations, and train on how each compares with its group."""
    held = actor.converse(
        prompts.prompt, prompts.prompt_id, agent, cfg.sampling, max_turns=cfg.max_turns
    )
    advantage = conversation_advantage(
        held.score,
        held.prompt_id,
        held.piece,
        divide_by_std=cfg.divide_by_std,
        variance=cfg.std_variance,
        eps=cfg.std_eps,
    )
    return train_policy(actor, held, broadcast_over_tokens(advantage, held.mask), cfg.loss, cfg)
