"""GRPO on conversations: a conversation is as good as it beats the others about the same problem.

The same advantage and loss as `grpo`, over all turns of the policy: what it was shown in between is
not trained on. Each turn's tokens get the advantage of the whole conversation, as in Cao et al.,
"SkyRL-Agent", 2025, and Jin et al., "Search-R1", 2025, section 3.
"""

from __future__ import annotations

from ..dataflow.options import option_class
from .grpo import GRPO
from .ops.advantages import broadcast_over_tokens
from .ops.turns import conversation_advantage
from .options.policy_updates import train_policy
from .roles import Agent, Policy, Prompts, Sampling, TrainMetrics


@option_class
class AgentGRPO(GRPO):
    """Options of GRPO on conversations."""

    sampling: Sampling = Sampling(num_samples=8, max_new_tokens=256, max_total_tokens=2048)
    """How turns are sampled; see `Policy.converse` for its lengths."""
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
