"""The processes of one group: started, joined and built together, and ended together.

Where a group keeps nothing its ranks are *replicas*: each is a worker group of its own, which is
started and ended without the others.

The *warm pool* keeps processes of an executor that has stopped for the next one. Only those that
are expensive to start are kept: whose workers all leave an engine behind for the next of their
kind, as vLLM's do. They end with their backend, or when an executor starts that has no use for
them.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...dataflow.errors import PenstockError, PlanError, WorkerError
from ...dataflow.graph.role import Role
from ...dataflow.runtime.executor import Program, WorkerLost
from ...dataflow.runtime.placement import DeviceGroup
from ...dataflow.runtime.worker_protocol import CLOSE_S, WorkerSpec
from .process_backend import (
    BackendError,
    CallFailed,
    NotInTime,
    Process,
    ProcessBackend,
    ProcessDied,
    Ref,
    Reservation,
)
from .rank_process import RankProcess

# How long an answer is waited for: who gives none is busy, or its death is not known yet.
_NOTICE_S = 5.0

_OTHERS_S = 0.5  # The same once one is known to be dead: what ends a machine ends several

_POLL_S = 2.0  # How often is looked whether there are devices again


def dead_processes(
    backend: ProcessBackend,
    groups: Iterable[GroupProcesses],
    returning: Collection[tuple[str, int]],
) -> dict[tuple[str, int], str]:
    """Group and rank of which a process has died -> one line that says how.

    Of ranks that have not joined their group yet nothing is said: no other depends on them. Nor is
    anything of those that are `returning`: they are being started again.
    """
    left: dict[Ref, tuple[str, int]] = {}
    for group in groups:
        ranks = [r for r in range(group.num_ranks) if (group.group.name, r) not in returning]
        for rank in ranks:
            for process in group.group.processes(rank):
                left[group.call(process, "is_running")] = group.group.name, rank
    dead: dict[tuple[str, int], str] = {}
    end_s = time.monotonic() + _NOTICE_S
    while left and (left_s := end_s - time.monotonic()) > 0:
        for ref in backend.watch(list(left), left_s):
            place = left.pop(ref)
            try:
                backend.get([ref], _NOTICE_S)
            except ProcessDied as error:
                dead[place] = str(error)
                end_s = min(end_s, time.monotonic() + _OTHERS_S)
            except BackendError:  # it cannot say so, but it has answered
                continue
    return dead


def reserve_again(
    backend: ProcessBackend,
    groups: Sequence[GroupProcesses],
    others: Sequence[GroupProcesses],
    training: Collection[str],
    timeout_s: float,
) -> None:
    """Set devices aside anew for groups of which some are gone, once they or others are there."""
    for one in groups:
        one.give_back_lost()
    end_s = time.monotonic() + timeout_s
    while True:
        left_s = end_s - time.monotonic()
        try:
            reserve_devices(backend, groups, others, training, max(left_s, _POLL_S))
        except PlanError:
            if left_s < _POLL_S:
                raise
            time.sleep(_POLL_S)
        else:
            return


def reserve_devices(
    backend: ProcessBackend,
    groups: Sequence[GroupProcesses],
    others: Sequence[GroupProcesses],
    training: Collection[str],
    timeout_s: float,
) -> None:
    """Reserve devices for all groups that have none yet, around those that others hold."""
    held: list[Any] = [held for one in (*groups, *others) for held in one.reservations]
    without = [one for one in groups if one.devices is None and one.around is None]
    if without:
        wanted = [one.group for one in without]
        devices = backend.reserve(wanted, timeout_s, set(training), held)
        held.append(devices)
        for one in without:
            one.devices = devices
    for one in groups:
        one.reserve(range(one.num_ranks), held)


_RESERVE_S = 10.0  # Devices of a rank that joins must be free by then: the run waits for the answer

LEAST_START_S = 300.0
"""Starting processes and loading models may take this long, however short a step's deadline is."""


