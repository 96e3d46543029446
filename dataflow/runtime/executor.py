"""The contract of executors: they carry out the work that the engine asks for.

An executor owns worker processes (or none), stores what calls produce, and reports completions. It
decides nothing: order, versions and placement are the scheduler's. Where groups share devices it
puts one to sleep and wakes the other before it gives out work; see `DeviceSharing`.

When processes die, a group that keeps nothing is started again beside the run, unnoticed
by others. What a group with weights or a state has lost is had from the newest checkpoint, or from
the copy in a neighbor's memory. The run goes back to there and computes the same again: random
numbers belong to samples, so its result does not change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Le

from ..errors import ConfigError, PlanError, WorkerError, no_exit
from ..graph.graph import Graph
from ..graph.role import Role
from ..options import NonNegativeFloat, NonNegativeInt, PositiveInt, option_class
from .columns import Part
from .messages import Handle, RankWork, Report
from .placement import DeviceGroup, Placement
from .worker_protocol import WorkerContext, WorkerSpec, is_spec


class WorkerLost(WorkerError):
    """Processes died, or what they had stored is gone: no fault of what they were doing."""

    def __init__(self, said: str, *, stored: bool = False, report: str = "") -> None:
        super().__init__(report or said)
        self.said, self.stored = said, stored

    def reported(self, report: str) -> WorkerLost:
        return WorkerLost(self.said, stored=self.stored, report=report)


@option_class
class Recovery:
    """Number of times that a run goes on by itself after processes died, and the pause before."""

    max_restarts: NonNegativeInt = 20
    """Times in all; 0 ends the run with the first death of what cannot be started again beside it.
    `penstock run --supervise` starts a run anew as often at most."""
    max_repeats: PositiveInt = 3
    """Times in a row without a step that was not complete before: a fault that comes again each
    time is not one that starting again fixes."""
    pause_s: Annotated[NonNegativeFloat, Le(3600)] = 1.0
    """Seconds before the second time in a row; they double with each further one, up to a minute or
    what is given here."""

    def wait_s(self, in_a_row: int) -> float:
        if not in_a_row:
            return 0.0
        return min(self.pause_s * 2.0 ** (in_a_row - 1), max(60.0, self.pause_s))


@dataclass(frozen=True)
class Restart:
    """Ranks of a group are started again, and do again what they had not finished."""

    group: str
    took_s: float  # Seconds since one died
    ranks: tuple[int, ...] = ()  # Which of its ranks; all if none is named
    held_up_s: float = 0.0  # Seconds of these in which `Executor.wait` was busy with it
    # Whether they are there. Before, this is said about once a second of those that are started
    # while others work: what they owe is not late.
    is_over: bool = True


@dataclass(frozen=True)
class Recovered:
    """A run has gone back and goes on."""

    said: str  # The processes that died, and how
    step: int  # Steps that are complete where it goes on
    completed: int  # Steps that had been complete
    # Where it goes on: its own start if there was no checkpoint yet.
    source: Literal["checkpoint", "mirror", "start"]
    took_s: float  # Seconds from the news to where it goes on, the pause included
    number: int  # Times it has gone back by now


class Recoveries:
    def __init__(self, recovery: Recovery) -> None:
        self.recovery = recovery
        self.number = 0
        self._in_a_row = 0
        self._furthest = -1

    def pause_s(self, lost: WorkerLost, completed: int) -> float:
        """Seconds to wait before the next restart, after a death with `completed` steps done.

        Raises:
            WorkerLost: If the restarts are spent, or too many came without a step in between.
        """
        limits = self.recovery
        if completed > self._furthest:
            self._furthest, self._in_a_row = completed, 0
        if self.number >= limits.max_restarts:
            raise WorkerLost(self._spent(lost)) from lost
        if self._in_a_row >= limits.max_repeats:
            raise WorkerLost(
                f"{lost}\n    that was the death number {self._in_a_row + 1} after step "
                f"{completed} with no step completed in between: starting again does not fix it "
                "(recovery.max_repeats)"
            ) from lost
        pause_s = limits.wait_s(self._in_a_row)
        self.number, self._in_a_row = self.number + 1, self._in_a_row + 1
        return pause_s

    def _spent(self, lost: WorkerLost) -> str:
        if not self.recovery.max_restarts:
            return str(lost)
        return (
            f"{lost}\n    the run had gone back {self.number} times before, and may no more often "
            "(recovery.max_restarts)"
        )


Told = Callable[[Recovered | Restart], None]
"""Callback for deaths: the run has gone back, or ranks were started again beside it."""


Lost = Literal["", "process", "stored", "for good"]
"""The part of a process's death in a failure: one died, or what others had made is gone, or one
dies however often it is started again, of which nothing is tried any more; "" if it has none."""


@dataclass(frozen=True)
class Program:
    """A graph, where its nodes run, and how long the longest of its calls may take."""

    graph: Graph
    placement: Placement
    longest_s: float = 0.0  # If that is longer than what holds for anything


@dataclass(frozen=True)
class Completion:
    """One rank finished one piece of work."""

    ticket: int  # The number it was submitted under
    rank: int
    report: Report | None  # None if it failed
    parts: tuple[Handle, ...] = ()  # The stored output chunks
    weights: Handle | None = None  # A stored snapshot
    error: BaseException | None = None  # What was raised, if it failed
    trace: str = ""  # The traceback as text, if the failure was in another process
    answers: tuple[Any, ...] = ()  # `Report.answer` of the rank's processes, if it has several
    lost: Lost = ""


class Executor(ABC):
    """A place that carries out work; `start`, `put`, `get`, `wait` and `resize` alone may block.

    Attributes:
        one_at_a_time: All ranks share one thread, so that work begins only when what was submitted
            before it has ended.
        moves_slices: Its hosts have `export_slices` and `import_slices`.
        elastic: Groups can have other ranks while a run goes on: `prepare` and `resize`.
        recovery: How often it may start a rank again by itself; set by the engine before `start`.
    """

    one_at_a_time = False
    moves_slices = False
    elastic = False
    recovery = Recovery()

    @abstractmethod
    def start(
        self,
        programs: Mapping[str, Program],
        workers: Mapping[str, WorkerSpec | Role],
        seed: int,
        deadline_s: float,
    ) -> None:
        """Build every group's roles. If that fails, `stop` ends what was started.

        Args:
            programs: What is to run, by name.
            workers: Role name -> its worker.
            seed: The run's.
            deadline_s: How long anything may take but a call that a program gives longer.

        Raises:
            PlanError: If the groups cannot be provided.
        """

    @abstractmethod
    def submit(self, ticket: int, program: str, group: str, rank: int, work: RankWork) -> None:
        """Queue work on one rank; ranks do theirs in the order of submission."""

    @abstractmethod
    def wait(self, timeout_s: float) -> Sequence[Completion | Restart]:
        """Return what happened since the last call; nothing if the time is up, or before."""

    @abstractmethod
    def put(self, part: Part) -> Handle:
        """Store a part made by the controller."""

    @abstractmethod
    def get(self, handles: Sequence[Handle]) -> list[Part]:
        """Bring stored parts to the controller.

        Raises:
            WorkerError: If one is lost, or not there within the deadline.
        """

    @abstractmethod
    def release(self, handles: Sequence[Handle]) -> None:
        """Forget stored parts."""

    @abstractmethod
    def died(self) -> str:
        """Describe the processes that have died and were not started again; "" if none is known.

        To be asked when something has failed: it may take some seconds.
        """

    @abstractmethod
    def revive(self, groups: Collection[str]) -> frozenset[str]:
        """Start the groups again of which a process has died, and others besides.

        What they had is lost, and what they owed is forgotten. All others go on
        with what they have been given.

        Args:
            groups: Those that are to be started again though they live.

        Returns:
            All that were started again.

        Raises:
            WorkerError: If a process fails or is not ready in time.
            PlanError: If a group cannot be provided any more.
        """

    @abstractmethod
    def outlives(self, group: str) -> bool:
        """True if what a group's calls have made outlives its processes."""

    def prepare(self, group: str, num_ranks: int) -> bool:
        """Start the ranks that are missing, beside what runs; says whether all have started.

        To be called again until they have.

        Raises:
            PenstockError: If one cannot be started. None of the others is then.
        """
        raise NotImplementedError

    def resize(self, group: str, num_ranks: int) -> int:
        """Give those that were prepared the group's weights, or end the last ones.

        Nothing runs in the group.

        Returns:
            How many ranks it has: as many as before, if one that joins cannot have the weights.
        """
        raise NotImplementedError

    @abstractmethod
    def stop(self) -> None:
        """Close the workers that were built from specs, end all worker processes; idempotent."""

    @property
    @abstractmethod
    def controller_bytes(self) -> int:
        """Bytes that have passed through the controller since the start."""


