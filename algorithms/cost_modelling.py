"""Cost modeling: learn how unsafe responses are, with 0 between safe and unsafe.

Dai et al., "Safe RLHF: Safe Reinforcement Learning from Human Feedback", 2023, equation 6.
"""

from __future__ import annotations

from ..dataflow.options import PositiveInt, option_class
from .losses import CostModelLoss
from .roles import RewardModel, ScoredPairBatch, ScoredPairs, TrainMetrics


@option_class
class CostModelling:
    """Options of cost modelling."""

    loss: CostModelLoss = CostModelLoss()
    """Which responses count as safe."""
    epochs: PositiveInt = 1
    """Passes over each step's pairs."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""


def cost_modelling_step(pairs: ScoredPairs, cost: RewardModel, cfg: CostModelling) -> TrainMetrics:
    """Train on one step's pairs, of which the chosen response is the safer one."""
    return cost.train(
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
