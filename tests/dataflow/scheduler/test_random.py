"""Random flows, timings, failures and resumes, checked by a shell that trusts no books.

`Recorded` keeps what passes between scheduler and shell; `replay` acts it out with its own idea of
ranks, stored outputs and weights, and `expected_reads` says by arithmetic what must be read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.events import (
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
    Publish,
    Release,
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
from penstock.dataflow.scheduler.flow import Flow, FlowKind, FlowNode
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler
from penstock.dataflow.scheduler.simulate import dry_run

# --- random flows


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    groups = {f"g{i}": draw(st.integers(1, 3)) for i in range(draw(st.integers(1, 3)))}
    names = sorted(groups)
    homes = {f"r{i}": draw(st.sampled_from(names)) for i in range(draw(st.integers(0, 2)))}
    trains = {role: draw(st.integers(1, 2)) for role in homes}
    sources = tuple(FlowNode(f"source{i}", "source") for i in range(draw(st.integers(1, 2))))
    kinds: list[str] = ["call"] * draw(st.integers(1, 6))
    kinds += [role for role, count in trains.items() for _ in range(count)]
    nodes, trained = list(sources), dict.fromkeys(homes, 0)
    num_chunks = draw(st.integers(1, 3))
    for i, kind in enumerate(draw(st.permutations(kinds))):
        node = draw(_node(i, kind, nodes, homes, names, trained))
        nodes.append(draw(_streaming(node, nodes, groups, num_chunks)))
        if kind in homes:
            trained[kind] += 1
    pairs = [(a, b) for a in names for b in names if a < b and draw(st.booleans())]
    sharing = {a: frozenset(x for p in pairs if a in p for x in p if x != a) for a in names}
    return Flow("random", tuple(nodes), groups, homes, trains, num_chunks, sharing)


@st.composite
def _node(
    draw: st.DrawFn,
    i: int,
    role: str,
    before: list[FlowNode],
    homes: dict[str, str],
    groups: list[str],
    trained: dict[str, int],
) -> FlowNode:
    choices = [node.name for node in before if node.kind != "train"]
    if draw(st.booleans()):
        choices = choices[:1]  # hangs on a source alone: more nodes may run ahead
    inputs = tuple(draw(st.lists(st.sampled_from(choices), max_size=3, unique=True)))
    read = draw(st.lists(st.sampled_from([*sorted(homes), "frozen"]), max_size=2, unique=True))
    if role in homes:
        reads = tuple(WeightRead(r, trained.get(r, 0)) for r in read if r != role)
        return FlowNode(f"n{i}", "train", False, homes[role], inputs, reads, role)
    kind: FlowKind = draw(st.sampled_from(["op", "forward", "rollout"]))
    served = st.sampled_from(["", "", *groups])
    reads = tuple(WeightRead(r, trained.get(r, 0), kind == "rollout", draw(served)) for r in read)
    group, chunked = draw(st.sampled_from(groups)), draw(st.booleans())
    return FlowNode(f"n{i}", kind, chunked, group, inputs, reads if kind != "op" else ())


@st.composite
def _streaming(
    draw: st.DrawFn, node: FlowNode, before: list[FlowNode], groups: dict[str, int], chunks: int
) -> FlowNode:
    """The node, or the same streaming, where it can."""
    if draw(st.booleans()):
        return node
    by_source = all(name.startswith("source") for name in node.inputs)
    if node.kind == "rollout" and node.chunked and by_source:
        return replace(node, streams=True)
    streams = [other.name for other in before if other.streams]
    if node.kind == "train" and streams and chunks % groups[node.group] == 0:
        return replace(node, order_of=draw(st.sampled_from(streams)))
    return node


def size(task: NodeTask) -> int:
    """Of every task of a node that streams; some are equal."""
    return random.Random(f"{task}").randrange(4)


def timing(seed: int) -> Callable[[object], float]:
    rng = random.Random(seed)
    return lambda work: rng.choice([0.01, 0.1, 1.0, 1.1, 5.0, 20.0])


SEEDS = st.integers(0, 10_000)
LAGS = st.integers(0, 3)
STEPS = st.integers(0, 6)


# --- what must happen, by arithmetic and by acting it out


def expected_reads(flow: Flow, schedule: Schedule, num_steps: int) -> dict[NodeTask, Versions]:
    """Which versions every task reads in step order."""
    inputs = {node.name: node.inputs for node in flow.nodes}
    exact = {
        node.name: node.trains is not None
        or any(read.role in flow.homes and not read.lagged for read in node.reads)
        for node in flow.nodes
    }

    def ahead(name: str) -> bool:
        return not exact[name] and all(ahead(other) for other in inputs[name])

    reads: dict[NodeTask, Versions] = {}
    for step in range(num_steps):
        trained = dict.fromkeys(flow.homes, 0)
        for node in flow.nodes:
            versions: dict[str, int] = {}
            for read in node.reads:
                if read.role in flow.homes:
                    late = schedule.max_lag if read.lagged and ahead(node.name) else 0
                    n = flow.trains_per_step[read.role]
                    versions[read.role] = max(0, (step - late) * n + read.offset)
            if node.trains is not None:
                n = flow.trains_per_step[node.trains]
                versions[node.trains] = step * n + trained[node.trains]
                trained[node.trains] += 1
            if node.kind != "source":
                for chunk in task_numbers(flow, node):
                    reads[NodeTask(node.name, step, chunk)] = tuple(sorted(versions.items()))
    return reads


def task_numbers(flow: Flow, node: FlowNode) -> tuple[int | None, ...]:
    """`NodeTask.chunk` of a node's tasks in a step."""
    if node.order_of:
        return tuple(range(flow.num_chunks // flow.groups[node.group]))
    return tuple(range(flow.num_chunks)) if node.chunked else (None,)


class Recorded(Scheduler):
    """A scheduler that keeps all that passes, and checks its invariants after every event."""

    trace: list[Event | Instruction]

    def start(self, at_s: float) -> list[Instruction]:
        self.trace = list(super().start(at_s))
        self.validate()
        return list(self.trace)  # pyright: ignore[reportReturnType] - only instructions so far

    def handle(self, event: Event) -> list[Instruction]:
        instructions = super().handle(event)
        self.trace += [event, *instructions]
        self.validate()
        return instructions


class Shell:
    """Acts out a trace: ranks, stored outputs, copies of weights, snapshots, admission."""

    def __init__(self, flow: Flow, schedule: Schedule, first_step: int = 0) -> None:
        self.flow, self.schedule = flow, schedule
        self.nodes = {node.name: node for node in flow.nodes}
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
        self.completed = first_step
        self.ended: list[Task] = []

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
            assert not self.busy.get((group, rank))
            self.busy[group, rank] = set(tasks)

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

    def check_held(self, node: FlowNode, versions: Versions) -> None:
        """What a node reads is there, when it begins and still when it ends."""
        where = {r.role: r.at or node.group for r in node.reads if r.role in self.flow.homes}
        where |= {node.trains: node.group} if node.trains else {}
        assert dict(versions) == {role: self.holds[role, group] for role, group in where.items()}

    def on_RunCall(self, message: RunCall) -> None:
        node = self.nodes[message.node]
        expected = (message.chunk or 0) % self.flow.groups[node.group]
        assert message.rank == expected
        assert node.chunked == (message.chunk is not None)
        assert not node.streams
        chunks = None if message.chunk is None else (message.chunk,)
        self.check_inputs(message.task, message.versions, chunks)
        self.occupy(node.group, range(expected, expected + 1), [message.task], message)

    def on_RunStream(self, message: RunStream) -> None:
        node = self.nodes[message.node]
        num_ranks = self.flow.groups[node.group]
        assert node.streams
        assert message.chunks == tuple(range(message.rank, self.flow.num_chunks, num_ranks))
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
        self.occupy(message.group, range(self.flow.groups[message.group]), [message], message)

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
                self.check_held(self.nodes[work.node], work.versions)
                self.store(work.node, work.step, message.task.chunk)
            case RunTrain() if not work.last:
                self.check_held(self.nodes[work.node], work.versions)
            case RunTrain():
                role = self.nodes[work.node].trains
                assert role is not None
                key = (role, self.flow.homes[role])
                assert work.makes_version == self.holds[key] + 1 == dict(work.versions)[role] + 1
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
    simulation = dry_run(scheduler, timing(seed), size=size)
    shell = Shell(flow, schedule)
    for message in scheduler.trace:
        shell.take(message)
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


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(flows(), LAGS, STEPS, SEEDS, st.sampled_from([None, 1, 2, 3]))
def test_every_task_runs_once_with_versions_that_depend_on_its_step_alone(
    flow: Flow, max_lag: int, num_steps: int, seed: int, every: int | None
) -> None:
    schedule = Schedule(max_lag=max_lag)
    scheduler, reads = run(flow, schedule, num_steps, seed, every)
    assert reads == expected_reads(flow, schedule, num_steps)
    assert_only_needed_weights_move(flow, scheduler, reads)
    other, again = run(flow, schedule, num_steps, seed + 1)
    assert again == reads
    assert other.schedule_sha256() == scheduler.schedule_sha256()
    assert other.lag_counts == scheduler.lag_counts


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(flows(), LAGS, STEPS, SEEDS, st.sampled_from([None, 1, 2]))
def test_arrival_order_stays_within_the_bound(
    flow: Flow, max_lag: int, num_steps: int, seed: int, every: int | None
) -> None:
    schedule = Schedule(max_lag=max_lag, order="arrival")
    _, reads = run(flow, schedule, num_steps, seed, every)
    oldest = expected_reads(flow, schedule, num_steps)
    newest = expected_reads(flow, replace(schedule, max_lag=0), num_steps)
    assert reads.keys() == oldest.keys()
    for task, versions in reads.items():
        for (role, version), (_, low), (_, high) in zip(
            versions, oldest[task], newest[task], strict=True
        ):
            assert low <= version <= high, (task, role)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(flows(), LAGS, st.integers(1, 6), SEEDS, st.integers(1, 3), st.booleans(), st.data())
def test_a_resumed_run_does_exactly_what_is_left(
    flow: Flow,
    max_lag: int,
    num_steps: int,
    seed: int,
    every: int,
    arrival: bool,
    data: st.DataObject,
) -> None:
    schedule = Schedule(max_lag=max_lag, order="arrival" if arrival else "step")
    whole, reads = run(flow, schedule, num_steps, seed, every)
    saves = [message for message in whole.trace if isinstance(message, SaveCheckpoint)]
    assert [save.step for save in saves] == sorted({*range(every, num_steps + 1, every), num_steps})
    save = data.draw(st.sampled_from(saves))
    resumed = Recorded(flow, schedule, num_steps, checkpoint_every=every, resume=save.resume)
    stored = [output for step in resumed.steps.values() for output in step.stored]
    assert set(stored) == set(save.live)

    rest = dry_run(resumed, timing(seed + 1), size=size).reads
    shell = Shell(flow, schedule, save.step)
    shell.stored = set(save.live)
    for message in resumed.trace:
        shell.take(message)
    before = {t: v for t, v in reads.items() if t.step < save.step or t in save.resume.done}
    assert rest.keys() == reads.keys() - before.keys()
    if arrival:
        return  # the tasks are the same; the versions need not be
    assert rest == {task: reads[task] for task in rest}
    assert resumed.schedule_sha256() == whole.schedule_sha256()


class Interrupted(Recorded):
    """Is told to stop right after its nth event."""

    events_left = 0

    def handle(self, event: Event) -> list[Instruction]:
        instructions = super().handle(event)
        self.events_left -= 1
        if self.events_left == 0:
            instructions = [*instructions, *super().handle(Stop(event.at_s))]
        return instructions


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(flows(), LAGS, st.integers(1, 5), SEEDS, st.integers(1, 60), st.sampled_from([None, 1, 2]))
def test_a_stopped_run_goes_on_to_the_same_end(
    flow: Flow, max_lag: int, num_steps: int, seed: int, nth: int, every: int | None
) -> None:
    """It stops with a checkpoint before it trains any step that it had not begun to train."""
    schedule = Schedule(max_lag=max_lag)
    whole, reads = run(flow, schedule, num_steps, seed)
    stopped = Interrupted(flow, schedule, num_steps, checkpoint_every=every)
    stopped.events_left = nth
    first = dry_run(stopped, timing(seed), size=size)
    assert stopped.done
    assert not stopped.running
    told = [i for i, message in enumerate(stopped.trace) if isinstance(message, Stop)]
    if not told or stopped.completed == num_steps:
        return  # it was over, or was nearly
    trained = [
        {m.step for m in part if isinstance(m, RunTrain)}
        for part in (stopped.trace[: told[0]], stopped.trace)
    ]
    assert trained[0] == trained[1]
    save = first.checkpoints[-1]
    assert isinstance(stopped.trace[-1], Finished)
    assert save.step == max(trained[0], default=-1) + 1 or not trained[0]
    resumed = Recorded(flow, schedule, num_steps, checkpoint_every=every, resume=save.resume)
    assert {o for step in resumed.steps.values() for o in step.stored} == set(save.live)
    rest = dry_run(resumed, timing(seed + 1), size=size).reads
    assert rest == {t: reads[t] for t in reads if t.step >= save.step and t not in save.resume.done}
    assert resumed.schedule_sha256() == whole.schedule_sha256()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(flows(), LAGS, st.integers(1, 4), SEEDS, st.integers(0, 30))
def test_a_failure_aborts_once_and_for_good(
    flow: Flow, max_lag: int, num_steps: int, seed: int, nth: int
) -> None:
    count = 0

    def fail_nth(event: Event) -> Event:
        nonlocal count
        count += isinstance(event, TaskDone)
        if isinstance(event, TaskDone) and count == nth:
            return TaskFailed(event.task, 0, "boom", event.at_s)
        return event

    scheduler = Recorded(flow, Schedule(max_lag=max_lag), num_steps)
    simulation = dry_run(scheduler, timing(seed), replace=fail_nth, size=size)
    ends = [i for i in simulation.instructions if isinstance(i, Abort | Finished)]
    assert len(ends) == 1
    if isinstance(ends[0], Abort):
        assert count == nth
        assert "boom" in str(ends[0].report)
        for task in scheduler.running:
            assert scheduler.handle(TaskDone(task, 1e6)) == []
        assert scheduler.handle(Tick(1e9)) == []
        assert scheduler.handle(CheckpointSaved(1, 1e9)) == []


@settings(max_examples=100, deadline=None)
@given(flows(), LAGS, st.integers(1, 4), SEEDS, st.integers(0, 30))
def test_whatever_stops_answering_is_noticed(
    flow: Flow, max_lag: int, num_steps: int, seed: int, nth: int
) -> None:
    """From some event on only time passes: the next tick past the deadline ends the run."""
    scheduler = Recorded(flow, Schedule(max_lag=max_lag, deadline_s=60.0), num_steps)
    count = 0

    def go_silent(event: Event) -> Event:
        nonlocal count
        count += 1
        return event if count <= nth else Tick(event.at_s + 60.1)

    simulation = dry_run(scheduler, timing(seed), replace=go_silent, size=size)
    if count > nth:
        assert isinstance(simulation.instructions[-1], Abort)
        assert count == nth + 1
    else:
        assert scheduler.done


def _seconds(work: object, train_s: float) -> float:
    if isinstance(work, RunTrain):
        return train_s
    return 1.0 if isinstance(work, RunCall) else 0.01


def test_arrival_order_depends_on_timing() -> None:
    """What step order buys: the same flow reads other versions when something is slower."""
    flow = Flow(
        "grpo",
        (
            FlowNode("prompts", "source"),
            FlowNode(
                "generate", "rollout", True, "b", ("prompts",), (WeightRead("actor", 0, True),)
            ),
            FlowNode("train", "train", False, "a", ("generate",), trains="actor"),
        ),
        {"a": 1, "b": 1},
        {"actor": "a"},
        {"actor": 1},
    )

    def versions(order: str, train_s: float) -> list[int]:
        schedule = Schedule(max_lag=2, order=order)  # pyright: ignore[reportArgumentType]
        scheduler = Recorded(flow, schedule, 6)
        simulation = dry_run(scheduler, lambda work: _seconds(work, train_s))
        reads = simulation.reads
        return [dict(reads[NodeTask("generate", step, 0)])["actor"] for step in range(6)]

    assert versions("step", 0.1) == versions("step", 10.0) == [0, 0, 0, 1, 2, 3]
    assert versions("arrival", 10.0) == [0, 0, 0, 1, 2, 3]
    assert versions("arrival", 0.1) == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_memory_does_not_grow_with_steps(max_lag: int) -> None:
    flow = Flow(
        "loop",
        (
            FlowNode("prompts", "source"),
            FlowNode(
                "generate", "rollout", True, "b", ("prompts",), (WeightRead("actor", 0, True),)
            ),
            FlowNode("train", "train", False, "a", ("generate",), trains="actor"),
        ),
        {"a": 1, "b": 1},
        {"actor": "a"},
        {"actor": 1},
        2,
    )
    scheduler = Scheduler(flow, Schedule(max_lag=max_lag), 300, max_log=100)
    sizes: list[int] = []

    def measure(scheduler: Scheduler, event: Event) -> None:
        snapshots = sum(map(len, scheduler.weights.snapshots.values()))
        blocked = sum(len(i.blocked) for i in scheduler.weights.instances.values())
        sizes.append(
            len(scheduler.steps) + len(scheduler.running) + len(scheduler.ranks.queued())
            + snapshots + blocked
        )  # fmt: skip

    dry_run(scheduler, timing(0), after_event=measure)
    assert max(sizes[len(sizes) // 2 :]) <= max(sizes[: len(sizes) // 2])
    assert len(scheduler.log.entries) == 100


@pytest.mark.parametrize("at", ["dispatcher", "main"])
def test_a_served_copy_stays_in_order_of_arrival_too(at: str) -> None:
    """Its ranks are free while the reader's work, so nothing else would keep it."""
    read = WeightRead("actor", lagged=True, at=at)
    rollout = FlowNode("rollout", "rollout", True, "acting", ("prompts",), (read,))
    train = FlowNode("train", "train", False, "main", ("rollout",), (), "actor")
    flow = Flow(
        "served",
        (FlowNode("prompts", "source"), rollout, train),
        {"main": 1, "acting": 1, "dispatcher": 1},
        {"actor": "main"},
        {"actor": 1},
        num_chunks=2,
    )
    schedule = Schedule(max_lag=1, order="arrival")
    scheduler = Recorded(flow, schedule, 4)
    simulation = dry_run(scheduler, lambda work: 10.0 if isinstance(work, RunCall) else 0.1)
    shell = Shell(flow, schedule)
    for message in scheduler.trace:
        shell.take(message)
    assert scheduler.done
    assert simulation.reads == expected_reads(flow, schedule, 4)
