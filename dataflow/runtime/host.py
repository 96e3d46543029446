"""One rank: the roles it hosts, and how it performs the work it is given.

The same `Host` serves every executor. It unpacks a call's inputs to dense tensors, makes the call
with the randomness scope of its step, checks and packs the outputs, and cuts a whole batch's output
into the chunks that the other nodes work on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import ConfigError, StateError, WorkerError, no_exit
from ..file_errors import writing
from ..graph.axes import Spec
from ..graph.graph import Argument, Constant, Graph, Node, NodeKind, OutputColumn, Ref, RoleRef
from ..graph.role import Metric, Role
from .call_context import call_scope
from .call_stream import CallStream, one_by_one
from .messages import (
    AnswerWork,
    BeginStreamWork,
    CallMethodWork,
    CallWork,
    ExportSlicesWork,
    ExportWork,
    ImportSlicesWork,
    ImportWork,
    LayoutWork,
    LoadPartWork,
    LoadStateWork,
    Part,
    Report,
    Result,
    SavePartWork,
    SaveStateWork,
    SetServedVersionWork,
    Weights,
    Work,
)
from .ragged import Packed, concatenate, lengths_of, pack, split, unpack
from .remote_inference import ServedRole, ServedWeights
from .table_parts import pack_table, unpack_table
from .worker_protocol import Continues, Stateful, Streamed, Trainable, drain_metrics

__all__ = ["Host", "cut_table", "even_cuts"]

Fetch = Callable[[Any], Any]


class Host:
    """Performs work on one rank of one group.

    Args:
        graph: The recorded step.
        roles: The workers built here, by role name.
        num_chunks: Pieces into which whole-batch outputs are cut.
        fetch: Resolves a handle to the `Part` or `Weights` it stands for.
        served: The roles that others serve here.
        served_weights: What is served from here; told which weights there are.
    """

    def __init__(
        self,
        graph: Graph,
        roles: Mapping[str, Role],
        num_chunks: int,
        fetch: Fetch,
        served: Mapping[str, ServedRole] | None = None,
        served_weights: ServedWeights | None = None,
    ) -> None:
        self.graph = graph
        self.roles = roles
        self.num_chunks = num_chunks
        self._fetch = fetch
        self._served = served or {}
        self._served_weights = served_weights or ServedWeights("this group")
        self._streams: dict[str, CallStream] = {}

    def perform(self, work: Work) -> Result:
        """Do one piece of work.

        Raises:
            WorkerError: If an output contradicts its declaration, or the user's code exits.
            Exception: Whatever the user's code raises, untouched.
        """
        with no_exit():
            return self._perform(work)

    def _perform(self, work: Work) -> Result:
        start_s = time.time()
        metrics: Mapping[str, Metric] = {}
        parts: tuple[Part, ...] = ()
        weights: Weights | None = None
        answer: Any = None
        chunk, size = None, 0
        match work:
            case CallWork():
                parts, metrics = self._call(work)
            case BeginStreamWork():
                self._begin_stream(work)
            case AnswerWork():
                start_s = self._streams[work.node].since_s
                parts, metrics, chunk, size = self._answer(work)
            case ExportWork():
                weights = self._trainable(work.role).export_weights()
            case ImportWork():
                with self._served_weights.changing(work.role, work.version):
                    self._trainable(work.role).load_weights(self._fetch(work.weights))
            case SetServedVersionWork():
                self._served_weights.set_version(work.role, work.version)
            case SaveStateWork():
                with writing(Path(work.folder)):
                    self._stateful(work.role).save_state(Path(work.folder))
            case LoadStateWork():
                self._stateful(work.role).load_state(Path(work.folder))
            case SavePartWork():
                _save_part(self._fetch(work.part), Path(work.file))
            case LoadPartWork():
                parts = (_load_part(Path(work.file)),)
            case LayoutWork() | ExportSlicesWork() | ImportSlicesWork():
                raise StateError(f"{type(work).__name__} is for executors that move slices")
            case CallMethodWork():
                answer = getattr(self.roles[work.role], work.method)(*work.arguments)
        report = Report(
            start_s,
            time.time(),
            metrics,
            tuple(part[0].num_rows if part else 0 for part in parts),
            sum(column.num_bytes for part in parts for column in part),
            answer,
            chunk,
            size,
        )
        return Result(report, parts, weights)

    def workers_of(self, work: Work) -> list[Role]:
        """The workers here with whose weights a piece of work is done."""
        match work:
            case CallWork() | AnswerWork():
                names = [read.role for read in self.graph[work.node].reads]
            case (
                SavePartWork()
                | LoadPartWork()
                | LayoutWork()
                | SetServedVersionWork()
                | BeginStreamWork()
            ):
                names = []
            case _:
                names = [work.role]
        return [self.roles[name] for name in dict.fromkeys(names) if name in self.roles]

    def _trainable(self, role: str) -> Trainable:
        worker = self.roles[role]
        if not isinstance(worker, Trainable):
            raise WorkerError(
                f"role '{role}' is trained, but its worker {type(worker).__name__} is not "
                "Trainable; it needs export_weights, load_weights, save_state and load_state"
            )
        return worker

    def _stateful(self, role: str) -> Stateful:
        if role in self.graph.trains_per_step:
            return self._trainable(role)
        worker = self.roles[role]
        if not isinstance(worker, Stateful):
            raise WorkerError(
                f"role '{role}' keeps state, but its worker {type(worker).__name__} is not "
                "Stateful; it needs save_state and load_state"
            )
        return worker

    def _call(self, work: CallWork) -> tuple[tuple[Part, ...], Mapping[str, Metric]]:
        node = self.graph[work.node]
        columns, versions = self._columns(work), dict(work.versions)
        arguments = {name: self._bind(arg, columns, versions) for name, arg in node.arguments}
        with self._scope(node, work):
            if node.function is not None:
                with torch.no_grad():
                    returned = node.function(**arguments)
                stored = self._store(node, columns, returned, work.chunk)
                return stored, _reported(self.graph, node, stored)
            worker = self.roles[node.role or ""]
            with self._changing(node, versions):
                returned = getattr(worker, node.method or "")(**arguments)
        metrics = drain_metrics(worker)
        if node.kind is NodeKind.TRAIN:
            return (), {**metrics, **returned.metrics}
        stored = self._store(node, columns, returned, work.chunk)
        return stored, {**metrics, **_reported(self.graph, node, stored)}

    def _scope(self, node: Node, work: CallWork) -> AbstractContextManager[None]:
        """What the worker may ask about the call while it serves it."""
        version = dict(work.versions).get(node.role or "", 0)
        own = [read.offset for read in node.reads if read.role == node.role]
        per_step = self.graph.trains_per_step.get(node.role or "", 0)
        current = work.step * per_step + (own[0] if own and per_step else 0)
        return call_scope(
            work.step,
            node.ordinal,
            work.staleness,
            work.piece,
            version=version,
            lag=current - version,
        )

    def _begin_stream(self, work: BeginStreamWork) -> None:
        """Note calls that are served together; the worker begins with the first answer."""
        node = self.graph[work.calls[0].node]
        self._streams[node.name] = CallStream(
            work.calls, lambda: self._scope(node, work.calls[0]), lambda: self._serve(node, work)
        )

    def _serve(self, node: Node, work: BeginStreamWork) -> Iterator[Streamed]:
        columns = [self._columns(call) for call in work.calls]
        arguments = [
            {name: self._bind(arg, own, dict(call.versions)) for name, arg in node.arguments}
            for call, own in zip(work.calls, columns, strict=True)
        ]
        worker, method = self.roles[node.role or ""], node.method or ""
        if work.segment is not None:
            if not isinstance(worker, Continues):
                raise ConfigError(
                    f"'{node.name}' is to go on in later steps (Schedule.segment_tokens), which "
                    f"{type(worker).__name__} cannot\n    set schedule.segment_tokens=0, or give "
                    f"'{node.role}' a worker with `stream_segment`"
                )
            begun = [
                None if handle is None else unpack_table(worker.unfinished, self._fetch(handle))
                for handle in work.begun
            ]
            return worker.stream_segment(method, arguments, begun, work.segment)

        def size(call: int, returned: Any) -> int:
            dense = _returned_columns(node, returned)
            lengths = _output_lengths(node, columns[call], dense).values()
            return max((int(n.max()) for n in lengths if n is not None and len(n)), default=0)

        return one_by_one(worker, method, arguments, size)

    def _answer(
        self, work: AnswerWork
    ) -> tuple[tuple[Part, ...], Mapping[str, Metric], int | None, int]:
        """The next answer: its part, metrics, chunk and size."""
        node, stream = self.graph[work.node], self._streams[work.node]
        found = stream.answer(work)
        call = stream.calls[found.call]
        stored = self._store(node, self._columns(call), found.returned, call.chunk)
        if found.unfinished is not None:
            stored = (*stored, pack_table(found.unfinished))
        metrics = drain_metrics(self.roles[node.role or ""])
        stream.since_s = time.time()
        reported = _reported(self.graph, node, stored[:1])
        return stored, {**metrics, **reported}, call.chunk, found.size

    def _columns(self, work: CallWork) -> _Columns:
        return _Columns(self.graph, {n: self._parts(h) for n, h in work.inputs.items()})

    def _changing(self, node: Node, versions: Mapping[str, int]) -> AbstractContextManager[None]:
        """While a node trains, nobody is served what it changes."""
        if node.kind is not NodeKind.TRAIN or node.role is None:
            return nullcontext()
        return self._served_weights.changing(node.role, versions.get(node.role, 0) + 1)

    def _parts(self, handles: Sequence[Any]) -> list[Part]:
        return [self._fetch(handle) for handle in handles]

    def _bind(self, argument: Argument, columns: _Columns, versions: Mapping[str, int]) -> Any:
        if isinstance(argument, Ref):
            return columns.dense(argument)
        if isinstance(argument, RoleRef):
            served = self._served.get(argument.role)
            if served is not None:
                return served.at(versions.get(argument.role, 0))
            return self.roles[argument.role]
        if isinstance(argument, Constant):
            return argument.value
        fields = {name: self._bind(value, columns, versions) for name, value in argument.fields}
        return argument.table(**fields)

    def _store(
        self, node: Node, columns: _Columns, returned: Any, chunk: int | None
    ) -> tuple[Part, ...]:
        dense = _returned_columns(node, returned)
        lengths = _output_lengths(node, columns, dense)
        packed = tuple(
            pack(f"{node.name}.{o.name}", column, o.spec, lengths.get(_length_key(o.spec)))
            for o, column in zip(node.outputs, dense, strict=True)
        )
        self._check_rows(node, columns, packed)
        if chunk is not None:
            return (packed,)
        return _cut(node, columns, packed, self.num_chunks)

    def _check_rows(self, node: Node, columns: _Columns, packed: Part) -> None:
        """An output said to describe its input's rows must have as many."""
        for output, column in zip(node.outputs, packed, strict=True):
            expected = columns.num_rows(output.rows) if output.rows != node.name else None
            if expected is not None and output.spec.row_axis and column.num_rows != sum(expected):
                raise WorkerError(
                    f"'{node.name}.{output.name}' is {output.spec}: expected {sum(expected)} rows "
                    f"like its inputs from '{output.rows}', got {column.num_rows}; declare the op "
                    "with makes_rows=True if it changes rows"
                )


