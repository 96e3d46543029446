"""Executors: where work is carried out. The in-process one is here; it is the embedded default.

An executor owns worker processes (or none), stores what calls produce, and reports completions. It
decides nothing: order, versions and placement are the scheduler's. Where groups share devices it
puts one to sleep and wakes the other before it hands over work; see `turns.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import ConfigError, PlanError
from ..graph.graph import Graph
from ..graph.role import Role
from .deadline import DeadlineExceeded, deadline
from .device_sharing import Turns, needs_device, sleep_workers, wake_workers
from .host import Host
from .messages import Handle, Part, Report, Work
from .placement import DeviceGroup, Placement
from .remote_inference import Holdings, Served
from .worker_protocol import WorkerContext, WorkerSpec, close_workers

__all__ = [
    "Completion",
    "Executor",
    "InProcess",
    "Program",
    "build_role",
    "check_workers",
    "groups_of",
    "methods_of",
    "servers_of",
]


@dataclass(frozen=True)
class Program:
    """A graph and where its nodes run."""

    graph: Graph
    placement: Placement


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
    """

    ticket: int
    rank: int
    report: Report | None
    parts: tuple[Handle, ...] = ()
    weights: Handle | None = None
    error: BaseException | None = None
    trace: str = ""


class Executor(Protocol):
    """What the engine needs of an executor. Nothing blocks but `start`, `put` and `wait`.

    Attributes:
        one_at_a_time: Whether all ranks share one thread, so that work begins only when what was
            submitted before it has ended.
        moves_slices: Whether it serves `LayoutWork`, `ExportSlicesWork` and `ImportSlicesWork`.
    """

    one_at_a_time: bool
    moves_slices: bool

    def start(
        self,
        programs: Mapping[str, Program],
        workers: Mapping[str, WorkerSpec | Role],
        seed: int,
        deadline_s: float,
    ) -> None:
        """Build every group's roles. If that fails, `stop` ends what was started.

        Raises:
            PlanError: If the groups cannot be provided.
        """
        ...

    def submit(self, ticket: int, program: str, group: str, rank: int, work: Work) -> None:
        """Queue work on one rank; ranks do theirs in the order of submission."""
        ...

    def wait(self, timeout_s: float) -> Sequence[Completion]:
        """Completions since the last call: at least one, or none if the time is up."""
        ...

    def put(self, part: Part) -> Handle:
        """Store a part made by the controller."""
        ...

    def release(self, handles: Sequence[Handle]) -> None:
        """Forget stored parts."""
        ...

    def stop(self) -> None:
        """Close the workers that were built from specs, end all worker processes; idempotent."""
        ...

    @property
    def controller_bytes(self) -> int:
        """Bytes that have passed through the controller since the start."""
        ...


def groups_of(programs: Mapping[str, Program]) -> list[DeviceGroup]:
    """Every group named by any program, once.

    Raises:
        PlanError: If two programs declare a group differently.
    """
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


def methods_of(programs: Mapping[str, Program], group: str, role: str) -> frozenset[str]:
    """What all programs together ask of a role in a group."""
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


def build_role(name: str, worker: WorkerSpec | Role, context: WorkerContext) -> Role:
    """The worker of a role, built if it was given as a spec."""
    built = worker.build(context) if isinstance(worker, WorkerSpec) else worker
    if not isinstance(built, Role):  # pyright: ignore[reportUnnecessaryIsInstance] - user code
        raise ConfigError(
            f"the worker of role '{name}' is a {type(built).__name__}, which is no Role; derive it "
            "from the role's contract"
        )
    return built


