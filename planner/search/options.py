"""What the search chooses between: groupings of call groups, and the ways to run each on a mesh.

The search sees durations and bytes only; where they come from is the business of the models of time
and memory. So it can be checked against brute force on made-up tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import le
from typing import Protocol, TypeAlias

from ..inputs.layout import Layout
from ..inputs.mesh import Mesh


@dataclass(frozen=True)
class CallNode:
    """A call as the search sees it.

    Attributes:
        name: The node's name.
        call_group: What it is placed with; all calls of a call group share a group.
        after: Calls of the same step that must have ended.
        reads_older: Whether it may read weights that lag (a rollout): with `max_lag=k` it waits
            for the train calls of its role of k + 1 steps before, not of the step before.
        role: The role whose weights it reads.
        trains: Whether it makes the role's next weights.
    """

    name: str
    call_group: str
    after: tuple[str, ...]
    role: str
    reads_older: bool = False
    trains: bool = False


@dataclass(frozen=True)
class Option:
    """One way to run a call group on a mesh.

    Attributes:
        durations_s: Call name -> seconds, weight movement into the call's layout included.
        resident_bytes: Per device, always held.
        transient_bytes: Call name -> per device, held while the call runs.
        layouts: Call name -> layout, for the plan.
    """

    durations_s: Mapping[str, float]
    resident_bytes: int
    transient_bytes: Mapping[str, int]
    layouts: Mapping[str, Layout]

    @property
    def least_bytes(self) -> int:
        """Per device at its peak, if nothing shared it."""
        return self.resident_bytes + max(self.transient_bytes.values())


class OptionTable(Protocol):
    """Where the search asks for options; deterministic."""

    def options(self, call_group: str, mesh: Mesh, *, with_source: bool) -> Sequence[Option]:
        """Ways to run a call group on a mesh, none dominated; none if nothing fits or divides.

        Args:
            call_group: A role, or "role.generate" for a trained role's generation.
            mesh: The devices.
            with_source: For "role.generate": whether the role trains on the same mesh, so that
                its weights are there already and only change layout.
        """
        ...


def dominant(options: Sequence[Option], *, slack_bytes: int = 0) -> tuple[Option, ...]:
    """Drop options that another one equals or beats in every duration and every size.

    Args:
        options: What there is, all of the same calls in the same order.
        slack_bytes: Sizes that differ by no more count as equal, except for the option that needs
            least: near misses multiply what a group must be searched for and change nothing.
    """
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


Partition: TypeAlias = tuple[tuple[str, ...], ...]
"""What is grouped stands in the order given, groups in the order of their first member."""


def partitions(
    call_groups: Sequence[str],
    together: Sequence[Sequence[str]] = (),
    apart: Sequence[Sequence[str]] = (),
) -> Iterator[Partition]:
    """All partitions of `call_groups`; everything in one group comes first, all alone last.

    Args:
        call_groups: What is placed.
        together: Call groups of one entry share a group.
        apart: No two call groups of one entry do.
    """
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