def groups_of(programs: Mapping[str, Program]) -> list[DeviceGroup]:
    groups: dict[str, DeviceGroup] = {}
    for program in programs.values():
        for group in program.placement.groups:
            known = groups.setdefault(group.name, group)
            if known != group:
                raise PlanError(
                    f"group '{group.name}' is declared as {known} and as {group}; programs that "
                    "share a group must agree on it"
                )
    return list(groups.values())


def longest_s(programs: Mapping[str, Program], deadline_s: float) -> float:
    """Seconds that the longest call of several programs may take; see `Executor.start`."""
    return max([deadline_s, *(program.longest_s for program in programs.values())])


def methods_of(programs: Mapping[str, Program], group: str, role: str) -> frozenset[str]:
    found = (one.placement.methods(one.graph, group, role) for one in programs.values())
    return frozenset[str]().union(*found)


def servers_of(programs: Mapping[str, Program]) -> dict[str, tuple[str, ...]]:
    """Group that serves roles in any program -> the groups that it serves."""
    found: dict[str, dict[str, None]] = {}
    for program in programs.values():
        for group in program.placement.groups:
            for server in program.placement.served_roles(program.graph, group.name).values():
                found.setdefault(server, {})[group.name] = None
    return {server: tuple(clients) for server, clients in found.items()}


