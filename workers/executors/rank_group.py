"""The processes of one group: started, joined and built together, and ended together.

The *warm pool* keeps processes of an executor that has stopped for the next one. Only those that
are expensive to start are kept: whose workers all leave an engine behind for the next of their
kind, as vLLM's do. They end with their backend, or when an executor starts that has no use for
them.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any

from ...dataflow.errors import PenstockError, WorkerError
from ...dataflow.runtime.placement import DeviceGroup
from ...dataflow.runtime.worker_protocol import CLOSE_S
from .process_backend import (
    BackendError,
    CallFailed,
    NotInTime,
    Process,
    ProcessBackend,
    Ref,
    Reservation,
)
from .rank_process import RankProcess

__all__ = [
    "LEAST_START_S",
    "RankGroup",
    "all_results",
    "end_groups",
    "forget_warm",
    "keep_warm",
    "start_groups",
    "take_warm",
]

LEAST_START_S = 300.0
"""Starting processes and loading models may take this long, however short a step's deadline is."""


class RankGroup:
    """The processes of a group.

    Args:
        backend: What starts them.
        group: The group.
        num_threads: Torch threads per process.
        deadline_s: How long a process waits for another in a call.
        hosted: What it builds, as bytes. Processes that share a model stay for the same again only:
            an engine that ends takes with it what they have in common.

    Attributes:
        backend: What has started them.
        group: The group.
        processes: The processes, by number.
        devices: What they run on; None before it is reserved.
        num_starts: How often they were started.
        is_warm: Whether they run since an executor before this one, and have no roles.
    """

    def __init__(
        self,
        backend: ProcessBackend,
        group: DeviceGroup,
        num_threads: int,
        deadline_s: float,
        hosted: bytes,
    ) -> None:
        self.backend = backend
        self.group = group
        self.processes: list[Process] = []
        self.devices: Reservation | None = None
        self.num_starts = 0
        self.is_warm = False
        self._num_threads = num_threads
        self._deadline_s = deadline_s
        self._hosted = hosted if group.num_processes > group.num_ranks else b""

    @property
    def key(self) -> object:
        """Equal for groups whose processes can stand in for each other."""
        return self.backend, self.group, self._num_threads, self._deadline_s, self._hosted

    def spawn(self, start_s: float) -> None:
        """Start the processes; comes back before they run."""
        self.num_starts += 1
        self.processes = [
            self.backend.spawn(
                RankProcess,
                (self.group, process, self._num_threads, self._deadline_s, start_s),
                self.group,
                process,
                self.devices,
            )
            for process in range(self.group.num_processes)
        ]

    def call(self, process: int, method: str, *arguments: Any) -> Ref:
        """Call a method of one process's `RankProcess`; comes back at once."""
        (ref,) = self.backend.call(self.processes[process], method, arguments)
        return ref

    def call_all(self, method: str, *arguments: Any) -> list[Ref]:
        """The same of all of them."""
        return [self.call(process, method, *arguments) for process in range(len(self.processes))]

    def kill(self) -> None:
        """End the processes at once."""
        if self.backend.is_up:
            for process in self.processes:
                self.backend.kill(process)


def start_groups(
    groups: Sequence[RankGroup],
    hosted: Ref,
    seed: int,
    start_s: float,
    asleep: frozenset[str] = frozenset(),
) -> None:
    """Start the processes of several groups, all at once.

    Groups that are to sleep build their roles one after another on GPUs, so that each finds the
    memory of its devices free.

    Args:
        groups: The groups to start, all of one backend; their devices are reserved.
        hosted: Programs, workers and the weight channel's name.
        seed: The run's.
        start_s: How long each phase may take.
        asleep: Those that shall sleep afterwards, because they share devices.

    Raises:
        WorkerError: If a process fails or takes too long.
        PenstockError: Whatever of ours building a worker raises.
    """
    new = [group for group in groups if not group.is_warm]
    for group in groups:
        group.is_warm = False
    for group in new:
        group.spawn(start_s)
    backend = groups[0].backend
    several = [group for group in new if len(group.processes) > 1]
    listening = [group.call(0, "listen") for group in several]
    addresses = all_results(backend, listening, "opening a socket for its group", start_s)
    joining = [
        call
        for group, address in zip(several, addresses, strict=True)
        for call in group.call_all("join", address)
    ]
    all_results(backend, joining, "joining its process group", start_s)
    for some in _together(groups, asleep):
        building = [call for group in some for call in group.call_all("build", hosted, seed)]
        all_results(backend, building, "building its roles", start_s)
        sleeping = [group for group in some if group.group.name in asleep]
        calls = [call for group in sleeping for call in group.call_all("sleep")]
        all_results(backend, calls, "giving its devices up", start_s)