class InProcess:
    """Runs everything in the calling thread: no processes, no copies, and pdb works.

    Work is performed inside `wait`, oldest first. A call that exceeds its deadline is interrupted,
    but not outside the main thread, under a debugger, or where something else uses SIGALRM: there
    nothing bounds it. Groups that share devices sleep in turn.
    """

    one_at_a_time = True
    moves_slices = False

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, str], Host] = {}
        self._built: list[Role] = []
        self._roles: dict[str, list[Role]] = {}
        self._turns = Turns(())
        self._queue: deque[tuple[int, str, str, Work]] = deque()
        self._deadline_s = 0.0

    def start(
        self,
        programs: Mapping[str, Program],
        workers: Mapping[str, WorkerSpec | Role],
        seed: int,
        deadline_s: float,
    ) -> None:
        """Build the roles of every group here. See `Executor.start`."""
        self._deadline_s = deadline_s
        roles: dict[tuple[str, str], Role] = {}
        for program in programs.values():
            for group in program.placement.groups:
                if group.num_processes != 1:
                    raise PlanError(
                        f"group '{group.name}' has {group.num_processes} ranks, but the in-process "
                        "executor runs one; set executor=ray or num_ranks=1"
                    )
                for role in program.placement.hosted_roles(program.graph, group.name):
                    if (group.name, role) not in roles:
                        methods = methods_of(programs, group.name, role)
                        context = WorkerContext(role, seed, device=group.device, methods=methods)
                        built = self._build(role, workers[role], context)
                        roles[group.name, role] = built
                        self._roles.setdefault(group.name, []).append(built)
        self._make_hosts(programs, roles)
        self._turns = Turns(groups_of(programs))
        for name, built in self._roles.items():
            if self._turns.shares(name):
                sleep_workers(built)

    def _make_hosts(
        self, programs: Mapping[str, Program], roles: Mapping[tuple[str, str], Role]
    ) -> None:
        holdings = {group.name: Holdings(f"group '{group.name}'") for group in groups_of(programs)}
        for key, program in programs.items():
            graph, placement = program.graph, program.placement
            for role, server in placement.serving(graph):
                holdings[server].add(role, graph.roles[role], roles[server, role])
            for group in placement.groups:
                served = placement.served_roles(graph, group.name)
                self._hosts[key, group.name] = Host(
                    graph,
                    {r: roles[group.name, r] for r in placement.hosted_roles(graph, group.name)},
                    placement.num_chunks,
                    lambda handle: handle,
                    {r: Served(r, graph.roles[r], holdings[g].answer) for r, g in served.items()},
                    holdings[group.name],
                )

    def _hand_over(self, group: str) -> None:
        change = self._turns.take(group)
        for name in change.sleep:
            sleep_workers(self._roles.get(name, ()))
        if change.wake is not None:
            wake_workers(self._roles.get(change.wake, ()))

    def _build(self, name: str, worker: WorkerSpec | Role, context: WorkerContext) -> Role:
        role = build_role(name, worker, context)
        if role is not worker:
            self._built.append(role)
        return role

    def role(self, group: str, role: str) -> Role:
        """The live worker of a role, to look at under a debugger or after a run."""
        for (_, name), host in self._hosts.items():
            if name == group and role in host.roles:
                return host.roles[role]
        raise KeyError((group, role))

    def submit(self, ticket: int, program: str, group: str, rank: int, work: Work) -> None:
        """See `Executor.submit`."""
        self._queue.append((ticket, program, group, work))

    def wait(self, timeout_s: float) -> Sequence[Completion]:
        """Perform the oldest queued work. See `Executor.wait`."""
        if not self._queue:
            return []
        ticket, program, group, work = self._queue.popleft()
        try:
            with deadline(self._deadline_s):
                if needs_device(work):
                    self._hand_over(group)
                result = self._hosts[program, group].perform(work)
        except DeadlineExceeded:
            return []
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is passed on
            return [Completion(ticket, 0, None, error=error)]
        return [Completion(ticket, 0, result.report, result.parts, result.weights)]

    def put(self, part: Part) -> Handle:
        """See `Executor.put`."""
        return part

    def release(self, handles: Sequence[Handle]) -> None:
        """Nothing to do: the engine held the only reference."""

    def stop(self) -> None:
        """See `Executor.stop`."""
        self._queue.clear()
        self._hosts.clear()
        self._roles.clear()
        built, self._built = self._built, []
        close_workers(built)

    @property
    def controller_bytes(self) -> int:
        """Always 0: there is nothing to pass through."""
        return 0


def check_workers(graph: Graph, workers: Mapping[str, WorkerSpec | Role]) -> None:
    """Every role of the graph must be provided, and nothing else.

    Raises:
        ConfigError: Naming the roles that are missing or unknown.
    """
    missing = [role for role in graph.roles if role not in workers]
    if missing:
        role = missing[0]
        raise ConfigError(
            f"graph '{graph.name}' has a role '{role}' ({graph.roles[role].__name__}) that nobody "
            f"provides; give workers={{'{role}': ...}} (provided: {', '.join(workers) or 'none'})"
        )
