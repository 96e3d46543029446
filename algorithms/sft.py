"""Supervised fine-tuning: imitate demonstrated responses by maximum likelihood."""

from __future__ import annotations

from ..dataflow.options import PositiveInt, option_class
from .losses.tokens import CrossEntropyLoss
from .roles import Demonstrations, Policy, TrainMetrics


@option_class
class SFT:
    """Options of supervised fine-tuning."""

    loss: CrossEntropyLoss = CrossEntropyLoss()
    """Weighing of tokens of the responses."""
    epochs: PositiveInt = 1
    """Passes over each step's demonstrations."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""


def sft_step(demos: Demonstrations, actor: Policy, cfg: SFT) -> TrainMetrics:
    """Train on one step's demonstrations; prompts are context and are not imitated."""
    return actor.train(cfg.loss, demos, epochs=cfg.epochs, num_minibatches=cfg.num_minibatches)
