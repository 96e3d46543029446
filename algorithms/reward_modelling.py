"""Reward modeling: learn to score responses as people (or rules) compared them.

Ouyang et al., "Training Language Models to Follow Instructions with Human Feedback", 2022. Reward
models overfit fast: one pass over the pairs is usual. Of responses that are good or bad, each by
itself, it learns how likely each is to be good: an outcome reward model.
"""

from __future__ import annotations

from ..dataflow.options import PositiveInt, option_class
from .losses.preference import BradleyTerryLoss
from .roles import Feedback, RewardModel, TrainMetrics


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
    pairs: Feedback, reward: RewardModel, cfg: RewardModelling
) -> TrainMetrics:
    """Train on one step's pairs of responses, or on responses with a label each."""
    return reward.train(cfg.loss, pairs, epochs=cfg.epochs, num_minibatches=cfg.num_minibatches)
