"""The actors of one worker group: started, joined and built together, and ended together."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....dataflow.errors import PenstockError, WorkerError
from ....dataflow.runtime.executor import Program, groups_of
from ....dataflow.runtime.placement import DeviceGroup
from ....dataflow.runtime.worker_protocol import CLOSE_S
from ...weight_sync.packet_server import Route
from .devices import SharedDevices

if TYPE_CHECKING:
    import ray

__all__ = [
    "LEAST_START_S",
    "ActorGroup",
    "connect_groups",
    "connect_mail",
    "end_actors",
    "routes_of",
    "start_groups",
]

LEAST_START_S = 300.0
"""Starting processes and loading models may take this long, however short a step's deadline is."""


class ActorGroup:
    """One actor per process of a group.

    Args:
        group: The group.
        num_threads: Torch threads per process.
        deadline_s: How long a process waits for another in a call.
        devices: What to ask Ray for.
        hosted: What it builds, as bytes. Processes that share a model stay for the same again only:
            an engine that ends takes with it what they have in common.

    Attributes:
        actors: By process.
        num_starts: How often they were started.
        is_parked: Whether they run since an executor before this one, and have no roles.
    """

    def __init__(
        self,
        group: DeviceGroup,
        num_threads: int,
        deadline_s: float,
        devices: SharedDevices,
        hosted: bytes,
    ) -> None:
        self.group = group
        self.actors: list[Any] = []
        self.num_starts = 0
        self.is_parked = False
        self._num_threads = num_threads
        self._deadline_s = deadline_s
        self._devices = devices
        self._hosted = hosted if group.num_processes > group.num_ranks else b""

    @property
    def key(self) -> object:
        """Equal for groups whose processes can stand in for each other."""
        return self.group, self._num_threads, self._deadline_s, self._hosted

    def create(self, start_s: float) -> None:
        """Ask Ray for the processes; comes back before they run."""
        import ray

        from .actor import Rank

        self.num_starts += 1
        actor = ray.remote(Rank)
        self.actors = [
            actor.options(
                num_cpus=0, max_restarts=0, **self._devices.options(self.group, process)
            ).remote(self.group, process, self._num_threads, self._deadline_s, start_s)
            for process in range(self.group.num_processes)
        ]


def start_groups(
    groups: Sequence[ActorGroup],
    hosted: ray.ObjectRef[Any],
    seed: int,
    start_s: float,
    asleep: frozenset[str] = frozenset(),
) -> None:
    """Start the actors of several groups, all at once.

    Groups that are to sleep build their roles one after another on GPUs, so that each finds the
    memory of its devices free.

    Args:
        groups: Which.
        hosted: Programs and workers.
        seed: The run's.
        start_s: How long each phase may take.
        asleep: Those that shall sleep afterwards, because they share devices.

    Raises:
        WorkerError: If a process fails or takes too long.
        PenstockError: Whatever of ours building a worker raises.
    """
    new = [group for group in groups if not group.is_parked]
    for group in groups:
        group.is_parked = False
    for group in new:
        group.create(start_s)
    several = [group for group in new if len(group.actors) > 1]
    addresses = _all(
        [group.actors[0].listen.remote() for group in several],
        "opening a socket for its group",
        start_s,
    )
    _all(
        [
            actor.join.remote(address)
            for group, address in zip(several, addresses, strict=True)
            for actor in group.actors
        ],
        "joining its process group",
        start_s,
    )
    for some in _together(groups, asleep):
        _all(
            [actor.build.remote([hosted], seed) for group in some for actor in group.actors],
            "building its roles",
            start_s,
        )
        sleeping = [group for group in some if group.group.name in asleep]
        _all(
            [actor.sleep.remote() for group in sleeping for actor in group.actors],
            "giving its devices up",
            start_s,
        )


