"""One rank: the roles it hosts, and how it performs the work it is given.

The same `Host` serves every executor. It unpacks a call's inputs to dense tensors, makes the call
with the randomness scope of its step, checks and packs the outputs, and cuts a whole batch's output
into the chunks that the other nodes work on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, StateError, WorkerError, no_exit
from ..files import Background, WrittenFile, disk_refusal, writing
from ..graph.graph import Argument, Constant, Graph, Node, Ref, RoleRef
from ..graph.role import Metric, Role, Streamed, Worker
from ..kinds import NodeKind
from .call_context import Piece, call_scope
from .columns import (
    CallColumns,
    Part,
    cut,
    empty_part,
    length_key,
    load_part,
    output_lengths,
    pack,
    pack_table,
    returned_columns,
    save_part,
    unpack_table,
)
from .ledger import digest_of, feeding, pieces_of
from .messages import (
    Handle,
    HeldLayout,
    NextAnswer,
    NodeCall,
    RankWork,
    Report,
    Result,
    SaveReport,
    anywhere,
    sets,
    without_workers,
)
from .remote_inference import ServedRole, ServedWeights
from .worker_protocol import CLOSE_S, drain_metrics, on_device

_Arguments = Mapping[str, Any]


PAUSE_AFTER = 16
"""Pauses of a worker in flight after which newer weights may come. More make a message rarer."""


@dataclass
class CallStream:
    """Calls that were begun, and their answers."""

    calls: tuple[NodeCall, ...]
    # The scope in which the worker serves them; entered anew for each answer.
    scope: Callable[[NextAnswer], AbstractContextManager[None]]
    # Binds the arguments of some of them, given by their places, and has the worker begin.
    begin: Callable[[NextAnswer, Sequence[int]], Iterator[Streamed | None]]
    # When the last answer was given, or the calls were begun; seconds since the epoch.
    since_s: float = field(default_factory=time.time)
    _answers: Iterator[Streamed | None] | None = None
    _num_answered: int = 0
    _served: Sequence[int] = ()

    def answer(self, work: NextAnswer, skipped: Callable[[], object]) -> Streamed | None:
        """The answer after `work.number` others; None if newer weights may come first."""
        if work.step != self.calls[0].step or work.number < self._num_answered:
            raise StateError(
                f"answer {work.number} of '{work.node}' of step {work.step} was asked for, but "
                f"{self._num_answered} of step {self.calls[0].step} have been given"
            )
        if self._answers is None and work.given is not None:
            # A rank that begins again has other weights; chunks that it has answered stay.
            self._num_answered = len(work.given)
        while True:
            with self.scope(work):
                found = self._next(work)
            if found is None:
                return None
            self._num_answered += 1
            if self._num_answered > work.number:
                break
            skipped()
        if self._num_answered == len(self.calls):
            self._end(work)
        return found

    def _next(self, work: NextAnswer) -> Streamed | None:
        if self._answers is None:
            given = work.given or ()
            places = range(len(self.calls))
            self._served = [place for place in places if self.calls[place].chunk not in given]
            self._answers = self.begin(work, self._served)
        for num_paused, found in enumerate(self._answers, start=1):
            if found is not None:
                return replace(found, call=self._served[found.call])
            if work.given is not None and num_paused >= PAUSE_AFTER:
                return None
        raise StateError(
            f"'{work.node}' answered {self._num_answered} of the {len(self.calls)} calls that it "
            "was to serve together"
        )

    def _end(self, work: NextAnswer) -> None:
        with self.scope(work):
            if any(found is not None for found in self._answers or ()):
                raise StateError(f"more than the {len(self.calls)} calls were answered")
        self._answers = iter(())


def one_by_one(
    worker: Worker, method: str, calls: Sequence[_Arguments], size: Callable[[int, Any], int]
) -> Iterator[Streamed | None]:
    """The answers of a worker to calls, by (size, call)."""
    if overrides(worker, method, "stream"):
        return _in_turn(getattr(worker, method), calls, size)
    return worker.stream(method, calls)


def overrides(worker: Worker, method: str, together: str) -> bool:
    """True if a worker's own `method` would be passed by if its calls were served together.

    So it is where a class defines the method anew below what serves calls together; `Worker`, which
    defines the latter as a refusal, comes last.
    """
    where = [vars(worker), *(vars(kind) for kind in type(worker).__mro__)]
    first = next((own for own in where if method in own or together in own), {})
    return method in first and together not in first


def _in_turn(
    method: Callable[..., Any], calls: Sequence[_Arguments], size: Callable[[int, Any], int]
) -> Generator[Streamed]:
    returned = [method(**arguments) for arguments in calls]
    answers = [Streamed(call, one, size(call, one)) for call, one in enumerate(returned)]
    yield from sorted(answers, key=lambda answer: (answer.size, answer.call))


_Written = Mapping[str, WrittenFile]


def refusal_of(write: Callable[[], object], path: Path) -> str:
    """Write something at `path`, and say what kept the disk from taking it; "" if nothing did."""
    try:
        with writing(path):
            write()
    except OSError as error:
        said = disk_refusal(error)
        if said is None:
            raise
        return said
    return ""


class Saves:
    """States that are being written to one checkpoint, each by a thread of its own."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._unwanted = threading.Event()
        self._begun: dict[str, Background[_Written]] = {}

    def begin(self, worker: Worker, folder: Path) -> str:
        # One that was given up may be tried again in a folder of the same name.
        if folder.parent != self._folder or self._unwanted.is_set():
            self.close()
            self._folder, self._unwanted = folder.parent, threading.Event()
        if overrides(worker, "save_state", "take_state"):
            return refusal_of(lambda: worker.save_state(folder), folder)
        write = partial(worker.take_state(), folder, self._unwanted.is_set)
        self._begun[folder.name] = Background(write, f"save {folder.name}")
        return ""

    def report(self, wait_s: float, *, unwanted: bool) -> SaveReport:
        """Say how far it has come, see `Host.save_report`. Asked again, it says the same."""
        if unwanted:
            self._unwanted.set()
        until_s = time.monotonic() + wait_s
        begun = self._begun.items()
        if not all([one.wait(max(until_s - time.monotonic(), 0.0)) for _, one in begun]):
            return SaveReport(writing=True)
        files: dict[str, WrittenFile] = {}
        failed = "it was given up while it was written" if self._unwanted.is_set() else ""
        for name, one in begun:
            failed = failed or refusal_of(one.result, (self._folder or Path()) / name)
            if not failed:
                files |= {f"{name}/{file}": entry for file, entry in one.result().items()}
        return SaveReport(writing=False, files={} if failed else files, failed=failed)

    def close(self) -> None:
        self._unwanted.set()
        until_s = time.monotonic() + CLOSE_S
        for name, one in self._begun.items():
            if not one.wait(max(until_s - time.monotonic(), 0.0)):
                raise StateError(
                    f"'{self._folder}/{name}' is still being written and does not end; its disk "
                    "hangs\n    see to the disk, or choose another folder"
                )
        self._begun = {}