def _together(
    groups: Sequence[RankGroup], asleep: frozenset[str]
) -> Generator[Sequence[RankGroup]]:
    """Which groups may build at the same time."""
    waiting = [g for g in groups if g.group.name in asleep and g.group.device.startswith("cuda")]
    yield [group for group in groups if group not in waiting]
    for group in waiting:
        yield [group]


def all_results(
    backend: ProcessBackend, calls: Sequence[Ref], doing: str, start_s: float
) -> list[Any]:
    """What all of the calls return.

    Args:
        backend: Of the processes that were called.
        calls: The calls.
        doing: What they do, for messages.
        start_s: How long all of them may take.

    Raises:
        WorkerError: If one fails or takes too long.
        PenstockError: Whatever of ours one raises.
    """
    try:
        return backend.get(calls, start_s)
    except NotInTime as error:
        raise WorkerError(
            f"a rank was still {doing} after {start_s:g} s (Schedule.deadline_s, but at least "
            f"{LEAST_START_S:g} s)"
        ) from error
    except CallFailed as error:
        if isinstance(error.cause, PenstockError):
            raise error.cause from error
        raise WorkerError(f"a rank failed while {doing}: {error}") from error
    except BackendError as error:
        raise WorkerError(f"a rank failed while {doing}: {error}") from error


def end_groups(groups: Sequence[RankGroup], *, closing: bool) -> None:
    """End the processes of groups of one backend, and give their devices back.

    Args:
        groups: The groups to end.
        closing: Whether their workers are asked to close first, within `CLOSE_S`.
    """
    if not groups or not groups[0].backend.is_up:
        return  # They ended with it.
    try:
        if closing:
            calls = [call for group in groups for call in group.call_all("close")]
            _wait(groups[0].backend, calls)
    finally:
        for group in groups:
            group.kill()
            if group.devices is not None:
                group.devices.release(group.group.name)


def _wait(backend: ProcessBackend, calls: Sequence[Ref]) -> None:
    """Until all calls have ended in some way, or `CLOSE_S` seconds are over."""
    end_s, left = time.monotonic() + CLOSE_S, set(calls)
    while left and (left_s := end_s - time.monotonic()) > 0:
        left.difference_update(backend.watch(list(left), left_s))


_WARM: list[RankGroup] = []


def keep_warm(groups: Sequence[RankGroup]) -> list[RankGroup]:
    """Keep the groups whose workers all leave an engine behind.

    Returns:
        The others, which are to be ended.
    """
    others: list[RankGroup] = []
    for group in groups:
        answers = _answers(group, group.call_all("keep_warm"))
        (_WARM if answers and all(answers) else others).append(group)
    return others


def take_warm(backend: ProcessBackend, groups: Sequence[RankGroup]) -> None:
    """Give new groups the processes of warm ones that are like them, and end all others."""
    warm = [group for group in _WARM if group.backend == backend]
    forget_warm(backend)
    for group in groups:
        found = next((other for other in warm if other.key == group.key), None)
        if found is not None and _answers(found, found.call_all("is_running")):
            group.processes, group.is_warm, group.num_starts = found.processes, True, 1
            group.devices = found.devices
            warm.remove(found)
    end_groups(warm, closing=True)


def forget_warm(backend: ProcessBackend) -> None:
    """Once the backend has ended them."""
    _WARM[:] = [group for group in _WARM if group.backend != backend]


def _answers(group: RankGroup, calls: Sequence[Ref]) -> list[bool]:
    """What all of its processes answer; nothing if one does not."""
    try:
        return group.backend.get(calls, CLOSE_S)
    except BackendError:
        return []
