"""Tasks, events that go into the scheduler, and instructions that come out.

All are frozen and compare by value, so a test says "this event, these instructions". `at_s` is the
shell's clock in seconds; the scheduler has none of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from .schedule import Deadline


@dataclass(frozen=True)
class FailureReport:
    what: str  # The task in words: "actor.train step 3"
    where: str  # The rank: "train[0]"
    error: str  # The error's text as the worker gave it, traceback included
    story: tuple[str, ...]  # The scheduler's events of the node in that step

    def __str__(self) -> str:
        lines = [f"{self.what} failed on {self.where}", *_indent(self.error.splitlines())]
        return "\n".join([*lines, "what happened before:", *_indent(self.story)])


@dataclass(frozen=True)
class HungTask:
    node: str  # The node's name, or "publish actor@3" and the like
    step: int | None  # Its step; None for publications and loads
    roles: tuple[str, ...]  # Roles whose weights it reads, with versions: "actor@2"
    ranks: tuple[str, ...]  # Where it runs: "rollout[1]"
    running_s: float  # For how long
    num_rows: int | None  # Rows of the chunk it works on, if known
    missing: str  # Inputs of the node's step that are not there yet: "chunks 1, 3 of 4 (64 rows)"

    def lines(self) -> list[str]:
        step = "" if self.step is None else f" of step {self.step}"
        lines = [f"{self.node}{step} has run for {self.running_s:.1f} s"]
        lines.append(f"    on {', '.join(self.ranks)}")
        if self.roles:
            lines.append(f"    with weights {', '.join(self.roles)}")
        if self.num_rows is not None:
            lines.append(f"    working on {self.num_rows} rows")
        if self.missing:
            lines.append(f"    not done: {self.missing}")
        return lines


@dataclass(frozen=True)
class HangReport:
    """Nothing came back within the deadline."""

    at_s: float  # When it was noticed
    deadline: Deadline  # The deadline that was exceeded first
    hung: tuple[HungTask, ...]  # Tasks over their deadlines
    awaited: tuple[str, ...]  # Other things waited for: a batch, a checkpoint
    blocked: tuple[str, ...]  # Tasks that cannot start, and why (the first few)
    ranks: tuple[str, ...]  # Last event of every rank
    instances: tuple[str, ...]  # Version and last event of every copy of trainable weights

    def __str__(self) -> str:
        lines = [f"no progress within {self.deadline}, at {self.at_s:.1f} s"]
        for task in self.hung:
            lines += _indent(task.lines())
        lines += _indent(self.awaited)
        sections = {
            "waiting to start:": self.blocked,
            "last event of each rank:": self.ranks,
            "weights:": self.instances,
        }
        for title, texts in sections.items():
            if texts:
                lines += [title, *_indent(texts)]
        return "\n".join(lines)


def _indent(lines: tuple[str, ...] | list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


Versions: TypeAlias = tuple[tuple[str, int], ...]
"""`(trainable role, version read)` pairs, sorted by role."""


# --- tasks: what occupies ranks, and what `TaskDone` names


@dataclass(frozen=True, slots=True)
class NodeTask:
    """One execution of a node; `chunk` is None for barriers and sources.

    A train node has one per step, without a chunk; one that takes chunks in the order in which they
    were sampled has one for each time that its ranks take some, and `chunk` counts these.
    """

    node: str
    step: int
    chunk: int | None = None

    def __str__(self) -> str:
        chunk = "" if self.chunk is None else f" chunk {self.chunk}"
        return f"{self.node} step {self.step}{chunk}"


@dataclass(frozen=True, slots=True)
class Publish:
    """Task and instruction: rank 0 of the role's home takes a snapshot of `version`."""

    role: str
    version: int

    def __str__(self) -> str:
        return f"publish {self.role}@{self.version}"


@dataclass(frozen=True, slots=True)
class Load:
    """Task and instruction: all ranks of `group` replace the role's weights by a snapshot."""

    role: str
    version: int
    group: str

    def __str__(self) -> str:
        return f"load {self.role}@{self.version} on {self.group}"


Task: TypeAlias = NodeTask | Publish | Load


@dataclass(frozen=True, slots=True)
class Output:
    """One stored part of a node's output."""

    node: str
    step: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Awaited:
    """Something other than a task that the scheduler waits for: a batch, a checkpoint, ranks.

    Of ranks `group` names whose they are, and `step` counts the completed steps.
    """

    what: Literal["batch", "checkpoint", "ranks"]
    step: int
    group: str = ""

    def __str__(self) -> str:
        return f"{self.what} of {self.group or f'step {self.step}'}"


@dataclass(frozen=True)
class ResumeState:
    """From where a run goes on: what a checkpoint says beside weights and stored outputs."""

    step: int  # Completed steps; every trainable role is at version `step * trains_per_step`
    # Finished tasks of later steps, sources included (`NodeTask(source, step)`).
    done: frozenset[NodeTask] = frozenset()
    # `schedule_sha256` of the completed steps; carried so that a resumed run ends with the hash of
    # one that was never stopped.
    history_sha256: str = ""
    # Those of the finished tasks that have one; see `TaskDone`.
    sizes: tuple[tuple[NodeTask, int], ...] = ()
    # Rows of outputs of later steps, where the engine gave them.
    rows: tuple[tuple[Output, int], ...] = ()


