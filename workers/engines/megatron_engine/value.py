"""A backbone with a value head as a `ValueModel` computed by megatron-core."""

from __future__ import annotations

from dataclasses import dataclass

from ....algorithms.roles.language import ValueModel
from ....dataflow.runtime.worker_protocol import WorkerContext
from ...models.spec import ModelSpec
from ..sharded.value import ShardedValue, value_head
from .options import MegatronOptions
from .worker import MegatronWorker

__all__ = ["MegatronValue", "MegatronValueSpec"]


@dataclass(frozen=True, kw_only=True)
class MegatronValueSpec(MegatronOptions):
    """Recipe for a `MegatronValue`."""

    model: ModelSpec
    """The backbone: the policy's folder or architecture, or a folder a value worker saved."""
    zero_init_head: bool = True
    """Start with value 0 everywhere, unless the folder has a head of its own."""

    def build(self, context: WorkerContext) -> MegatronValue:
        """Make this process's part of the value model on the context's device."""
        return MegatronValue(self, context)


class MegatronValue(MegatronWorker, ShardedValue, ValueModel):
    """See `MegatronValueSpec`."""

    def __init__(self, spec: MegatronValueSpec, context: WorkerContext) -> None:
        self.spec = spec
        head = value_head(spec.model, context, zero_init=spec.zero_init_head)
        super().__init__(context, spec.model, spec, ("value_head", head))