class _Columns:
    """A call's inputs: dense tensors on demand, each unpacked once, and their rows and lengths."""

    def __init__(self, graph: Graph, parts: Mapping[str, list[Part]]) -> None:
        self._graph = graph
        self._parts = parts
        self._packed: dict[Ref, Packed] = {}
        self._dense: dict[Ref, Tensor] = {}

    def _output(self, ref: Ref) -> tuple[int, OutputColumn]:
        for index, output in enumerate(self._graph[ref.node].outputs):
            if output.name == ref.column:
                return index, output
        raise KeyError(ref)

    def packed(self, ref: Ref) -> Packed:
        """All chunks of a column as one."""
        if ref not in self._packed:
            index, output = self._output(ref)
            pieces = [part[index] for part in self._parts[ref.node]]
            scalar = output.spec.row_axis is None
            self._packed[ref] = pieces[0] if scalar else concatenate(pieces)
        return self._packed[ref]

    def dense(self, ref: Ref) -> Tensor:
        """The column as a padded tensor."""
        if ref not in self._dense:
            _, output = self._output(ref)
            self._dense[ref] = unpack(self.packed(ref), output.spec.dtype)
        return self._dense[ref]

    def lengths(self, rows: str, spec: Spec) -> Tensor | None:
        """Row lengths of `rows`, from any input column that has them."""
        for node in self._parts:
            for output in self._graph[node].outputs:
                if output.rows == rows and _length_key(output.spec) == _length_key(spec):
                    return self.packed(Ref(node, output.name)).lengths
        return None

    def num_rows(self, rows: str) -> list[int] | None:
        """How many of the rows made by `rows` each chunk holds, from any input that has them."""
        for node, parts in self._parts.items():
            for index, output in enumerate(self._graph[node].outputs):
                if output.rows == rows and output.spec.row_axis is not None:
                    return [part[index].num_rows for part in parts]
        return None


