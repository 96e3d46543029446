"""A shell that trusts no books: it acts out what passes between a scheduler and its shell.

`Recorded` keeps what passes; `Shell` replays it with its own idea of ranks, stored outputs and
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.events import (
    AdmitStep,
    DropSnapshot,
    Event,
    Finished,
    Instruction,
    Load,
    NodeTask,
    Output,
    Publish,
    Release,
    Resized,
    ResizeGroup,
    RunCall,
    RunStream,
    RunTrain,
    SaveCheckpoint,
    SourceReady,
    StepCompleted,
    Task,
    TaskDone,
    Versions,
)
from penstock.dataflow.scheduler.schedule import Flow, FlowNode, Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler
from penstock.dataflow.scheduler.simulate import dry_run

from .invariants import validate
from .random_flows import size, timing


class Recorded(Scheduler):
    """A scheduler that keeps all that passes, and checks its invariants after every event."""

    trace: list[Event | Instruction]

    def start(self, at_s: float) -> list[Instruction]:
        self.trace = list(super().start(at_s))
        validate(self)
        return list(self.trace)  # pyright: ignore[reportReturnType] - only instructions so far

    def handle(self, *events: Event) -> list[Instruction]:
        instructions = super().handle(*events)
        self.trace += [*events, *instructions]
        validate(self)
        return instructions


class Shell:
    """Acts out a trace: ranks, stored outputs, copies of weights, snapshots, admission."""

    def __init__(self, flow: Flow, schedule: Schedule, first_step: int = 0) -> None:
        self.flow, self.schedule = flow, schedule
        self.nodes = {node.name: node for node in flow.nodes}
        self.num_ranks = dict(flow.groups)
        self.before: frozenset[Task] = frozenset()
        self.busy: dict[tuple[str, int], set[Task]] = {}
        self.runs: dict[Task, RunCall | RunStream | RunTrain | Publish | Load] = {}
        self.trained: dict[tuple[str, int], list[int]] = {}
        self.stored: set[Output] = set()
        self.snapshots: set[tuple[str, int]] = set()
        self.holds = {
            (read.role, read.at or node.group): first_step * flow.trains_per_step[read.role]
            for node in flow.nodes
            for read in (*node.reads, *([WeightRead(node.trains)] if node.trains else []))
            if read.role in flow.homes
        }
        self.answered: dict[tuple[str, int], list[int]] = {}
        self.num_swaps = 0
        self.completed = first_step
        self.ended: list[Task] = []

    @classmethod
    def at(cls, place: SaveCheckpoint, flow: Flow, schedule: Schedule) -> Shell:
        """As a run finds it that goes on from a checkpoint."""
        shell = cls(flow, schedule, place.step)
        shell.before, shell.stored = place.resume.done, set(place.live)
        for task in sorted(place.resume.done, key=lambda t: (size(t), t.chunk or 0)):
            if task.chunk is not None:
                shell.answered.setdefault((task.node, task.step), []).append(task.chunk)
        return shell

    def replay(self, scheduler: Recorded) -> Shell:
        for message in scheduler.trace:
            self.take(message)
        return self

    def take(self, message: Event | Instruction) -> None:
        getattr(self, f"on_{type(message).__name__}", lambda message: None)(message)  # pyright: ignore[reportUnknownLambdaType]

    def store(self, node: str, step: int, chunk: int | None) -> None:
        for part in range(self.flow.num_chunks) if chunk is None else (chunk,):
            assert Output(node, step, part) not in self.stored
            self.stored.add(Output(node, step, part))

    def occupy(
        self,
        group: str,
        ranks: range,
        tasks: Sequence[Task],
        work: RunCall | RunStream | RunTrain | Publish | Load,
    ) -> None:
        for task in tasks:
            assert task not in self.runs
            assert task not in self.ended
            self.runs[task] = work
        for rank in ranks:
            busy = self.busy.setdefault((group, rank), set())
            assert not busy or (isinstance(work, Load) and all(map(self.in_flight, busy)))
            self.num_swaps += len(busy)
            busy.update(tasks)

    def in_flight(self, task: Task) -> bool:
        """Whether a task takes newer weights than those that it began with."""
        streams = isinstance(task, NodeTask) and self.nodes[task.node].streams
        return streams and self.schedule.in_flight

    def on_AdmitStep(self, message: AdmitStep) -> None:
        assert message.step <= self.completed + self.schedule.max_lag

    def on_SourceReady(self, message: SourceReady) -> None:
        for node in self.flow.nodes:
            if node.kind == "source":
                self.store(node.name, message.step, None)

    def check_inputs(
        self, task: NodeTask, versions: Versions, chunks: Sequence[int] | None
    ) -> None:
        node = self.nodes[task.node]
        for name in node.inputs:
            for part in range(self.flow.num_chunks) if chunks is None else chunks:
                assert Output(name, task.step, part) in self.stored
        self.check_held(node, versions)

    def check_taken(self, task: NodeTask, versions: Versions) -> None:
        """What a node has taken in flight is not older than at its begin, nor of its own step."""
        node = self.nodes[task.node]
        for read in node.reads:
            if read.role in self.flow.homes:
                current = task.step * self.flow.trains_per_step[read.role] + read.offset
                holds = self.holds[read.role, read.at or node.group]
                assert dict(versions)[read.role] <= holds <= current

    def check_held(self, node: FlowNode, versions: Versions) -> None:
        """What a node reads is there, when it begins and still when it ends."""
        where = {r.role: r.at or node.group for r in node.reads if r.role in self.flow.homes}
        where |= {node.trains: node.group} if node.trains else {}
        assert dict(versions) == {role: self.holds[role, group] for role, group in where.items()}

    def on_RunCall(self, message: RunCall) -> None:
        node = self.nodes[message.node]
        expected = (message.chunk or 0) % self.num_ranks[node.group]
        assert message.rank == expected
        assert node.chunked == (message.chunk is not None)
        assert not node.streams
        chunks = None if message.chunk is None else (message.chunk,)
        self.check_inputs(message.task, message.versions, chunks)
        self.occupy(node.group, range(expected, expected + 1), [message.task], message)

    def on_RunStream(self, message: RunStream) -> None:
        node = self.nodes[message.node]
        mine = range(message.rank, self.flow.num_chunks, self.num_ranks[node.group])
        tasks = {chunk: NodeTask(message.node, message.step, chunk) for chunk in mine}
        assert node.streams
        assert message.chunks == tuple(
            chunk
            for chunk, task in tasks.items()
            if task not in self.before and task not in self.ended
        )
        self.check_inputs(message.tasks[0], message.versions, message.chunks)
        self.occupy(node.group, range(message.rank, message.rank + 1), message.tasks, message)

    def on_RunTrain(self, message: RunTrain) -> None:
        node = self.nodes[message.node]
        assert message.ranks == tuple(range(self.flow.groups[node.group]))
        if node.order_of:
            self.check_order(node, message)
        else:
            assert message.last
        chunks = message.chunks if node.order_of else None
        self.check_inputs(message.task, message.versions, chunks)
        self.occupy(node.group, range(len(message.ranks)), [message.task], message)

    def check_order(self, node: FlowNode, message: RunTrain) -> None:
        """Chunks are taken by (size, chunk), one for each rank, and the last part ends the step."""
        step, num_ranks = message.step, self.flow.groups[node.group]
        every = range(self.flow.num_chunks)
        order = sorted(every, key=lambda c: (size(NodeTask(node.order_of, step, c)), c))
        if self.schedule.in_flight:
            order = self.answered.get((node.order_of, step), order)
        taken = self.trained.setdefault((node.name, step), [])
        assert message.part == len(taken) // num_ranks
        assert list(message.chunks) == order[len(taken) :][:num_ranks]
        taken.extend(message.chunks)
        assert message.last == (len(taken) == len(every))

    def on_Publish(self, message: Publish) -> None:
        home = self.flow.homes[message.role]
        assert self.holds[message.role, home] == message.version
        self.occupy(home, range(1), [message], message)

    def on_Load(self, message: Load) -> None:
        assert (message.role, message.version) in self.snapshots
        assert self.flow.homes[message.role] != message.group
        assert self.holds[message.role, message.group] < message.version
        self.occupy(message.group, range(self.num_ranks[message.group]), [message], message)

    def on_ResizeGroup(self, message: ResizeGroup) -> None:
        assert message.group not in self.flow.homes.values()
        assert not any(self.busy.get((message.group, r)) for r in range(self.flow.num_chunks))

    def on_Resized(self, message: Resized) -> None:
        self.on_ResizeGroup(ResizeGroup(message.group, message.num_ranks))
        self.num_ranks[message.group] = message.num_ranks

    def on_TaskDone(self, message: TaskDone) -> None:
        work = self.runs.pop(message.task)
        for tasks in self.busy.values():
            tasks.discard(message.task)
        self.ended.append(message.task)
        match work:
            case RunCall():
                self.check_held(self.nodes[work.node], work.versions)
                self.store(work.node, work.step, work.chunk)
            case RunStream():
                assert isinstance(message.task, NodeTask)
                assert message.task.chunk is not None
                if self.schedule.in_flight:
                    self.check_taken(message.task, work.versions)
                    answered = self.answered.setdefault((work.node, work.step), [])
                    answered.append(message.task.chunk)
                else:
                    self.check_held(self.nodes[work.node], work.versions)
                self.store(work.node, work.step, message.task.chunk)
            case RunTrain() if not work.last:
                self.check_held(self.nodes[work.node], work.versions)
            case RunTrain():
                role = self.nodes[work.node].trains
                assert role is not None
                key = (role, self.flow.homes[role])
                assert self.holds[key] == dict(work.versions)[role]
                self.holds[key] += 1
            case Publish():
                assert self.holds[work.role, self.flow.homes[work.role]] == work.version
                self.snapshots.add((work.role, work.version))
            case Load():
                self.holds[work.role, work.group] = work.version

    def on_Release(self, message: Release) -> None:
        assert message.outputs
        for output in message.outputs:
            self.stored.remove(output)

    def on_DropSnapshot(self, message: DropSnapshot) -> None:
        self.snapshots.remove((message.role, message.version))

    def on_StepCompleted(self, message: StepCompleted) -> None:
        assert message.step == self.completed
        self.completed += 1

    def on_SaveCheckpoint(self, message: SaveCheckpoint) -> None:
        assert not self.runs
        assert message.step == self.completed == message.resume.step
        assert len(message.live) == len(set(message.live))
        assert set(message.live) == self.stored
        for role, home in self.flow.homes.items():
            assert self.holds[role, home] == message.step * self.flow.trains_per_step[role]

    def on_Finished(self, message: Finished) -> None:
        assert not self.runs
        assert not self.stored
        assert not self.snapshots


def run(
    flow: Flow, schedule: Schedule, num_steps: int, seed: int, checkpoint_every: int | None = None
) -> tuple[Recorded, dict[NodeTask, Versions]]:
    """Rehearse a whole run and act it out; returns what was read."""
    scheduler = Recorded(flow, schedule, num_steps, checkpoint_every=checkpoint_every)
    # Of every other history several events are told together.
    simulation = dry_run(scheduler, timing(seed), size=size, within_s=0.5 * (seed % 2))
    shell = Shell(flow, schedule).replay(scheduler)
    assert scheduler.done
    assert shell.completed == num_steps
    assert len(shell.ended) == len(set(shell.ended))
    return scheduler, simulation.reads


def assert_only_needed_weights_move(
    flow: Flow, scheduler: Recorded, reads: dict[NodeTask, Versions]
) -> None:
    """Every load is read, every publication is loaded, nothing is loaded twice."""
    at = {(node.name, read.role): read.at for node in flow.nodes for read in node.reads}
    groups = {node.name: node.group for node in flow.nodes}
    read = {
        (role, version, at.get((task.node, role)) or groups[task.node])
        for task, versions in reads.items()
        for role, version in versions
    }
    done = [message.task for message in scheduler.trace if isinstance(message, TaskDone)]
    loads = [(t.role, t.version, t.group) for t in done if isinstance(t, Load)]
    published = [(t.role, t.version) for t in done if isinstance(t, Publish)]
    assert set(loads) <= read
    assert len(set(loads)) == len(loads)
    assert {(role, version) for role, version, _ in loads} == set(published)
