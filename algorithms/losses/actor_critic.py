"""Losses of an actor with a critic: a policy's and a value's, as language models are trained with.

Where both share an optimizer they are one loss, because it takes one step on both, under one bound
on the gradient. What their metrics mean is said in `losses`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ...dataflow.graph.role import Loss, LossSum
from ..ops.reductions import zero_where_masked_out
from ..ops.value_transforms import two_hot_loss, value_bins
from ..roles.environment import ActorCriticBatch, ActorCriticOutput
from ..roles.language_tables import PolicyOutput, ValueOutput
from .tokens import ClippedPolicyLoss, ClippedValueLoss, ReinforceLoss


@dataclass(frozen=True, kw_only=True)
class ActorLoss(Loss[ActorCriticBatch, PolicyOutput]):
    """A policy's loss over steps of environments."""

    policy: ClippedPolicyLoss | ReinforceLoss = ClippedPolicyLoss(entropy_coef=0.01)
    """The policy's, with the entropy bonus."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of every minibatch to mean 0 and deviation 1."""

    @property
    def needs_entropy(self) -> bool:
        return self.policy.needs_entropy

    def totals(self, batch: ActorCriticBatch) -> Tensor:
        """f64[5]: those of the policy's loss, and two moments of the advantages."""
        advantage = zero_where_masked_out(batch.advantage, batch.mask).double()
        moments = torch.stack([advantage.sum(), advantage.square().sum()])
        return torch.cat([self.policy.totals(batch), moments])

    def divisor(self, totals: Tensor) -> Tensor | None:
        """The policy loss's; None if advantages are normalized, by moments of all of them."""
        return None if self.normalize_advantages else self.policy.divisor(totals)

    def __call__(self, output: PolicyOutput, batch: ActorCriticBatch, totals: Tensor) -> LossSum:
        if self.normalize_advantages:
            # Less the minibatch's mean, over its unbiased deviation plus 1e-8.
            steps, total, squares = totals[0], totals[3], totals[4]
            mean = total / steps.clamp(min=1)
            variance = (squares - steps * mean.square()).clamp(min=0) / (steps - 1).clamp(min=1)
            advantage = (batch.advantage - mean) / (variance.sqrt() + 1e-8)
            batch = replace(batch, advantage=advantage.to(batch.advantage))
        return self.policy(output, batch, totals[:3])


@dataclass(frozen=True, kw_only=True)
class CriticLoss(Loss[ActorCriticBatch, ValueOutput]):
    """A critic's loss over steps of environments."""

    tolerates_lag: ClassVar[bool] = True

    value: ClippedValueLoss = ClippedValueLoss(coef=0.5)
    """Half a squared error times its `coef`."""

    def totals(self, batch: ActorCriticBatch) -> Tensor:
        return self.value.totals(batch)

    def __call__(self, output: ValueOutput, batch: ActorCriticBatch, totals: Tensor) -> LossSum:
        return self.value(output, batch, totals)


@dataclass(frozen=True, kw_only=True)
class ActorCriticLoss(Loss[ActorCriticBatch, ActorCriticOutput]):
    """The sum of a policy's loss and a critic's, each with its own coefficients."""

    policy: ClippedPolicyLoss | ReinforceLoss = ClippedPolicyLoss(entropy_coef=0.01)
    """The actor's, with the entropy bonus."""
    value: ClippedValueLoss = ClippedValueLoss(coef=0.5)
    """The critic's, half a squared error times its `coef`."""
    normalize_advantages: bool = True
    """Shift and scale the advantages of every minibatch to mean 0 and deviation 1."""
    two_hot: bool = False
    """Train a critic that weighs values, by cross-entropy: `model.architecture.value_bins`. Of
    `value`, only `coef` and the aggregation count then."""

    @property
    def _actor(self) -> ActorLoss:
        return ActorLoss(policy=self.policy, normalize_advantages=self.normalize_advantages)

    @property
    def needs_entropy(self) -> bool:
        return self.policy.needs_entropy

    def totals(self, batch: ActorCriticBatch) -> Tensor:
        """f64[12]: those of `ActorLoss`, then those of the critic's."""
        return torch.cat([self._actor.totals(batch), self.value.totals(batch)])

    def __call__(
        self, output: ActorCriticOutput, batch: ActorCriticBatch, totals: Tensor
    ) -> LossSum:
        if output.value_logits is not None and not self.two_hot:
            raise ValueError(
                "the critic weighs values, and the loss is not two_hot; set algorithm.cfg.loss."
                "two_hot=true (env_ppo and a2c; learning.loss of self_play and population), or "
                "leave out model.architecture.value_bins"
            )
        policy = self._actor(output, batch, totals[:5])
        value = self.value(output, batch, totals[5:])
        total = value.total
        if self.two_hot:
            logits = output.value_logits
            if logits is None:
                raise ValueError(
                    "the loss is two_hot, and the critic says one value; give the network "
                    "value_bins"
                )
            target = zero_where_masked_out(batch.value_target, batch.mask)
            loss = two_hot_loss(logits, target, value_bins(logits.shape[-1]).to(logits))
            total = self.value.coef * self.value.reduce(loss, batch.mask, totals[5:])
        return LossSum(policy.total + total, {**policy.metrics, **value.metrics})
