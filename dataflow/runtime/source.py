"""Sources: where the rows of a step come from, and how they become stored parts."""

from __future__ import annotations

from typing import Any, Protocol

from ..errors import ConfigError, no_exit
from ..graph.graph import Node
from .call_columns import cut_table
from .call_context import DeadlineExceeded, deadline
from .messages import Part
from .ragged import lengths_of, pack


class Source(Protocol):
    """A step's rows, as a pure function of the step's index."""

    def batch(self, step: int) -> Any:
        """The table of that step, as dense padded tensors."""
        ...


def read_source(
    node: Node, source: Source, step: int, num_chunks: int, deadline_s: float
) -> tuple[Part, ...]:
    """A step's rows from the source of `node`, packed and cut into chunks."""
    try:
        with no_exit(), deadline(deadline_s):
            table = source.batch(step)
    except DeadlineExceeded:
        raise TimeoutError(
            f"it gave nothing within {deadline_s:g} s (Schedule.deadline_s)"
        ) from None
    return _pack(node, table, num_chunks)


def _pack(node: Node, table: Any, num_chunks: int) -> tuple[Part, ...]:
    expected = node.output_table
    if expected is None or not isinstance(table, expected):
        raise ConfigError(
            f"source '{node.name}' should give a {expected.__name__ if expected else 'table'}, but "
            f"gave a {type(table).__name__}"
        )
    lengths = {
        output.spec.ragged_axis: lengths_of(getattr(table, output.name))
        for output in node.outputs
        if output.spec.ragged_axis is not None and output.spec.dtype.value == "i64"
    }
    packed = tuple(
        pack(
            f"{node.name}.{output.name}",
            getattr(table, output.name),
            output.spec,
            lengths.get(output.spec.ragged_axis) if output.spec.ragged_axis else None,
        )
        for output in node.outputs
    )
    return cut_table(node, packed, num_chunks)
