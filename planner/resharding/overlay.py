"""Two shardings laid over each other: what stays, what must move, and who could send it.

All parameters that are alike on both sides (a kind) are treated at once: the layers of a stage
differ in name only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...dataflow.errors import PlanError
from .box import Box, Grid, intersection, volume
from .sharding import Pattern, Sharding, Slice

Cell = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """Parameters of one shape that are spread alike in the source and alike in the destination."""

    params: tuple[int, ...]  # their indices in the destination sharding
    names: tuple[str, ...]  # their names, in the same order
    source: Pattern  # how the source holds each
    destination: Pattern  # how the destination holds each
    # dimensions of the source engine's tensor, as in `StoredParam.dims`
    source_dims: tuple[int, ...]
    destination_dims: tuple[int, ...]  # the same of the destination


@dataclass(frozen=True)
class Kept:
    """A box that a device needs and has: it is copied, not sent."""

    kind: Kind
    box: Box
    source: Slice
    destination: Slice


@dataclass(frozen=True)
class Piece:
    """A box that some devices need and lack; no plan has to cut it further."""

    kind: Kind  # the kind of the parameters
    box: Box  # the indices of each
    holders: Mapping[int, Slice]  # device -> its slice around the box, in the source
    # device that lacks the box -> its slice around the box, in the destination
    needers: Mapping[int, Slice]


def kinds_of(source: Sharding, destination: Sharding) -> tuple[Kind, ...]:
    """The kinds of parameters, in the order of their first one."""
    given = {param.name: param for param in source.params}
    wanted = {param.name: param for param in destination.params}
    for name in [*wanted, *given]:
        if name not in given or name not in wanted:
            side = "source" if name not in given else "destination"
            raise PlanError(
                f"cannot plan a transfer: the {side} has no parameter '{name}'; both sides must "
                "describe the same model with the same head"
            )
        if given[name].shape != wanted[name].shape:
            raise PlanError(
                f"cannot plan a transfer: parameter '{name}' is {given[name].shape} in the source "
                f"and {wanted[name].shape} in the destination"
            )
    groups = defaultdict[tuple[object, ...], list[int]](list)
    for index, param in enumerate(destination.params):
        other = given[param.name]
        key = (param.shape, other.pattern, other.dims, param.pattern, param.dims)
        groups[key].append(index)
    kinds: list[Kind] = []
    for params in groups.values():
        names = tuple(destination.params[i].name for i in params)
        one, other = given[names[0]], wanted[names[0]]
        patterns = (source.patterns[one.pattern], destination.patterns[other.pattern])
        kinds.append(Kind(tuple(params), names, *patterns, one.dims, other.dims))
    return tuple(kinds)


def kept_slices(kind: Kind) -> Iterator[Kept]:
    held = _by_device(kind.source)
    for wanted in kind.destination:
        for given in held.get(wanted.device, ()):
            shared = intersection(given.box, wanted.box)
            if shared is not None:
                yield Kept(kind, shared, given, wanted)


def pieces_of(kind: Kind) -> Iterator[Piece]:
    sources, wanted = _by_box(kind.source), _by_box(kind.destination)
    if not wanted:
        return
    grid = Grid.of([*sources, *wanted])
    holders, needers = _by_cell(grid, sources), _by_cell(grid, wanted)
    for cell in sorted(needers):
        have = _merged(holders.get(cell, []))
        lack = {d: s for d, s in _merged(needers[cell]).items() if d not in have}
        if not have:
            raise PlanError(
                f"cannot plan a transfer: no source device holds {grid.box(cell)} of parameter "
                f"'{kind.names[0]}', which device {min(lack)} needs"
            )
        if lack:
            yield Piece(kind, grid.box(cell), have, lack)


def _by_device(pattern: Pattern) -> Mapping[int, list[Slice]]:
    held = defaultdict[int, list[Slice]](list)
    for piece in pattern:
        held[piece.device].append(piece)
    return held


def _by_box(pattern: Pattern) -> Mapping[Box, dict[int, Slice]]:
    held = defaultdict[Box, dict[int, Slice]](dict)
    for piece in pattern:
        if volume(piece.box):
            held[piece.box][piece.device] = piece
    return held


def _by_cell(
    grid: Grid, held: Mapping[Box, dict[int, Slice]]
) -> Mapping[Cell, list[dict[int, Slice]]]:
    cells = defaultdict[Cell, list[dict[int, Slice]]](list)
    for box, replicas in held.items():
        for cell in grid.cells(box):
            cells[cell].append(replicas)
    return cells


def _merged(groups: list[dict[int, Slice]]) -> Mapping[int, Slice]:
    if len(groups) == 1:
        return groups[0]
    return {device: piece for group in groups for device, piece in group.items()}
