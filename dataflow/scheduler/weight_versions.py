"""Versions of the copies of all weights, and the gates at which tasks wait for them.

An *instance* is a copy of a trainable role's weights on one group. It holds exactly one version at
a time. The home instance advances by training in place; every other instance (a replica) advances
by a `Publish` at home followed by a `Load`. An instance may leave a version only when everybody who
must read it, in any step still to come, has done so: its *ceiling* is the newest version it may
hold, the smallest "at most" among the reads that are still outstanding.

Everything about steps not yet admitted follows from arithmetic on version numbers, so nothing here
grows with the number of steps.

Why it cannot deadlock. Give the task of node p in step s the place (s, p), or (s - k, p) if it runs
ahead (its reads are lagged by k, and so are those of everything it hangs on). Every rule makes a
task wait only for tasks of smaller place:

- inputs have smaller p, and run ahead if their consumer does;
- version v is made by a training before the place of each of its readers and overwritten by one
  after it, because offsets count the trainings before a node in program order; publishing and
  loading v happen between the training that makes v and its first reader;
- admission of step s waits for steps up to s - k - 1;
- a checkpoint at step c waits for steps below c and for reads of versions below c * n, and holds
  back nothing that those need.

So the unfinished task of smallest place can always run, whatever order tasks end in. In arrival
order use (s, p) for all: a read may take anything from its lower bound to its own step's version.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import DropSnapshot, Load, NodeTask, Publish, Task, Versions
from .flow import Flow
from .read_rules import ReadRule, read_rules
from .schedule import Schedule

NO_CEILING = 1 << 62
"""Ceiling of an instance that nobody will read again."""


@dataclass(slots=True)
class Instance:
    """One copy of a trainable role's weights."""

    role: str
    group: str  # Where the copy lives, on every rank
    is_home: bool  # Whether it is trained here
    holds: int  # The version it holds
    # The newest version it may hold while the reads outstanding are not done.
    ceiling: int = NO_CEILING
    # Reads of this instance, the role's own train nodes left out.
    rules: list[ReadRule] = field(default_factory=list[ReadRule])
    loading: Load | None = None  # The load queued or running, if any
    # Tasks with all inputs there that wait for a version, by version.
    blocked: dict[int, list[NodeTask]] = field(default_factory=dict[int, list[NodeTask]])
    # Train tasks that wait for readers of the version they would overwrite.
    blocked_trains: list[NodeTask] = field(default_factory=list[NodeTask])
    changed_s: float | None = None  # When `holds` changed last; None since the start

    def advance(self, version: int, at_s: float) -> list[Task]:
        """Hold `version` from now on; returns the tasks that waited for it."""
        self.holds = version
        self.changed_s = at_s
        ready: list[Task] = []
        for wanted in sorted(key for key in self.blocked if key <= version):
            ready += self.blocked.pop(wanted)
        return ready


