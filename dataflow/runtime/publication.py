"""How a role's weights get from the group that trains them to the groups that read copies.

Where all workers concerned can say how they hold the weights, each process is sent exactly what it
lacks, cut out where it lies. Otherwise one rank exports everything and every copy takes all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..scheduler.schedule import Deadline
from .dispatcher import Dispatcher
from .host import Host
from .messages import Handle, HeldLayout, Work, work


class Publication:
    """Makes the work of publishing and loading, and has it done between runs.

    Args:
        dispatcher: Where workers are asked how they hold weights.
        moves_slices: Whether the executor can move slices.
        deadline: How long a worker may take to say it.
    """

    def __init__(self, dispatcher: Dispatcher, *, moves_slices: bool, deadline: Deadline) -> None:
        self._dispatcher = dispatcher
        self._moves_slices = moves_slices
        self._deadline = deadline
        self._layouts: dict[tuple[str, str], HeldLayout | None] = {}
        self._receivers: dict[str, tuple[str, ...]] = {}

    def learn(
        self, role: str, home: tuple[str, str], program: str, receivers: Sequence[str]
    ) -> None:
        """Ask how a role's weights are held, unless that is known; before `export` and `take`.

        Args:
            role: The role whose weights are published.
            home: Program and group of the copy that is trained.
            program: Name of the program of the copies.
            receivers: Their groups.
        """
        self._receivers.pop(role, None)
        if not self._moves_slices or not receivers:
            return
        for where, group in (home, *((program, receiver) for receiver in receivers)):
            if (role, group) not in self._layouts:
                asked = {0: work(Host.layout, role)}
                done = self._dispatcher.perform_now(where, group, asked, self._deadline)
                answer = done.first.report.answer if done.first.report else None
                self._layouts[role, group] = answer
            if self._layouts[role, group] is None:
                return
        self._receivers[role] = tuple(receivers)

    def export(self, role: str, version: int) -> Work:
        """The work of the home's rank 0."""
        if role not in self._receivers:
            return work(Host.export_weights, role)
        receivers = {group: self._known(role, group).receives for group in self._receivers[role]}
        return work(Host.export_slices, role, receivers, version)

    def take(self, role: str, home: str, weights: Handle, version: int) -> Work:
        """For all ranks of a copy's group; `weights` is what the export left."""
        if role not in self._receivers:
            return work(Host.import_weights, role, weights, version)
        slices = weights if isinstance(weights, tuple) else (weights,)
        return work(Host.import_slices, role, self._known(role, home).sends, slices, version)

    def share(
        self,
        role: str,
        version: int,
        trained: tuple[str, str],
        program: str,
        replicas: Mapping[str, int],
    ) -> None:
        """Bring all copies of a role to the weights that an earlier run has trained last.

        Args:
            role: The role.
            version: What the weights count as.
            trained: Program and group where it was trained.
            program: Name of the program of the copies.
            replicas: Their groups -> how many ranks each has.
        """
        if not replicas:
            return
        self.learn(role, trained, program, list(replicas))
        where, home = trained
        exporting = {0: self.export(role, version)}
        exported = self._dispatcher.perform_now(where, home, exporting, self._deadline)
        for group, num_ranks in replicas.items():
            take = self.take(role, home, exported.first.weights, version)
            works = dict.fromkeys(range(num_ranks), take)
            self._dispatcher.perform_now(program, group, works, self._deadline)

    def _known(self, role: str, group: str) -> HeldLayout:
        layout = self._layouts[role, group]
        assert layout is not None, "a role is published in slices only where all layouts are known"
        return layout
