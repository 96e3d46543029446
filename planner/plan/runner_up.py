"""Why the second best plan lost, in terms of the step times that stand beside it."""

from __future__ import annotations

from collections.abc import Sequence

from ..formatting import seconds_text
from ..search.result import Assignment, GroupAssignment
from .prediction import RunnerUp

_SAME = 1e-9
"""Step times that differ by less than this share are equal: sums of floats in other orders."""

_CLOSE = 0.005
"""Step times that differ by less than this share look the same with three digits."""


def runner_up(second: Assignment | None, best: Assignment) -> RunnerUp | None:
    """The second best plan in words; None if there is none.

    Its busiest group alone may need longer than a whole step of the best plan; or groups wait for
    each other. The best plan's own groups are not compared: a step of it may be waiting too.
    """
    if second is None:
        return None
    return RunnerUp(
        description="; ".join(
            f"{_listed(group.call_groups)} on {len(group.devices)}" for group in second.groups
        ),
        step_time_s=second.step_time_s,
        why=_why(second, best.step_time_s),
    )


def _why(second: Assignment, best_s: float) -> str:
    slower_s = second.step_time_s - best_s
    if slower_s <= _SAME * best_s:
        return "as fast as the best plan; of plans that take the same time the first one found wins"
    group = max(second.groups, key=_busy_s)
    on, busy_s = f"{_listed(group.call_groups)} on {len(group.devices)} devices", _busy_s(group)
    close = f"only {seconds_text(slower_s)} slower: " if slower_s < _CLOSE * best_s else ""
    if busy_s > best_s * (1 + _SAME):
        than = "longer than" if close else f"longer than the {seconds_text(best_s)} of"
        whole = " takes" if close else ""
        return (
            f"{close}its group of {on} is busy {seconds_text(busy_s)} of each step, {than} a whole "
            f"step of the best plan{whole}"
        )
    return (
        f"{close}its busiest group, {on}, works {seconds_text(busy_s)} of each step and waits the "
        "rest for other groups"
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _busy_s(group: GroupAssignment) -> float:
    return sum(s for option in group.options.values() for s in option.durations_s.values())
