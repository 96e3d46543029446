"""Direct preference optimization: learn from pairs of responses without a reward model.

Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model",
2023. Length-normalized DPO, IPO and others are values of `loss.loss_type`.
"""

from __future__ import annotations

from ..dataflow.options import PositiveInt, option_class
from .losses.preference import DPOLoss
from .roles import Policy, PreferencePairs, ReferencePairBatch, TrainMetrics


@option_class
class DPO:
    """Options of direct preference optimization."""

    loss: DPOLoss = DPOLoss()
    """Function of the two log-ratios, and its beta."""
    epochs: PositiveInt = 1
    """Passes over each step's pairs."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""


def dpo_step(pairs: PreferencePairs, actor: Policy, ref: Policy, cfg: DPO) -> TrainMetrics:
    """Make chosen responses likelier than rejected ones, measured against the reference."""
    return actor.train(
        cfg.loss,
        ReferencePairBatch(
            pair_id=pairs.pair_id,
            tokens=pairs.tokens,
            mask=pairs.mask,
            chosen=pairs.chosen,
            ref_logprob=ref.logprob(pairs.tokens, pairs.mask),
        ),
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
    )
