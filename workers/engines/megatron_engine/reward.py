"""A backbone with a score head as a `RewardModel` computed by megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

from ....algorithms.roles.language import RewardModel
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.spec import ModelSpec
from ..sharded.value import ShardedReward, score_head
from .options import MegatronOptions
from .worker import MegatronWorker

__all__ = ["MegatronReward", "MegatronRewardSpec"]


@dataclass(frozen=True, kw_only=True)
class MegatronRewardSpec(MegatronOptions):
    """Recipe for a `MegatronReward`."""

    model: ModelSpec
    """The backbone: the policy's folder or architecture, or a folder a reward worker saved."""

    def build(self, context: WorkerContext) -> MegatronReward:
        """Make this process's part of the reward model on the context's device."""
        return MegatronReward(self, context)


class MegatronReward(MegatronWorker, ShardedReward, RewardModel):
    """See `MegatronRewardSpec`. A row without any masked token scores 0."""

    def __init__(self, spec: MegatronRewardSpec, context: WorkerContext) -> None:
        self.spec = spec
        super().__init__(context, spec.model, spec, ("score", score_head(spec.model, context)))
