"""Options of the search: groupings of call groups, and the ways to run each on a mesh.

The search sees durations and bytes only; where they come from is the business of the models of time
and memory. So it can be checked against brute force on made-up tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import Protocol, TypeAlias

from ..inputs.cluster import Mesh
from ..inputs.layout import Layout


@dataclass(frozen=True)
class CallNode:
    name: str  # the node's name
    call_group: str  # what it is placed with; all calls of a call group share a group
    after: tuple[str, ...]  # calls of the same step that must have ended
    role: str  # the role whose weights it reads
    # whether it may read weights that lag (a rollout): with `max_lag=k` it waits for the train
    # calls of its role of k + 1 steps before, not of the step before
    reads_older: bool = False
    trains: bool = False  # whether it makes the role's next weights


@dataclass(frozen=True)
class Option:
    # call name -> seconds, weight movement into the call's layout included
    durations_s: Mapping[str, float]
    resident_bytes: int  # per device, always held
    transient_bytes: Mapping[str, int]  # call name -> per device, held while the call runs
    layouts: Mapping[str, Layout]  # call name -> layout, for the plan

    @property
    def least_bytes(self) -> int:
        return self.resident_bytes + max(self.transient_bytes.values())


class OptionTable(Protocol):
    """Table that the search asks for options; deterministic."""

    def options(
        self, call_group: str, mesh: Mesh, *, beside: tuple[str, ...] = (), lagged: bool = False
    ) -> Sequence[Option]:
        """The ways to run a call group, together with call groups that read what it trains.

        Args:
            call_group: The call group.
            mesh: The devices.
            beside: Call groups on the same devices that read its weights; an option is of all.
            lagged: Whether what generates reads weights of earlier steps.
        """
        ...


def dominant(options: Sequence[Option], *, slack_bytes: int = 0) -> tuple[Option, ...]:
    """Drop options that another one equals or beats in every duration and every size."""
    least = min((option.least_bytes for option in options), default=0)
    kept: list[Option] = []
    sizes: list[tuple[tuple[float, ...], tuple[int, ...]]] = []
    for option in sorted(options, key=lambda o: (sum(o.durations_s.values()), o.least_bytes)):
        slack = 0 if option.least_bytes == least else slack_bytes
        seconds = tuple(option.durations_s.values())
        most = (option.resident_bytes + slack,
                *[size + slack for size in option.transient_bytes.values()])  # fmt: skip
        if not any(
            all(map(le, num_bytes, most)) and all(map(le, less_s, seconds))
            for less_s, num_bytes in sizes
        ):
            kept.append(option)
            sizes.append((seconds, (option.resident_bytes, *option.transient_bytes.values())))
    return tuple(kept)


# what is grouped stands in the order given, groups in the order of their first member
Partition: TypeAlias = tuple[tuple[str, ...], ...]


def partitions(
    call_groups: Sequence[str],
    together: Sequence[Sequence[str]] = (),
    apart: Sequence[Sequence[str]] = (),
) -> Iterator[Partition]:
    """All partitions of `call_groups`; everything in one group comes first, all alone last."""
    partners = {u: {v for s in together if u in s for v in s} for u in call_groups}
    strangers = {u: {v for s in apart if u in s for v in s if v != u} for u in call_groups}

    def extend(groups: list[list[str]], position: int) -> Iterator[Partition]:
        if position == len(call_groups):
            yield tuple(tuple(group) for group in groups)
            return
        call_group = call_groups[position]
        earlier = partners[call_group] & set(call_groups[:position])
        for group in groups:
            if earlier <= set(group) and strangers[call_group].isdisjoint(group):
                group.append(call_group)
                yield from extend(groups, position + 1)
                group.pop()
        if not earlier:
            yield from extend([*groups, [call_group]], position + 1)

    yield from extend([], 0)


@dataclass(frozen=True)
class GroupAssignment:
    call_groups: tuple[str, ...]  # the call groups, in program order
    mesh: Mesh  # the devices, as the models of time and memory saw them
    devices: tuple[int, ...]  # their ids, ascending
    # call group -> how it runs, and with it what reads its weights in this group
    options: Mapping[str, Option]


@dataclass(frozen=True)
class Assignment:
    """A group for every call group, devices for every group, an option for every call group."""

    groups: tuple[GroupAssignment, ...]  # in the order of their first call groups
    max_lag: int  # the schedule
    step_time_s: float  # seconds per step in the long run

    @property
    def options(self) -> dict[str, Option]:
        return {name: option for group in self.groups for name, option in group.options.items()}

    @property
    def durations_s(self) -> dict[str, float]:
        return {
            name: seconds
            for option in self.options.values()
            for name, seconds in option.durations_s.items()
        }

    def __str__(self) -> str:
        groups = (
            f"{', '.join(group.call_groups)} on {len(group.devices)} device(s)"
            for group in self.groups
        )
        return f"{self.step_time_s:.6g} s per step: {'; '.join(groups)}"


@dataclass(frozen=True)
class SearchResult:
    """The best plan found, and proof of how good it is."""

    best: Assignment  # the assignment
    lower_bound_s: float  # no assignment takes less, under the schedule of `best`
    # the best with other groups or other device counts; None if there is no other
    runner_up: Assignment | None
    num_asked: int  # times that the option table was asked
    search_time_s: float  # how long it took, by the clock
    stopped_at_deadline: bool  # whether the clock ended it; the result then depends on the machine
    # device counts for which there were more choices of options than are looked at, in the fastest
    # order; then a gap may be left without a deadline
    num_cut_short: int = 0
    # the results for the other schedules that were to be tried, lowest lag first
    other_lags: tuple[SearchResult, ...] = ()

    @property
    def step_time_s(self) -> float:
        return self.best.step_time_s

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.lower_bound_s / self.step_time_s)
