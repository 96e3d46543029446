"""Ways to put units into groups: the partitions of a set, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

__all__ = ["Partition", "partitions"]

Partition: TypeAlias = tuple[tuple[str, ...], ...]
"""Groups of units; units in the order given, groups in the order of their first units."""


def partitions(
    units: Sequence[str],
    together: Sequence[Sequence[str]] = (),
    apart: Sequence[Sequence[str]] = (),
) -> Iterator[Partition]:
    """All partitions of `units`; everything in one group comes first, all alone last.

    Args:
        units: What is placed.
        together: Units of one entry share a group.
        apart: No two units of one entry do.
    """
    partners = {u: {v for s in together if u in s for v in s} for u in units}
    strangers = {u: {v for s in apart if u in s for v in s if v != u} for u in units}

    def extend(groups: list[list[str]], position: int) -> Iterator[Partition]:
        if position == len(units):
            yield tuple(tuple(group) for group in groups)
            return
        unit = units[position]
        earlier = partners[unit] & set(units[:position])
        for group in groups:
            if earlier <= set(group) and strangers[unit].isdisjoint(group):
                group.append(unit)
                yield from extend(groups, position + 1)
                group.pop()
        if not earlier:
            yield from extend([*groups, [unit]], position + 1)

    yield from extend([], 0)
