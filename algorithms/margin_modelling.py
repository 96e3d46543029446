"""Reward modeling with margins: a response should win by as much as people said it is better.

Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..dataflow.option_checks import check_range
from .losses import MarginLoss
from .roles import RewardModel, ScoredPairBatch, ScoredPairs, TrainMetrics


@dataclass(frozen=True, kw_only=True)
class MarginModelling:
    """Options of reward modeling with margins."""

    loss: MarginLoss = MarginLoss()
    """Margin per unit of score, and centering."""
    epochs: int = 1
    """Passes over each step's pairs."""
    num_minibatches: int = 1
    """Optimizer steps per pass."""

    def __post_init__(self) -> None:
        check_range(self, "epochs", "num_minibatches", at_least=1)


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
