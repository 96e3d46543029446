"""What steps share that train on pairs of responses to one prompt."""

from __future__ import annotations

from dataclasses import dataclass

from ...dataflow.option_checks import check_range
from ..losses.preference import DPOLoss
from ..losses.sequence import ComparedPairBatch, PairLoss
from ..ops.pairs import SelectedPairs
from ..roles.language import PerSample, Policy, ReferencePairBatch, Rollout, Sampling, TrainMetrics
from .policy_updates import Updates

__all__ = ["PairUpdates", "train_on_pairs", "train_on_preferences"]


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


def train_on_preferences(
    actor: Policy, ref: Policy, pairs: SelectedPairs, loss: DPOLoss, cfg: Updates
) -> TrainMetrics:
    """Train a policy on pairs of its rollouts of which one is preferred."""
    temperature = cfg.sampling.temperature
    batch = ReferencePairBatch(
        pair_id=pairs.pair_id,
        tokens=pairs.tokens,
        mask=pairs.mask,
        chosen=pairs.chosen,
        ref_logprob=ref.logprob(pairs.tokens, pairs.mask, temperature=temperature),
    )
    return actor.train(
        loss,
        batch,
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
        temperature=temperature,
    )
