"""Graphs of step functions, and the engine that runs them.

The public names, each importable from here. They are loaded when first asked for, because most of
them need torch, whose import takes seconds, and a program that only looks something up does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .axes import Axis, Behavior, GroupId, boolean, f32, i64
    from .context import call_key
    from .eager import run_eagerly
    from .engine import Engine, Source, StepResult
    from .errors import (
        ConfigError,
        FlowError,
        PenstockError,
        PlanError,
        StateError,
        WorkerError,
    )
    from .executor import Executor, InProcess
    from .graph import Graph
    from .placement import DeviceGroup, Placement, one_group
    from .record import build, op
    from .role import Loss, LossSum, Metric, Role, call
    from .schedule import Schedule
    from .worker import Closable, Trainable, WorkerContext, WorkerSpec

__all__ = [
    "Axis",
    "Behavior",
    "Closable",
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
    "Trainable",
    "WorkerContext",
    "WorkerError",
    "WorkerSpec",
    "boolean",
    "build",
    "call",
    "call_key",
    "f32",
    "i64",
    "one_group",
    "op",
    "run_eagerly",
]

_MODULES = {
    "axes": ("Axis", "Behavior", "GroupId", "boolean", "f32", "i64"),
    "context": ("call_key",),
    "eager": ("run_eagerly",),
    "engine": ("Engine", "Source", "StepResult"),
    "errors": (
        "ConfigError",
        "FlowError",
        "PenstockError",
        "PlanError",
        "StateError",
        "WorkerError",
    ),
    "executor": ("Executor", "InProcess"),
    "graph": ("Graph",),
    "placement": ("DeviceGroup", "Placement", "one_group"),
    "record": ("build", "op"),
    "role": ("Loss", "LossSum", "Metric", "Role", "call"),
    "schedule": ("Schedule",),
    "worker": ("Closable", "Trainable", "WorkerContext", "WorkerSpec"),
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
