"""What a search returns: assignments, how good they are, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..inputs.mesh import Mesh
from .options import Option


@dataclass(frozen=True)
class GroupAssignment:
    """Call groups that share devices."""

    call_groups: tuple[str, ...]  # the call groups, in program order
    mesh: Mesh  # the devices, as the models of time and memory saw them
    devices: tuple[int, ...]  # their ids, ascending
    options: Mapping[str, Option]  # call group -> how it runs

    @property
    def resident_bytes(self) -> int:
        return sum(option.resident_bytes for option in self.options.values())

    @property
    def transient_bytes(self) -> int:
        return max(max(option.transient_bytes.values()) for option in self.options.values())


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
    num_played: int  # schedules played
    num_boxes: int  # sets of allocations bounded
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
