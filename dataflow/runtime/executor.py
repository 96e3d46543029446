"""The contract of executors: they carry out the work that the engine asks for.

An executor owns worker processes (or none), stores what calls produce, and reports completions. It
decides nothing: order, versions and placement are the scheduler's. Where groups share devices it
puts one to sleep and wakes the other before it gives out work; see `device_sharing.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..errors import ConfigError, PlanError, no_exit
from ..graph.graph import Graph
from ..graph.role import Role
from .messages import Handle, Part, RankWork, Report
from .placement import DeviceGroup, Placement
from .recovery.limits import Recovery, Restart
from .worker_protocol import WorkerContext, WorkerSpec, is_spec

__all__ = [
    "Completion",
    "Executor",
    "Lost",
    "Program",
    "Restart",
    "TaskSpan",
    "build_role",
    "check_workers",
    "groups_of",
    "longest_s",
    "methods_of",
    "routes_of",
    "servers_of",
]


Lost = Literal["", "process", "stored", "for good"]
"""The part of a process's death in a failure; see `Completion.lost`."""


@dataclass(frozen=True)
class Program:
    """A graph, where its nodes run, and how long the longest of its calls may take.

    Attributes:
        graph: The graph.
        placement: Where its nodes run.
        longest_s: Deadline of its longest call, if that is longer than what holds for anything.
    """

    graph: Graph
    placement: Placement
    longest_s: float = 0.0


@dataclass(frozen=True)
class Completion:
    """One rank finished one piece of work.

    Attributes:
        ticket: The number it was submitted under.
        rank: The rank that did it.
        report: What it says, or None if it failed.
        parts: Handles of the stored output chunks.
        weights: Handle of a stored snapshot.
        error: What was raised, if it failed.
        trace: The traceback as text, if the failure was in another process.
        answers: `Report.answer` of all processes of the rank, if it has several.
        lost: Whether it failed because a process died ("process"), or because what others had made
            is gone ("stored"), or one dies however often it is started again ("for good", of which
            nothing is tried any more); "" if it did not, or as far as is known.
    """

    ticket: int
    rank: int
    report: Report | None
    parts: tuple[Handle, ...] = ()
    weights: Handle | None = None
    error: BaseException | None = None
    trace: str = ""
    answers: tuple[Any, ...] = ()
    lost: Lost = ""


@dataclass(frozen=True)
class TaskSpan:
    """One task on one rank, from start to end.

    Attributes:
        node: Name of the node in the graph: "actor.generate".
        step: The step it belongs to, which need not be the step then being consumed.
        chunk: Which part of the step's rows, or None for the whole batch.
        group: Name of the worker group it ran on.
        rank: Which rank of that group.
        start_s: When it started, in seconds since the epoch: the one clock that processes share.
        end_s: When it ended, on the same clock.
        versions: `(role, version)` of every set of weights it read, sorted by role.
        peak_bytes: See `Report.peak_bytes`.
    """

    node: str
    step: int
    chunk: int | None
    group: str
    rank: int
    start_s: float
    end_s: float
    versions: tuple[tuple[str, int], ...] = ()
    peak_bytes: int = 0


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

        What they had is lost, and what they owed is forgotten: nobody hears of it. All others go on
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
    """Every group named by any program, once."""
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
    """The methods that all programs together ask of a role in a group."""
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
    """The worker of a role, built if it was given as a spec."""
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
    """Every role of the graph must be provided, and nothing else."""
    missing = [role for role in graph.roles if role not in workers]
    if missing:
        role = missing[0]
        raise ConfigError(
            f"graph '{graph.name}' has a role '{role}' ({graph.roles[role].__name__}) that nobody "
            f"provides; give workers={{'{role}': ...}} (provided: {', '.join(workers) or 'none'})"
        )
