"""The executors, and what one declares: all that the outside knows of it.

To add one: a folder with its `ProcessBackend` and its `ExecutorKind`, a line in `EXECUTORS`, and an
option for the command line (`configs/executor/NAME.yaml`). One that is not part of this package
needs no line: `executor.kind=module:EXECUTOR`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ...dataflow.errors import ConfigError, nearest, one_process
from ...dataflow.registry import Registry
from ...dataflow.runtime.executor import Executor
from ..weight_sync.channel import Transport

if TYPE_CHECKING:
    from .assignment import Machine
    from .process_backend import ProcessBackend


@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutorKind:
    """A kind of executor."""

    name: str  # What the configuration and messages call it
    # Makes one that is not started, from the threads of each process (None for an equal share of
    # the cores) and the weight channel; see `Supervisor`.
    create: Callable[[int | None, Transport], Executor]
    # Whether groups and ranks are processes of their own; otherwise there is one group of one rank,
    # and no weights travel.
    has_processes: bool = True
    # What must be installed, as it is imported and as it is called; None if nothing.
    package: str | None = None
    # Starts what its processes live in, or joins it, as the first executor would; what provides
    # them, or None if it is not shared.
    connect: Callable[[], ProcessBackend | None] = lambda: None
    # The machines of the cluster that its processes run on, those first that are taken first; none
    # if they run on this one.
    machines: Callable[[], Sequence[Machine]] = tuple
    # Ends what stopped executors of the kind have left running for the next.
    end: Callable[[], None] = lambda: None

    @property
    def is_installed(self) -> bool:
        return self.package is None or find_spec(self.package) is not None

    def make(self, num_threads: int | None, transport: Transport) -> Executor:
        """One that is not started."""
        if not self.is_installed:
            raise ConfigError(
                f"executor={self.name} needs the package {self.package}, which is not installed\n"
                f"    pip install 'penstock-rl[{self.package}]', or set executor=in_process"
            )
        with one_process():
            made: Any = self.create(num_threads, transport)
        if isinstance(made, Executor):
            return made
        raise ConfigError(
            f"executor '{self.name}': its ExecutorKind.create returned a {type(made).__name__}, "
            "which is no executor\n    return one of a class that inherits from Executor "
            f"({Executor.__module__})"
        )


def _in_process(num_threads: int | None, transport: Transport) -> Executor:
    from ...dataflow.runtime.in_process import InProcess

    return InProcess()


IN_PROCESS = ExecutorKind(name="in_process", create=_in_process, has_processes=False)
"""The calling process, which computes everything one after another."""


DEFAULT_EXECUTOR = "in_process"
"""The executor of a run by default: the calling process."""

PARALLEL_EXECUTOR = "ray"
"""The executor that runs several processes by default."""

EXECUTORS = Registry[ExecutorKind](
    {
        DEFAULT_EXECUTOR: "penstock.workers.executors.registry:IN_PROCESS",
        PARALLEL_EXECUTOR: "penstock.workers.executors.on_ray.executor:RAY",
    }
)
"""Name -> kind."""


def check_executor(name: str) -> str:
    """The name, if an executor has it, or it may be the user's own ("module:EXECUTOR")."""
    if name in EXECUTORS or ":" in name:
        return name
    raise ValueError(
        f"'{name}' is no executor{nearest(name, EXECUTORS)}\n"
        f"    there are: {', '.join(EXECUTORS)}, or module:EXECUTOR for one of your own"
    )
