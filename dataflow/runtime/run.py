"""One run of a program: the shell between the scheduler's instructions and the executor's answers.

Instructions become work for ranks, answers become events, and stored outputs are looked up by name.
Through here pass messages, not tensors: an output is a handle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..errors import ConfigError, StateError, WorkerError
from ..graph.graph import Node
from ..kinds import NodeKind
from ..scheduler.events import (
    Abort,
    AdmitStep,
    CheckpointSaved,
    DropSnapshot,
    Event,
    Finished,
    Instruction,
    Load,
    NodeTask,
    Output,
    Pause,
    Publish,
    Release,
    ResizeGroup,
    Restarted,
    RunCall,
    RunStream,
    RunTrain,
    SaveCheckpoint,
    SourceReady,
    StepCompleted,
    Stop,
    Task,
    TaskDone,
    TaskFailed,
    Tick,
    Versions,
)
from ..scheduler.schedule import Deadline, Flow, Schedule
from ..scheduler.scheduler import Scheduler
from .call_context import Piece
from .checkpoint import (
    Interval,
    Pauses,
    ResumePoint,
    SavedRun,
    Saving,
    StateInWorkers,
    Suspended,
    is_unfinished,
    unfinished,
)
from .columns import Source, rank_shares, read_source
from .dispatcher import POLL_S, Dispatcher, Submission, describe
from .executor import Executor, Program, Restart, WorkerLost
from .host import Host
from .ledger import Ledger
from .messages import (
    Done,
    Handle,
    HeldLayout,
    NextAnswer,
    NodeCall,
    RankWork,
    StepResult,
    step_result,
    work,
)
from .placement import flow_of
from .recovery import Known, Resizing, Scale, made_by
from .watch import WATCH, Hold, KeptColumns, Watch


@dataclass
class OpenStream:
    instruction: RunStream
    group: str  # Where it runs
    in_flight: bool  # Whether it takes newer weights meanwhile
    versions: dict[str, int]  # Read from now on
    given: list[int] = field(default_factory=list[int])  # The chunks answered, in this order
    num_taken: int = 0  # Answers that were taken in, or are about to be
    # Answers that were heard of before those that the rank gave before them, by number.
    early: dict[int, Submission] = field(default_factory=dict[int, Submission])

    def asked(self) -> list[tuple[NodeTask, NextAnswer]]:
        """The answers to ask for now, each under a task that nothing is asked for under."""
        left = [task for task in self.instruction.tasks if task.chunk not in self.given]
        versions = tuple(sorted(self.versions.items()))
        first = NextAnswer(self.instruction.node, self.instruction.step, 0, versions)
        if self.in_flight:
            return [
                (task, replace(first, number=len(self.given), given=tuple(self.given)))
                for task in left[:1]
            ]
        return [(task, replace(first, number=number)) for number, task in enumerate(left)]


class OpenStreams:
    def __init__(self, *, in_flight: bool) -> None:
        self._in_flight = in_flight
        self._by_task: dict[NodeTask, OpenStream] = {}

    def __contains__(self, task: object) -> bool:
        return task in self._by_task

    def begin(self, instruction: RunStream, group: str) -> OpenStream:
        stream = OpenStream(instruction, group, self._in_flight, dict(instruction.versions))
        self._by_task.update(dict.fromkeys(instruction.tasks, stream))
        return stream

    def loads(self, load: Load) -> None:
        """Weights are sent to a group: what is asked of its ranks from now on comes after them."""
        for stream in self._by_task.values():
            if stream.group == load.group and load.role in stream.versions:
                stream.versions[load.role] = load.version

    def in_order(self, heard: Submission | Restart) -> list[Submission | Restart]:
        """Return what may be taken in now: a rank's answers in the order in which it gave them.

        Of two that are given within a millisecond a backend may tell the second first.
        """
        task = heard.task if isinstance(heard, Submission) else None
        if not isinstance(task, NodeTask) or task not in self._by_task:
            return [heard]
        stream = self._by_task[task]
        assert isinstance(heard, Submission), "nothing else has a task"
        if stream.in_flight or heard.failed is not None:
            return [heard]
        stream.early[stream.instruction.tasks.index(task)] = heard
        ready: list[Submission | Restart] = []
        while stream.num_taken in stream.early:
            ready.append(stream.early.pop(stream.num_taken))
            stream.num_taken += 1
        return ready

    def answered(
        self, asked: NodeTask, submission: Submission
    ) -> tuple[NodeTask | None, OpenStream]:
        """The task that an answer is of, and its stream; None if it was a pause.

        A failure is of the first that is left.
        """
        stream = self._by_task[asked]
        report = submission.first.report if submission.failed is None else None
        if report is None:
            return _first(stream), stream
        if report.chunk is None:
            return None, stream
        task = replace(asked, chunk=report.chunk)
        stream.given.append(report.chunk)
        # What is left is known by the tasks under which something is asked, or may be.
        del self._by_task[task if self._in_flight else asked]
        return task, stream


def _first(stream: OpenStream) -> NodeTask:
    left: Sequence[NodeTask] = stream.instruction.tasks
    return next(task for task in left if task.chunk not in stream.given)


class Publication:
    """Makes the work of publishing and loading, and has it done between runs."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        moves_slices: bool,
        deadline: Deadline,
        views: frozenset[str] = frozenset(),
    ) -> None:
        self._dispatcher = dispatcher
        self._moves_slices = moves_slices
        self._deadline = deadline
        self._layouts: dict[tuple[str, str], HeldLayout | None] = {}
        self._receivers: dict[str, tuple[str, ...]] = {}
        self._views = views

    def learn(
        self, role: str, home: tuple[str, str], program: str, receivers: Sequence[str]
    ) -> None:
        """Ask how a role's weights are held, unless that is known; before `export` and `take`."""
        self._receivers.pop(role, None)
        if not self._moves_slices or not receivers:
            return
        for where, group in (home, *((program, receiver) for receiver in receivers)):
            if (role, group) not in self._layouts:
                asked = {0: work(Host.layout, role)}
                done = self._dispatcher.perform_now(where, group, asked, self._deadline)
                answer = done.first.report.answer if done.first.report else None
                self._layouts[role, group] = answer
            if self._layouts[role, group] is None:
                return
        self._receivers[role] = tuple(receivers)

    def export(self, role: str, version: int) -> RankWork:
        if role not in self._receivers:
            return work(Host.export_weights, role)
        others = [group for group in self._receivers[role] if group not in self._views]
        receivers = {group: self._known(role, group).receives for group in others}
        return work(Host.export_slices, role, receivers, version)

    def take(self, role: str, home: str, group: str, weights: Handle, version: int) -> RankWork:
        if role not in self._receivers:
            return work(Host.import_weights, role, weights, version)
        if group in self._views:
            return work(Host.hold_view, role, version)
        slices = weights if isinstance(weights, tuple) else (weights,)
        return work(Host.import_slices, role, self._known(role, home).sends, slices, version)

    def share(
        self,
        role: str,
        version: int,
        trained: tuple[str, str],
        program: str,
        replicas: Mapping[str, int],
    ) -> None:
        """Bring all copies of a role to the weights that an earlier run has trained last."""
        if not replicas:
            return
        self.learn(role, trained, program, list(replicas))
        where, home = trained
        exporting = {0: self.export(role, version)}
        exported = self._dispatcher.perform_now(where, home, exporting, self._deadline)
        for group, num_ranks in replicas.items():
            take = self.take(role, home, group, exported.first.weights, version)
            works = dict.fromkeys(range(num_ranks), take)
            self._dispatcher.perform_now(program, group, works, self._deadline)

    def _known(self, role: str, group: str) -> HeldLayout:
        layout = self._layouts[role, group]
        assert layout is not None, "a role is published in slices only where all layouts are known"
        return layout