def routes_of(programs: Mapping[str, Program]) -> Iterator[tuple[DeviceGroup, DeviceGroup]]:
    """Each group that trains a role, with each other one that has a copy."""
    for one in programs.values():
        for role in one.graph.trains_per_step:
            home = one.placement.home(one.graph, role)
            for group in one.placement.groups:
                hosted = one.placement.hosted_roles(one.graph, group.name)
                if home is not None and group.name != home and role in hosted:
                    yield one.placement.group(home), group


def build_role(name: str, worker: WorkerSpec | Role, context: WorkerContext) -> Role:
    """Build a role's worker from its spec; a live worker is returned as it is.

    Raises:
        ConfigError: If what was built is no `Role`.
    """
    if context.device.startswith("cuda"):
        # cuDNN's attention makes a plan for each shape that it has not met, which takes about a
        # second; batches of ragged rows bring new ones for many steps.
        torch.backends.cuda.enable_cudnn_sdp(False)
    with no_exit():
        built = worker.build(context) if is_spec(worker) else worker
    if not isinstance(built, Role):  # pyright: ignore[reportUnnecessaryIsInstance] - user code
        raise ConfigError(
            f"the worker of role '{name}' is a {type(built).__name__}, which is no Role; derive it "
            "from the role's contract"
        )
    return built


def check_workers(graph: Graph, workers: Mapping[str, WorkerSpec | Role]) -> None:
    missing = [role for role in graph.roles if role not in workers]
    if missing:
        role = missing[0]
        raise ConfigError(
            f"graph '{graph.name}' has a role '{role}' ({graph.roles[role].__name__}) that is not "
            f"provided; give workers={{'{role}': ...}} (provided: {', '.join(workers) or 'none'})"
        )