@dataclass(frozen=True)
class HostOutcome:
    """Results of a method of `Host` besides an answer; see `Report` and `Result`."""

    parts: tuple[Part, ...] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    weights: Any = None
    chunk: int | None = None
    size: int = 0
    start_s: float | None = None
    made: tuple[int, ...] = ()
    taken: tuple[tuple[str, int, int], ...] = ()


class Host:
    """Performs work on one rank of one group: each method is what the engine may ask of it."""

    def __init__(
        self,
        graph: Graph,
        roles: Mapping[str, Role],  # the workers built here
        num_chunks: int,  # pieces into which whole-batch outputs are cut
        fetch: Callable[[Any], Any],  # resolves a handle to what it stands for
        served: Mapping[str, ServedRole] | None = None,  # the roles that others serve here
        served_weights: ServedWeights | None = None,  # what is served from here
    ) -> None:
        self.graph = graph
        self.roles = roles
        self.num_chunks = num_chunks
        self.served_weights = served_weights or ServedWeights("this group")
        self._fetch = fetch
        self._served = served or {}
        self._streams: dict[str, CallStream] = {}
        self._saves = Saves()
        self._feeding = feeding(graph)
        self._given: dict[str, list[Part]] = {}

    def perform(self, work: RankWork) -> Result:
        """Do one piece of work, with the workers concerned on the device.

        Raises:
            WorkerError: If an output contradicts its declaration, or the user's code exits.
            Exception: Whatever the user's code raises, untouched.
        """
        start_s = time.time()
        is_call = bool(work.arguments) and isinstance(work.arguments[0], NodeCall | NextAnswer)
        on_cuda = torch.cuda.is_initialized() and is_call
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        with on_device(self._workers_of(work)), no_exit():
            found = getattr(self, work.name)(*work.arguments, **work.named)
        one = found if isinstance(found, HostOutcome) else HostOutcome()
        report = Report(
            start_s if one.start_s is None else one.start_s,
            time.time(),
            one.metrics,
            tuple(part[0].num_rows if part else 0 for part in one.parts),
            sum(column.num_bytes for part in one.parts for column in part),
            None if one is found else found,
            one.chunk,
            one.size,
            torch.cuda.max_memory_allocated() if on_cuda else 0,
            one.made,
            one.taken,
        )
        return Result(report, one.parts, one.weights)

    def _workers_of(self, work: RankWork) -> list[Role]:
        if work.needs != "workers":
            return []
        subject = work.arguments[0]
        names = [subject]
        if not isinstance(subject, str):
            names = [read.role for read in self.graph[subject.node].reads]
        return [self.roles[name] for name in dict.fromkeys(names) if name in self.roles]

    def check_version(self, role: str, version: int) -> None:
        """Refuse a call that must see weights of a version which is not here."""

    def close(self) -> None:
        self._saves.close()

    # --- weights

    def export_weights(self, role: str) -> HostOutcome:
        return HostOutcome(weights=self.roles[role].export_weights())

    @sets("weights")
    def import_weights(self, role: str, weights: Handle, version: int = 0) -> None:
        with self.served_weights.changing(role, version):
            self.roles[role].load_weights(self._fetch(weights))

    @sets("version")
    @without_workers
    def set_served_version(self, role: str, version: int) -> None:
        """Count the weights of a role that is served as this version, from now on."""
        self.served_weights.set_version(role, version)

    @anywhere
    def layout(self, role: str) -> HeldLayout | None:
        """The layout in which the group holds a role's weights; None if its worker has none."""
        return None

    def export_slices(self, role: str, receivers: Mapping[str, Any], version: int) -> HostOutcome:
        """Snapshot what other groups lack of a role's weights, apart for each of their processes.

        `receivers` says how each group is to hold the weights, from `layout`.
        """
        raise StateError("this executor moves no slices of weights")

    @sets("weights")
    def hold_view(self, role: str, version: int) -> HostOutcome:
        """Count a role's weights as this version: they are a view, made as the group woke."""
        raise StateError("this executor has no groups within others")

    @sets("weights")
    def import_slices(
        self, role: str, source: Any, slices: tuple[Handle, ...], version: int
    ) -> None:
        """Replace a role's weights by slices that a group exported which holds them as `source`."""
        raise StateError("this executor moves no slices of weights")

    # --- states and parts in files

    def save_state(self, role: str, folder: str) -> str:
        """Take a role's training state, and write it into a folder: at once, or from then on.

        Says what kept it from being written at once; "" if nothing did.
        """
        return self._saves.begin(self.roles[role], Path(folder))

    def load_state(self, role: str, folder: str) -> None:
        self.roles[role].load_state(Path(folder))

    @without_workers
    def save_part(self, part: Handle, file: str) -> str:
        """Write a stored part to a safetensors file; returns as `save_state` does."""
        found, path = self._fetch(part), Path(file)
        return refusal_of(lambda: save_part(found, path), path)

    @without_workers
    def load_part(self, file: str) -> HostOutcome:
        return HostOutcome((load_part(Path(file)),))

    @anywhere
    def save_report(self, wait_s: float = 0.0, *, unwanted: bool = False) -> SaveReport:
        """Say how far the writing of states has come, once it has ended or after `wait_s`.

        What is unwanted ends: the checkpoint will not come about.
        """
        return self._saves.report(wait_s, unwanted=unwanted)

    def call_method(self, role: str, method: str, arguments: tuple[Any, ...] = ()) -> Any:
        """Call a worker's own method outside any step: to hash its weights, to export a folder."""
        return getattr(self.roles[role], method)(*arguments)

    # --- calls of a step

    def call(self, work: NodeCall) -> HostOutcome:
        for role, version in work.versions:
            self.check_version(role, version)
        parts, metrics = self._call(work)
        made = pieces_of(parts) if work.node in self._feeding else ()
        return HostOutcome(parts, metrics, made=made, taken=self._taken(work))

    def _taken(self, work: NodeCall) -> tuple[tuple[str, int, int], ...]:
        given, self._given = self._given, {}
        if self.graph[work.node].kind is not NodeKind.TRAIN:
            return ()
        return tuple(
            (node, part[0].num_rows if part else 0, digest_of(part))
            for node, parts in given.items()
            for part in parts
        )

    def _call(self, work: NodeCall) -> tuple[tuple[Part, ...], Mapping[str, Metric]]:
        node = self.graph[work.node]
        columns, versions = self._columns(work), dict(work.versions)
        if _makes_nothing(node, columns):
            return (empty_part(node),) * (1 if work.chunk is not None else self.num_chunks), {}
        arguments = {name: self._bind(arg, columns, versions) for name, arg in node.arguments}
        with self._scope(node, work):
            if node.function is not None:
                with torch.no_grad():
                    returned = node.function(**arguments)
                stored = self._store(node, columns, returned, work.chunk)
                return stored, _reported(self.graph, node, stored)
            worker = self.roles[node.role or ""]
            _check_piece(node, worker, work.piece)
            with self._changing(node, versions, work.piece):
                returned = getattr(worker, node.method or "")(**arguments)
        metrics = drain_metrics(worker)
        if node.kind is NodeKind.TRAIN:
            return (), {**metrics, **returned.metrics}
        stored = self._store(node, columns, returned, work.chunk)
        return stored, {**metrics, **_reported(self.graph, node, stored)}

    def _scope(
        self, node: Node, work: NodeCall, *, in_flight: bool = False
    ) -> AbstractContextManager[None]:
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
            in_flight=in_flight,
        )

    @without_workers
    def begin_stream(
        self,
        calls: tuple[NodeCall, ...],
        segment: int | None = None,
        begun: tuple[Handle | None, ...] = (),
    ) -> None:
        """Begin calls of one node in one step, one for each chunk, that are served together.

        The worker begins with the first `answer`. `segment` is how far each row may grow, and
        `begun` what is unfinished of each chunk since the step before.
        """
        node = self.graph[calls[0].node]

        def scope(answer: NextAnswer) -> AbstractContextManager[None]:
            now = replace(calls[0], versions=answer.versions)
            return self._scope(node, now, in_flight=answer.given is not None)

        def begin(answer: NextAnswer, places: Sequence[int]) -> Iterator[Streamed | None]:
            if answer.given is not None:
                _check_takes_weights(node, self.roles[node.role or ""])
            before = [begun[place] for place in places] if begun else []
            return self._serve(node, [calls[place] for place in places], segment, before)

        self._streams[node.name] = CallStream(calls, scope, begin)

    def _serve(
        self,
        node: Node,
        calls: Sequence[NodeCall],
        segment: int | None,
        begun: Sequence[Handle | None],
    ) -> Iterator[Streamed | None]:
        columns = [self._columns(call) for call in calls]
        arguments = [
            {name: self._bind(arg, own, dict(call.versions)) for name, arg in node.arguments}
            for call, own in zip(calls, columns, strict=True)
        ]
        worker, method = self.roles[node.role or ""], node.method or ""
        if segment is not None:
            table = _check_segments(node, worker)
            unfinished = [
                None if handle is None else unpack_table(table, self._fetch(handle))
                for handle in begun
            ]
            return worker.stream_segment(method, arguments, unfinished, segment)

        def size(call: int, returned: Any) -> int:
            dense = returned_columns(node, returned)
            lengths = output_lengths(node, columns[call], dense).values()
            return max((int(n.max()) for n in lengths if n is not None and len(n)), default=0)

        return one_by_one(worker, method, arguments, size)

    def answer(self, work: NextAnswer) -> HostOutcome:
        """Go on with the calls that were begun until one more is answered, or they pause."""
        for role, version in work.versions:
            self.check_version(role, version)
        node, stream = self.graph[work.node], self._streams[work.node]
        start_s, worker = stream.since_s, self.roles[node.role or ""]
        found = stream.answer(work, lambda: drain_metrics(worker))
        if found is None:
            return HostOutcome(start_s=start_s)
        call = stream.calls[found.call]
        stored = self._store(node, self._columns(call), found.returned, call.chunk)
        metrics = drain_metrics(worker)
        stream.since_s, self._given = time.time(), {}
        return HostOutcome(
            stored if found.unfinished is None else (*stored, pack_table(found.unfinished)),
            {**metrics, **_reported(self.graph, node, stored)},
            chunk=call.chunk,
            size=found.size,
            start_s=start_s,
            made=pieces_of(stored[:1]) if work.node in self._feeding else (),
        )

    def _columns(self, work: NodeCall) -> CallColumns:
        self._given = {node: self._parts(handles) for node, handles in work.inputs.items()}
        return CallColumns(self.graph, self._given)

    def _changing(
        self, node: Node, versions: Mapping[str, int], piece: Piece
    ) -> AbstractContextManager[None]:
        if node.kind is not NodeKind.TRAIN or node.role is None or piece in ("first", "part"):
            return nullcontext()
        return self.served_weights.changing(node.role, versions.get(node.role, 0) + 1)

    def _parts(self, handles: Sequence[Any]) -> list[Part]:
        return [self._fetch(handle) for handle in handles]

    def _bind(self, argument: Argument, columns: CallColumns, versions: Mapping[str, int]) -> Any:
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
        self, node: Node, columns: CallColumns, returned: Any, chunk: int | None
    ) -> tuple[Part, ...]:
        dense = returned_columns(node, returned)
        lengths = output_lengths(node, columns, dense)
        packed = tuple(
            pack(f"{node.name}.{o.name}", column, o.spec, lengths.get(length_key(o.spec)))
            for o, column in zip(node.outputs, dense, strict=True)
        )
        self._check_rows(node, columns, packed)
        if chunk is not None:
            return (packed,)
        return cut(node, columns, packed, self.num_chunks)

    def _check_rows(self, node: Node, columns: CallColumns, packed: Part) -> None:
        # An output said to describe its input's rows must have as many.
        for output, column in zip(node.outputs, packed, strict=True):
            expected = columns.num_rows(output.rows) if output.rows != node.name else None
            if expected is not None and output.spec.row_axis and column.num_rows != sum(expected):
                raise WorkerError(
                    f"'{node.name}.{output.name}' is {output.spec}: expected {sum(expected)} rows "
                    f"like its inputs from '{output.rows}', got {column.num_rows}; declare the op "
                    "with makes_rows=True if it changes rows"
                )


