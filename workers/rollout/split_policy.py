"""One policy, two engines: what a process runs follows from what its group is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from ...dataflow.errors import ConfigError
from ...dataflow.graph.role import Role
from ...dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec

__all__ = ["SplitPolicySpec"]

_ROLLOUT = frozenset({"generate"})


@dataclass(frozen=True, kw_only=True)
class SplitPolicySpec:
    """Recipe for a policy that one engine trains and another samples from."""

    train: WorkerSpec
    """Trains it and computes log-probabilities."""
    rollout: WorkerSpec
    """Generates; its weights are published by the other."""

    def build(self, context: WorkerContext) -> Role:
        """The engine that this group needs.

        Raises:
            ConfigError: If the group is asked to generate and for something else.
        """
        if not context.methods & _ROLLOUT:
            return self.train.build(context)
        if context.methods != _ROLLOUT:
            others = ", ".join(sorted(context.methods - _ROLLOUT))
            raise ConfigError(
                f"role '{context.role}' is to generate on the group that does its {others}, but "
                "generates with another engine\n    give generation a group of its own: "
                f"executor.nodes.{context.role}.generate=rollout, or set rollout=same"
            )
        return self.rollout.build(context)
