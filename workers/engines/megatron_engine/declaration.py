"""The Megatron engine as configuration, placement and planner know it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....planner.cost.engine_model import EngineModel
from ....planner.inputs.calls import CallKind
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import ModelShape
from ..engine import Engine, Requirement, usual_options, why_not_as_usual

__all__ = ["FAMILIES", "MEGATRON"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""The `model_type`s that it computes."""

_NAME = "megatron"


def _why_not(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    if kind == "generate":
        return "Megatron does not generate here"
    if layout.zero > 1:
        return "Megatron shares no more than the optimizer's state"
    if shape is not None:
        if shape.num_experts or (shape.family and shape.family not in FAMILIES):
            return f"Megatron computes {', '.join(FAMILIES)} here, not '{shape.family}'"
        if shape.num_key_heads % layout.tp:
            return f"Megatron cannot divide {shape.num_key_heads} key heads by tp={layout.tp}"
    return why_not_as_usual(_NAME, layout, kind)


def _options(layout: Layout) -> Mapping[str, Any]:
    cut = {"sequence_parallel": True} if layout.sequence_parallel else {}
    return usual_options(layout) | cut


MEGATRON = Engine(
    planned=EngineModel(name=_NAME, why_not=_why_not, zero_stages=(1,)),
    roles={
        "policy": "penstock.workers.engines.megatron_engine.specs:MegatronPolicySpec",
        "value": "penstock.workers.engines.megatron_engine.specs:MegatronValueSpec",
        "reward_model": "penstock.workers.engines.megatron_engine.specs:MegatronRewardSpec",
    },
    needs=Requirement("megatron", "megatron-core", "penstock-rl[megatron]"),
    options=_options,
    computes=lambda model: "by Megatron",
)
