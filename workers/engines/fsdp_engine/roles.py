"""Policies, value models and reward models of the FSDP engine."""

from __future__ import annotations

from dataclasses import dataclass

from ....algorithms.roles.language import Policy, RewardModel, ValueModel
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.spec import ModelSpec
from ...training.logprob_mismatch import MismatchLimits
from ..sharded.policy import ShardedPolicy
from ..sharded.value import ShardedReward, ShardedValue, score_head, value_head
from .options import FsdpOptions
from .worker import FsdpWorker

__all__ = [
    "FsdpPolicy",
    "FsdpPolicySpec",
    "FsdpReward",
    "FsdpRewardSpec",
    "FsdpValue",
    "FsdpValueSpec",
]


@dataclass(frozen=True, kw_only=True)
class FsdpPolicySpec(FsdpOptions):
    """Recipe for an `FsdpPolicy`."""

    model: ModelSpec
    """Architecture and weights; tensor parallelism is for Llama, Qwen2 and Qwen3."""
    eos_token_id: int
    """The token that ends a response."""
    mismatch: MismatchLimits = MismatchLimits()
    """How far what it is trained on may be from its own log-probabilities."""

    def build(self, context: WorkerContext) -> FsdpPolicy:
        """Make this process's part of the policy on the context's device."""
        return FsdpPolicy(self, context)


class FsdpPolicy(FsdpWorker, ShardedPolicy, Policy):
    """See `FsdpPolicySpec`. It generates nothing: rollouts are another engine's."""

    engine = "the FSDP engine"

    def __init__(self, spec: FsdpPolicySpec, context: WorkerContext) -> None:
        self.spec = spec
        self.limits = spec.mismatch
        super().__init__(context, spec.model, spec)


@dataclass(frozen=True, kw_only=True)
class FsdpValueSpec(FsdpOptions):
    """Recipe for an `FsdpValue`."""

    model: ModelSpec
    """The backbone: the policy's folder or architecture, or a folder a value worker saved."""
    zero_init_head: bool = True
    """Start with value 0 everywhere, unless the folder has a head of its own."""

    def build(self, context: WorkerContext) -> FsdpValue:
        """Make this process's part of the value model on the context's device."""
        return FsdpValue(self, context)


class FsdpValue(FsdpWorker, ShardedValue, ValueModel):
    """See `FsdpValueSpec`."""

    def __init__(self, spec: FsdpValueSpec, context: WorkerContext) -> None:
        self.spec = spec
        head = value_head(spec.model, context, zero_init=spec.zero_init_head)
        super().__init__(context, spec.model, spec, ("value_head", head))


@dataclass(frozen=True, kw_only=True)
class FsdpRewardSpec(FsdpOptions):
    """Recipe for an `FsdpReward`."""

    model: ModelSpec
    """The backbone: the policy's folder or architecture, or a folder a reward worker saved."""

    def build(self, context: WorkerContext) -> FsdpReward:
        """Make this process's part of the reward model on the context's device."""
        return FsdpReward(self, context)


class FsdpReward(FsdpWorker, ShardedReward, RewardModel):
    """See `FsdpRewardSpec`. A row without any masked token scores 0."""

    def __init__(self, spec: FsdpRewardSpec, context: WorkerContext) -> None:
        self.spec = spec
        super().__init__(context, spec.model, spec, ("score", score_head(spec.model, context)))