def _length_key(spec: Spec) -> str | None:
    return f"{spec.row_axis},{spec.ragged_axis}" if spec.ragged_axis is not None else None


def _returned_columns(node: Node, returned: Any) -> list[Tensor]:
    expected = node.output_table.__name__ if node.output_table else "a tensor"
    if node.output_table is not None and not isinstance(returned, node.output_table):
        raise WorkerError(
            f"'{node.name}' should return {expected}, but returned a {type(returned).__name__}"
        )
    columns = [
        returned if node.output_table is None else getattr(returned, output.name)
        for output in node.outputs
    ]
    for output, column in zip(node.outputs, columns, strict=True):
        if not isinstance(column, Tensor):
            raise WorkerError(
                f"'{node.name}.{output.name}' should be {output.spec}, but the call returned a "
                f"{type(column).__name__}"
            )
    return columns


def _reported(graph: Graph, node: Node, parts: Sequence[Part]) -> dict[str, Metric]:
    """Means of the output columns that the step returned and that hold one number per row.

    A ragged column has entries that nobody wrote, so it is not averaged.
    """
    metrics: dict[str, Metric] = {}
    for index, output in enumerate(node.outputs):
        spec = output.spec
        ids = spec.dtype.value == "i64"
        if ids or spec.ragged_axis or Ref(node.name, output.name) not in graph.reported:
            continue
        values = torch.cat([part[index].values for part in parts]).double()
        name = "mean" if node.output_table is None else output.name
        metrics[name] = Metric.mean(float(values.sum()), float(values.numel()))
    return metrics