# --- events: the shell tells


@dataclass(frozen=True, slots=True)
class SourceReady:
    """The batch of `step` is stored for every source node; rows per chunk if known."""

    step: int
    at_s: float
    num_rows: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class TaskDone:
    """`task` finished on all its ranks; rows it made, one number per chunk made, if known.

    `size` is the length of the longest row, of a task of a node that streams.
    """

    task: Task
    at_s: float
    num_rows: tuple[int, ...] | None = None
    size: int = 0


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """`task` failed on `rank` of its group (None: not on a rank, as a source)."""

    task: Task
    rank: int | None
    error: str
    at_s: float


@dataclass(frozen=True, slots=True)
class CheckpointSaved:
    """All that `SaveCheckpoint(step)` asked for is taken; the run may change what it is of."""

    step: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Restarted:
    """The processes of `group` were started again, and do again what they have running.

    Those of some ranks, or of all if none is named.
    """

    group: str
    at_s: float
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; sent every now and then so that deadlines are noticed."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run as soon as a checkpoint can be taken, and take it."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Resize:
    """`group` is to have so many ranks, once it has nothing to do; ranks that join are ready."""

    group: str
    num_ranks: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Resized:
    """`group` has so many ranks, and all of them the weights that it holds.

    They are as many as before if who was to join could not.
    """

    group: str
    num_ranks: int
    at_s: float


Event: TypeAlias = (
    SourceReady
    | TaskDone
    | TaskFailed
    | CheckpointSaved
    | Restarted
    | Tick
    | Stop
    | Resize
    | Resized
)


# --- instructions: the scheduler asks


@dataclass(frozen=True, slots=True)
class AdmitStep:
    """Store the batch of `step` for every source node, then send `SourceReady`."""

    step: int


@dataclass(frozen=True, slots=True)
class RunCall:
    """Run a node on one rank of its group, with exactly these weight versions."""

    node: str
    step: int
    chunk: int | None
    rank: int
    versions: Versions = ()

    @property
    def task(self) -> NodeTask:
        """The task to name in `TaskDone`."""
        return NodeTask(self.node, self.step, self.chunk)


@dataclass(frozen=True, slots=True)
class RunStream:
    """Run several chunks of a node together on one rank; `TaskDone` comes for each, by its size."""

    node: str
    step: int
    chunks: tuple[int, ...]
    rank: int
    versions: Versions = ()

    @property
    def tasks(self) -> tuple[NodeTask, ...]:
        """The tasks to name in `TaskDone`."""
        return tuple(NodeTask(self.node, self.step, chunk) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class RunTrain:
    """Run a train node on all ranks of its group, in place."""

    node: str  # Its name
    step: int
    ranks: tuple[int, ...]
    versions: Versions  # Read by it
    # Which of its parts, of a node that takes chunks as they come; None for all at once.
    part: int | None = None
    chunks: tuple[int, ...] = ()  # One for each rank then
    last: bool = True  # Whether the optimizer takes its step with these

    @property
    def task(self) -> NodeTask:
        """The task to name in `TaskDone`."""
        return NodeTask(self.node, self.step, self.part)


@dataclass(frozen=True, slots=True)
class Release:
    """Forget these outputs, which no task needs any more."""

    outputs: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class DropSnapshot:
    """Drop this published version, which no rank will load any more."""

    role: str
    version: int


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Nothing runs; take weights, the `live` outputs and `resume`, then send `CheckpointSaved`.

    `step` steps are complete and every trainable role's home is at version `step * n`.
    """

    step: int
    live: tuple[Output, ...]
    resume: ResumeState


@dataclass(frozen=True, slots=True)
class ResizeGroup:
    """Nothing of `group` runs; have so many ranks there, then send `Resized`."""

    group: str
    num_ranks: int


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing runs, and no instruction follows: another run goes on from `place`.

    Weights and outputs are as at a checkpoint of that step, whether or not one was asked for.
    """

    place: SaveCheckpoint


@dataclass(frozen=True, slots=True)
class StepCompleted:
    """All tasks of `step` are done; its outputs that no task consumed are released after this."""

    step: int  # The step; steps complete in index order
    # `(versions behind the step's own, number of tasks)` over the step's rollout reads.
    lag: tuple[tuple[int, int], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Finished:
    """All steps are complete and saved, or those before a stop are."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop everything; no instruction follows. `str(report)` is for people."""

    report: FailureReport | HangReport


Instruction: TypeAlias = (
    AdmitStep
    | RunCall
    | RunStream
    | RunTrain
    | Publish
    | Load
    | Release
    | DropSnapshot
    | SaveCheckpoint
    | ResizeGroup
    | Pause
    | StepCompleted
    | Finished
    | Abort
)
