"""Reward modeling with margins: a response should win by as much as people said it is better.

Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models", 2023, section 3.2.2.
"""

from __future__ import annotations

from torch import Tensor

from ...dataflow.graph.role import Loss, LossSum
from ...dataflow.options import NonNegativeFloat, PositiveInt, option_class
from ..losses.preference import PairMean, of_scores
from ..ops.pairs import pair_rows
from ..roles import RewardModel, ScoredPairs, TrainMetrics
from ..roles.language_tables import ScoreOutput


@option_class
class MarginLoss(PairMean, Loss[ScoredPairs, ScoreOutput]):
    """As `BradleyTerryLoss`, where the chosen response should win by what the data says.

    Touvron et al., "Llama 2", 2023, equation 2.
    """

    margin_coef: NonNegativeFloat = 1.0
    """Margin per unit by which the data scores the chosen response higher."""
    centering_coef: NonNegativeFloat = 0.0
    """Weight of the term that keeps scores around 0; 0.01 is usual."""

    def __call__(self, output: ScoreOutput, batch: ScoredPairs, totals: Tensor) -> LossSum:
        chosen, rejected = pair_rows(batch.pair_id, batch.chosen)
        margin = self.margin_coef * (batch.score[chosen] - batch.score[rejected])
        return of_scores(output, batch, self.divisor(totals), margin, self.centering_coef)


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
    return reward.train(cfg.loss, pairs, epochs=cfg.epochs, num_minibatches=cfg.num_minibatches)