def _output_lengths(
    node: Node, columns: _Columns, dense: list[Tensor]
) -> dict[str | None, Tensor | None]:
    """Lengths for each ragged axis of the outputs: the inputs' if rows are kept, else from ids."""
    lengths: dict[str | None, Tensor | None] = {None: None}
    for output in node.outputs:
        key = _length_key(output.spec)
        if key is not None and key not in lengths and output.rows != node.name:
            lengths[key] = columns.lengths(output.rows, output.spec)
    for output, column in zip(node.outputs, dense, strict=True):
        key = _length_key(output.spec)
        if lengths.get(key) is None and key is not None and output.spec.dtype.value == "i64":
            lengths[key] = lengths_of(column)
    return lengths


def _cut(node: Node, columns: _Columns, packed: Part, num_chunks: int) -> tuple[Part, ...]:
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


def _save_part(part: Part, file: Path) -> None:
    # Cloned, because columns of one table share their lengths and safetensors refuses to write
    # memory that is shared.
    tensors: dict[str, Tensor] = {}
    for index, column in enumerate(part):
        tensors[f"{index}.values"] = column.values.clone()
        if column.lengths is not None:
            tensors[f"{index}.lengths"] = column.lengths.clone()
    with writing(file):
        save_file(tensors, file, metadata={"columns": json.dumps(len(part))})


def _load_part(file: Path) -> Part:
    with safe_open(file, "pt") as stored:  # pyright: ignore[reportUnknownVariableType]
        names = set(stored.keys())
        count = json.loads(stored.metadata()["columns"])
        return tuple(
            Packed(
                stored.get_tensor(f"{index}.values"),
                stored.get_tensor(f"{index}.lengths") if f"{index}.lengths" in names else None,
            )
            for index in range(count)
        )
