"""The contract of backends, which provide an executor's processes.

A backend starts processes on devices, each with one object in it, calls that object's methods from
here, and stores what is put or returned, so that any of the processes can get it. Ray is one such
backend. What the processes do, and when, is no concern of it: see `supervisor.py`.

A backend keeps to this:

- The calls of one process are carried out one after another, in the order in which they were made.
- No function blocks but `reserve`, `get` and `watch`, and those for no longer than they are told.
- A process does not outlive the one that started it.
- Only these processes can connect to them, or make them unpickle anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from ...dataflow.runtime.placement import DeviceGroup

Ref = Any
"""Stands for what is stored, or will be returned by a call; what it is depends on the backend.

It can be hashed, pickled, and given to other processes. What it stands for is stored for as long as
any process has the reference.
"""

Process = Any
"""A started process; what it is depends on the backend."""


class BackendError(Exception):
    """The object that a reference stands for cannot be had."""


class ProcessDied(BackendError):
    """The process ended before the call did; one line says how."""


class NotInTime(BackendError):
    """It is not there yet."""


class CallFailed(BackendError):
    """The called method raised something.

    Args:
        text: The traceback.
        cause: What it raised.
    """

    def __init__(self, text: str, cause: BaseException | None) -> None:
        super().__init__(text)
        self.cause = cause


class ObjectStore(Protocol):
    """Objects by reference, for this process and all others."""

    def put(self, value: Any) -> Ref:
        """Store an object; what this process has put may end with it."""
        ...

    def get(self, refs: Sequence[Ref], timeout_s: float) -> list[Any]:
        """Wait for all of these, and copy them here; arrays in them may be read-only.

        Raises:
            CallFailed: If the call that was to return one raised something.
            ProcessDied: If its process ended.
            NotInTime: If not all of them are there within `timeout_s` seconds.
            BackendError: If one cannot be had for another reason.
        """
        ...


class ProcessHome(ObjectStore, Protocol):
    """The backend as the object in a process sees it."""

    @property
    def host(self) -> str:
        """The address on which it may listen: the other processes can connect to it there."""
        ...


class Reservation(Protocol):
    """Devices that were set aside for the groups of an executor."""

    def release(self, group: str) -> None:
        """Give back what a group has and no other; idempotent. Its processes have ended."""

    def is_there(self, group: str) -> bool:
        """True if all devices of a group are still there: no machine that has some is gone."""
        ...


class ProcessBackend(ObjectStore, Protocol):
    """Starts processes, calls them, and tells what has become of that.

    Equal backends can use each other's processes.
    """

    @property
    def is_up(self) -> bool:
        """False once all its processes have ended because the backend has."""
        ...

    def reserve(
        self,
        groups: Sequence[DeviceGroup],
        timeout_s: float,
        training: AbstractSet[str] = frozenset(),
        held: Sequence[Any] = (),
    ) -> Reservation:
        """Set devices aside for the processes of these groups: all of them, or none.

        Args:
            groups: The groups. Their processes are on the nodes that they name.
            timeout_s: How long to wait for what others have.
            training: Names of those that cannot do without each other; any other comes and goes.
            held: What was reserved for groups that have stayed from before, and has not been given
                back.

        Raises:
            PlanError: If they are not there; says which and where.
        """
        ...

    def spawn(
        self,
        make: Callable[..., Any],
        arguments: tuple[Any, ...],
        group: DeviceGroup,
        process: int,
        devices: Any,
    ) -> Process:
        """Start a process on its device; comes back before it runs.

        Args:
            make: Makes the object in it, of its `ProcessHome` and the arguments. What it raises is
                raised by whatever is called first.
            arguments: Picklable.
            group: The group it belongs to.
            process: Its number there.
            devices: What `reserve` gave for the group.
        """
        ...

    def call(
        self, process: Process, method: str, arguments: tuple[Any, ...], num_results: int = 1
    ) -> list[Ref]:
        """Call a method of the object in a process.

        Args:
            process: The process to call.
            method: Name of the method.
            arguments: Picklable; references in them arrive as such.
            num_results: References to return. If there are several, the method returns a tuple of
                as many. Results outlive the process.
        """
        ...

    def watch(self, refs: Sequence[Ref], timeout_s: float) -> list[Ref]:
        """Wait until something is known of any of these, be it that it will never be there.

        Returns:
            All of which it is known; none if the time is up.
        """
        ...

    def kill(self, process: Process) -> None:
        """End a process at once; nothing if it has ended."""