class Weights:
    """All instances, the snapshots between them, and the gates tasks pass."""

    def __init__(self, flow: Flow, schedule: Schedule, num_steps: int, first_step: int) -> None:
        self._flow = flow
        self._num_steps = num_steps
        # Per node the first step in which it is not done; moved by the scheduler.
        self.frontier = [first_step] * len(flow.nodes)
        # `(role, group)` -> the copy of the weights.
        self.instances: dict[tuple[str, str], Instance] = {}
        # Role -> version whose snapshot is queued or being taken.
        self.publishing: dict[str, int] = {}
        # Role -> published version -> groups that have yet to load it or a newer one.
        self.snapshots: dict[str, dict[int, set[str]]] = {role: {} for role in flow.homes}
        # Per node, its read rules sorted by role, its own training included.
        self.rules_of = read_rules(flow, schedule)
        self._versions: list[Versions] = [()] * len(flow.nodes)
        for rules in self.rules_of:
            for rule in rules:
                self._register(rule, first_step)
        for instance in self.instances.values():
            self._raise_ceiling(instance)

    def _register(self, rule: ReadRule, first_step: int) -> None:
        key = (rule.role, rule.group)
        if key not in self.instances:
            is_home = self._flow.homes[rule.role] == rule.group
            self.instances[key] = Instance(*key, is_home, first_step * rule.per_step)
        if self._flow.nodes[rule.node].trains != rule.role:
            self.instances[key].rules.append(rule)

    def replicas(self, role: str) -> list[Instance]:
        """The instances of `role` that are not its home."""
        return [i for i in self.instances.values() if i.role == role and not i.is_home]

    def home(self, role: str) -> Instance:
        """The instance where `role` is trained."""
        return self.instances[role, self._flow.homes[role]]

    def gate(self, index: int, task: NodeTask, *, overwrites: bool) -> bool:
        # Whether every instance `task` reads holds the right version; parks it otherwise.
        for rule in self.rules_of[index]:
            instance = self.instances[rule.role, rule.group]
            lowest = rule.lowest(task.step)
            if instance.holds < lowest:
                instance.blocked.setdefault(lowest, []).append(task)
                return False
        trains = self._flow.nodes[index].trains
        if trains is not None and overwrites and not self._may_train(self.home(trains)):
            self.home(trains).blocked_trains.append(task)
            return False
        return True

    def versions(self, index: int) -> Versions:
        # The versions that node `index` would read now; one object as long as they are equal.
        found = tuple((r.role, self.instances[r.role, r.group].holds) for r in self.rules_of[index])
        if found != self._versions[index]:
            self._versions[index] = found
        return self._versions[index]

    def frontier_moved(self, index: int) -> list[Task]:
        """`frontier[index]` grew: some versions may have lost their last reader."""
        ready: list[Task] = []
        for rule in self.rules_of[index]:
            instance = self.instances[rule.role, rule.group]
            before = instance.ceiling
            self._raise_ceiling(instance)
            if instance.ceiling != before:
                ready += self._retry_trains(instance) if instance.is_home else self._load(instance)
        return ready

    def trained(self, role: str, version: int, at_s: float) -> list[Task]:
        """The home of `role` now holds `version`; publishes it if a replica will read it."""
        ready = self.home(role).advance(version, at_s)
        if any(self._wanted(replica, version) for replica in self.replicas(role)):
            self.publishing[role] = version
            ready.append(Publish(role, version))
        return ready

    def published(self, task: Publish) -> tuple[list[Task], list[DropSnapshot]]:
        """A snapshot is there: replicas may load it, and training may overwrite the original."""
        del self.publishing[task.role]
        receivers = [r for r in self.replicas(task.role) if self._wanted(r, task.version)]
        ready = self._retry_trains(self.home(task.role))
        if not receivers:
            return ready, [DropSnapshot(task.role, task.version)]
        self.snapshots[task.role][task.version] = {replica.group for replica in receivers}
        for replica in receivers:
            ready += self._load(replica)
        return ready, []

    def loaded(self, task: Load, at_s: float) -> tuple[list[Task], list[DropSnapshot]]:
        """A replica holds a new version; also returns the snapshots nobody needs any more."""
        instance = self.instances[task.role, task.group]
        instance.loading = None
        ready = instance.advance(task.version, at_s)
        snapshots = self.snapshots[task.role]
        dropped: list[DropSnapshot] = []
        for version in sorted(v for v in snapshots if v <= task.version):
            snapshots[version].discard(task.group)
            if not snapshots[version]:
                del snapshots[version]
                dropped.append(DropSnapshot(task.role, version))
        return ready + self._load(instance), dropped

    def drop_rest(self) -> list[DropSnapshot]:
        """Forget every snapshot: the run is over (only arrival order leaves some)."""
        dropped = [DropSnapshot(r, v) for r, held in self.snapshots.items() for v in sorted(held)]
        for held in self.snapshots.values():
            held.clear()
        return dropped

    def ceiling(self, instance: Instance) -> int:
        """The newest version `instance` may hold, computed from the frontier."""
        return min(
            (
                rule.highest(self.frontier[rule.node])
                for rule in instance.rules
                if self.frontier[rule.node] < self._num_steps
            ),
            default=NO_CEILING,
        )

    def _raise_ceiling(self, instance: Instance) -> None:
        instance.ceiling = self.ceiling(instance)

    def _may_train(self, home: Instance) -> bool:
        return home.ceiling > home.holds and home.role not in self.publishing

    def _retry_trains(self, home: Instance) -> list[Task]:
        if not home.blocked_trains or not self._may_train(home):
            return []
        ready: list[Task] = list(home.blocked_trains)
        home.blocked_trains.clear()
        return ready

    def _wanted(self, replica: Instance, version: int) -> bool:
        return any(
            rule.wants(version, self.frontier[rule.node], self._num_steps) for rule in replica.rules
        )

    def _load(self, replica: Instance) -> list[Task]:
        if replica.loading is not None or replica.ceiling == NO_CEILING:
            return []
        choices = [
            version
            for version, groups in self.snapshots[replica.role].items()
            if replica.holds < version <= replica.ceiling and replica.group in groups
        ]
        if not choices:
            return []
        replica.loading = Load(replica.role, max(choices), replica.group)
        return [replica.loading]
