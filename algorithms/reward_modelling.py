"""Reward modeling: learn to score responses as people (or rules) compared them.

Ouyang et al., "Training Language Models to Follow Instructions with Human Feedback", 2022. Reward
models overfit fast: one pass over the pairs is usual.
"""

from __future__ import annotations

from ..dataflow.options import PositiveInt, option_class
from .losses.preference import BradleyTerryLoss
from .roles import PreferencePairs, RewardModel, TrainMetrics


@option_class
class RewardModelling:
    """Options of reward modelling."""

    loss: BradleyTerryLoss = BradleyTerryLoss()
    """Margin and centering of the pairwise loss."""
    epochs: PositiveInt = 1
    """Passes over each step's pairs."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""


def reward_modelling_step(
    pairs: PreferencePairs, reward: RewardModel, cfg: RewardModelling
) -> TrainMetrics:
    """Train on one step's pairs of responses."""
    return reward.train(cfg.loss, pairs, epochs=cfg.epochs, num_minibatches=cfg.num_minibatches)
