"""Ray's actors as the processes of an executor, and its object store.

Ray itself is imported here, so this module is imported only once `connect_ray` has set the
environment that Ray reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from ....dataflow.errors import WorkerError
from ....dataflow.runtime.placement import DeviceGroup
from ..process_backend import BackendError, CallFailed, NotInTime, Process, ProcessDied
from .devices import RayDevices, reserve

_Ref = ray.ObjectRef[Any]

# In what Ray says if a machine cannot import the class of an actor, or of what it is made of.
_NO_IMPORT = (
    "failed to import on the worker",
    "input arguments for this task could not be computed",
)
_ADDRESS = re.compile(r"\bip=([^,\s)]+)")  # In the same: the machine's


class _Store:
    """Ray's object store; what a process has put ends with it."""

    def put(self, value: Any) -> _Ref:
        return ray.put(value)

    def get(self, refs: Sequence[_Ref], timeout_s: float) -> list[Any]:
        with _told_apart():
            return ray.get(list(refs), timeout=timeout_s)


class _Home(_Store):
    """A `ProcessHome` in a Ray actor."""

    @property
    def host(self) -> str:
        return ray.util.get_node_ip_address()


class RankActor:
    """A process: the object in it, whose methods are called by name."""

    def __init__(self, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._resident = make(_Home(), *arguments)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._resident, method)(*arguments)


@dataclass(frozen=True)
class RayBackend(_Store):
    """A `ProcessBackend` of Ray actors; any two are equal, as they use the process's own Ray."""

    @property
    def is_up(self) -> bool:
        return ray.is_initialized()

    def reserve(
        self,
        groups: Sequence[DeviceGroup],
        timeout_s: float,
        training: AbstractSet[str] = frozenset(),
        held: Sequence[RayDevices] = (),
    ) -> RayDevices:
        return reserve(groups, timeout_s, training, held)

    def spawn(
        self,
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        group: DeviceGroup,
        process: int,
        devices: RayDevices,
    ) -> Process:
        options = devices.options(group, process)
        # Ray calls a process after its class: `ps` is to say which of a run's it is.
        named = type(f"{group.name}[{process}]", (RankActor,), {})
        actor: Any = ray.remote(named)
        return actor.options(num_cpus=0, max_restarts=0, **options).remote(make, arguments)

    def call(
        self, process: Process, method: str, arguments: tuple[Any, ...], num_results: int = 1
    ) -> list[_Ref]:
        if num_results == 1:
            return [process.call.remote(method, arguments)]
        return process.call.options(num_returns=num_results).remote(method, arguments)

    def watch(self, refs: Sequence[_Ref], timeout_s: float) -> list[_Ref]:
        ready, _ = ray.wait(list(refs), num_returns=1, timeout=timeout_s)
        if len(refs) > 1 and ready:
            ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
        return ready

    def kill(self, process: Process) -> None:
        ray.kill(process)


def _cannot_import(error: RayError) -> WorkerError | None:
    said = str(error)
    if all(text not in said for text in _NO_IMPORT):
        return None
    where = _ADDRESS.search(said)
    (why,) = [line for line in said.splitlines() if line.strip()][-1:]
    return WorkerError(
        f"the machine {where[1] if where else 'of a process'} cannot import what runs there: "
        f"{why}\n    install the same versions of Penstock and of its requirements on every machine"
    )


@contextmanager
def _told_apart() -> Generator[None]:
    try:
        yield
    except GetTimeoutError as error:
        raise NotInTime(str(error)) from error
    except RayTaskError as error:
        raise CallFailed(str(error), error.cause) from error
    except RayActorError as error:
        if (missing := _cannot_import(error)) is not None:
            raise CallFailed(str(error), missing) from error
        raise ProcessDied(str(error).splitlines()[0]) from error
    except RayError as error:
        raise BackendError(str(error)) from error
