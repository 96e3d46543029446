"""Supervised fine-tuning: imitate demonstrated responses by maximum likelihood."""

from __future__ import annotations

from dataclasses import dataclass

from ..dataflow.option_checks import check_range
from .losses import CrossEntropyLoss
from .roles import DemonstrationBatch, Demonstrations, Policy, TrainMetrics


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Options of supervised fine-tuning."""

    loss: CrossEntropyLoss = CrossEntropyLoss()
    """How tokens of the responses are weighed."""
    epochs: int = 1
    """Passes over each step's demonstrations."""
    num_minibatches: int = 1
    """Optimizer steps per pass."""

    def __post_init__(self) -> None:
        check_range(self, "epochs", "num_minibatches", at_least=1)


def sft_step(demos: Demonstrations, actor: Policy, cfg: SFT) -> TrainMetrics:
    """Train on one step's demonstrations; prompts are context and are not imitated."""
    return actor.train(
        cfg.loss,
        DemonstrationBatch(tokens=demos.tokens, mask=demos.mask),
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
    )
