"""A policy whose engine drifts away from what trains it, for the tests beside it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from penstock.dataflow.runtime.call_context import current_step
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.workers.engines.registry import DEFAULT
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.optimizer import OptimizerSpec


@dataclass(frozen=True, kw_only=True)
class DriftingSpec:
    """A policy that reports other probabilities than it samples with, further off in every step."""

    model: ModelSpec
    end_ids: tuple[int, ...]
    optimizer: OptimizerSpec | None = None
    start_nats: float = 0.015
    nats_per_step: float = 0.005

    def build(self, context: WorkerContext) -> Any:
        """Make the policy, with `generate` replaced by one that reports drifted probabilities."""
        spec = DEFAULT.spec("policy")(
            model=self.model, end_ids=self.end_ids, optimizer=self.optimizer
        )
        policy: Any = spec.build(context)
        generate = policy.generate

        def drifted(**given: Any) -> Any:
            roll = generate(**given)
            off = self.start_nats + self.nats_per_step * current_step()
            return replace(roll, behavior_logprob=roll.behavior_logprob - off * roll.mask)

        policy.generate = drifted
        return policy