_Spans = list[tuple[float, float]]

Trained = dict[str, tuple[str, str]]
"""Role -> (program, group) where it was trained last: its newest weights."""


@dataclass(frozen=True)
class Asked:
    """Arguments of `Engine.run`."""

    program: str
    sources: Mapping[str, Source]
    num_steps: int
    checkpoint_every: int | None
    stop: Callable[[], bool] | None
    pauses: Pauses
    keep: Sequence[str]
    ledger: Ledger | None
    scale: Scale | None


class EngineRun:
    """The state between instructions and answers, from where a run begins or goes on."""

    def __init__(
        self,
        program: Program,
        asked: Asked,
        schedule: Schedule,
        executor: Executor,
        dispatcher: Dispatcher,
        trained: Trained,
        *,
        seed: int,
        saving: Saving | None,
        watch: Watch | None,
        longest: Deadline,
        pauses: Collection[int],
        suspended: Suspended | None,
        known: Known,
        begun: Callable[[int], None],
        resizing: Callable[[Flow], Resizing] | None,
    ) -> None:
        self.place: SaveCheckpoint | None = None  # Where it has paused; None if it has not
        self.known, self._begun = known, begun
        self._heard: list[Submission | Restart] = []
        self._already: list[Event] = []
        self._lost: WorkerLost | None = None
        self._ledger = asked.ledger
        self._graph, self._placement = program.graph, program.placement
        self._segment = schedule.segment_tokens or None
        self._mixes_versions = bool(schedule.segment_tokens or schedule.in_flight)
        self._flow = flow_of(program.graph, program.placement, schedule)
        self._resizing = resizing(self._flow) if resizing else None
        self._state = StateInWorkers(dispatcher, asked.program, program, longest)
        self._name, self._sources, self._wait_s = asked.program, asked.sources, schedule.wait_s
        self._executor, self._dispatcher, self._trained = executor, dispatcher, trained
        self._seed, self._saving, self._longest, self._stop = seed, saving, longest, asked.stop
        self._watch, self._kept = watch, KeptColumns(program.graph, asked.keep)
        self._checkpoint_every = asked.checkpoint_every
        held = Hold(watch.nodes if watch else ()), Hold(self._kept.nodes)
        self._looked, self._handed = suspended.holds if suspended else held
        self._store: dict[Output, Handle] = dict(suspended.outputs) if suspended else {}
        self._snapshots: dict[tuple[str, int], Handle] = {}
        self._done_by_step: dict[int, list[Done]] = {}
        self._versions: dict[NodeTask, Versions] = {}
        self._streams = OpenStreams(in_flight=schedule.in_flight)
        self._failed: tuple[Task, BaseException | None] | None = None
        moves = executor.moves_slices
        views = frozenset(one.name for one in program.placement.groups if one.within)
        self._publication = Publication(
            dispatcher, moves_slices=moves, deadline=longest, views=views
        )
        self._bytes_before, self._weights_s = executor.controller_bytes, _Spans()
        self._point: ResumePoint | None = None
        if saving and not suspended:
            self._point = saving.newest_point(self._graph, seed)
        if self._ledger is not None and not suspended:
            self._ledger.went_back(self._point.folder if self._point else None)
        self.scheduler = self._new_scheduler(schedule, asked.num_steps, pauses, suspended)

    def _new_scheduler(
        self,
        schedule: Schedule,
        num_steps: int,
        pauses: Collection[int],
        suspended: Suspended | None,
    ) -> Scheduler:
        resume = self._point.state if self._point else suspended.state if suspended else None
        every = self._checkpoint_every
        if self._saving is not None and self._saving.has_mirror:
            every = 1
        try:
            return Scheduler(
                self._flow,
                schedule,
                num_steps,
                checkpoint_every=every,
                pauses=pauses,
                resume=resume,
                one_at_a_time=self._executor.one_at_a_time,
            )
        except ValueError as error:
            where = f"{self._point.folder}: " if self._point else ""
            raise ConfigError(f"{where}{error}") from error

    def steps(self) -> Generator[StepResult]:
        """Bring the workers to where the run begins, then yield steps as they complete."""
        with self._dispatcher.run(self._name):
            for role, home in self._flow.homes.items():
                replicas = list(self._replicas(role, home))
                self._publication.learn(role, (self._name, home), self._name, replicas)
            if self._point:
                self._restore(self._point)
            self._share_weights()
            self._begun(self.scheduler.completed)
            try:
                yield from self._drive()
            except WorkerLost:
                self._leave()
                raise

    def _drive(self) -> Generator[StepResult]:
        todo: deque[Instruction] = deque(self.scheduler.start(self._waited_s))
        while True:
            while todo:
                instruction = todo.popleft()
                if isinstance(instruction, StepCompleted):
                    yield self._result(instruction)
                elif isinstance(instruction, Pause):
                    if self._saving is not None:  # what comes between may take long
                        self._saving.settle(self._longest.limit_s)
                    self.place = instruction.place
                    return
                elif isinstance(instruction, Finished):
                    if self._saving is not None:
                        self._saving.finish(self.scheduler.completed)
                    self._executor.release(list(self._store.values()))
                    return
                else:
                    todo.extend(self._carry_out(instruction))
            answers, self._heard = self._heard, []
            if not (answers or self._already):
                answers = self._dispatcher.wait(min(POLL_S, self._wait_s))
            events, self._already = self._already, []
            ready = [one for answer in answers for one in self._streams.in_order(answer)]
            events += [event for one in ready for event in self._answered(one)]
            if self._saving is not None:
                self._saving.look()
            if self._stop is not None and self._stop():
                self._stop = None
                events.append(Stop(self._waited_s))
            if self._resizing is not None:
                events += self._resizing.look(self._waited_s)
            todo.extend(self.scheduler.handle(*events, Tick(self._waited_s)))

    @property
    def _waited_s(self) -> float:
        return self._dispatcher.waited_s

    # --- instructions

    def _carry_out(self, instruction: Instruction) -> Sequence[Instruction]:
        match instruction:
            case AdmitStep():
                return self._admit(instruction.step)
            case RunTrain():
                self._run_node(instruction)
            case RunCall():
                if not self._knows(instruction):
                    self._run_node(instruction)
            case RunStream():
                if not self._knows(instruction):
                    self._run_stream(instruction)
            case Publish():
                role, version = instruction.role, instruction.version
                export = self._publication.export(role, version)
                self._submit(instruction, self._flow.homes[role], {0: export})
            case Load():
                role, group, version = instruction.role, instruction.group, instruction.version
                weights = self._snapshots[role, version]
                home = self._flow.homes[role]
                take = self._publication.take(role, home, group, weights, version)
                self._submit(instruction, group, self._on_all(group, take))
                self._streams.loads(instruction)
            case Release():
                self._release(instruction.outputs)
            case DropSnapshot():
                handle = self._snapshots.pop((instruction.role, instruction.version))
                self._executor.release([handle])
            case SaveCheckpoint():
                self._save(instruction)
                return self.scheduler.handle(CheckpointSaved(instruction.step, self._waited_s))
            case ResizeGroup():
                assert self._resizing is not None, "only resizing has a group resized"
                self._forget_out(instruction.group)
                return self.scheduler.handle(self._resizing.carry_out(instruction, self._waited_s))
            case Abort():
                raise self._failure(instruction)
            case _:
                raise StateError(f"unexpected instruction {instruction}")
        return ()

    def _admit(self, step: int) -> Sequence[Instruction]:
        num_rows: tuple[int, ...] = ()
        for name in self._graph.sources:
            source, num_chunks = self._sources[name], self._flow.num_chunks
            try:
                parts = read_source(self._graph[name], source, step, num_chunks, self._wait_s)
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - a source may raise anything; it is passed on
                return self._source_failed(NodeTask(name, step), error)
            if self._ledger is not None:
                self._ledger.read(step, name, parts)
            for chunk, part in enumerate(parts):
                self._store[Output(name, step, chunk)] = self._executor.put(part)
            num_rows = tuple(part[0].num_rows for part in parts)
        return self.scheduler.handle(SourceReady(step, self._waited_s, num_rows))

    def _source_failed(self, task: NodeTask, error: Exception) -> Sequence[Instruction]:
        self._failed = (task, error)
        text = f"{type(error).__name__}: {error}"
        return self.scheduler.handle(TaskFailed(task, None, text, self._waited_s))

    def _run_node(self, instruction: RunCall | RunTrain) -> None:
        node, task = self._graph[instruction.node], instruction.task
        self._versions[task] = instruction.versions
        if isinstance(instruction, RunCall):
            chunks = range(self._flow.num_chunks) if task.chunk is None else [task.chunk]
            works = {instruction.rank: work(Host.call, self._call(node, task, chunks))}
        else:
            if instruction.last:
                self._look(node, task)
            self._trained[node.role or ""] = (self._name, self._flow.homes[node.role or ""])
            works = self._train_works(node, instruction)
        self._submit(task, self._placement.nodes[node.name], works)

    def _train_works(self, node: Node, instruction: RunTrain) -> dict[int, RankWork]:
        task, ranks = instruction.task, instruction.ranks
        piece: Piece = "whole"
        shares = rank_shares(self._flow.num_chunks, len(ranks))
        if instruction.part is not None:
            piece = "last" if instruction.last else "part"
            if instruction.part == 0:  # whatever another run has left is not of this batch
                piece = "whole" if instruction.last else "first"
            shares = [[chunk] for chunk in instruction.chunks]
        if instruction.last and self._segment and not self._has_rows(node, task.step):
            piece = "none"
        return {
            rank: work(Host.call, replace(self._call(node, task, shares[rank]), piece=piece))
            for rank in ranks
        }

    def _has_rows(self, node: Node, step: int) -> bool:
        rows, index = self.scheduler.steps[step].rows, self.scheduler.index
        names = {ref.node for _, ref in node.inputs}
        counts = [rows.get((index.index[name], c), 1) for name in names for c in index.chunks]
        return any(counts)

    def _run_stream(self, instruction: RunStream) -> None:
        node, tasks = self._graph[instruction.node], instruction.tasks
        group, rank = self._placement.nodes[node.name], instruction.rank
        self._versions.update(dict.fromkeys(tasks, instruction.versions))
        calls = tuple(self._call(node, task, [task.chunk or 0]) for task in tasks)
        begun = tuple(self._store.get(unfinished(task, before=1)) for task in tasks)
        begin = work(Host.begin_stream, calls, self._segment, begun)
        self._dispatcher.submit(None, self._name, group, {rank: begin})
        self._ask(self._streams.begin(instruction, group))

    def _ask(self, stream: OpenStream) -> None:
        for task, answer in stream.asked():
            self._submit(task, stream.group, {stream.instruction.rank: work(Host.answer, answer)})

    def _call(self, node: Node, task: NodeTask, chunks: Sequence[int]) -> NodeCall:
        inputs = {
            producer: tuple(self._store[Output(producer, task.step, chunk)] for chunk in chunks)
            for producer in dict.fromkeys(ref.node for _, ref in node.inputs)
        }
        versions, staleness = self._versions[task], self._staleness(node, task)
        return NodeCall(node.name, task.step, task.chunk, inputs, versions, staleness)

    def _staleness(self, node: Node, task: NodeTask) -> int | None:
        if node.kind is not NodeKind.TRAIN or self._mixes_versions:
            return None
        read = [
            dict(done.versions).get(node.role or "")
            for done in self._done_by_step.get(task.step, ())
            if self._graph[done.task.node].kind is NodeKind.ROLLOUT
        ]
        known = [version for version in read if version is not None]
        return dict(self._versions[task])[node.role or ""] - min(known) if known else None

    def _look(self, node: Node, task: NodeTask) -> None:
        watch = self._watch
        if watch is None or node.name != watch.before:
            return
        handles = self._made(watch.nodes, task.step)
        if len(handles) == len(watch.nodes):
            look = watch.work(task.step, handles, self._staleness(node, task))
            self._dispatcher.submit(None, WATCH, watch.group, {0: look})
        self._release(self._looked.let_go(task.step))

    def _made(self, nodes: Collection[str], step: int) -> dict[str, tuple[Handle, ...]]:
        made = {n: [Output(n, step, c) for c in range(self._flow.num_chunks)] for n in nodes}
        return {
            node: tuple(self._store[output] for output in outputs)
            for node, outputs in made.items()
            if all(output in self._store for output in outputs)
        }

    def _release(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if not (self._looked.take(output) or self._handed.take(output)):
                self._executor.release([self._store.pop(output)])

    def _submit(self, task: Task, group: str, works: Mapping[int, RankWork]) -> None:
        self._dispatcher.submit(task, self._name, group, works)

    def _on_all(self, group: str, one: RankWork) -> dict[int, RankWork]:
        return dict.fromkeys(range(self.scheduler.index.num_ranks[group]), one)

    # --- answers

    def _answered(self, submission: Submission | Restart) -> Sequence[Event]:
        now = self._waited_s
        if isinstance(submission, Restart):
            return (Restarted(submission.group, now, submission.ranks),)
        task = submission.task
        assert task is not None, "a dispatcher keeps other answers from its run"
        if isinstance(task, NodeTask) and task in self._streams:
            task, stream = self._streams.answered(task, submission)
            if submission.failed is None and stream.in_flight:
                self._ask(stream)
            if task is None:
                return ()
        if submission.failed is not None:
            self._lost = self._lost or self._dispatcher.loss(submission.failed)
            # The run ends with the first; others may have been heard of at the same time.
            self._failed = self._failed or (task, submission.failed.error)
            text = describe(submission.failed)
            return (TaskFailed(task, submission.failed.rank, text, now),)
        if isinstance(task, Publish):
            self._snapshots[task.role, task.version] = submission.first.weights
        elif isinstance(task, NodeTask):
            self._keep(task, submission)
        report = submission.first.report
        if report is not None and isinstance(task, Publish | Load):
            self._weights_s.append((report.start_s, report.end_s))
        rows, size = (report.num_rows, report.size) if report else ((), 0)
        if report is not None and report.chunk is not None:
            rows = rows[:1]  # without what is unfinished
        return (TaskDone(task, now, rows or None, size),)

    def _keep(self, task: NodeTask, submission: Submission) -> None:
        done = self._done_by_step.setdefault(task.step, [])
        versions = self._versions.pop(task)
        for completion in submission.completions:
            if completion.report:
                done.append(Done(task, completion.rank, completion.report, versions))
                if self._ledger is not None:
                    self._ledger.done(task, completion.report)
            parts = completion.parts
            if completion.report and completion.report.chunk is not None:
                parts = self._keep_unfinished(task, parts)
            for index, part in enumerate(parts):
                self._store[Output(task.node, task.step, (task.chunk or 0) + index)] = part

    def _keep_unfinished(self, task: NodeTask, parts: Sequence[Handle]) -> Sequence[Handle]:
        before = self._store.pop(unfinished(task, before=1), None)
        if before is not None:
            self._executor.release([before])
        self._store.update({unfinished(task): part for part in parts[1:]})
        return parts[:1]

    def _result(self, completed: StepCompleted) -> StepResult:
        self.known.forget(completed.step)
        done = self._done_by_step.pop(completed.step, [])
        if self._ledger is not None:
            self._ledger.complete(completed.step)
        kept = self._hand_out(completed.step)
        passed = self._executor.controller_bytes - self._bytes_before
        self._bytes_before += passed
        moved, self._weights_s = self._weights_s, _Spans()
        mirrored = self._saving.take_mirrored_bytes() if self._saving else 0
        return step_result(
            self._graph, self._placement, completed, done, passed, kept, moved, mirrored
        )

    def _hand_out(self, step: int) -> dict[str, Any]:
        made = self._made(self._kept.nodes, step)
        parts = self._executor.get([handle for handles in made.values() for handle in handles])
        found = iter(parts)
        kept = self._kept.tables({node: [next(found) for _ in made[node]] for node in made})
        self._release(self._handed.let_go(step))
        return kept

    def _failure(self, abort: Abort) -> WorkerError:
        task, cause = self._failed or (None, None)
        where = f"{self._graph[task.node].where}\n" if isinstance(task, NodeTask) else ""
        # What did not answer in time may only have waited for a process that died.
        lost = self._lost if self._failed else self._dispatcher.loss()
        report = f"{where}{abort.report}"
        failure = lost.reported(report) if lost is not None else WorkerError(report)
        failure.__cause__ = cause
        return failure

    # --- going back

    def _knows(self, instruction: RunCall | RunStream) -> bool:
        tasks = instruction.tasks if isinstance(instruction, RunStream) else (instruction.task,)
        versions = instruction.versions
        for made in (found := self.known.take(tasks, versions)):
            self._store.update(made.outputs)
            self._done_by_step.setdefault(made.task.step, []).extend(made.done)
            if self._ledger is not None:
                for one in made.done:
                    self._ledger.done(made.task, one.report)
            self._already.append(TaskDone(made.task, self._waited_s, made.num_rows, made.size))
        if found or isinstance(instruction, RunStream):
            return bool(found)
        submission = self.known.take_out(tasks[0], versions)
        if submission is None:
            return False
        self._versions[tasks[0]] = versions
        if not submission.waiting:
            self._heard.append(submission)
        return True

    def _forget_out(self, group: str) -> None:
        self._dispatcher.drop({group})
        self.known.forget_out({group})

    def _leave(self) -> None:
        if self._mixes_versions:
            self.known = Known()  # what was read when depends on the time
            return
        keeps = self._placement.state_homes(self._graph)  # calls of these change it
        num_parts = {
            node.name: self._flow.num_chunks
            for node in self._flow.nodes
            if not (node.kind == "source" or node.trains or self._graph[node.name].role in keeps)
        }
        every = [one for done in self._done_by_step.values() for one in done]
        self.known.made |= made_by(every, self._store, num_parts)
        tasks = [t for t in self._versions if t.node in num_parts and t not in self._streams]
        self.known.leave_out(self._dispatcher.out(), {t: self._versions[t] for t in tasks})

    # --- weights between runs

    def _share_weights(self) -> None:
        for role, trained in self._trained.items():
            replicas = self._replicas(role, trained[1])
            version = self.scheduler.version_of(role)
            self._publication.share(role, version, trained, self._name, replicas)
        for role, group in self._placement.serving(self._graph):
            version = self.scheduler.version_of(role)
            works = self._on_all(group, work(Host.set_served_version, role, version))
            self._dispatcher.perform_now(self._name, group, works, self._longest)

    def _replicas(self, role: str, home: str) -> dict[str, int]:
        hosts, num_ranks = self._placement.hosts(self._graph, role), self.scheduler.index.num_ranks
        return {group: num_ranks[group] for group in hosts if group != home}

    # --- checkpoints

    def interval(self, place: SaveCheckpoint) -> Interval:
        is_saved = self._saving is not None and self._saving.has(place.step)
        return Interval(place.step, is_saved, lambda: self._save(place, due=True))

    def suspended(self, place: SaveCheckpoint) -> Suspended:
        return Suspended(place.resume, self._store, (self._looked, self._handed))

    def _save(self, instruction: SaveCheckpoint, *, due: bool = False) -> None:
        if self._saving is None:
            return
        going_on = filter(is_unfinished, self._store)
        instruction = replace(instruction, live=(*instruction.live, *going_on))
        done = tuple(one for every in self._done_by_step.values() for one in every)
        saved = SavedRun(self._graph, self._seed, instruction, self._ledger, done)
        due = due or self._is_due(instruction.step)
        take = partial(self._state.take, saved, self._store)
        self._saving.begin(instruction.step, take, due=due)

    def _is_due(self, step: int) -> bool:
        every = self._checkpoint_every
        at_end = step == self.scheduler.num_steps or self.scheduler.checkpoints.stopping
        return every is not None and (at_end or step % every == 0)

    def _restore(self, point: ResumePoint) -> None:
        outputs = self._state.load_outputs(point, self._flow.num_chunks if self._segment else 0)
        self._state.load(point)
        for role, home in self._flow.homes.items():
            self._trained[role] = (self._name, home)
        self._store.update(outputs)
        for one in point.done:
            self._done_by_step.setdefault(one.task.step, []).append(one)
