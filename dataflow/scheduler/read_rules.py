"""Version arithmetic: which versions of which role a node may read in a given step."""

from __future__ import annotations

from dataclasses import dataclass

from .flow import Flow
from .schedule import Schedule


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
    for read in node.reads:
        if read.role not in flow.homes or read.role == node.trains:
            continue
        lag = schedule.max_lag if read.lagged and ahead else 0
        # A copy elsewhere does not stay as it is merely because the node's own ranks are busy.
        by_timing = schedule.order == "arrival" or (schedule.in_flight and node.streams)
        is_loose = by_timing and lag > 0 and not read.at
        rules.append(
            ReadRule(
                node=i,
                role=read.role,
                group=read.at or node.group,
                per_step=flow.trains_per_step[read.role],
                offset=read.offset,
                lag=lag,
                loose=is_loose,
                lagged=read.lagged,
            )
        )
    if node.trains is not None:
        rules.append(
            ReadRule(
                node=i,
                role=node.trains,
                group=node.group,
                per_step=flow.trains_per_step[node.trains],
                offset=sum(other.trains == node.trains for other in flow.nodes[:i]),
                lag=0,
                loose=False,
                lagged=False,
            )
        )
    return tuple(sorted(rules, key=lambda rule: rule.role))
