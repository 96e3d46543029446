"""The engine: the thin shell that carries out what the scheduler decides.

It owns no policy. Instructions become work for an executor, completions become events, and stored
outputs are looked up by name. Through it pass messages, not tensors: an output is a handle here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .batch import lengths_of, pack
from .check import check_lag
from .checkpoint import CheckpointFolder, ResumePoint, SavedRun, read_resume_point, write_run_state
from .errors import ConfigError, StateError, WorkerError
from .executor import Completion, Executor, InProcess, Program, check_workers
from .graph import Graph, Node, NodeKind
from .host import cut_table
from .placement import Placement, flow_of
from .role import Metric, Role
from .schedule import Schedule
from .scheduler import Scheduler
from .scheduler_events import (
    Abort,
    AdmitStep,
    CheckpointSaved,
    DropSnapshot,
    Finished,
    Instruction,
    Load,
    NodeTask,
    Output,
    Publish,
    Release,
    RunCall,
    RunTrain,
    SaveCheckpoint,
    SourceReady,
    StepCompleted,
    Task,
    TaskDone,
    TaskFailed,
    Tick,
)
from .spans import TaskSpan
from .work import (
    CallWork,
    ExportWork,
    Handle,
    ImportWork,
    LoadPartWork,
    LoadStateWork,
    Part,
    Report,
    SavePartWork,
    SaveStateWork,
    Work,
)
from .worker import WorkerSpec

__all__ = ["Engine", "Source", "StepResult"]

_POLL_S = 1.0
"""Longest wait for completions before deadlines are looked at again."""


class Source(Protocol):
    """Where a step's rows come from: a pure function of the step's index."""

    def batch(self, step: int) -> Any:
        """The table of that step, as dense padded tensors."""
        ...


@dataclass(frozen=True)
class StepResult:
    """What one completed step reports.

    Attributes:
        step: Its index.
        metrics: `node/name` -> value, merged over chunks and ranks.
        spans: When and where each of its tasks ran.
        lag: (versions behind, number of rollout tasks) pairs.
        num_rows: Node -> rows it made.
        controller_bytes: Bytes that passed through the controller since the step before.
    """

    step: int
    metrics: Mapping[str, float]
    spans: tuple[TaskSpan, ...]
    lag: tuple[tuple[int, int], ...] = ()
    num_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    controller_bytes: int = 0


class Engine:
    """Runs a graph as its placement and schedule say.

    Args:
        graph: From `build`.
        placement: Where its nodes run; a `Plan` reduces to one.
        workers: Role name -> `WorkerSpec`, or a live worker (in-process only).
        schedule: How far generation may run ahead.
        seed: All randomness of the run derives from it.
        executor: Where work is carried out; in this process by default.
        also: Further programs on the same workers, such as an evaluation, by name.

    Raises:
        ConfigError: If a role has no worker.
        FlowError: If the schedule allows lag that a loss cannot correct for.
        PlanError: If the placement does not fit the graph or the executor.

    Example:
        >>> engine = Engine(graph, one_group(graph), workers={"actor": spec, "reward": rule})
        >>> for step in engine.run({"prompts": source}, num_steps=200):
        ...     print(step.metrics)
    """

    def __init__(
        self,
        graph: Graph,
        placement: Placement,
        *,
        workers: Mapping[str, WorkerSpec | Role],
        schedule: Schedule | None = None,
        seed: int = 0,
        executor: Executor | None = None,
        also: Mapping[str, Program] | None = None,
    ) -> None:
        self.schedule = schedule or Schedule()
        check_lag(graph, self.schedule.max_lag)
        self.programs = {"main": Program(graph, placement), **(also or {})}
        for program in self.programs.values():
            check_workers(program.graph, workers)
            flow_of(program.graph, program.placement)
        self.executor = executor or InProcess()
        self.seed = seed
        self._workers = workers
        self._started = False
        self._tickets = 0

    def start(self) -> None:
        """Build the workers; `run` does it if nobody did."""
        if not self._started:
            self.executor.start(self.programs, self._workers, self.seed, self.schedule.deadline_s)
            self._started = True

    def close(self) -> None:
        """End all worker processes; idempotent."""
        self.executor.stop()
        self._started = False

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        sources: Mapping[str, Source],
        num_steps: int,
        *,
        program: str = "main",
        checkpoint_every: int | None = None,
        checkpoints: CheckpointFolder | None = None,
    ) -> Iterator[StepResult]:
        """Run steps and yield each as it completes, in order.

        Args:
            sources: Source name -> where its rows come from.
            num_steps: Steps in all, those before a resume included.
            program: Which program to run; "main" is the graph the engine was made with.
            checkpoint_every: Save after every so many steps and at the end.
            checkpoints: Where to save, and where to resume from if it holds a checkpoint.

        Raises:
            WorkerError: If user code fails or nothing comes back within the deadline.
            ConfigError: If a source is missing or a checkpoint belongs to another graph.
        """
        self.start()
        graph = self.programs[program].graph
        for name in graph.sources:
            if name not in sources:
                raise ConfigError(
                    f"graph '{graph.name}' reads a source '{name}' that nobody provides; give "
                    f"sources={{'{name}': ...}}"
                )
        return _Run(self, program, sources, num_steps, checkpoint_every, checkpoints).steps()

    def next_ticket(self) -> int:
        """A number for one submission to the executor."""
        self._tickets += 1
        return self._tickets


@dataclass
class _Submission:
    """Work out on one or more ranks."""

    task: Task | None
    group: str
    waiting: set[int]
    completions: list[Completion] = field(default_factory=list[Completion])


class _Run:
    """One pass of `Engine.run`: the state between instructions and completions."""

    def __init__(
        self,
        engine: Engine,
        program: str,
        sources: Mapping[str, Source],
        num_steps: int,
        checkpoint_every: int | None,
        checkpoints: CheckpointFolder | None,
    ) -> None:
        self.engine = engine
        self.executor = engine.executor
        self.program = program
        self.graph = engine.programs[program].graph
        self.placement = engine.programs[program].placement
        self.flow = flow_of(self.graph, self.placement)
        self.sources = sources
        self.checkpoints = checkpoints
        self._out: dict[int, _Submission] = {}
        self._store: dict[Output, Handle] = {}
        self._snapshots: dict[tuple[str, int], Handle] = {}
        self._reports: dict[int, list[tuple[NodeTask, int, Report]]] = {}
        self._versions: dict[Task, tuple[tuple[str, int], ...]] = {}
        self._bytes_before = self.executor.controller_bytes
        point = read_resume_point(checkpoints, self.graph, engine.seed) if checkpoints else None
        self.scheduler = Scheduler(
            self.flow,
            engine.schedule,
            num_steps,
            checkpoint_every=checkpoint_every,
            resume=point.state if point else None,
        )
        if point:
            self._restore(point)

    def steps(self) -> Iterator[StepResult]:
        """Drive the scheduler to its end."""
        todo: deque[Instruction] = deque(self.scheduler.start(time.monotonic()))
        while True:
            while todo:
                instruction = todo.popleft()
                if isinstance(instruction, StepCompleted):
                    yield self._result(instruction)
                elif isinstance(instruction, Finished):
                    return
                else:
                    todo.extend(self._carry_out(instruction))
            todo.extend(self._await_events())

    def _await_events(self) -> list[Instruction]:
        completions = self.executor.wait(min(_POLL_S, self.engine.schedule.deadline_s))
        instructions: list[Instruction] = []
        for completion in completions:
            instructions.extend(self._completed(completion))
        instructions.extend(self.scheduler.handle(Tick(time.monotonic())))
        return instructions

    def _carry_out(self, instruction: Instruction) -> Sequence[Instruction]:
        match instruction:
            case AdmitStep():
                return self._admit(instruction.step)
            case RunCall() | RunTrain():
                self._run_node(instruction)
            case Publish():
                home = self.flow.homes[instruction.role]
                self._submit(instruction, home, {0: ExportWork(instruction.role)})
            case Load():
                weights = self._snapshots[instruction.role, instruction.version]
                work = ImportWork(instruction.role, weights)
                ranks = range(self.flow.groups[instruction.group])
                self._submit(instruction, instruction.group, dict.fromkeys(ranks, work))
            case Release():
                self.executor.release([self._store.pop(o) for o in instruction.outputs])
            case DropSnapshot():
                handle = self._snapshots.pop((instruction.role, instruction.version))
                self.executor.release([handle])
            case SaveCheckpoint():
                self._save(instruction)
                return self.scheduler.handle(CheckpointSaved(instruction.step, time.monotonic()))
            case Abort():
                raise self._failure(instruction)
            case _:
                raise StateError(f"unexpected instruction {instruction}")
        return ()

    def _admit(self, step: int) -> Sequence[Instruction]:
        num_rows: tuple[int, ...] = ()
        for name in self.graph.sources:
            node = self.graph[name]
            parts = _pack_source(node, self.sources[name].batch(step), self.flow.num_chunks)
            for chunk, part in enumerate(parts):
                self._store[Output(name, step, chunk)] = self.executor.put(part)
            num_rows = tuple(part[0].num_rows for part in parts)
        return self.scheduler.handle(SourceReady(step, time.monotonic(), num_rows))

    def _run_node(self, instruction: RunCall | RunTrain) -> None:
        node = self.graph[instruction.node]
        task = instruction.task
        self._versions[task] = instruction.versions
        group = self.placement.nodes[node.name]
        if isinstance(instruction, RunCall):
            chunks = range(self.flow.num_chunks) if task.chunk is None else [task.chunk]
            work = self._call(node, task, list(chunks))
            self._submit(task, group, {instruction.rank: work})
            return
        shares = _shares(self.flow.num_chunks, len(instruction.ranks))
        works = {rank: self._call(node, task, shares[rank]) for rank in instruction.ranks}
        self._submit(task, group, works)

    def _call(self, node: Node, task: NodeTask, chunks: list[int]) -> CallWork:
        producers = dict.fromkeys(ref.node for _, ref in node.inputs)
        inputs = {
            producer: tuple(self._store[Output(producer, task.step, chunk)] for chunk in chunks)
            for producer in producers
        }
        return CallWork(node.name, task.step, task.chunk, inputs)

    def _submit(self, task: Task | None, group: str, works: Mapping[int, Work]) -> int:
        ticket = self.engine.next_ticket()
        self._out[ticket] = _Submission(task, group, set(works))
        for rank, work in works.items():
            self.executor.submit(ticket, self.program, group, rank, work)
        return ticket

    def _completed(self, completion: Completion) -> Sequence[Instruction]:
        submission = self._out.get(completion.ticket)
        if submission is None:
            return ()
        if completion.error is not None:
            self._out.pop(completion.ticket)
            return self._failed(submission, completion)
        submission.waiting.discard(completion.rank)
        submission.completions.append(completion)
        if submission.waiting:
            return ()
        del self._out[completion.ticket]
        return self._done(submission)

    def _failed(self, submission: _Submission, completion: Completion) -> Sequence[Instruction]:
        self._error = completion.error
        if submission.task is None:
            raise WorkerError(_describe(completion)) from completion.error
        event = TaskFailed(
            submission.task, completion.rank, _describe(completion), time.monotonic()
        )
        return self.scheduler.handle(event)

    def _done(self, submission: _Submission) -> Sequence[Instruction]:
        first = min(submission.completions, key=lambda c: c.rank)
        task = submission.task
        if task is None:
            return ()
        if isinstance(task, Publish):
            self._snapshots[task.role, task.version] = first.weights
        elif isinstance(task, NodeTask):
            self._keep(task, submission)
        rows = first.report.num_rows if first.report else ()
        return self.scheduler.handle(TaskDone(task, time.monotonic(), rows or None))

    def _keep(self, task: NodeTask, submission: _Submission) -> None:
        reports = self._reports.setdefault(task.step, [])
        for completion in submission.completions:
            if completion.report:
                reports.append((task, completion.rank, completion.report))
            first_chunk = task.chunk or 0
            for index, part in enumerate(completion.parts):
                self._store[Output(task.node, task.step, first_chunk + index)] = part

    def _result(self, completed: StepCompleted) -> StepResult:
        reports = self._reports.pop(completed.step, [])
        spans: list[TaskSpan] = []
        merged: dict[str, Metric] = {}
        rows: dict[str, int] = {}
        for task, rank, report in reports:
            versions = self._versions.get(task, ())
            group = self.placement.nodes[task.node]
            spans.append(
                TaskSpan(task.node, task.step, task.chunk, group, rank, report.start_s,
                         report.end_s, versions)
            )  # fmt: skip
            rows[task.node] = rows.get(task.node, 0) + sum(report.num_rows)
            train = self.graph[task.node].kind is NodeKind.TRAIN
            for name, metric in report.metrics.items() if not (train and rank) else ():
                key = f"{task.node}/{name}"
                merged[key] = merged[key] + metric if key in merged else metric
        for task, _, _ in reports:
            self._versions.pop(task, None)
        passed = self.executor.controller_bytes - self._bytes_before
        self._bytes_before += passed
        return StepResult(
            completed.step,
            {name: metric.value for name, metric in sorted(merged.items())},
            tuple(spans),
            completed.lag,
            rows,
            passed,
        )

    def _failure(self, abort: Abort) -> WorkerError:
        report = abort.report
        node = getattr(report, "node", None)
        where = f"{self.graph[node].where}\n" if node else ""
        failure = WorkerError(f"{where}{report}")
        failure.__cause__ = getattr(self, "_error", None)
        return failure

    # --- checkpoints

    def _wait_for(self, ticket: int) -> list[Completion]:
        """Wait for one administrative submission; nothing else is out at that time."""
        submission = self._out[ticket]
        deadline = time.monotonic() + self.engine.schedule.deadline_s
        while ticket in self._out:
            for completion in self.executor.wait(_POLL_S):
                self._completed(completion)
            if time.monotonic() > deadline and ticket in self._out:
                raise WorkerError(
                    f"saving or restoring on group '{submission.group}' took longer than "
                    f"{self.engine.schedule.deadline_s} s (Schedule.deadline_s); rank(s) "
                    f"{sorted(submission.waiting)} did not answer"
                )
        return submission.completions

    def _save(self, instruction: SaveCheckpoint) -> None:
        if self.checkpoints is None:
            return
        with self.checkpoints.write(instruction.step) as folder:
            saved = SavedRun(self.graph, self.engine.seed, instruction)
            for role, group in self.flow.homes.items():
                (folder / role).mkdir()
                work = SaveStateWork(role, str(folder / role))
                ranks = range(self.flow.groups[group])
                self._wait_for(self._submit(None, group, dict.fromkeys(ranks, work)))
            for output, file in saved.part_files(folder):
                group = self.placement.nodes.get(output.node, self.placement.groups[0].name)
                work = SavePartWork(self._store[output], str(file))
                self._wait_for(self._submit(None, group, {0: work}))
            write_run_state(folder, saved)

    def _restore(self, point: ResumePoint) -> None:
        for group in self.placement.groups:
            for role in self.placement.hosted_roles(self.graph, group.name):
                if role in self.flow.homes:
                    work = LoadStateWork(role, str(point.folder / role))
                    ranks = range(group.num_ranks)
                    self._wait_for(self._submit(None, group.name, dict.fromkeys(ranks, work)))
        for output, file in point.parts:
            group = self.placement.nodes.get(output.node, self.placement.groups[0].name)
            work = LoadPartWork(output.node, str(file))
            (done,) = self._wait_for(self._submit(None, group, {0: work}))
            self._store[output] = done.parts[0]


def _describe(completion: Completion) -> str:
    if completion.trace:
        return completion.trace.rstrip()
    return f"{type(completion.error).__name__}: {completion.error}"


def _shares(num_chunks: int, num_ranks: int) -> list[list[int]]:
    """Which chunks each rank trains on: contiguous, so that rank order is row order."""
    bounds = [num_chunks * rank // num_ranks for rank in range(num_ranks + 1)]
    return [list(range(bounds[rank], bounds[rank + 1])) for rank in range(num_ranks)]


def _pack_source(node: Node, table: Any, num_chunks: int) -> tuple[Part, ...]:
    expected = node.output_table
    if expected is None or not isinstance(table, expected):
        raise ConfigError(
            f"source '{node.name}' should give a {expected.__name__ if expected else 'table'}, but "
            f"gave a {type(table).__name__}"
        )
    columns = [(output, getattr(table, output.name)) for output in node.outputs]
    lengths = next(
        (
            lengths_of(column)
            for output, column in columns
            if output.spec.ragged_axis is not None and output.spec.dtype.value == "i64"
        ),
        None,
    )
    packed = tuple(
        pack(f"{node.name}.{output.name}", column, output.spec,
             lengths if output.spec.ragged_axis is not None else None)
        for output, column in columns
    )  # fmt: skip
    return cut_table(node, packed, num_chunks)
