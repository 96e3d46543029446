"""Which groups answer inference requests of which others, and where their processes do.

A process that takes the place of one that has died listens where that one did, so whoever asks it
need not be told: a process that is busy with a call could not be. Only where that address is taken,
or is another machine's, do its clients have to begin anew.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterable, Mapping

from ...dataflow.runtime.executor import Program, servers_of
from .process_backend import Ref
from .process_setup import Address
from .rank_group import RankGroup, all_results

_LOOK_S = 1.0
"""Between two looks at whether a server lives: nobody calls it who would notice."""


class Connections:
    """The connections of one executor's groups.

    Args:
        programs: All that it runs.

    Attributes:
        servers: Group that serves -> the groups that it serves.
        clients: The groups that others serve.
    """

    def __init__(self, programs: Mapping[str, Program]) -> None:
        self.servers = servers_of(programs)
        self.clients = frozenset(name for names in self.servers.values() for name in names)
        self._token = secrets.token_hex(32)
        self._places: dict[str, list[Address]] = {}
        self._looked_s: dict[str, float] = {}

    def open(
        self, groups: Mapping[str, RankGroup], names: Iterable[str], start_s: float
    ) -> set[str]:
        """Have groups listen, and tell those that they serve where.

        Args:
            groups: All groups by name; those of `names`, and all whom they serve, are built.
            names: Groups that were started just now; they have the weights that they serve.
            start_s: How long each phase may take.

        Returns:
            Groups that ask one which listens somewhere else than before: they are told, but what
            they are doing waits for it in vain.

        Raises:
            WorkerError: If a process fails or takes too long.
        """
        new = set(names)
        serving = {name: self._serve(groups[name]) for name in sorted(new & self.servers.keys())}
        moved = set[str]()
        for name, calls in serving.items():
            backend, doing = groups[name].backend, "opening a socket to answer at"
            places = all_results(backend, calls, doing, start_s)
            if self._places.get(name, places) != places:
                moved.update(self.servers[name])
            self._places[name] = places
        for name in moved - new:
            self._tell(groups[name])
        asking = sorted(new & self.clients)
        calls = [call for name in asking for call in self._tell(groups[name])]
        if calls:
            backend = groups[asking[0]].backend
            all_results(backend, calls, "being told who answers", start_s)
        return moved - new

    def _tell(self, group: RankGroup) -> list[Ref]:
        return group.call_all("connect_to_servers", self._places, self._token)

    def _serve(self, group: RankGroup) -> list[Ref]:
        before = self._places.get(group.group.name)
        return [
            group.call(process, "serve", self._token, before[process] if before else None)
            for process in range(len(group.processes))
        ]

    def to_look_at(self, busy: Iterable[str]) -> Generator[str]:
        """Servers that it is time to look at: somebody may be asking them.

        Args:
            busy: Groups that have work.
        """
        working, now_s = set(busy), time.monotonic()
        for name, clients in self.servers.items():
            if working.intersection(clients) and now_s >= self._looked_s.get(name, 0.0):
                self._looked_s[name] = now_s + _LOOK_S
                yield name
