"""An engine that is not part of the package: it trains on one device only, at a fraction of lr.

Its workers are the default engine's; what is its own is what an engine declares: a name, layouts,
memory, an option.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.dataflow.graph.role import Role
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.planner.cost.engine_model import EngineMemory, EngineModel
from penstock.planner.cost.memory import Parts
from penstock.planner.inputs.calls import Call, CallKind
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.workers.engines.engine import EngineKind
from penstock.workers.engines.registry import DEFAULT
from penstock.workers.models.spec import ModelSpec
from penstock.workers.training.logprob_mismatch import MismatchLimits
from penstock.workers.training.optimizer import OptimizerSpec

MEMORY_BYTES = 3 * 2**20


@dataclass(frozen=True, kw_only=True)
class SlowPolicySpec:
    """Recipe for a policy that learns slowly."""

    model: ModelSpec
    end_ids: tuple[int, ...]
    optimizer: OptimizerSpec | None = None
    mismatch: MismatchLimits = MismatchLimits()
    micro_batch_tokens: int = 1024
    lr_share: float = 0.5
    """Of the learning rate that was configured."""

    def build(self, context: WorkerContext) -> Role:
        optimizer = self.optimizer and replace(self.optimizer, lr=self.lr_share * self.optimizer.lr)
        spec = DEFAULT.spec("policy")(
            model=self.model,
            end_ids=self.end_ids,
            optimizer=optimizer,
            mismatch=self.mismatch,
            micro_batch_tokens=self.micro_batch_tokens,
        )
        return spec.build(context)


class SlowMemory(EngineMemory):
    """Always the same, whatever is called."""

    def resident(self, call: Call, layout: Layout) -> Parts:
        return Parts(weights=MEMORY_BYTES)

    def transient(
        self,
        call: Call,
        layout: Layout,
        *,
        on_cpu: bool = True,
        borrows: bool = False,
        rows: int | None = None,
    ) -> Parts:
        return Parts(activations=MEMORY_BYTES)


def why_not(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    return "the slow engine has one device" if layout.num_devices > 1 else None


ENGINE = EngineKind(
    planned=EngineModel(
        name="slow", why_not=why_not, memory=SlowMemory(), zero_stages=(0,), packs_tokens=1024
    ),
    roles={"policy": "own_engine:SlowPolicySpec"},
    generates=True,
)
