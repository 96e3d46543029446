"""What the engine asks of a worker process, and what comes back.

Work is small, picklable data. Tensors never travel inside it: inputs and outputs are handles that
only an executor can resolve (the parts themselves in-process, object references on Ray).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..graph.role import Metric
from ..written_files import WrittenFile
from .call_context import Piece
from .ragged import Packed

Part = tuple[Packed, ...]
"""One chunk of a node's output: its columns, in the order of `Node.outputs`."""

Weights = Mapping[str, Tensor]
"""A role's weights by logical parameter name."""

Handle = object
"""Stands for a stored `Part` or `Weights`; what it is depends on the executor."""


@dataclass(frozen=True)
class CallWork:
    """Run a node of any kind but a source.

    Attributes:
        node: Name of the node.
        step: The step it belongs to.
        chunk: Which chunk, or None if the node sees the whole batch.
        inputs: Producing node -> handles of its parts, in chunk order.
        versions: Trained role -> version of its weights that the call must see.
        staleness: See `call_staleness`.
        piece: See `call_piece`.
    """

    node: str
    step: int
    chunk: int | None
    inputs: Mapping[str, tuple[Handle, ...]]
    versions: tuple[tuple[str, int], ...] = ()
    staleness: int | None = None
    piece: Piece = "whole"


@dataclass(frozen=True)
class BeginStreamWork:
    """Begin calls of one node in one step that are served together; `AnswerWork` follows for each.

    Attributes:
        calls: One for each chunk, in the order of the chunks.
        segment: How far each row may grow; None if calls are served to their end.
        begun: What is unfinished of each chunk since the step before; None if nothing is.
    """

    calls: tuple[CallWork, ...]
    segment: int | None = None
    begun: tuple[Handle | None, ...] = ()


@dataclass(frozen=True)
class AnswerWork:
    """Go on with the calls that were begun until one more of them is answered.

    Attributes:
        node: Name of the node.
        step: The step.
        number: How many are answered before it. Which calls these are follows from the calls alone,
            so that a process that had to begin again gives the same.
        versions: Trained role -> version of its weights that is to be read from here on.
        given: Of calls that take newer weights in flight, the chunks that were answered before: a
            process that had to begin again leaves them out. Such work may end without an answer,
            so that weights can come; it is asked for again then. None of other calls.
    """

    node: str
    step: int
    number: int
    versions: tuple[tuple[str, int], ...] = ()
    given: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class ExportWork:
    """Snapshot a role's weights."""

    role: str


@dataclass(frozen=True)
class ImportWork:
    """Replace a role's weights by a snapshot of some version."""

    role: str
    weights: Handle
    version: int = 0


@dataclass(frozen=True)
class SetServedVersionWork:
    """Count the weights of a role that is served as this version, from now on."""

    role: str
    version: int


@dataclass(frozen=True)
class LayoutWork:
    """Say how the group holds a role's weights: a `HeldLayout`, or None if its worker cannot."""

    role: str


@dataclass(frozen=True)
class HeldLayout:
    """How a group holds a role's weights; what is in it only executors and workers understand.

    Attributes:
        sends: What the processes of rank 0 hold, which export for all.
        receives: What all processes hold, or are to hold.
    """

    sends: Any
    receives: Any


@dataclass(frozen=True)
class ExportSlicesWork:
    """Snapshot what other groups lack of a role's weights, apart for each of their processes.

    Attributes:
        role: The role whose weights they are.
        receivers: Group -> how it is to hold the weights, from `LayoutWork`.
        version: Version of the weights.
    """

    role: str
    receivers: Mapping[str, Any]
    version: int


@dataclass(frozen=True)
class ImportSlicesWork:
    """Replace a role's weights by slices that others exported.

    Attributes:
        role: The role whose weights they are.
        group: The group that does it.
        source: How the exporting group holds the weights.
        slices: The snapshots of its processes.
        version: That is expected.
    """

    role: str
    group: str
    source: Any
    slices: tuple[Handle, ...]
    version: int


@dataclass(frozen=True)
class SaveStateWork:
    """Take a role's training state, and write it into a folder: at once, or from then on.

    Answers with what kept it from being written at once; "" if nothing did.
    """

    role: str
    folder: str


@dataclass(frozen=True)
class LoadStateWork:
    """Restore a role's training state from a folder."""

    role: str
    folder: str


@dataclass(frozen=True)
class SavePartWork:
    """Write a stored part to a safetensors file; answers as `SaveStateWork`."""

    part: Handle
    file: str


@dataclass(frozen=True)
class SaveReportWork:
    """Say how far the writing of states has come: a `SaveReport`.

    Attributes:
        wait_s: How long to wait for its end.
        unwanted: Whether it is to end because the checkpoint will not come about.
    """

    wait_s: float = 0.0
    unwanted: bool = False


@dataclass(frozen=True)
class SaveReport:
    """How far a process has come with what it was given to save last.

    Attributes:
        writing: Whether it is still being written.
        files: What has been written since it was taken, by the names in the checkpoint's folder.
        failed: What kept it from being written; "" if nothing did.
    """

    writing: bool
    files: Mapping[str, WrittenFile] = field(default_factory=dict[str, WrittenFile])
    failed: str = ""


@dataclass(frozen=True)
class LoadPartWork:
    """Read a part from a safetensors file back into the store."""

    node: str
    file: str


@dataclass(frozen=True)
class CallMethodWork:
    """Call a worker's own method outside any step: to hash its weights, to export a folder.

    Attributes:
        role: The role whose worker is called.
        method: Name of a public method.
        arguments: Small picklable arguments, by position.
    """

    role: str
    method: str
    arguments: tuple[Any, ...] = ()


Work = (
    CallWork
    | BeginStreamWork
    | AnswerWork
    | CallMethodWork
    | ExportWork
    | ImportWork
    | SetServedVersionWork
    | LayoutWork
    | ExportSlicesWork
    | ImportSlicesWork
    | SaveStateWork
    | LoadStateWork
    | SavePartWork
    | SaveReportWork
    | LoadPartWork
)


@dataclass(frozen=True)
class Report:
    """What a worker says about work it has done; a few hundred bytes.

    Attributes:
        start_s: Wall-clock start, seconds since the epoch.
        end_s: Wall-clock end.
        metrics: Named numbers of this call, to be merged over chunks and ranks.
        num_rows: Rows in each stored part.
        num_bytes: Bytes of the stored parts.
        answer: What a `CallMethodWork` returned, or what a save says of itself.
        chunk: Which of the calls an `AnswerWork` has answered; None if it has paused.
        size: Length of its longest row.
        peak_bytes: The most that torch had allocated on this process's CUDA device during a call,
            what its workers always hold included; 0 where there is none.
        made: Of each stored part that is trained on, its digest; see `recovery/ledger.py`.
        taken: Of a train call, for each part that it was given: who made it, its rows, its digest.
    """

    start_s: float
    end_s: float
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    num_rows: tuple[int, ...] = ()
    num_bytes: int = 0
    answer: Any = None
    chunk: int | None = None
    size: int = 0
    peak_bytes: int = 0
    made: tuple[int, ...] = ()
    taken: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True)
class Result:
    """Work done: the report, and what the executor is to store.

    Attributes:
        report: See `Report`.
        parts: Output chunks: one for a chunked call, all of them for a whole-batch call.
        weights: The snapshot of an `ExportWork`.
    """

    report: Report
    parts: tuple[Part, ...] = ()
    weights: Weights | None = None
