"""Why nothing fits: the least by which memory is exceeded, and where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...dataflow.errors import InfeasibleError
from ..formatting import bytes_text
from .allocation import AllocationGrid, Boxes, Corners, Index, Ints, RangeMin
from .choices import CallGroupOption, Choices
from .options import Partition

_AT_ONCE = 512

# bytes lacking, the call groups that lack them, and where
_Least: TypeAlias = tuple[float, tuple[str, ...], Index]


@dataclass(frozen=True)
class Shortfall:
    call_groups: tuple[str, ...]  # its call groups
    num_devices: int  # devices of its mesh
    device: str  # what they are
    needed_bytes: int  # what it needs per device at least
    memory_bytes: int  # what it can have

    def __str__(self) -> str:
        first, *others = self.call_groups
        subject = ", ".join(self.call_groups) if others else f"'{first}' alone"
        needed, there = bytes_text(self.needed_bytes), bytes_text(self.memory_bytes)
        lacking = bytes_text(self.needed_bytes - self.memory_bytes)
        return (
            f"{subject} on {self.num_devices} x {self.device}: {needed} per device are needed, "
            f"{there} are there, {lacking} are lacking"
        )


def explain_infeasible(choices: Choices, partitions: Sequence[Partition]) -> InfeasibleError:
    cluster = choices.space.cluster.name
    for call_group in choices.calls_of:
        if not _runs_on(choices, call_group):
            return InfeasibleError(
                f"'{call_group}' has no legal layout on cluster '{cluster}': on none of the "
                f"{len(choices.indices)} meshes that a group can have does the table offer a "
                "way to run it that the pins and the number of rows allow\n    a train call has as "
                "many rows on every rank: change the pins, the devices, or the prompts of a step"
            )
    for call_group in choices.calls_of:
        found = _alone(choices, call_group)
        if found is not None and found.needed_bytes > found.memory_bytes:
            return InfeasibleError(
                f"'{call_group}' fits nowhere on cluster '{cluster}'. At best: {found}"
            )
    found = shortfall(choices, partitions)
    if found is not None:
        return InfeasibleError(
            f"the call groups do not fit together on cluster '{cluster}'. At best: {found}"
        )
    lines = [
        f"no way to divide the {choices.space.cluster.num_devices} devices of cluster '{cluster}' "
        "gives every call group a number of devices on which it has a layout:"
    ]
    for call_group in choices.calls_of:
        counts = ", ".join(map(str, _runs_on(choices, call_group)))
        lines.append(f"    '{call_group}' has one on {counts}")
    return InfeasibleError("\n".join(lines))


def shortfall(choices: Choices, partitions: Sequence[Partition]) -> Shortfall | None:
    """The group that lacks most in the assignment where that is least; None if there is none."""
    best: _Least | None = None
    for partition in partitions:
        best = _Lacks(choices, partition).least(best[0] if best else inf) or best
    return _shortfall(choices, best) if best else None


def _shortfall(choices: Choices, least: _Least) -> Shortfall:
    lacking, call_groups, index = least
    mesh = choices.space.mesh(index)
    used = zip(mesh.cluster.node_groups, mesh.counts, strict=True)
    smallest = min(
        (group.device for group, count in used if count),
        key=lambda device: device.memory_bytes - device.reserved_bytes,
    )
    needed = int(lacking) + mesh.memory_bytes
    return Shortfall(call_groups, mesh.num_devices, smallest.name, needed, mesh.memory_bytes)


def _alone(choices: Choices, call_group: str) -> Shortfall | None:
    may = choices.may_have((call_group,))
    needed = [
        (_needed([options]) - choices.memory_bytes[index], (call_group,), index)
        for index, can in zip(choices.indices, may, strict=True)
        for options in _options(choices, call_group, index)
        if can
    ]
    least = min(needed, default=None)
    return _shortfall(choices, least) if least and least[0] < inf else None


def _options(choices: Choices, call_group: str, index: Index) -> list[tuple[CallGroupOption, ...]]:
    # Weights that others train can be read where they are, which may be the only way that fits.
    heads = choices.every_head(choices.sources.get(call_group, call_group))
    ways = [(call_group, ()), *(head for head in heads if call_group in head[1])]
    return [choices.options(head, index) for head in ways]


def _runs_on(choices: Choices, call_group: str) -> list[int]:
    may = choices.may_have((call_group,))
    return sorted(
        {
            choices.space.num_devices(index)
            for index, can in zip(choices.indices, may, strict=True)
            if can and any(_options(choices, call_group, index))
        }
    )


def _needed(pools: Sequence[Sequence[CallGroupOption]]) -> float:
    least = inf
    for most in {option.transient_bytes for pool in pools for option in pool}:
        resident = sum(
            min((o.resident_bytes for o in pool if o.transient_bytes <= most), default=inf)
            for pool in pools
        )
        least = min(least, resident + most)
    return least


class _Lacks:
    def __init__(self, choices: Choices, partition: Partition) -> None:
        self._space, self._partition = choices.space, partition
        self._fixed = choices.pins.fixed(partition)
        self._grid = AllocationGrid(choices.space, self._fixed)
        self._tables = [RangeMin(_lacks(choices, call_groups)[None]) for call_groups in partition]

    def least(self, below: float) -> _Least | None:
        best: _Least | None = None
        boxes = self._bounded(self._grid.root())
        while len(boxes):
            taken = np.arange(len(boxes)) < _AT_ONCE
            some, rest = boxes.where(taken), boxes.where(~taken)
            point = some.is_point
            for row in point.nonzero()[0]:
                allocation = some.point(int(row))
                if some.bound[row] < below and self._space.fits(allocation, self._fixed):
                    below = float(some.bound[row])
                    k = int(self._per_group(some.low[[row]], some.high[[row]])[0].argmax())
                    best = (below, self._partition[k], allocation[k])
            boxes = rest.plus(self._bounded(self._grid.split(some.where(~point))))
            boxes = boxes.where(boxes.bound < below).best_first()
        return best

    def _per_group(self, low: Ints, high: Ints) -> NDArray[np.float64]:
        found = [table(low[:, k], high[:, k])[:, 0] for k, table in enumerate(self._tables)]
        return np.array(found).T

    def _bounded(self, corners: Corners) -> Boxes:
        bound = self._per_group(*corners).max(1)
        can = np.isfinite(bound)
        return Boxes(corners[0][can], corners[1][can], bound[can])


def _lacks(choices: Choices, call_groups: Sequence[str]) -> NDArray[np.float64]:
    found = np.full(choices.space.shape, np.inf)
    for index, may in zip(choices.indices, choices.may_have(call_groups), strict=True):
        if may:
            pools = [choices.options(head, index) for head in choices.heads(call_groups)]
            found[index] = _needed(pools) - choices.memory_bytes[index]
    return found
