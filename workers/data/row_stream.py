"""Rows of a set that is larger than memory: as many as a buffer holds, shuffled, then the next.

The set is thought of as repeated without end and cut into buffers of equally many rows. Which rows
a buffer holds follows from its number, and the order in which they are taken from the seed and that
number, so there is no position to save: a resumed run skips to the buffer of its step. Every
process that scores responses reads the stream for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ..verifiers.verifiers import BUILT_IN
from .row_forms import remade
from .row_task import RowSource, RowTask, RowTaskSpec, whole_prompts

if TYPE_CHECKING:
    from datasets import Dataset

RowsFrom = Callable[[int], Iterator[tuple[str, Any]]]
"""The rows of a set from one on, counted from 0: where each stands, and the row."""

_FIRST_HELD_OUT = 1 << 40  # problems before it are the stream's
_BUFFERS_KEPT = 4  # of those read last: with a lag, responses to older ones are still scored


class StreamedRowTask(RowTask):
    """Problems of a stream of rows; held out are rows of its first buffer, or of another source."""

    def __init__(
        self,
        spec: RowTaskSpec,
        task_id: str,
        name: str,
        rows_from: RowsFrom,
        buffer_rows: int,
        held_out: RowSource | None,
    ) -> None:
        self._stream = _Endless(rows_from)
        first = self._stream.first(buffer_rows)
        super().__init__(spec, task_id, RowSource(name, first), held_out)
        self.buffer_rows = len(first)  # of a set that is smaller than a buffer all
        evaluated = self._rows.select([*self.held_out])
        self._evaluated = frozenset(whole_prompts(evaluated))
        self._buffers = {0: self._rows.select([*self.train])}
        self._rows: Any = _Rows(self._buffer, self.buffer_rows, evaluated)
        self._rewards = sorted(BUILT_IN)  # any may come
        self.train = range(_FIRST_HELD_OUT)
        self.held_out = range(_FIRST_HELD_OUT, _FIRST_HELD_OUT + len(evaluated))
        self.report.notes[
            f"{name}: a stream, of which {self.buffer_rows} rows at a time are read and shuffled; "
            "checks and lengths are those of the first"
        ] = 0

    @override
    def buffered(self, number: int) -> Sequence[int]:
        start = number * self.buffer_rows
        return range(start, start + len(self._buffer(number)))

    def _buffer(self, number: int) -> Dataset:
        rows = self._buffers.pop(number, None)
        if rows is None:
            given = self._stream.take(number * self.buffer_rows, self.buffer_rows)
            rows, _ = self.read(RowSource(self._name, remade(self.spec.map, given)))
            prompts = enumerate(whole_prompts(rows))
            rows = rows.select([i for i, prompt in prompts if prompt not in self._evaluated])
        self._buffers[number] = rows  # the one that was asked for last stands last
        if len(self._buffers) > _BUFFERS_KEPT:
            del self._buffers[next(iter(self._buffers))]
        return rows


class _Rows:
    """A problem's row by its index."""

    def __init__(self, buffer: Callable[[int], Dataset], size: int, evaluated: Dataset) -> None:
        self._buffer, self._size, self._evaluated = buffer, size, evaluated

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= _FIRST_HELD_OUT:
            return self._evaluated[index - _FIRST_HELD_OUT]
        number, place = divmod(index, self._size)
        return self._buffer(number)[place]


class _Endless:
    """The rows of a set, again and again; it reads on where it was, or skips to another place."""

    def __init__(self, rows_from: RowsFrom) -> None:
        self._rows_from = rows_from
        self._open = rows_from(0)
        self._next = 0  # the row of the endless series that comes next
        self._num_rows: int | None = None  # of the set, once its end was seen

    def first(self, count: int) -> list[tuple[str, Any]]:
        """Return the first rows, `count` of them or all of the set."""
        rows = list(islice(self._open, count))
        self._next = len(rows)
        if len(rows) < count:
            self._num_rows = len(rows)
        return rows

    def take(self, start: int, count: int) -> Iterator[tuple[str, Any]]:
        if start != self._next:
            self._skip_to(start)
        for _ in range(count):
            row = next(self._open, None)
            if row is None:
                if self._num_rows is None:
                    self._num_rows = self._next
                self._open = self._rows_from(0)
                row = next(self._open)
            self._next += 1
            yield row

    def _skip_to(self, start: int) -> None:
        self._open = self._rows_from(start if self._num_rows is None else start % self._num_rows)
        self._next = start
        first = next(self._open, None)
        if first is None and self._num_rows is None:  # skipped past the end
            self._num_rows = sum(1 for _ in self._rows_from(0))
            self._skip_to(start)
        elif first is not None:
            self._open = chain([first], self._open)
