"""Recipes of workers, and where they are built.

A role of a run is given either as a live object that implements its contract (in-process only) or
as a `WorkerSpec`: picklable data that builds such an object where it is to live. What was built
from a spec is closed by who had it built; a live object is its owner's to close.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import TypeIs

from ..graph.role import Metric, Role, Worker
from .call_context import DeadlineExceeded, deadline

CLOSE_S = 5.0
"""Seconds a worker may take to close."""

_LOG = logging.getLogger("penstock.worker")


@dataclass(frozen=True)
class WorkerContext:
    """The place where a worker is being built.

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
        places: Where the group lives within another one (`DeviceGroup.within`): the number that
            each of its processes has there, and in torch.distributed. Empty if it does not.
        group: The worker group's name; empty outside of a placement.

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
    places: tuple[int, ...] = ()
    group: str = ""

    def __post_init__(self) -> None:
        if self.device == "cuda":
            object.__setattr__(self, "device", "cuda:0")

    @property
    def num_processes(self) -> int:
        return self.num_ranks * self.tensor_parallel * self.pipeline_parallel

    @property
    def process(self) -> int:
        """This process in its group; see `DeviceGroup.processes`."""
        return self.tensor_rank + self.tensor_parallel * (self.rank + self.num_ranks * self.stage)

    @property
    def answers(self) -> bool:
        """True if this process answers for its rank: the first of the last stage.

        What the others return is not looked at.
        """
        return self.tensor_rank == 0 and self.stage == self.pipeline_parallel - 1


class WorkerSpec(Protocol):
    """Picklable recipe for a worker."""

    def build(self, context: WorkerContext) -> Role:
        """Make the worker in the process and on the device where it is to run."""
        ...


def is_spec(worker: object) -> TypeIs[WorkerSpec]:
    """True if a worker was given as a recipe, and not live."""
    return callable(getattr(worker, "build", None))


class _Closes(Protocol):
    def close(self) -> None: ...


def close_workers(workers: Iterable[_Closes]) -> None:
    """Close each; one that fails, or that takes too long where that can be noticed, is logged."""
    for worker in workers:
        try:
            with deadline(CLOSE_S):
                worker.close()
        except (Exception, DeadlineExceeded):
            _LOG.exception("closing a %s failed", type(worker).__name__)


def drain_metrics(worker: object) -> dict[str, Metric]:
    """Take the metrics a worker gathered during its last call; see `Worker.metrics`."""
    gathered: dict[str, Metric] | None = getattr(worker, "metrics", None)
    if not gathered:
        return {}
    taken = dict(gathered)
    gathered.clear()
    return taken


def sleep_workers(workers: Iterable[Worker]) -> None:
    for worker in workers:
        worker.sleep()


def wake_workers(workers: Iterable[Worker]) -> None:
    """Wake workers, but for those that wait in host memory for their next call."""
    for worker in workers:
        if not worker.offload:
            worker.wake()


def sleep_offloaded(workers: Iterable[Worker]) -> None:
    """Put those to sleep that wait in host memory for their next call."""
    sleep_workers(worker for worker in workers if worker.offload)


@contextmanager
def on_device(workers: Iterable[Worker]) -> Generator[None]:
    waiting = [worker for worker in workers if worker.offload]
    try:
        for worker in waiting:
            worker.wake()
        yield
    finally:
        sleep_workers(waiting)
