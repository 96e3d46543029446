"""Work that the engine asks of a rank, and its results.

Work is a method of `Host` with small, picklable arguments. Tensors never travel inside it: inputs
and outputs are handles that only an executor can resolve (the parts themselves in-process, object
references on Ray).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

from torch import Tensor

from ..files import WrittenFile
from ..graph.graph import Graph
from ..graph.role import Metric, add_metrics
from ..kinds import NodeKind
from ..scheduler.events import NodeTask, StepCompleted, Versions
from .call_context import Piece
from .columns import Part
from .placement import Placement

Weights = Mapping[str, Tensor]
"""A role's weights by logical parameter name."""

Handle = object
"""Stands for a stored `Part` or `Weights`; what it is depends on the executor."""


@dataclass(frozen=True)
class NodeCall:
    """A call of a node of any kind but a source."""

    node: str  # Name of the node
    step: int  # The step it belongs to
    chunk: int | None  # Which chunk, or None if the node sees the whole batch
    # Producing node -> handles of its parts, in chunk order.
    inputs: Mapping[str, tuple[Handle, ...]]
    # Trained role -> version of its weights that the call must see.
    versions: tuple[tuple[str, int], ...] = ()
    staleness: int | None = None  # See `call_staleness`
    piece: Piece = "whole"  # See `call_piece`


@dataclass(frozen=True)
class NextAnswer:
    """A request for one more answer of the calls that were begun together."""

    node: str  # Name of the node
    step: int
    # Calls answered before it. Which these are follows from the calls alone, so that a process that
    # had to begin again gives the same.
    number: int
    # Trained role -> version of its weights that is to be read from here on.
    versions: tuple[tuple[str, int], ...] = ()
    # Of calls that take newer weights in flight, the chunks that were answered before: a process
    # that had to begin again leaves them out. Such a request may end without an answer, so that
    # weights can come; it is made again then. None of other calls.
    given: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class HeldLayout:
    """The layout in which a group holds a role's weights; only executors and workers read it."""

    sends: Any  # Layout of the weights of rank 0's processes, which export for all
    receives: Any  # Layout of the weights of all processes, now or after the next transfer


@dataclass(frozen=True)
class SaveReport:
    """The progress of a process with what it was given to save last."""

    writing: bool  # Whether it is still being written
    # Files written since it was taken, by their names in the checkpoint's folder.
    files: Mapping[str, WrittenFile] = field(default_factory=dict[str, WrittenFile])
    failed: str = ""  # Why it could not be written; "" if it could


H = TypeVar("H")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])

Needs = Literal["workers", "device", "nothing"]


@dataclass(frozen=True)
class RankWork:
    """A method of `Host` that a rank is to call, made by `work`."""

    method: Callable[..., Any]  # The method; a rank calls what its own host has by this name
    # Picklable. The first names the role, or is a `NodeCall` or a `NextAnswer`, unless the method
    # works without workers.
    arguments: tuple[Any, ...]
    named: Mapping[str, Any] = field(default_factory=dict[str, Any])  # Further arguments by name

    @property
    def name(self) -> str:
        return self.method.__name__

    @property
    def needs(self) -> Needs:
        """The part that must be awake: group and workers concerned, the group, or neither."""
        return getattr(self.method, "needs", "workers")

    @property
    def lasting(self) -> str:
        """The part of a role that it sets; a rank that is started again sets it anew."""
        return getattr(self.method, "lasting", "")


def work(method: Callable[Concatenate[H, P], Any], *args: P.args, **named: P.kwargs) -> RankWork:
    """Have a method of `Host` called in a rank; arguments are checked as for the call itself."""
    return RankWork(method, args, named)


def anywhere(method: F) -> F:
    """Declare a method of `Host` that a group may be asked while it sleeps."""
    return _marked(method, needs="nothing")


def without_workers(method: F) -> F:
    """Declare a method of `Host` that needs the group's device, but none of its workers."""
    return _marked(method, needs="device")


def sets(what: Literal["weights", "version"]) -> Callable[[F], F]:
    """Declare a method of `Host` whose effect a rank has to have again when it is started again."""
    return lambda method: _marked(method, lasting=what)


def _marked(method: F, **marks: str) -> F:
    vars(method).update(marks)
    return method