def connect_groups(
    groups: Sequence[ActorGroup], servers: Mapping[str, Sequence[str]], start_s: float
) -> None:
    """Have groups answer questions of others, and tell those where.

    Args:
        groups: All groups; built.
        servers: Group that serves -> the groups that it serves.
        start_s: How long each phase may take.

    Raises:
        WorkerError: If a process fails or takes too long.
    """
    token = secrets.token_hex(32)
    actors = {group.group.name: group.actors for group in groups}
    asked = [(name, actor) for name in servers for actor in actors[name]]
    doing = "opening a socket to answer at"
    found = _all([actor.serve.remote(token) for _, actor in asked], doing, start_s)
    places: dict[str, list[tuple[str, int]]] = {name: [] for name in servers}
    for (name, _), place in zip(asked, found, strict=True):
        places[name].append(place)
    clients = {client for names in servers.values() for client in names}
    calls = [actor.ask_at.remote(places, token) for name in clients for actor in actors[name]]
    _all(calls, "being told who answers", start_s)


def connect_mail(groups: Mapping[str, ActorGroup], routes: Sequence[Route], start_s: float) -> None:
    """Connect groups for weights to go from process to process, again if they were.

    Args:
        groups: By name; built.
        routes: Which to connect.
        start_s: How long each phase of one may take.

    Raises:
        WorkerError: If a process fails or takes too long.
    """
    for route in routes:
        senders = [groups[route.senders].actors[i] for i in route.from_processes]
        receivers = [groups[route.receivers].actors[i] for i in route.to_processes]
        (address,) = _all([senders[0].listen.remote()], "opening a socket for weights", start_s)
        calls = [actor.exchange.remote(route, address) for actor in (*senders, *receivers)]
        _all(calls, "connecting for weights", start_s)


def routes_of(programs: Mapping[str, Program]) -> list[Route]:
    """From every group in which any program trains a role to every other that has a copy of it."""
    homes: dict[str, set[str]] = {}
    for one in programs.values():
        for role in one.graph.trains_per_step:
            if (home := one.placement.home(one.graph, role)) is not None:
                homes.setdefault(role, set()).add(home)
    pairs = {
        (home, group.name)
        for one in programs.values()
        for group in one.placement.groups
        for role in one.placement.hosted_roles(one.graph, group.name)
        for home in homes.get(role, ())
        if home != group.name
    }
    groups = {group.name: group for group in groups_of(programs)}
    return [
        Route(
            home,
            receiver,
            tuple(groups[home].processes(0)),
            tuple(range(groups[receiver].num_processes)),
        )
        for home, receiver in sorted(pairs)
    ]


def _together(
    groups: Sequence[ActorGroup], asleep: frozenset[str]
) -> Generator[Sequence[ActorGroup]]:
    """Which groups may build at the same time."""
    waiting = [g for g in groups if g.group.name in asleep and g.group.device.startswith("cuda")]
    yield [group for group in groups if group not in waiting]
    for group in waiting:
        yield [group]


def _all(answers: list[Any], doing: str, start_s: float) -> list[Any]:
    import ray
    from ray.exceptions import GetTimeoutError, RayError, RayTaskError

    try:
        return ray.get(answers, timeout=start_s)
    except GetTimeoutError as error:
        raise WorkerError(
            f"a rank was still {doing} after {start_s:g} s (Schedule.deadline_s, but at least "
            f"{LEAST_START_S:g} s)"
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, PenstockError):
            raise error.cause from error
        raise WorkerError(f"a rank failed while {doing}: {error}") from error
    except RayError as error:
        raise WorkerError(f"a rank failed while {doing}: {error}") from error


def end_actors(actors: Sequence[Any], *, closing: bool) -> None:
    """End processes; if `closing`, their workers are asked to close first, within `CLOSE_S`."""
    import ray

    if not ray.is_initialized() or not actors:
        return  # They ended with it.
    try:
        if closing:
            asked = [actor.close.remote() for actor in actors]
            ray.wait(asked, num_returns=len(actors), timeout=CLOSE_S)
    finally:
        for actor in actors:
            ray.kill(actor)
