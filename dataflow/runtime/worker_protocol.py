"""What the engine needs of the things that run roles, and nothing about how they do it.

A role of a run is given either as a live object that implements its contract (in-process only) or
as a `WorkerSpec`: picklable data that builds such an object where it is to live. What was built
from a spec is closed by who had it built; a live object is its owner's to close.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..graph.role import Metric, Role
from ..written_files import WrittenFile
from .call_context import DeadlineExceeded, deadline

CLOSE_S = 5.0
"""Seconds a worker may take to close."""

_LOG = logging.getLogger("penstock.worker")


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker is being built.

    Attributes:
        role: The role's name in the step function: "actor".
        seed: The run's seed; all randomness derives from it and a `CallKey`.
        rank: This process's data-parallel rank in its worker group.
        num_ranks: Data-parallel ranks of the group.
        device: "cpu" or "cuda:0", as torch spells it. "cuda" becomes "cuda:0": libraries take a
            device of a process by its number.
        tensor_parallel: Processes among which this rank's matrices may be divided.
        tensor_rank: Which of them this is.
        pipeline_parallel: Stages into which this rank's layers may be divided.
        stage: In which of them this process is.
        methods: What is asked of the role in this group, "generate" and "train" say; empty if that
            is not known.
        replica: Which of the independent ranks this is, in a group that trains nothing and keeps no
            state. Each of them is a worker group of its own here, of rank 0 alone, because it
            is started again without the others, and others may come and go.
        num_replicas: How many there were when this one was built.

    If the group has several processes, torch.distributed's default process group is initialized
    and spans exactly them before `build` is called, and so are groups that an engine makes of it.
    """

    role: str
    seed: int = 0
    rank: int = 0
    num_ranks: int = 1
    device: str = "cpu"
    tensor_parallel: int = 1
    tensor_rank: int = 0
    pipeline_parallel: int = 1
    stage: int = 0
    methods: frozenset[str] = frozenset()
    replica: int = 0
    num_replicas: int = 1

    def __post_init__(self) -> None:
        if self.device == "cuda":
            object.__setattr__(self, "device", "cuda:0")

    @property
    def num_processes(self) -> int:
        """Processes of the group."""
        return self.num_ranks * self.tensor_parallel * self.pipeline_parallel

    @property
    def process(self) -> int:
        """This process in its group; see `DeviceGroup.processes`."""
        return self.tensor_rank + self.tensor_parallel * (self.rank + self.num_ranks * self.stage)

    @property
    def answers(self) -> bool:
        """Whether this process answers for its rank: the first of the last stage.

        What the others return is not looked at.
        """
        return self.tensor_rank == 0 and self.stage == self.pipeline_parallel - 1


@runtime_checkable
class WorkerSpec(Protocol):
    """Picklable recipe for a worker."""

    def build(self, context: WorkerContext) -> Role:
        """Make the worker in the process and on the device where it is to run."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A worker with a state of its own: what checkpoints ask of it.

    On a group of several ranks every method is called on every rank, and all of them are given the
    same folder. Of what all ranks hold rank 0 may write all, or each rank a share; of one whose
    ranks hold different things every rank writes files of its own, and may find more in the folder
    than it wrote.
    """

    def save_state(self, folder: Path) -> None:
        """Write the state to `folder` as safetensors and JSON."""

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, bit for bit, by any number of ranks."""


WriteState = Callable[[Path, Callable[[], bool]], Mapping[str, WrittenFile]]
"""Writes a state that was taken before into a folder; see `SavesLater`.