@dataclass(frozen=True)
class Report:
    """A worker's report about work it has done; a few hundred bytes."""

    start_s: float  # Wall-clock start, seconds since the epoch
    end_s: float  # Wall-clock end
    # Named numbers of this call, to be merged over chunks and ranks.
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    num_rows: tuple[int, ...] = ()  # Rows in each stored part
    num_bytes: int = 0  # Bytes of the stored parts
    answer: Any = None  # The method's return value, unless that was an `Outcome`
    # Which of the calls begun together is answered; None if they have paused.
    chunk: int | None = None
    size: int = 0  # Length of its longest row
    # The most that torch had allocated on this process's CUDA device during a call, what its
    # workers always hold included; 0 where there is none.
    peak_bytes: int = 0
    # Digest of each stored part that is trained on; see `ledger.py`.
    made: tuple[int, ...] = ()
    # For each part given to a train call: its producer, its rows, its digest.
    taken: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Result:
    report: Report  # See `Report`
    # Output chunks: one for a chunked call, all of them for a whole-batch call.
    parts: tuple[Part, ...] = ()
    weights: Any = None  # An exported snapshot, or what stands for its slices


@dataclass(frozen=True)
class TaskSpan:
    """One task on one rank, from start to end."""

    node: str  # Name of the node in the graph: "actor.generate"
    step: int  # The step it belongs to, which need not be the step then being consumed
    chunk: int | None  # Which part of the step's rows, or None for the whole batch
    group: str
    rank: int
    start_s: float  # In seconds since the epoch: the one clock that processes share
    end_s: float
    versions: Versions = ()  # Of every set of weights it read
    peak_bytes: int = 0  # See `Report.peak_bytes`


@dataclass(frozen=True)
class StepResult:
    """The report of a completed step.

    Attributes:
        step: Index of the step.
        metrics: `node/name` -> value, merged over chunks and ranks.
        spans: When and where each of its tasks ran.
        lag: (versions behind, number of rollout tasks) pairs.
        num_rows: Node -> rows it made.
        controller_bytes: Bytes that passed through the controller since the step before.
        kept: Name -> column or table, of what `Engine.run` was asked to keep. Columns are dense
            tensors on the CPU, ragged ones padded on the right: ids with -1, other numbers with 0.
        weights_s: Start and end, in seconds since the epoch, of every time that new weights were
            brought from group to group since the step before.
        mirrored_bytes: Bytes that were copied to a mirror's memory since the step before.
    """

    step: int
    metrics: Mapping[str, float]
    spans: tuple[TaskSpan, ...]
    lag: tuple[tuple[int, int], ...] = ()
    num_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    controller_bytes: int = 0
    kept: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    weights_s: tuple[tuple[float, float], ...] = ()
    mirrored_bytes: int = 0


@dataclass(frozen=True)
class Done:
    """One rank's share of a finished task."""

    task: NodeTask
    rank: int
    report: Report
    versions: Versions


def step_result(
    graph: Graph,
    placement: Placement,
    completed: StepCompleted,
    done: Sequence[Done],
    controller_bytes: int,
    kept: Mapping[str, Any],
    weights_s: Sequence[tuple[float, float]] = (),
    mirrored_bytes: int = 0,
) -> StepResult:
    """Gather the metrics, times and row counts of a step from the reports of its tasks."""
    rows: dict[str, int] = {}
    for one in done:
        made = one.report.num_rows if one.report.chunk is None else one.report.num_rows[:1]
        rows[one.task.node] = rows.get(one.task.node, 0) + sum(made)
    return StepResult(
        completed.step,
        {name: metric.value for name, metric in sorted(_merged(graph, done).items())},
        tuple(_span(placement.nodes, one.task, one) for one in done),
        completed.lag,
        rows,
        controller_bytes,
        kept,
        tuple(weights_s),
        mirrored_bytes,
    )


def _merged(graph: Graph, done: Sequence[Done]) -> dict[str, Metric]:
    merged: dict[str, Metric] = {}
    for one in done:
        if one.rank and graph[one.task.node].kind is NodeKind.TRAIN:
            continue
        found = one.report.metrics.items()
        add_metrics(merged, {f"{one.task.node}/{name}": metric for name, metric in found})
    return merged


def _span(group_of: Mapping[str, str], task: NodeTask, one: Done) -> TaskSpan:
    told = one.report
    at = (group_of[task.node], one.rank, told.start_s, told.end_s)
    return TaskSpan(task.node, task.step, task.chunk, *at, one.versions, told.peak_bytes)
