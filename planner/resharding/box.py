"""Hyper-rectangles of indices: the arithmetic under shardings and transfer plans."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

Box = tuple[tuple[int, int], ...]  # one (start, stop) per dimension of a parameter


def whole(shape: Iterable[int]) -> Box:
    """All indices of a parameter."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Elements in a box; 0 if any range is empty."""
    return prod(max(stop - start, 0) for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    shared = tuple(
        (max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True)
    )  # fmt: skip
    return shared if all(start < stop for start, stop in shared) else None


@dataclass(frozen=True)
class Grid:
    """The coarsest grid in which every given box is a block of whole cells."""

    cuts: tuple[tuple[int, ...], ...]  # per dimension, where cells begin and end, ascending

    @staticmethod
    def of(boxes: Iterable[Box]) -> Grid:
        columns = zip(*boxes, strict=True)
        return Grid(
            tuple(tuple(sorted({i for span in column for i in span})) for column in columns)
        )

    def cells(self, box: Box) -> Iterator[tuple[int, ...]]:
        return itertools.product(
            *(
                range(bisect_left(cuts, start), bisect_left(cuts, stop))
                for cuts, (start, stop) in zip(self.cuts, box, strict=True)
            )
        )

    def box(self, cell: tuple[int, ...]) -> Box:
        return tuple((cuts[i], cuts[i + 1]) for cuts, i in zip(self.cuts, cell, strict=True))
