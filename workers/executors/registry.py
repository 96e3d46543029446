"""The executors that come with Penstock; `executor_kind.py` says what one declares."""

from __future__ import annotations

from ...dataflow.errors import nearest
from ...dataflow.registry import Registry
from .executor_kind import ExecutorKind

DEFAULT_EXECUTOR = "in_process"
"""Where a run computes by default: in the calling process."""

PARALLEL_EXECUTOR = "ray"
"""What several processes run on by default."""

EXECUTORS = Registry[ExecutorKind](
    {
        DEFAULT_EXECUTOR: "penstock.workers.executors.executor_kind:IN_PROCESS",
        PARALLEL_EXECUTOR: "penstock.workers.executors.on_ray.declaration:RAY",
    }
)
"""Name -> kind."""


def check_executor(name: str) -> str:
    """The name, if an executor has it, or it may be somebody's own ("module:EXECUTOR")."""
    if name in EXECUTORS or ":" in name:
        return name
    raise ValueError(
        f"'{name}' is no executor{nearest(name, EXECUTORS)}\n"
        f"    there are: {', '.join(EXECUTORS)}, or module:EXECUTOR for one of your own"
    )
