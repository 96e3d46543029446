"""The torch engine as configuration, placement and planner know it."""

from __future__ import annotations

from typing import Any

from ....planner.cost.engine_model import EngineModel
from ....planner.inputs.calls import CallKind
from ....planner.inputs.layout import Layout
from ....planner.inputs.model_shape import ModelShape
from ..engine import EngineKind, why_not_as_usual
from .costs import MICRO_BATCH_TOKENS, TorchMemory, TorchSaving


def _why_not(layout: Layout, kind: CallKind, shape: ModelShape | None) -> str | None:
    shares = layout.zero > 0 and kind != "generate"
    alone = layout.num_devices == layout.dp and layout.ep == 1
    if not alone or shares:
        return "the torch engine runs data-parallel only"
    return why_not_as_usual("torch", layout, kind)


def _computes(model: Any) -> str:
    from .backbone import is_lean

    return "by Penstock" if is_lean(model.base_model) else "through transformers"


TORCH = EngineKind(
    planned=EngineModel(
        name="torch",
        why_not=_why_not,
        memory=TorchMemory(),
        zero_stages=(0,),
        sequence_parallel=False,
        packs_tokens=MICRO_BATCH_TOKENS,
        shares_prompts=True,
        reads_responses=True,
        draws_minibatches=True,
        head_products=4,
        generates_in_place=True,
    ),
    roles={
        "policy": "penstock.workers.engines.torch_engine.specs:TorchPolicySpec",
        "value": "penstock.workers.engines.torch_engine.specs:TorchValueSpec",
        "reward_model": "penstock.workers.engines.torch_engine.specs:TorchRewardModelSpec",
        "process_reward": "penstock.workers.rewards.process_reward:TorchProcessRewardSpec",
    },
    rollout="penstock.workers.engines.torch_engine.specs:TorchGeneratorSpec",
    generates=True,
    saving=TorchSaving(),
    computes=_computes,
)
