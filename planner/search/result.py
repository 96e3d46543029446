"""What a search returns: assignments, how good they are, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..inputs.mesh import Mesh
from .options import Option


@dataclass(frozen=True)
class GroupAssignment:
    """Call groups that share devices.

    Attributes:
        call_groups: The call groups, in program order.
        mesh: The devices, as the models of time and memory saw them.
        devices: Their ids, ascending.
        options: Call group -> how it runs.
    """

    call_groups: tuple[str, ...]
    mesh: Mesh
    devices: tuple[int, ...]
    options: Mapping[str, Option]

    @property
    def resident_bytes(self) -> int:
        """Per device, of all call groups, always held."""
        return sum(option.resident_bytes for option in self.options.values())

    @property
    def transient_bytes(self) -> int:
        """Per device, of the hungriest call."""
        return max(max(option.transient_bytes.values()) for option in self.options.values())


@dataclass(frozen=True)
class Assignment:
    """A group for every call group, devices for every group, an option for every call group.

    Attributes:
        groups: In the order of their first call groups.
        max_lag: The schedule.
        step_time_s: Seconds per step in the long run.
    """

    groups: tuple[GroupAssignment, ...]
    max_lag: int
    step_time_s: float

    @property
    def options(self) -> dict[str, Option]:
        """Call group -> how it runs."""
        return {name: option for group in self.groups for name, option in group.options.items()}

    @property
    def durations_s(self) -> dict[str, float]:
        """Call name -> seconds."""
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
    """The best plan found, and proof of how good it is.

    Attributes:
        best: The assignment.
        lower_bound_s: No assignment takes less, under the schedule of `best`.
        runner_up: The best with other groups or other device counts; None if there is no other.
        num_played: Schedules played.
        num_boxes: Sets of allocations bounded.
        num_asked: Times that the option table was asked.
        search_time_s: How long it took, by the clock.
        stopped_at_deadline: Whether the clock ended it; the result then depends on the machine.
        num_cut_short: Device counts for which there were more choices of options than are looked
            at, in the fastest order; then a gap may be left without a deadline.
        other_lags: The results for the other schedules that were to be tried, lowest lag first.
    """

    best: Assignment
    lower_bound_s: float
    runner_up: Assignment | None
    num_played: int
    num_boxes: int
    num_asked: int
    search_time_s: float
    stopped_at_deadline: bool
    num_cut_short: int = 0
    other_lags: tuple[SearchResult, ...] = ()

    @property
    def step_time_s(self) -> float:
        """Seconds per step of `best`."""
        return self.best.step_time_s

    @property
    def gap(self) -> float:
        """The share of its time by which `best` could be improved at most."""
        return max(0.0, 1.0 - self.lower_bound_s / self.step_time_s)
