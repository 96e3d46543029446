"""A causal language model as a `Policy` that is evaluated and trained by megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

from ....algorithms.roles.language import Policy
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.spec import ModelSpec
from ...training.logprob_mismatch import MismatchLimits
from ..sharded.policy import ShardedPolicy
from .options import MegatronOptions
from .worker import MegatronWorker

__all__ = ["MegatronPolicy", "MegatronPolicySpec"]


@dataclass(frozen=True, kw_only=True)
class MegatronPolicySpec(MegatronOptions):
    """Recipe for a `MegatronPolicy`."""

    model: ModelSpec
    """Architecture and weights: Llama, Qwen2 or Qwen3."""
    eos_token_id: int
    """The token that ends a response."""
    mismatch: MismatchLimits = MismatchLimits()
    """How far what it is trained on may be from its own log-probabilities."""

    def build(self, context: WorkerContext) -> MegatronPolicy:
        """Make this process's part of the policy on the context's device."""
        return MegatronPolicy(self, context)


class MegatronPolicy(MegatronWorker, ShardedPolicy, Policy):
    """See `MegatronPolicySpec`. It generates nothing: rollouts are another engine's."""

    engine = "the Megatron engine"

    def __init__(self, spec: MegatronPolicySpec, context: WorkerContext) -> None:
        self.spec = spec
        self.limits = spec.mismatch
        super().__init__(context, spec.model, spec)
