"""What the Ray executor says of itself."""

from __future__ import annotations

from ....dataflow.runtime.executor import Executor
from ...weight_sync.registry import Transport
from ..executor_kind import ExecutorKind

__all__ = ["RAY"]


def _create(num_threads: int | None, transport: Transport) -> Executor:
    from .executor import RayExecutor

    return RayExecutor(num_threads, transport=transport)


def _start() -> None:
    from .executor import connect_ray

    connect_ray()


def _end() -> None:
    from .executor import shutdown_ray

    shutdown_ray()


RAY = ExecutorKind(name="ray", create=_create, package="ray", start=_start, end=_end)
