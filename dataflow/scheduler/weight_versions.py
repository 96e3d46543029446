"""Version arithmetic: which versions of which role a node may read in a given step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..kinds import WeightRead
from .events import DropSnapshot, Load, NodeTask, Publish, Task, Versions
from .schedule import Flow, Schedule


@dataclass(frozen=True, slots=True)
class ReadRule:
    """The versions that a node may read, as a function of the step."""

    node: int  # Index of the node in the flow
    role: str  # A trainable role
    group: str  # Where the copy is that it reads: where the node runs, or which group serves it
    per_step: int  # Versions made per step
    offset: int  # Versions made in the step before the node
    lag: int  # Steps by which the read is behind; 0 for an exact read
    # True if any version up to the step's own will do (arrival order, or a rollout that takes newer
    # weights in flight); of a copy on other ranks it never will, because those may be given another
    # while the node runs.
    loose: bool
    # True if the read was declared lagged; such reads are counted in the lag histogram.
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
        shift = 0 if self.loose else self.lag
        # The first step whose highest version reaches this one: a division that rounds up.
        step = max(first_step, shift - (self.offset - version) // self.per_step)
        return step < num_steps and self.lowest(step) <= version


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


def read_rules(flow: Flow, schedule: Schedule) -> tuple[tuple[ReadRule, ...], ...]:
    """Per node, its reads of trainable roles sorted by role, its own training included."""
    ahead = runs_ahead(flow)
    return tuple(_node_rules(flow, schedule, i, ahead[i]) for i in range(len(flow.nodes)))


def _node_rules(flow: Flow, schedule: Schedule, i: int, ahead: bool) -> tuple[ReadRule, ...]:
    node, rules = flow.nodes[i], list[ReadRule]()
    reads = [read for read in node.reads if read.role in flow.homes and read.role != node.trains]
    if node.trains is not None:
        before = sum(other.trains == node.trains for other in flow.nodes[:i])
        reads.append(WeightRead(node.trains, before))
    for read in reads:
        # Its inputs come after the trainings anyway, so older weights would gain no time.
        lag = schedule.max_lag if read.lagged and ahead else 0
        # A copy elsewhere does not stay as it is merely because the node's own ranks are busy.
        by_timing = schedule.order == "arrival" or (schedule.in_flight and node.streams)
        rules.append(
            ReadRule(
                node=i,
                role=read.role,
                group=read.at or node.group,
                per_step=flow.trains_per_step[read.role],
                offset=read.offset,
                lag=lag,
                loose=by_timing and lag > 0 and not read.at,
                lagged=read.lagged,
            )
        )
    return tuple(sorted(rules, key=lambda rule: rule.role))


NO_CEILING = 1 << 62
"""Ceiling of an instance that no task will read again."""


@dataclass(slots=True)
class Instance:
    """One copy of a trainable role's weights."""

    role: str
    group: str  # Where the copy lives, on every rank
    is_home: bool  # Whether it is trained here
    holds: int  # The version it holds
    # The newest version it may hold while the reads outstanding are not done.
    ceiling: int = NO_CEILING
    # Reads of this instance and, of a home, of its views; the role's own train nodes left out.
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
            # A version stays at home until the readers of its views have read it.
            if instance.group in flow.views:
                self.home(instance.role).rules += instance.rules
        for instance in self.instances.values():
            instance.ceiling = self.ceiling(instance)

    def _register(self, rule: ReadRule, first_step: int) -> None:
        key = (rule.role, rule.group)
        if key not in self.instances:
            is_home = self._flow.homes[rule.role] == rule.group
            self.instances[key] = Instance(*key, is_home, first_step * rule.per_step)
        if self._flow.nodes[rule.node].trains != rule.role:
            self.instances[key].rules.append(rule)

    def replicas(self, role: str) -> list[Instance]:
        return [i for i in self.instances.values() if i.role == role and not i.is_home]

    def home(self, role: str) -> Instance:
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
        # Parts of a batch only add up gradients; the last one overwrites the weights.
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
        rules = self.rules_of[index]
        bound = [self.instances[rule.role, rule.group] for rule in rules]
        bound += [self.home(rule.role) for rule in rules if rule.group in self._flow.views]
        for instance in bound:
            before = instance.ceiling
            instance.ceiling = self.ceiling(instance)
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
        """A replica holds a new version; also returns the snapshots that are no longer needed."""
        instance = self.instances[task.role, task.group]
        instance.loading = None
        ready = instance.advance(task.version, at_s)
        snapshots = self.snapshots[task.role]
        dropped: list[DropSnapshot] = []
        # Older snapshots as well: this group never goes back to one.
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
        # Without a ceiling nothing reads it again, and a load would move bytes for nothing.
        if replica.loading is not None or replica.ceiling == NO_CEILING:
            return []
        choices = [
            version
            for version, groups in self.snapshots[replica.role].items()
            if replica.holds < version <= replica.ceiling and replica.group in groups
        ]
        if not choices:
            return []
        # Versions in between are skipped: all that still wait take one as new as the ceiling.
        replica.loading = Load(replica.role, max(choices), replica.group)
        return [replica.loading]
