"""A whole batch's output as chunks: cut where the input's rows were, or evenly between groups."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import WorkerError
from ..graph.graph import Node
from .call_columns import CallColumns
from .messages import Part
from .ragged import split


def cut(node: Node, columns: CallColumns, packed: Part, num_chunks: int) -> tuple[Part, ...]:
    """Cut a whole batch's output into chunks: like its inputs' where rows are kept, else evenly."""
    kept = [o.rows for o in node.outputs if o.rows != node.name and o.spec.row_axis is not None]
    sizes = columns.num_rows(kept[0]) if kept else None
    if sizes is None:
        return cut_table(node, packed, num_chunks)
    return _cut_to(node, packed, sizes)


def cut_table(node: Node, packed: Part, num_chunks: int) -> tuple[Part, ...]:
    """Cut a table of new rows into `num_chunks` nearly equal parts that keep groups together.

    Raises:
        WorkerError: If the rows of a group are not next to each other, so that a cut could part it.
    """
    columns = list(zip(node.outputs, packed, strict=True))
    groups = [(f"{node.name}.{o.name}", column.values) for o, column in columns if o.group_id]
    if groups and num_chunks > 1:
        _check_together(*groups[0], num_chunks)
    rows = [column.num_rows for o, column in columns if o.spec.row_axis]
    sizes = even_cuts(rows[0] if rows else 0, num_chunks, groups[0][1] if groups else None)
    return _cut_to(node, packed, sizes)


def _check_together(column: str, groups: Tensor, num_chunks: int) -> None:
    starts = [0, *_changes(groups)] if len(groups) else []
    seen: set[int] = set()
    for start, group in zip(starts, groups[starts].tolist(), strict=True):
        if group in seen:
            raise WorkerError(
                f"'{column}' has rows of group {group} in places apart, again from row {start} on, "
                f"and cutting the rows into {num_chunks} chunks would part them; put the rows of a "
                "group next to each other, or set num_chunks to 1"
            )
        seen.add(group)


def _changes(groups: Tensor) -> list[int]:
    """The rows whose group is another than the row's before."""
    return ((groups[1:] != groups[:-1]).nonzero().flatten() + 1).tolist()


def _cut_to(node: Node, packed: Part, sizes: Sequence[int]) -> tuple[Part, ...]:
    if len(sizes) == 1:
        return (packed,)
    pieces = [
        split(column, sizes) if o.spec.row_axis is not None else [column] * len(sizes)
        for o, column in zip(node.outputs, packed, strict=True)
    ]
    return tuple(zip(*pieces, strict=True))


def even_cuts(num_rows: int, num_chunks: int, groups: Tensor | None) -> list[int]:
    """Sizes of `num_chunks` contiguous pieces, nearly equal, cutting only where the group changes.

    Args:
        num_rows: Rows to cut.
        num_chunks: Pieces; some may be empty.
        groups: i64[num_rows], the rows' groups, each contiguous; None if rows are independent.
    """
    allowed = list(range(num_rows + 1))
    if groups is not None and num_rows:
        allowed = [0, *_changes(groups), num_rows]
    ends = [min(allowed, key=lambda a: abs(a - num_rows * (i + 1) / num_chunks))
            for i in range(num_chunks - 1)]  # fmt: skip
    ends.append(num_rows)
    starts = [0, *ends[:-1]]
    return [end - start for start, end in zip(starts, ends, strict=True)]


def rank_shares(num_chunks: int, num_ranks: int) -> list[list[int]]:
    """Which chunks each rank trains on: contiguous, so that rank order is row order."""
    bounds = [num_chunks * rank // num_ranks for rank in range(num_ranks + 1)]
    return [list(range(bounds[rank], bounds[rank + 1])) for rank in range(num_ranks)]
