"""What steps share that train on pairs of responses to one prompt."""

from __future__ import annotations

from ...dataflow.options import NonNegativeFloat, PositiveInt, option_class
from ..losses.sequence import ComparedPairBatch, PairLoss
from ..roles.language import PerSample, Policy, Rollout, Sampling, TrainMetrics


@option_class
class PairUpdates:
    """Options of such steps.

    There is no `correction`: its weights are put on advantages of tokens, which a loss of pairs has
    not.
    """

    sampling: Sampling = Sampling(num_samples=2, max_new_tokens=53)
    """How responses are sampled, two per prompt."""
    epochs: PositiveInt = 1
    """Passes over each step's rollouts."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass."""
    kl_coef: NonNegativeFloat = 0.05
    """Score taken per nat of a response's KL to the reference; with 0 there is no reference."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        if self.sampling.num_samples != 2:
            raise ValueError(
                f"sampling.num_samples is {self.sampling.num_samples}, but "
                f"{type(self).__name__} compares exactly two samples of a prompt; set it to 2"
            )


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
