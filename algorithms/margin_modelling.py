"""Reward modeling with margins: a response should win by as much as people said it is better.

Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, section 3.2.2.
"""

from __future__ import annotations

from ..dataflow.options import PositiveInt, option_class
from .losses import MarginLoss
from .roles import RewardModel, ScoredPairBatch, ScoredPairs, TrainMetrics


@option_class
class MarginModelling:
    """Options of reward modeling with margins."""

    loss: MarginLoss = MarginLoss()
    """Margin per unit of score, and centering."""
    epochs: PositiveInt = 1
    """Passes over each step's pairs."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""


def margin_modelling_step(
    pairs: ScoredPairs, reward: RewardModel, cfg: MarginModelling
) -> TrainMetrics:
    """Train on one step's pairs of scored responses."""
    return reward.train(
        cfg.loss,
        ScoredPairBatch(
            pair_id=pairs.pair_id,
            tokens=pairs.tokens,
            mask=pairs.mask,
            chosen=pairs.chosen,
            score=pairs.score,
        ),
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
    )