class GroupProcesses:
    """The processes of a group."""

    def __init__(
        self,
        backend: ProcessBackend,
        group: DeviceGroup,
        num_threads: int,
        deadline_s: float,
        hosted: bytes,
        *,
        replicas: bool = False,
        around: GroupProcesses | None = None,
    ) -> None:
        # The group in whose processes this one lives, and its processes' numbers there
        self.around = around
        self._places = () if around is None else group.places_in(around.group)
        self.backend = backend  # What has started them
        self.group = group
        self.processes: dict[int, Process] = {}  # The processes, by number
        self.devices: Reservation | None = None  # What they run on; None before it is reserved
        self.num_ranks = group.num_ranks  # How many it has now
        # Whether they run since an executor before this one, and have no roles.
        self.is_warm = False
        self._replicas = replicas
        self._joined: dict[int, Reservation] = {}
        self._num_threads = num_threads
        self._deadline_s = deadline_s
        self._hosted = hosted if group.num_processes > group.num_ranks else b""

    @property
    def key(self) -> object:
        """Equal for groups whose processes can stand in for each other."""
        # All that a process is given when it is spawned, which cannot change afterwards.
        same = self.group, self._num_threads, self._deadline_s, self._hosted, self._replicas
        return self.backend, *same

    @property
    def reservations(self) -> list[Reservation]:
        if self.around is not None:
            return []
        return [*([] if self.devices is None else [self.devices]), *self._joined.values()]

    def reserve(self, ranks: Sequence[int], held: Sequence[Any]) -> None:
        """Set devices aside for ranks that join, for each its own."""
        # Those that the group had at first still have theirs, if they have left.
        wanted = [r for r in ranks if r >= self.group.num_ranks and r not in self._joined]
        try:
            for rank in wanted:
                found = self.backend.reserve([self._alone(rank)], _RESERVE_S, held=held)
                self._joined[rank] = found
        except BaseException:
            self._give_back(wanted)
            raise

    def is_there(self) -> bool:
        if self.around is not None:
            return self.around.is_there()
        return not any(one is None or not one.is_there(name) for name, one in self._reserved())

    def give_back_lost(self) -> None:
        if self.around is not None:
            return
        for name, one in self._reserved():
            if one is not None and not one.is_there(name):
                one.release(name)
                if one is self.devices:
                    self.devices = None
                self._joined = {r: other for r, other in self._joined.items() if other is not one}

    def _reserved(self) -> list[tuple[str, Reservation | None]]:
        joined = [(self._alone(rank).name, one) for rank, one in self._joined.items()]
        return [(self.group.name, self.devices), *joined]

    def _give_back(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if rank in self._joined:
                self._joined.pop(rank).release(self._alone(rank).name)

    def _alone(self, rank: int) -> DeviceGroup:
        name = f"{self.group.name}[{rank}]"
        return replace(self.group, name=name, num_ranks=1, devices=(), nodes=())

    def end(self, ranks: Sequence[int], *, closing: bool) -> None:
        """End the processes of some ranks, and give back what was set aside when they joined."""
        leaving = [p for rank in ranks for p in self.group.processes(rank) if p in self.processes]
        if closing:
            _wait(self.backend, [self.call(process, "close") for process in leaving])
        for process in leaving:
            self.backend.kill(self.processes.pop(process))
        self._give_back(ranks)

    def spawn(self, start_s: float, ranks: Sequence[int] | None = None) -> list[list[int]]:
        """Start the processes; comes back before they run."""
        if self.around is not None:
            for process, place in enumerate(self._places):
                self.processes[process] = self.around.processes[place]
                self.around.call(place, "admit", self.group, process, self._places)
            return []
        if not self._replicas:
            every = list(range(self.group.num_processes))
            for process in every:
                self._spawn(process, self.group, process, start_s, (0, 1))
            return [every] if len(every) > 1 else []
        # To itself a replica is a group of one rank, so the number of the others may change.
        own = replace(self.group, num_ranks=1, devices=(), nodes=())
        together: list[list[int]] = []
        for rank in range(self.num_ranks) if ranks is None else ranks:
            replica = rank, max(self.num_ranks, rank + 1)
            together.append(sorted(self.group.processes(rank)))
            for place, process in enumerate(together[-1]):
                self._spawn(process, own, place, start_s, replica)
        return [processes for processes in together if len(processes) > 1]

    def _spawn(
        self, process: int, own: DeviceGroup, place: int, start_s: float, replica: tuple[int, int]
    ) -> None:
        arguments = own, place, self._num_threads, self._deadline_s, start_s, replica
        joined = self._joined.get(replica[0]) if self._replicas else None
        where = (self.group, process, self.devices)
        if joined is not None:
            where = (self._alone(replica[0]), place, joined)
        self.processes[process] = self.backend.spawn(RankProcess, arguments, *where)

    def join(self, together: Sequence[Sequence[int]]) -> list[Ref]:
        """Have processes join the process groups that they share; comes back at once."""
        joining: list[Ref] = []
        for processes in together:
            address = self.call(processes[0], "listen")
            joining += [address, *(self.call(one, "join", address) for one in processes)]
        return joining

    def call(self, process: int, method: str, *arguments: Any) -> Ref:
        """Call a method of one process's `RankProcess`; comes back at once."""
        if self.around is not None:
            arguments = self.group.name, method, *arguments
            method = "call_within"
        (ref,) = self.backend.call(self.processes[process], method, arguments)
        return ref

    def call_all(self, method: str, *arguments: Any) -> list[Ref]:
        return [self.call(process, method, *arguments) for process in sorted(self.processes)]

    def kill(self, rank: int | None = None) -> None:
        if self.around is not None:
            self.around.kill()
        elif self.backend.is_up:
            for process in self.processes if rank is None else self.group.processes(rank):
                if process in self.processes:
                    self.backend.kill(self.processes[process])


def hosted_bytes(
    programs: Mapping[str, Program], workers: Mapping[str, WorkerSpec | Role], group: str
) -> bytes:
    roles = {
        role for one in programs.values() for role in one.placement.hosted_roles(one.graph, group)
    }
    return pickle.dumps([(role, workers.get(role)) for role in sorted(roles)])


@dataclass(frozen=True)
class Started:
    """The state of an executor between `start` and `stop`."""

    backend: ProcessBackend  # What provides the processes
    hosted: Ref  # Programs, workers and the weight channel's name, stored
    seed: int  # The run's
    start_s: float  # How long processes may take to start and to load models


def start_groups(
    groups: Sequence[GroupProcesses], here: Started, asleep: frozenset[str] = frozenset()
) -> None:
    """Start the processes of several groups, all at once."""
    new = [group for group in groups if not group.is_warm]
    for group in groups:
        group.is_warm = False
    backend, start_s = here.backend, here.start_s
    joining = [call for group in new for call in group.join(group.spawn(start_s))]
    all_results(backend, joining, "joining its process group", start_s)
    # Groups that are to sleep build their roles one after another on GPUs, so that each finds the
    # memory of its devices free.
    waiting = [g for g in groups if g.group.name in asleep and g.group.device.startswith("cuda")]
    together = [group for group in groups if group not in waiting]
    for some in (together, *([group] for group in waiting)):
        building = [
            call for group in some for call in group.call_all("build", here.hosted, here.seed)
        ]
        all_results(backend, building, "building its roles", start_s)
        sleeping = [group for group in some if group.group.name in asleep]
        calls = [call for group in sleeping for call in group.call_all("sleep")]
        all_results(backend, calls, "giving its devices up", start_s)


def all_results(
    backend: ProcessBackend, calls: Sequence[Ref], doing: str, start_s: float
) -> list[Any]:
    """Wait for the results of calls to several ranks, at most `start_s` seconds.

    Raises:
        WorkerError: If one failed or was not in time.
        WorkerLost: If a process died.
    """
    try:
        return backend.get(calls, start_s)
    except NotInTime as error:
        raise WorkerError(
            f"a rank was still {doing} after {start_s:g} s (Schedule.deadline_s, but at least "
            f"{LEAST_START_S:g} s)"
        ) from error
    except CallFailed as error:
        # It says what is wrong and how to fix it; another sentence around it would hide that.
        if isinstance(error.cause, PenstockError):
            raise error.cause from error
        raise WorkerError(f"a rank failed while {doing}: {error}") from error
    except ProcessDied as error:
        raise WorkerLost(f"a rank died while {doing}: {error}") from error
    except BackendError as error:
        raise WorkerError(f"a rank failed while {doing}: {error}") from error


def end_groups(groups: Sequence[GroupProcesses]) -> None:
    """End the processes of groups of one backend, and give their devices back."""
    if not groups or not groups[0].backend.is_up:
        return  # They ended with it.
    try:
        calls = [call for group in groups for call in group.call_all("close")]
        _wait(groups[0].backend, calls)
    finally:
        for group in groups:
            group.end(range(group.group.num_ranks, group.num_ranks), closing=False)
            group.kill()
            if group.around is None and group.devices is not None:
                group.devices.release(group.group.name)


def _wait(backend: ProcessBackend, calls: Sequence[Ref]) -> None:
    end_s, left = time.monotonic() + CLOSE_S, set(calls)
    while left and (left_s := end_s - time.monotonic()) > 0:
        left.difference_update(backend.watch(list(left), left_s))


_WARM: list[GroupProcesses] = []


def keep_warm(groups: Sequence[GroupProcesses]) -> list[GroupProcesses]:
    """Keep the groups whose workers all leave an engine behind."""
    others: list[GroupProcesses] = []
    for group in groups:
        answers = _answers(group, group.call_all("keep_warm"))
        (_WARM if answers and all(answers) else others).append(group)
    return others


def take_warm(backend: ProcessBackend, groups: Sequence[GroupProcesses]) -> None:
    """Give new groups the processes of warm ones that are like them, and end all others."""
    warm = [group for group in _WARM if group.backend == backend]
    forget_warm(backend)
    for group in groups:
        found = next((other for other in warm if other.key == group.key), None)
        if found is not None and _answers(found, found.call_all("is_running")):
            group.processes, group.is_warm = found.processes, True
            group.devices = found.devices
            warm.remove(found)
    end_groups(warm)


def forget_warm(backend: ProcessBackend) -> None:
    _WARM[:] = [group for group in _WARM if group.backend != backend]


def _answers(group: GroupProcesses, calls: Sequence[Ref]) -> list[bool]:
    try:
        return group.backend.get(calls, CLOSE_S)
    except BackendError:
        return []
