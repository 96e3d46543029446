"""What steps share that sample two responses per prompt and train on the difference."""

from __future__ import annotations

from dataclasses import dataclass

from ..dataflow.ranges import check_range
from .roles import PerSample, Policy, Rollout, Sampling, TrainMetrics
from .sequence_losses import ComparedPairBatch, PairLoss
from .updates import Updates

__all__ = ["PairUpdates", "train_on_pairs"]


@dataclass(frozen=True, kw_only=True)
class PairUpdates(Updates):
    """Options of such steps."""

    sampling: Sampling = Sampling(num_samples=2, max_new_tokens=53)
    """How responses are drawn, two per prompt."""
    kl_coef: float = 0.05
    """Score taken per nat of a response's KL to the reference; with 0 there is no reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "kl_coef", at_least=0)
        if self.sampling.num_samples != 2:
            raise ValueError(
                f"sampling.num_samples is {self.sampling.num_samples}, but "
                f"{type(self).__name__} compares exactly two samples of a prompt; set it to 2"
            )
        self.check_uncorrected()


def train_on_pairs(
    actor: Policy, roll: Rollout, score: PerSample, loss: PairLoss, cfg: PairUpdates
) -> TrainMetrics:
    """Train a policy on pairs of its rollouts and their scores."""
    batch = ComparedPairBatch(
        prompt_id=roll.prompt_id,
        tokens=roll.tokens,
        mask=roll.mask,
        behavior_logprob=roll.behavior_logprob,
        score=score,
    )
    return actor.train(
        loss,
        batch,
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
        temperature=cfg.sampling.temperature,
    )
