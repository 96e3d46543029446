"""What the FSDP engine holds, for the planner."""

from __future__ import annotations

from dataclasses import replace

from ....planner.cost.engine_model import ShardedMemory
from ....planner.cost.memory_ledger import Parts
from ....planner.inputs.calls import Call
from ....planner.inputs.layout import Layout

__all__ = ["FsdpMemory"]


class FsdpMemory(ShardedMemory):
    """An `EngineMemory`: frozen models are divided by rows as trained ones are."""

    def resident(self, call: Call, layout: Layout) -> Parts:
        """See `EngineMemory`."""
        held = super().resident(call, layout)
        if call.trained or layout.zero < 3:
            return held
        return held._replace(weights=-(-held.weights // layout.dp))

    def transient(
        self, call: Call, layout: Layout, *, borrows: bool = False, rows: int | None = None
    ) -> Parts:
        """See `EngineMemory`; a frozen layer is gathered while it is computed, as others are."""
        return super().transient(replace(call, trained=True), layout, borrows=borrows, rows=rows)
