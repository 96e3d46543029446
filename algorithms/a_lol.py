"""A-LoL: offline, imitate the given responses that are better than a prompt's expected reward.

Baheti et al., "Leftover Lunch: Advantage-based Offline Reinforcement Learning for Language Models",
2023. A whole response is one action. Two things differ from the paper: the value of a prompt is
learned along with the policy by a critic, and responses are repeated in proportion to their
advantage, without chance.
"""

from __future__ import annotations

from ..dataflow.options import PositiveInt, option_class
from .losses import ALoLLoss, ClippedValueLoss
from .ops.advantages import broadcast_over_tokens
from .ops.groups import scored_tokens
from .ops.weighted_responses import better_responses, first_token, value_of_prompt
from .roles import (
    Policy,
    PolicyBatch,
    PreferencePairs,
    Reward,
    TrainMetrics,
    ValueBatch,
    ValueModel,
)


@option_class
class ALoL:
    """Options of A-LoL."""

    loss: ALoLLoss = ALoLLoss()
    """Importance weights, or the reference-free or the KL variant."""
    value_loss: ClippedValueLoss = ClippedValueLoss(eps=None)
    """The critic's loss, on the state before a response's first token."""
    prioritized: bool = True
    """Repeat responses in proportion to their advantage; False trains on each once."""
    epochs: PositiveInt = 1
    """Passes over each step's responses."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""


def a_lol_step(
    pairs: PreferencePairs,
    actor: Policy,
    critic: ValueModel,
    ref: Policy,
    reward: Reward,
    cfg: ALoL,
) -> tuple[TrainMetrics, TrainMetrics]:
    """Score the given responses against what their prompt promises, and imitate the better ones."""
    start = first_token(pairs.mask)
    value = critic.value(pairs.tokens, start)
    score = reward.score(pairs.tokens, pairs.mask, pairs.pair_id)
    rows = better_responses(
        pairs.tokens,
        pairs.mask,
        score=score,
        value=value_of_prompt(value, start),
        prioritized=cfg.prioritized,
    )
    times = {"epochs": cfg.epochs, "num_minibatches": cfg.num_minibatches}
    batch = PolicyBatch(
        tokens=rows.tokens,
        mask=rows.mask,
        behavior_logprob=ref.logprob(rows.tokens, rows.mask),
        advantage=broadcast_over_tokens(rows.advantage, rows.mask),
    )
    start = scored_tokens(start, score)
    target = broadcast_over_tokens(score, start)
    states = ValueBatch(tokens=pairs.tokens, mask=start, old_value=value, value_target=target)
    return actor.train(cfg.loss, batch, **times), critic.train(cfg.value_loss, states, **times)
