"""The FSDP engine as configuration, placement and planner know it.

What a layout's data-parallel ranks are here depends on its ZeRO stage. With stages 2 and 3 they
divide the weights by rows and share out the rows of a call: together they are one rank of a worker
group, of `tp x dp` processes, `dp` of which are shards (see `mesh.py`). With stage 2 what one has
gathered of a layer it keeps until the call ends: gathering once takes the place of gathering in
each micro-batch's forward and backward pass. With stage 0 each of them is a rank that holds
everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....planner.cost.engine_model import EngineModel, ShardedMemory
from ....planner.cost.memory import weight_bytes
from ....planner.cost.memory_ledger import Parts
from ....planner.inputs.calls import Call, CallKind
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import ModelShape
from ..engine import Engine, usual_options, why_not_as_usual

__all__ = ["DIVIDED_FAMILIES", "FSDP"]

DIVIDED_FAMILIES = ("llama", "qwen2", "qwen3")
"""The `model_type`s whose matrix products it divides; it divides the weights of any by rows."""

_NAME = "fsdp"


def _why_not(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    if kind == "generate":
        return "FSDP does not generate here"
    if layout.pp > 1:
        return "FSDP has no pipeline stages"
    if layout.zero == 1:
        return "FSDP shares a model's gradients and weights (zero=2 or 3) or nothing"
    if layout.sequence_parallel:
        return "FSDP does not cut activations along the sequence"
    if shape is not None and layout.tp > 1:
        if shape.adapter_params:
            return "FSDP does not divide the matrix products of adapters"
        if shape.num_experts or (shape.family and shape.family not in DIVIDED_FAMILIES):
            families = ", ".join(DIVIDED_FAMILIES)
            return f"FSDP has tensor parallelism for {families}, not for '{shape.family}'"
        if shape.num_key_heads % layout.tp:
            return f"FSDP cannot divide {shape.num_key_heads} key heads by tp={layout.tp}"
    return why_not_as_usual(_NAME, layout, kind)


def _shards(layout: Layout) -> int:
    return layout.dp if layout.zero >= 2 else 1


def _division(layout: Layout) -> tuple[int, int]:
    return layout.tp * _shards(layout), layout.pp


def _options(layout: Layout) -> Mapping[str, Any]:
    keeps = {"reshard_after_forward": False} if layout.zero == 2 else {}
    return {**usual_options(layout), "shards": _shards(layout), **keeps}


class FsdpMemory(ShardedMemory):
    """An `EngineMemory`: frozen models are divided by rows as trained ones are."""

    def resident(self, call: Call, layout: Layout) -> Parts:
        """See `EngineMemory`; what stage 2 gathers is not held between calls."""
        held = super().resident(call, _stage_3(layout))
        if call.trained or layout.zero < 2:
            return held
        return held._replace(weights=-(-held.weights // layout.dp))

    def transient(
        self, call: Call, layout: Layout, *, borrows: bool = False, rows: int | None = None
    ) -> Parts:
        """See `EngineMemory`; a frozen layer is gathered while it is computed, as others are."""
        gathering = replace(call, trained=True)
        adds = super().transient(gathering, _stage_3(layout), borrows=borrows, rows=rows)
        if layout.zero != 2 or call.kind == "generate":
            return adds
        return adds._replace(weights=weight_bytes(call.model, call.head, layout))


def _stage_3(layout: Layout) -> Layout:
    return layout.model_copy(update={"zero": 3}) if layout.zero == 2 else layout


FSDP = Engine(
    planned=EngineModel(
        name=_NAME,
        why_not=_why_not,
        memory=FsdpMemory(),
        # Not 0 as well: roles of one group that divide alike need no processes of their own.
        zero_stages=(2, 3),
        shards_frozen=True,
        sequence_parallel=False,
    ),
    roles={
        "policy": "penstock.workers.engines.fsdp_engine.specs:FsdpPolicySpec",
        "value": "penstock.workers.engines.fsdp_engine.specs:FsdpValueSpec",
        "reward_model": "penstock.workers.engines.fsdp_engine.specs:FsdpRewardSpec",
    },
    division=_division,
    options=_options,
)
