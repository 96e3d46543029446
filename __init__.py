"""Penstock: RL and RLHF algorithms as dataflow graphs, driven by one controller.

`import penstock as ps` gives what a program of one's own needs; `docs/notebooks.md` has a table.
Names are loaded when first asked for, so importing the package costs nothing.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.algorithms.grpo import GRPO, grpo_step
    from penstock.algorithms.roles import (
        Policy,
        PolicyBatch,
        Prompts,
        Reward,
        RewardModel,
        Rollout,
        Sampling,
        TrainMetrics,
        ValueBatch,
        ValueModel,
    )
    from penstock.dataflow import (
        Engine,
        Loss,
        LossSum,
        Metric,
        Role,
        Schedule,
        build,
        call,
        one_group,
        op,
        run_eagerly,
    )
    from penstock.launch.from_python.handle import RunHandle, open_run
    from penstock.launch.from_python.run import Planned, plan, run
    from penstock.launch.stages.observers import StageObserver
    from penstock.workers.data.reasoning_task import ReasoningTaskSpec
    from penstock.workers.data.sources import PromptSource
    from penstock.workers.data.task import Task
    from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
    from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec
    from penstock.workers.engines.torch_engine.specs import TorchPolicySpec
    from penstock.workers.engines.vllm_engine.generator import VllmPolicySpec
    from penstock.workers.models.spec import ModelSpec
    from penstock.workers.models.tokenizer import TokenizerSpec
    from penstock.workers.rewards.rule_reward import RuleReward, RuleRewardSpec
    from penstock.workers.training.optimizer import OptimizerSpec

__version__ = "0.1.0"

_MODULES = {
    "launch.from_python.run": ("Planned", "plan", "run"),
    "launch.from_python.handle": ("RunHandle", "open_run"),
    "launch.stages.observers": ("StageObserver",),
    "dataflow": (
        *("Engine", "Loss", "LossSum", "Metric", "Role", "Schedule"),
        *("build", "call", "one_group", "op", "run_eagerly"),
    ),
    "algorithms.roles": (
        *("Policy", "Prompts", "Reward", "RewardModel", "ValueModel"),
        *("PolicyBatch", "Rollout", "Sampling", "TrainMetrics", "ValueBatch"),
    ),
    "algorithms.grpo": ("GRPO", "grpo_step"),
    "workers.data.task": ("Task",),
    "workers.data.reasoning_task": ("ReasoningTaskSpec",),
    "workers.data.sources": ("PromptSource",),
    "workers.engines.torch_engine.specs": ("TorchPolicySpec",),
    "workers.engines.fsdp_engine.specs": ("FsdpPolicySpec",),
    "workers.engines.megatron_engine.specs": ("MegatronPolicySpec",),
    "workers.engines.vllm_engine.generator": ("VllmPolicySpec",),
    "workers.models.spec": ("ModelSpec",),
    "workers.models.tokenizer": ("TokenizerSpec",),
    "workers.rewards.rule_reward": ("RuleReward", "RuleRewardSpec"),
    "workers.training.optimizer": ("OptimizerSpec",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Engine",
    "FsdpPolicySpec",
    "GRPO",
    "Loss",
    "LossSum",
    "MegatronPolicySpec",
    "Metric",
    "ModelSpec",
    "OptimizerSpec",
    "Planned",
    "Policy",
    "PolicyBatch",
    "PromptSource",
    "Prompts",
    "ReasoningTaskSpec",
    "Reward",
    "RewardModel",
    "Role",
    "Rollout",
    "RuleReward",
    "RuleRewardSpec",
    "RunHandle",
    "Sampling",
    "Schedule",
    "StageObserver",
    "Task",
    "TokenizerSpec",
    "TorchPolicySpec",
    "TrainMetrics",
    "ValueBatch",
    "ValueModel",
    "VllmPolicySpec",
    "__version__",
    "build",
    "call",
    "grpo_step",
    "one_group",
    "op",
    "open_run",
    "plan",
    "run",
    "run_eagerly",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    if name == "run" or "torch" not in sys.modules:
        from .launch.openmp import spin_briefly

        spin_briefly()  # before torch is imported, which the next line does
    with warnings.catch_warnings():
        # A library says so in every notebook without ipywidgets, of which nothing here makes use.
        warnings.filterwarnings("ignore", "IProgress not found")
        value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
