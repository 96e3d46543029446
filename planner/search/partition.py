"""Ways to put call groups into groups: the partitions of a set, each once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

__all__ = ["Partition", "partitions"]

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
