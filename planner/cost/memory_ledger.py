"""Memory per device over time, as data: what each role holds, what each call adds, whether it fits.

Calls of one device group run one after another, so a group's peak is what its roles always hold
plus what its hungriest call adds. Memory is a hard constraint: `check` refuses, it never weighs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...dataflow.errors import PlanError
from ..formatting import aligned, bytes_text, part_text


class Parts(NamedTuple):
    """Bytes on one device by what they are for; `sum` is the total."""

    weights: int = 0  # weights, gathered or resharded copies included
    gradients: int = 0  # gradients and the buffers they are added up in
    optimizer: int = 0  # adam's moments, float32 master weights, temporaries of a step
    activations: int = 0  # what the backward pass needs, and the working set of the layer at hand
    logits: int = 0  # logits, log-probabilities and their gradients
    kv_cache: int = 0  # keys and values of the rows being generated
    transfer: int = 0  # buckets that weights move through

    @property
    def total(self) -> int:
        return sum(self)

    def plus(self, other: Parts) -> Parts:
        return Parts(*map(int.__add__, self, other))

    @property
    def largest(self) -> str:
        return max(zip(self, self._fields, strict=True), key=lambda pair: pair[0])[1]


@dataclass(frozen=True)
class GroupLedger:
    """Memory of each device of one group."""

    name: str  # the group
    num_devices: int  # how many devices hold this much each
    resident: Mapping[str, Parts]  # what is always held: call group -> parts
    # what is held while a call runs, in the order of time: call -> parts
    calls: Mapping[str, Parts]

    @property
    def held(self) -> Parts:
        total = Parts()
        for parts in self.resident.values():
            total = total.plus(parts)
        return total

    @property
    def peak(self) -> tuple[str, Parts]:
        """The call that needs most and all that is held then; ("", ...) if no call adds anything.

        Of equal calls the first.
        """
        name, worst = "", Parts()
        for call, parts in self.calls.items():
            if parts.total > worst.total:
                name, worst = call, parts
        return name, self.held.plus(worst)


@dataclass(frozen=True)
class MemoryLedger:
    """All groups of a plan."""

    groups: tuple[GroupLedger, ...]

    def peak_bytes(self) -> dict[str, int]:
        return {group.name: group.peak[1].total for group in self.groups}

    def table(self) -> str:
        rows = [row for group in self.groups for row in _rows(group)]
        used = [name for name in Parts._fields if any(getattr(parts, name) for *_, parts in rows)]
        lines = [["group", "", *map(part_text, used), "total"]]
        for group, moment, parts in rows:
            sizes = [getattr(parts, name) for name in used]
            cells = [bytes_text(size) if size else "-" for size in sizes]
            lines.append([group, moment, *cells, bytes_text(parts.total)])
        return "\n".join(aligned(lines, right=range(2, len(used) + 3)))


def _rows(group: GroupLedger) -> list[tuple[str, str, Parts]]:
    rows = [(f"always: {call_group}", parts) for call_group, parts in group.resident.items()]
    rows += [(f"while: {call}", parts) for call, parts in group.calls.items()]
    rows.append(("peak", group.peak[1]))
    first = f"{group.name} x{group.num_devices}"
    return [("" if at else first, moment, parts) for at, (moment, parts) in enumerate(rows)]


def check(ledger: MemoryLedger, capacity: Mapping[str, int], *, change: str = "") -> None:
    """Refuse a plan that does not fit."""
    lacking = {
        group.name: group.peak[1].total - capacity[group.name]
        for group in ledger.groups
        if group.peak[1].total > capacity[group.name]
    }
    if not lacking:
        return
    worst = max(lacking, key=lambda name: lacking[name])
    group = next(group for group in ledger.groups if group.name == worst)
    call, parts = group.peak
    moment = f"during '{call}'" if call else "at rest"
    raise PlanError(
        f"group '{worst}' does not fit: {moment} each of its {group.num_devices} devices needs "
        f"{bytes_text(parts.total)}, but roles can use {bytes_text(capacity[worst])}; "
        f"{bytes_text(lacking[worst])} ({lacking[worst]} bytes) are missing. "
        f"The largest part is {part_text(parts.largest)}, "
        f"{bytes_text(getattr(parts, parts.largest))}\n{ledger.table()}"
        + (f"\nthe cheapest change that makes it fit: {change}" if change else "")
    )
