"""Random flows, timings, failures and resumes, checked by a shell that trusts no books."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.events import (
    Abort,
    CheckpointSaved,
    Event,
    Finished,
    Instruction,
    NodeTask,
    RunCall,
    RunTrain,
    SaveCheckpoint,
    Stop,
    TaskDone,
    TaskFailed,
    Tick,
)
from penstock.dataflow.scheduler.schedule import Flow, FlowNode, Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler
from penstock.dataflow.scheduler.simulate import dry_run

from .acted_out import Recorded, Shell, assert_only_needed_weights_move, run
from .random_flows import LAGS, SEEDS, STEPS, TIMES, expected_reads, flows, histories, size, timing

pytestmark = pytest.mark.timeout(300 * TIMES)


@pytest.mark.slow
@histories(300)
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
@histories(150)
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
@histories(250)
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
    stored = [output for step in resumed.steps.values() for output in step.stored()]
    assert set(stored) == set(save.live)

    rest = dry_run(resumed, timing(seed + 1), size=size).reads
    Shell.at(save, flow, schedule).replay(resumed)
    before = {t: v for t, v in reads.items() if t.step < save.step or t in save.resume.done}
    assert rest.keys() == reads.keys() - before.keys()
    if arrival:
        return  # the tasks are the same; the versions need not be
    assert rest == {task: reads[task] for task in rest}
    assert resumed.schedule_sha256() == whole.schedule_sha256()


class Interrupted(Recorded):
    """Is told to stop right after its nth event."""

    events_left = 0

    def handle(self, *events: Event) -> list[Instruction]:
        instructions = super().handle(*events)
        self.events_left -= 1
        if self.events_left == 0:
            instructions = [*instructions, *super().handle(Stop(events[-1].at_s))]
        return instructions


@pytest.mark.slow
@histories(300)
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
    assert {o for step in resumed.steps.values() for o in step.stored()} == set(save.live)
    rest = dry_run(resumed, timing(seed + 1), size=size).reads
    assert rest == {t: reads[t] for t in reads if t.step >= save.step and t not in save.resume.done}
    assert resumed.schedule_sha256() == whole.schedule_sha256()


@pytest.mark.slow
@histories(100)
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


@pytest.mark.slow
@histories(100)
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


def grpo_on_two_groups(num_chunks: int = 1) -> Flow:
    read = WeightRead("actor", 0, True)
    nodes = (
        FlowNode("prompts", "source"),
        FlowNode("generate", "rollout", True, "b", ("prompts",), (read,)),
        FlowNode("train", "train", False, "a", ("generate",), trains="actor"),
    )
    return Flow("grpo", nodes, {"a": 1, "b": 1}, {"actor": "a"}, {"actor": 1}, num_chunks)


def _seconds(work: object, train_s: float) -> float:
    if isinstance(work, RunTrain):
        return train_s
    return 1.0 if isinstance(work, RunCall) else 0.01


def test_arrival_order_depends_on_timing() -> None:
    """What step order buys: the same flow reads other versions when something is slower."""
    flow = grpo_on_two_groups()

    def versions(order: str, train_s: float) -> list[int]:
        schedule = Schedule(max_lag=2, order=order)  # pyright: ignore[reportArgumentType]
        scheduler = Recorded(flow, schedule, 6)
        reads = dry_run(scheduler, lambda work: _seconds(work, train_s)).reads
        return [dict(reads[NodeTask("generate", step, 0)])["actor"] for step in range(6)]

    assert versions("step", 0.1) == versions("step", 10.0) == [0, 0, 0, 1, 2, 3]
    assert versions("arrival", 10.0) == [0, 0, 0, 1, 2, 3]
    assert versions("arrival", 0.1) == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("max_lag", [0, 1])
def test_memory_does_not_grow_with_steps(max_lag: int) -> None:
    flow = grpo_on_two_groups(num_chunks=2)
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
    assert len(scheduler.log) == 100


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
    Shell(flow, schedule).replay(scheduler)
    assert scheduler.done
    assert simulation.reads == expected_reads(flow, schedule, 4)
