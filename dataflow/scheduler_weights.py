"""Which copy of which weights holds which version, and who must wait for whom.

An *instance* is a copy of a trainable role's weights on one group. It holds exactly one version at
a time. The home instance advances by training in place; every other instance (a replica) advances
by a `Publish` at home followed by a `Load`. An instance may leave a version only when everybody who
must read it, in any step still to come, has done so: its *ceiling* is the newest version it may
hold, the smallest "at most" among the reads that are still outstanding.

Everything about steps not yet admitted follows from arithmetic on version numbers, so nothing here
grows with the number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .flow import Flow
from .schedule import Schedule
from .scheduler_events import DropSnapshot, Load, NodeTask, Publish, Task, Versions

__all__ = ["NO_CEILING", "Instance", "ReadRule", "Weights", "runs_ahead"]

NO_CEILING = 1 << 62
"""Ceiling of an instance that nobody will read again."""


@dataclass(frozen=True, slots=True)
class ReadRule:
    """Which versions a node may read, as a function of the step.

    Attributes:
        node: Index of the node in the flow.
        role: A trainable role.
        group: Where the node runs, hence which instance it reads.
        per_step: Versions made per step.
        offset: Versions made in the step before the node.
        lag: Steps by which the read is behind; 0 for an exact read.
        loose: True if any version up to the step's own will do (arrival order).
        lagged: True if the read was declared lagged; such reads are counted in the lag histogram.
    """

    node: int
    role: str
    group: str
    per_step: int
    offset: int
    lag: int
    loose: bool
    lagged: bool

    def current(self, step: int) -> int:
        """The version current at the node's line in `step`."""
        return step * self.per_step + self.offset

    def lowest(self, step: int) -> int:
        """The oldest version the node may read in `step`."""
        return max(0, (step - self.lag) * self.per_step + self.offset)

    def highest(self, step: int) -> int:
        """The newest version the node may read in `step`."""
        return self.current(step) if self.loose else self.lowest(step)

    def wants(self, version: int, first_step: int, num_steps: int) -> bool:
        """Whether some step in `[first_step, num_steps)` may read `version` (at least 1)."""
        shift = 0 if self.loose else self.lag
        step = max(first_step, shift - (self.offset - version) // self.per_step)
        return step < num_steps and self.lowest(step) <= version


@dataclass(slots=True)
class Instance:
    """One copy of a trainable role's weights.

    Attributes:
        role: The role.
        group: Where the copy lives, on every rank.
        is_home: Whether it is trained here.
        holds: The version it holds.
        ceiling: The newest version it may hold while the reads outstanding are not done.
        rules: Reads of this instance, the role's own train nodes left out.
        loading: The load queued or running, if any.
        parked: Tasks with all inputs there that wait for a version, by version.
        parked_trains: Train tasks that wait for readers of the version they would overwrite.
        changed_s: When `holds` changed last; None since the start.
    """

    role: str
    group: str
    is_home: bool
    holds: int
    ceiling: int = NO_CEILING
    rules: list[ReadRule] = field(default_factory=list[ReadRule])
    loading: Load | None = None
    parked: dict[int, list[NodeTask]] = field(default_factory=dict[int, list[NodeTask]])
    parked_trains: list[NodeTask] = field(default_factory=list[NodeTask])
    changed_s: float | None = None

    def advance(self, version: int, at_s: float) -> list[Task]:
        """Hold `version` from now on; returns the tasks that waited for it."""
        self.holds = version
        self.changed_s = at_s
        ready: list[Task] = []
        for wanted in sorted(key for key in self.parked if key <= version):
            ready += self.parked.pop(wanted)
        return ready


def runs_ahead(flow: Flow) -> tuple[bool, ...]:
    """Per node, whether it may run before the trainings of earlier steps.

    A node whose inputs hang on an exact read of a trainable role cannot: its inputs exist only
    after those trainings. A lagged read of such a node is therefore treated as exact.
    """
    ahead: dict[str, bool] = {}
    for node in flow.nodes:
        exact = any(read.role in flow.homes and not read.lagged for read in node.reads)
        inputs = all(ahead[name] for name in node.inputs)
        ahead[node.name] = node.trains is None and inputs and not exact
    return tuple(ahead.values())


class Weights:
    """All instances, the snapshots between them, and the gates tasks pass.

    Attributes:
        instances: By `(role, group)`.
        rules_of: Per node, its read rules sorted by role, its own training included.
        frontier: Per node the first step in which it is not done; moved by the scheduler.
        publishing: Role -> version whose snapshot is queued or being taken.
        snapshots: Role -> published version -> groups that have yet to load it or a newer one.
    """

    def __init__(self, flow: Flow, schedule: Schedule, num_steps: int, first_step: int) -> None:
        self._flow = flow
        self._num_steps = num_steps
        self.frontier = [first_step] * len(flow.nodes)
        self.instances: dict[tuple[str, str], Instance] = {}
        self.publishing: dict[str, int] = {}
        self.snapshots: dict[str, dict[int, set[str]]] = {role: {} for role in flow.homes}
        self.rules_of = tuple(self._rules(index, schedule) for index in range(len(flow.nodes)))
        for rules in self.rules_of:
            for rule in rules:
                self._register(rule, first_step)
        for instance in self.instances.values():
            self._raise_ceiling(instance)

    def _rules(self, index: int, schedule: Schedule) -> tuple[ReadRule, ...]:
        flow, node = self._flow, self._flow.nodes[index]
        ahead = runs_ahead(flow)[index]
        loose = schedule.order == "arrival"
        rules: list[ReadRule] = []
        for read in node.reads:
            per_step = flow.trains_per_step.get(read.role)
            if per_step is not None and read.role != node.trains:
                lag = schedule.max_lag if read.lagged and ahead else 0
                rules.append(
                    ReadRule(
                        index, read.role, node.group, per_step, read.offset,
                        lag, loose and lag > 0, read.lagged,
                    )
                )  # fmt: skip
        if node.trains is not None:
            per_step = flow.trains_per_step[node.trains]
            offset = sum(other.trains == node.trains for other in flow.nodes[:index])
            rules.append(
                ReadRule(index, node.trains, node.group, per_step, offset, 0, False, False)
            )
        return tuple(sorted(rules, key=lambda rule: rule.role))

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

    def gate(self, index: int, task: NodeTask) -> bool:
        """Whether every instance `task` reads holds the right version; parks it otherwise."""
        for rule in self.rules_of[index]:
            instance = self.instances[rule.role, rule.group]
            lowest = rule.lowest(task.step)
            if instance.holds < lowest:
                instance.parked.setdefault(lowest, []).append(task)
                return False
        trains = self._flow.nodes[index].trains
        if trains is not None and not self._may_train(self.home(trains)):
            self.home(trains).parked_trains.append(task)
            return False
        return True

    def versions(self, index: int) -> Versions:
        """What node `index` would read now."""
        return tuple((r.role, self.instances[r.role, r.group].holds) for r in self.rules_of[index])

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
        takers = [r for r in self.replicas(task.role) if self._wanted(r, task.version)]
        ready = self._retry_trains(self.home(task.role))
        if not takers:
            return ready, [DropSnapshot(task.role, task.version)]
        self.snapshots[task.role][task.version] = {replica.group for replica in takers}
        for replica in takers:
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
        if not home.parked_trains or not self._may_train(home):
            return []
        ready: list[Task] = list(home.parked_trains)
        home.parked_trains.clear()
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
