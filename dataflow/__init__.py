"""Graphs of step functions, and the engine that runs them.

The public names, each importable from here. They are loaded when first asked for, because most of
them need torch, whose import takes seconds, and a program that only looks something up does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .registry import on_demand

if TYPE_CHECKING:
    from .errors import ConfigError, FlowError, PenstockError, PlanError, StateError, WorkerError
    from .graph.axes import Axis, Behavior, GroupId, boolean, f32, i64
    from .graph.graph import Graph
    from .graph.role import Loss, LossSum, Metric, Role, Worker, call
    from .graph.tracer import build, op
    from .runtime.call_context import call_key, current_step, step_scope
    from .runtime.columns import Source
    from .runtime.eager import run_eagerly
    from .runtime.engine import Engine
    from .runtime.executor import Executor
    from .runtime.in_process import InProcess
    from .runtime.messages import StepResult
    from .runtime.placement import DeviceGroup, Placement, one_group
    from .runtime.worker_protocol import WorkerContext, WorkerSpec
    from .scheduler.schedule import Schedule

_MODULES = {
    "errors": (
        *("ConfigError", "FlowError", "PenstockError"),
        *("PlanError", "StateError", "WorkerError"),
    ),
    "graph.axes": ("Axis", "Behavior", "GroupId", "boolean", "f32", "i64"),
    "graph.graph": ("Graph",),
    "graph.role": ("Loss", "LossSum", "Metric", "Role", "Worker", "call"),
    "graph.tracer": ("build", "op"),
    "runtime.call_context": ("call_key", "current_step", "step_scope"),
    "runtime.columns": ("Source",),
    "runtime.eager": ("run_eagerly",),
    "runtime.engine": ("Engine",),
    "runtime.executor": ("Executor",),
    "runtime.in_process": ("InProcess",),
    "runtime.messages": ("StepResult",),
    "runtime.placement": ("DeviceGroup", "Placement", "one_group"),
    "runtime.worker_protocol": ("WorkerContext", "WorkerSpec"),
    "scheduler.schedule": ("Schedule",),
}

__all__ = ["ConfigError", "FlowError", "PenstockError", "PlanError", "StateError", "WorkerError"]
__all__ += ["Axis", "Behavior", "Graph", "GroupId", "boolean", "build", "f32", "i64", "op"]
__all__ += ["Loss", "LossSum", "Metric", "Role", "Worker", "WorkerContext", "WorkerSpec", "call"]
__all__ += ["DeviceGroup", "Executor", "InProcess", "Placement", "Schedule", "Source", "one_group"]
__all__ += ["Engine", "StepResult", "call_key", "current_step", "run_eagerly", "step_scope"]

__getattr__ = on_demand(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
