"""Declaration of the Ray executor."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ....dataflow.runtime.executor import Executor
from ...weight_sync.registry import Transport
from ..assignment import Machine
from ..executor_kind import ExecutorKind
from ..process_backend import ProcessBackend


def _create(num_threads: int | None, transport: Transport) -> Executor:
    from .executor import RayExecutor

    return RayExecutor(num_threads, transport=transport)


def _connect() -> ProcessBackend:
    from .executor import ray_backend

    return ray_backend()


def _machines() -> Sequence[Machine]:
    if not os.environ.get("RAY_ADDRESS"):
        return ()
    from .executor import connect_ray

    connect_ray()
    from .devices import ray_nodes

    return ray_nodes()


def _end() -> None:
    from .executor import shutdown_ray

    shutdown_ray()


RAY = ExecutorKind(
    name="ray", create=_create, package="ray", connect=_connect, machines=_machines, end=_end
)
