"""What steps that train on their own rollouts share: checks of options, and the train call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol, TypeVar

from ...dataflow.graph.role import Loss
from ..ops.groups import scored_tokens
from ..ops.rollout_correction import RolloutCorrection, corrected_batch
from ..roles.language import (
    PerSample,
    PerToken,
    Policy,
    PolicyOutput,
    Rollout,
    Sampling,
    TrainMetrics,
)

R = TypeVar("R", bound=Rollout)


class SampledUpdates(Protocol):
    """The options of every step that samples responses and trains on them."""

    @property
    def sampling(self) -> Sampling:
        """How responses are sampled."""
        ...

    @property
    def epochs(self) -> int:
        """Passes over each step's rollouts."""
        ...

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps per pass."""
        ...


class PolicyUpdates(SampledUpdates, Protocol):
    """The options of a step whose loss is proportional to the advantages of tokens."""

    @property
    def correction(self) -> RolloutCorrection | None:
        """Importance weights of tokens; see `corrected_batch`."""
        ...


def check_groups(options: SampledUpdates) -> None:
    """Require several samples per prompt, for steps that compare them with each other.

    Raises:
        ValueError: If there is only one.
    """
    if options.sampling.num_samples < 2:
        raise ValueError(
            f"sampling.num_samples is {options.sampling.num_samples}, but {type(options).__name__} "
            "compares samples of one prompt with each other; set it to 2 or more"
        )


def scored_rows(roll: R, score: PerSample) -> R:
    """Return the rows with empty masks where there is no score; see `scored_tokens`."""
    return replace(roll, mask=scored_tokens(roll.mask, score))


def train_policy(
    actor: Policy,
    roll: Rollout,
    advantage: PerToken,
    loss: Loss[Any, PolicyOutput],
    cfg: PolicyUpdates,
    *,
    ref_logprob: PerToken | None = None,
) -> TrainMetrics:
    """Train a policy on its rollouts and their advantages, corrected as `cfg` says.

    `loss` reads a `PolicyBatch`, or a `ReferencePolicyBatch` if there is a `ref_logprob`.
    """
    temperature = cfg.sampling.temperature
    batch = corrected_batch(actor, roll, advantage, cfg.correction, temperature, ref_logprob)
    return actor.train(
        loss,
        batch,
        epochs=cfg.epochs,
        num_minibatches=cfg.num_minibatches,
        temperature=temperature,
    )
