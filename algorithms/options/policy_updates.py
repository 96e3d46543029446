"""What steps that train on their own rollouts share: sampling, corrections, and the train call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...dataflow.graph.role import Loss
from ...dataflow.option_checks import check_range
from ..ops.rollout_correction import RolloutCorrection, corrected, with_rollout_logprob
from ..roles.language import (
    PerToken,
    Policy,
    PolicyBatch,
    PolicyOutput,
    ReferencePolicyBatch,
    Rollout,
    Sampling,
    TrainMetrics,
)

__all__ = ["Updates", "train_policy"]


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How responses are drawn, and how often they are trained on."""

    sampling: Sampling = Sampling()
    """How responses are drawn."""
    correction: RolloutCorrection | None = None
    """Importance weights for an engine that samples with other numbers than the trainer's; None
    takes the engine's log-probabilities as they are."""
    epochs: int = 1
    """Passes over each step's rollouts."""
    num_minibatches: int = 1
    """Optimizer steps per pass."""

    def __post_init__(self) -> None:
        self.sampling.check_explores()
        check_range(self, "epochs", "num_minibatches", at_least=1)

    def check_uncorrected(self) -> None:
        """Refuse a correction, for steps that have nothing to put its weights on.

        Raises:
            ValueError: If there is one.
        """
        if self.correction is not None:
            raise ValueError(
                f"{type(self).__name__} takes no correction: importance weights are put on "
                "advantages of tokens, which its loss lacks or is not proportional to; leave "
                "correction out"
            )

    def check_groups(self) -> None:
        """Require several samples per prompt, for steps that compare them.

        Raises:
            ValueError: If there is only one.
        """
        if self.sampling.num_samples < 2:
            raise ValueError(
                f"sampling.num_samples is {self.sampling.num_samples}, but {type(self).__name__} "
                "compares samples of one prompt with each other; set it to 2 or more"
            )


def train_policy(
    actor: Policy,
    roll: Rollout,
    advantage: PerToken,
    loss: Loss[Any, PolicyOutput],
    cfg: Updates,
    *,
    ref_logprob: PerToken | None = None,
) -> TrainMetrics:
    """Train a policy on its rollouts and their advantages, corrected as `cfg` says.

    `loss` reads a `PolicyBatch`, or a `ReferencePolicyBatch` if there is a `ref_logprob`.
    """
    temperature = cfg.sampling.temperature
    behavior_logprob, weighted = corrected(actor, roll, advantage, cfg.correction, temperature)
    batch = PolicyBatch(
        tokens=roll.tokens, mask=roll.mask, behavior_logprob=behavior_logprob, advantage=weighted
    )
    if ref_logprob is not None:
        batch = ReferencePolicyBatch(**vars(batch), ref_logprob=ref_logprob)
    if cfg.correction is not None and cfg.correction.mode != "none":
        batch = with_rollout_logprob(batch, roll.behavior_logprob)
    return actor.train(
        loss,
        batch,
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
        temperature=temperature,
    )
