"""The executors there are, one line each; see `executor_kind.py` for what one says of itself."""

from __future__ import annotations

from collections.abc import Mapping

from ...dataflow.errors import nearest
from ...dataflow.runtime.executor import Executor
from ...dataflow.runtime.in_process import InProcess
from ..weight_sync.registry import Transport
from .executor_kind import ExecutorKind
from .on_ray.declaration import RAY


def _in_process(num_threads: int | None, transport: Transport) -> Executor:
    return InProcess()


DEFAULT_EXECUTOR = ExecutorKind(name="in_process", create=_in_process, has_processes=False)
"""Where a run is if nothing is said: in the calling process."""

PARALLEL_EXECUTOR = RAY
"""What several processes run on if nothing is said."""

EXECUTORS: Mapping[str, ExecutorKind] = {kind.name: kind for kind in (DEFAULT_EXECUTOR, RAY)}
"""Name -> kind."""


def check_executor(name: str) -> str:
    """The name, if an executor has it, or it may be somebody's own ("module:EXECUTOR").

    Raises:
        ValueError: If not; says what there is.
    """
    if name in EXECUTORS or ":" in name:
        return name
    raise ValueError(
        f"'{name}' is no executor{nearest(name, EXECUTORS)}\n"
        f"    there are: {', '.join(EXECUTORS)}, or module:EXECUTOR for one of your own"
    )