Given the folder, and what says whether nobody wants it any more, it returns what it has written, by
the names in the folder.
"""


@runtime_checkable
class SavesLater(Protocol):
    """A `Stateful` or `Trainable` worker whose state is written while it goes on. Optional.

    What another thread writes is the state as it was when `take_state` was called, whatever calls
    come meanwhile. The next `take_state` comes when it has ended.
    """

    def take_state(self) -> WriteState:
        """Take the state as it is now; `save_state` writes the same."""
        ...


@runtime_checkable
class Trainable(Protocol):
    """A worker whose weights change: what publication and checkpoints ask of it.

    On a group of several ranks every method is called on every rank.
    """

    def export_weights(self) -> Mapping[str, Tensor]:
        """Detached tensors by logical parameter name (Hugging Face's); a snapshot, not views."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Replace all weights in place; names and shapes must match exactly."""

    def save_state(self, folder: Path) -> None:
        """Write weights and optimizer state to `folder` as safetensors and JSON."""

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, bit for bit."""


@dataclass(frozen=True)
class Streamed:
    """The answer to one of several calls that are served together.

    Attributes:
        call: Which of them.
        returned: What the method returns.
        size: Length of its longest row.
        unfinished: What goes on in a later step; see `Continues`.
    """

    call: int
    returned: Any
    size: int
    unfinished: Any = None


@runtime_checkable
class Streams(Protocol):
    """A worker that serves several calls of a method together, each answered when it is ready.

    Optional. Of one that cannot, the engine makes one call after another.
    """

    def stream(self, method: str, calls: Sequence[Mapping[str, Any]]) -> Iterator[Streamed | None]:
        """Serve calls of one node in one step.

        What is answered, and in which order, is a function of the calls and the weights: in order
        of (size, call), whatever the timing. None is no answer, but a pause; see `TakesWeights`.

        Args:
            method: Name of the method.
            calls: The arguments of each, by name.
        """
        ...


@runtime_checkable
class Continues(Protocol):
    """A worker whose rows may go on in a later step, under newer weights. Optional.

    Attributes:
        unfinished: Table of what has been begun: a frozen dataclass of annotated columns.
    """

    unfinished: type

    def stream_segment(
        self,
        method: str,
        calls: Sequence[Mapping[str, Any]],
        begun: Sequence[Any | None],
        length: int,
    ) -> Iterator[Streamed | None]:
        """Serve calls as `Streams.stream` does, each for a segment only.

        A call goes on with the groups that are unfinished, and begins its own. It returns the rows
        of the groups all of whose rows have ended, and gives the others as `Streamed.unfinished`.
        Answers come by (size, call), the size being how far the segment has taken a row.

        Args:
            method: Name of the method.
            calls: The arguments of each, by name.
            begun: What the same call of the step before has left unfinished; None before there is
                one.
            length: By how much a row may grow.
        """
        ...


@runtime_checkable
class TakesPieces(Protocol):
    """A worker whose train calls may be given a batch piece by piece. Optional; see `call_piece`.

    Attributes:
        takes_pieces: True. Each piece adds to the gradient, and the optimizer steps with the last.
    """

    takes_pieces: bool


@runtime_checkable
class TakesWeights(Protocol):
    """A worker that streams, and can be given newer weights between two of its answers. Optional.

    While it serves a call in flight (`call_in_flight`) its stream gives None after every entry that
    it adds to its rows. When it is asked to go on, `call_version` may be newer: weights have come
    by `load_weights`, or were written in place. What it adds from there on it samples from these,
    and notes their version.

    Attributes:
        takes_weights: Whether it can.
    """

    takes_weights: bool


@runtime_checkable
class Closable(Protocol):
    """A worker that holds more than memory: processes, files, connections. Optional."""

    def close(self) -> None:
        """Give it all back, within `CLOSE_S`; nothing is asked of the worker afterwards."""


def close_workers(workers: Iterable[object]) -> None:
    """Close those that can be closed.

    One that fails, or that takes too long where that can be noticed, does not keep the others from
    being closed: it is logged with its traceback.
    """
    for worker in workers:
        if isinstance(worker, Closable):
            try:
                with deadline(CLOSE_S):
                    worker.close()
            except (Exception, DeadlineExceeded):
                _LOG.exception("closing a %s failed", type(worker).__name__)


def drain_metrics(worker: object) -> dict[str, Metric]:
    """Take the metrics a worker gathered during its last call, if it keeps any.

    A worker reports numbers about a call (response length, reward, malformed answers) by adding
    to its own `metrics: dict[str, Metric]` attribute; the engine takes and clears them after each
    call.
    """
    gathered: dict[str, Metric] | None = getattr(worker, "metrics", None)
    if not gathered:
        return {}
    taken = dict(gathered)
    gathered.clear()
    return taken
