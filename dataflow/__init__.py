"""Graphs of step functions, and the engine that runs them.

The public names, each importable from here. They are loaded when first asked for, because most of
them need torch, whose import takes seconds, and a program that only looks something up does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        ConfigError,
        FlowError,
        PenstockError,
        PlanError,
        StateError,
        WorkerError,
    )
    from .graph.axes import Axis, Behavior, GroupId, boolean, f32, i64
    from .graph.graph import Graph
    from .graph.role import Loss, LossSum, Metric, Role, Worker, call
    from .graph.tracer import build, op
    from .runtime.call_context import call_key, current_step, step_scope
    from .runtime.eager import run_eagerly
    from .runtime.engine import Engine, Source, StepResult
    from .runtime.executor import Executor
    from .runtime.in_process import InProcess
    from .runtime.placement import DeviceGroup, Placement, one_group
    from .runtime.worker_protocol import WorkerContext, WorkerSpec
    from .scheduler.schedule import Schedule

__all__ = [
    "Axis",
    "Behavior",
    "ConfigError",
    "DeviceGroup",
    "Engine",
    "Executor",
    "FlowError",
    "Graph",
    "GroupId",
    "InProcess",
    "Loss",
    "LossSum",
    "Metric",
    "PenstockError",
    "Placement",
    "PlanError",
    "Role",
    "Schedule",
    "Source",
    "StateError",
    "StepResult",
    "Worker",
    "WorkerContext",
    "WorkerError",
    "WorkerSpec",
    "boolean",
    "build",
    "call",
    "call_key",
    "current_step",
    "f32",
    "i64",
    "one_group",
    "op",
    "run_eagerly",
    "step_scope",
]

_MODULES = {
    "graph.axes": ("Axis", "Behavior", "GroupId", "boolean", "f32", "i64"),
    "runtime.call_context": ("call_key", "current_step", "step_scope"),
    "runtime.eager": ("run_eagerly",),
    "runtime.engine": ("Engine", "Source", "StepResult"),
    "errors": (
        "ConfigError",
        "FlowError",
        "PenstockError",
        "PlanError",
        "StateError",
        "WorkerError",
    ),
    "runtime.executor": ("Executor",),
    "runtime.in_process": ("InProcess",),
    "graph.graph": ("Graph",),
    "runtime.placement": ("DeviceGroup", "Placement", "one_group"),
    "graph.tracer": ("build", "op"),
    "graph.role": ("Loss", "LossSum", "Metric", "Role", "Worker", "call"),
    "scheduler.schedule": ("Schedule",),
    "runtime.worker_protocol": ("WorkerContext", "WorkerSpec"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
