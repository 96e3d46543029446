"""The executor without processes: everything runs in the calling thread. It is the default."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from ..errors import PlanError, StateError
from ..graph.role import Role
from .call_context import DeadlineExceeded, deadline
from .columns import Part
from .executor import (
    Completion,
    Executor,
    Program,
    Restart,
    build_role,
    groups_of,
    longest_s,
    methods_of,
)
from .host import Host
from .messages import Handle, RankWork
from .placement import DeviceSharing
from .remote_inference import ServedRole, ServedWeights
from .worker_protocol import (
    WorkerContext,
    WorkerSpec,
    close_workers,
    sleep_offloaded,
    sleep_workers,
    wake_workers,
)


class InProcess(Executor):
    """Runs everything in the calling thread: no processes, no copies, and pdb works.

    Work is performed inside `wait`, oldest first. A call that takes longer than the longest may is
    interrupted, but not outside the main thread, under a debugger, or where something else uses
    SIGALRM: there nothing bounds it. Groups that share devices sleep in turn.
    """

    one_at_a_time = True

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, str], Host] = {}
        self._built: list[Role] = []
        self._roles: dict[str, list[Role]] = {}
        self._sharing = DeviceSharing(())
        self._queue: deque[tuple[int, str, str, RankWork]] = deque()
        self._deadline_s = 0.0

    def start(
        self,
        programs: Mapping[str, Program],
        workers: Mapping[str, WorkerSpec | Role],
        seed: int,
        deadline_s: float,
    ) -> None:
        self._deadline_s = longest_s(programs, deadline_s)
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
        self._sharing = DeviceSharing(groups_of(programs))
        for name, built in self._roles.items():
            sleep_offloaded(built)
            if self._sharing.shares(name):
                sleep_workers(built)

    def _make_hosts(
        self, programs: Mapping[str, Program], roles: Mapping[tuple[str, str], Role]
    ) -> None:
        serving = {
            group.name: ServedWeights(f"group '{group.name}'") for group in groups_of(programs)
        }
        for key, program in programs.items():
            graph, placement = program.graph, program.placement
            for role, server in placement.serving(graph):
                serving[server].add(role, graph.roles[role], roles[server, role])
            for group in placement.groups:
                served = placement.served_roles(graph, group.name)
                self._hosts[key, group.name] = Host(
                    graph,
                    {r: roles[group.name, r] for r in placement.hosted_roles(graph, group.name)},
                    placement.num_chunks,
                    lambda handle: handle,
                    {
                        r: ServedRole(r, graph.roles[r], serving[g].answer)
                        for r, g in served.items()
                    },
                    serving[group.name],
                )

    def _hand_off(self, group: str) -> None:
        change = self._sharing.hand_off(group)
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

    def submit(self, ticket: int, program: str, group: str, rank: int, work: RankWork) -> None:
        self._queue.append((ticket, program, group, work))

    def wait(self, timeout_s: float) -> Sequence[Completion | Restart]:
        if not self._queue:
            return []
        ticket, program, group, work = self._queue.popleft()
        try:
            with deadline(self._deadline_s):
                if work.needs != "nothing":
                    self._hand_off(group)
                result = self._hosts[program, group].perform(work)
        except DeadlineExceeded:
            return []
        except Exception as error:  # noqa: BLE001 - user code may raise anything; it is passed on
            return [Completion(ticket, 0, None, error=error)]
        return [Completion(ticket, 0, result.report, result.parts, result.weights)]

    def put(self, part: Part) -> Handle:
        return part

    def get(self, handles: Sequence[Handle]) -> list[Part]:
        return [cast(Part, handle) for handle in handles]

    def release(self, handles: Sequence[Handle]) -> None:
        """Nothing to do: the engine held the only reference."""

    def died(self) -> str:
        return ""

    def revive(self, groups: Collection[str]) -> frozenset[str]:
        raise StateError(f"groups {sorted(groups)} have no processes of their own")

    def outlives(self, group: str) -> bool:
        return False

    def stop(self) -> None:
        self._queue.clear()
        hosts, built = list(self._hosts.values()), self._built
        self._hosts.clear()
        self._roles.clear()
        self._built = []
        close_workers([*hosts, *built])

    @property
    def controller_bytes(self) -> int:
        """Always 0: there is nothing to pass through."""
        return 0