def _check_segments(node: Node, worker: Role) -> type[Any]:
    kind, going_on = type(worker).__name__, f"'{node.name}' is to go on in later steps"
    if worker.unfinished is None:
        raise ConfigError(
            f"{going_on} (Schedule.segment_tokens), which {kind} cannot\n    set "
            f"schedule.segment_tokens=0, or give '{node.role}' a worker with `stream_segment`"
        )
    if overrides(worker, node.method or "", "stream_segment"):
        raise ConfigError(
            f"{going_on} (Schedule.segment_tokens), and {kind} defines its own `{node.method}`, "
            "which would not be called\n    set schedule.segment_tokens=0, or define "
            "`stream_segment` too"
        )
    return worker.unfinished


def _check_piece(node: Node, worker: Role, piece: Piece) -> None:
    # A worker that reads no piece would take an optimizer step with each.
    if piece == "whole" or worker.takes_pieces:
        return
    raise ConfigError(
        f"'{node.name}' would be given a step's rows in pieces (Schedule.streaming or "
        f"Schedule.segment_tokens), which {type(worker).__name__} does not take\n"
        f"    leave both out, or give '{node.role}' a worker that reads `call_piece` and says "
        "`takes_pieces = True`"
    )


def _check_takes_weights(node: Node, worker: Role) -> None:
    if worker.takes_weights:
        return
    raise ConfigError(
        f"'{node.name}' is to take newer weights in flight (Schedule.in_flight), which "
        f"{type(worker).__name__} cannot\n    set schedule.in_flight=false, or give "
        f"'{node.role}' a worker with `takes_weights`"
    )


def _makes_nothing(node: Node, columns: CallColumns) -> bool:
    # Whether a call need not be made: it is given no row, and makes nothing else.
    only_rows = all(output.spec.row_axis is not None for output in node.outputs)
    return bool(node.outputs) and only_rows and columns.no_rows()


def _reported(graph: Graph, node: Node, parts: Sequence[Part]) -> dict[str, Metric]:
    metrics: dict[str, Metric] = {}
    for index, output in enumerate(node.outputs):
        spec = output.spec
        ids = spec.dtype.value == "i64"
        if ids or spec.ragged_axis or Ref(node.name, output.name) not in graph.reported:
            continue
        values = torch.cat([part[index].values for part in parts]).double()
        missing, values = int(values.isnan().sum()), values[~values.isnan()]
        name = "mean" if node.output_table is None else output.name
        metrics[name] = Metric.mean(float(values.sum()), float(values.numel()))
        if missing:
            metrics[f"{name}_nan"] = Metric.sum(missing)
    return metrics
