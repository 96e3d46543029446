"""Newer weights for rollouts that are being sampled: who takes them, and within which bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.events import (
    Load,
    NodeTask,
    RunCall,
    RunStream,
    RunTrain,
    SaveCheckpoint,
    TaskDone,
    Versions,
)
from penstock.dataflow.scheduler.schedule import Flow, FlowNode, Schedule
from penstock.dataflow.scheduler.simulate import dry_run

from .acted_out import Recorded, Shell, run
from .random_flows import SEEDS, STEPS, TIMES, expected_reads, flows, histories, size, timing

pytestmark = pytest.mark.timeout(300 * TIMES)

LAGS = st.integers(1, 3)
IN_FLIGHT = Schedule(max_lag=1, streaming=1, in_flight=True)


def check_bounds(
    flow: Flow, schedule: Schedule, num_steps: int, reads: dict[NodeTask, Versions]
) -> None:
    """Nothing begins with weights older than the lag allows, or newer than its step's own."""
    oldest = expected_reads(flow, schedule, num_steps)
    newest = expected_reads(flow, Schedule(), num_steps)
    for task, versions in reads.items():
        for (_, version), (_, low), (_, high) in zip(
            versions, oldest[task], newest[task], strict=True
        ):
            assert low <= version <= high, task


@pytest.mark.slow
@histories(300)
@given(flows(), LAGS, STEPS, SEEDS, st.sampled_from([None, 1, 2]), st.booleans())
def test_every_task_runs_once_within_the_bounds(
    flow: Flow, max_lag: int, num_steps: int, seed: int, every: int | None, arrival: bool
) -> None:
    """Exactly once, no deadlock; `Shell` looks at what is held when a rollout begins and ends."""
    order = "arrival" if arrival else "step"
    schedule = replace(IN_FLIGHT, max_lag=max_lag, order=order)
    _, reads = run(flow, schedule, num_steps, seed, every)
    assert reads.keys() == expected_reads(flow, schedule, num_steps).keys()
    check_bounds(flow, schedule, num_steps, reads)
    if arrival:
        return
    exact = expected_reads(flow, schedule, num_steps)
    streams = {node.name for node in flow.nodes if node.streams}
    for task, versions in reads.items():
        assert task.node in streams or versions == exact[task]


@pytest.mark.slow
@histories(150)
@given(flows(), LAGS, st.integers(1, 6), SEEDS, st.integers(1, 3), st.data())
def test_a_resumed_run_does_what_is_left(
    flow: Flow, max_lag: int, num_steps: int, seed: int, every: int, data: st.DataObject
) -> None:
    schedule = replace(IN_FLIGHT, max_lag=max_lag)
    whole, reads = run(flow, schedule, num_steps, seed, every)
    saves = [message for message in whole.trace if isinstance(message, SaveCheckpoint)]
    save = data.draw(st.sampled_from(saves))
    resumed = Recorded(flow, schedule, num_steps, checkpoint_every=every, resume=save.resume)
    rest = dry_run(resumed, timing(seed + 1), size=size).reads
    Shell.at(save, flow, schedule).replay(resumed)
    before = {t for t in reads if t.step < save.step or t in save.resume.done}
    assert rest.keys() == reads.keys() - before
    check_bounds(flow, schedule, num_steps, rest)


def grpo(num_ranks: int = 1, num_chunks: int = 4) -> Flow:
    """Generation on a group of its own, which streams to training."""
    read = WeightRead("actor", 0, True)
    generate = FlowNode("generate", "rollout", True, "b", ("prompts",), (read,), streams=True)
    train = FlowNode(
        "train", "train", False, "a", ("generate",), trains="actor", order_of="generate"
    )
    nodes = (FlowNode("prompts", "source"), generate, train)
    return Flow("grpo", nodes, {"a": 1, "b": num_ranks}, {"actor": "a"}, {"actor": 1}, num_chunks)


def acted(flow: Flow, schedule: Schedule, num_steps: int, chunk_s: float) -> tuple[Recorded, Shell]:
    """A run in which a chunk takes so long to sample, and a part 1 s to train."""
    scheduler = Recorded(flow, schedule, num_steps)

    def seconds(work: object) -> float:
        if isinstance(work, RunStream | RunCall):
            return chunk_s
        return 1.0 if isinstance(work, RunTrain) else 0.1

    dry_run(scheduler, seconds, size=size)
    assert scheduler.done
    return scheduler, Shell(flow, schedule).replay(scheduler)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_come_while_a_step_is_sampled(num_ranks: int) -> None:
    flow = grpo(num_ranks)
    _, shell = acted(flow, IN_FLIGHT, 5, 1.0 * num_ranks)
    assert shell.num_swaps > 0
    assert shell.holds["actor", "b"] == 4
    _, shell = acted(flow, Schedule(max_lag=1, streaming=1), 5, 1.0 * num_ranks)
    assert shell.num_swaps == 0


def test_weights_wait_for_what_cannot_take_them() -> None:
    """Another node of the group has the rank: they come when it has ended."""
    score = FlowNode("score", "forward", True, "b", ("generate",))
    flow = grpo()
    flow = replace(flow, nodes=(*flow.nodes[:2], score, flow.nodes[2]))
    scheduler, shell = acted(flow, IN_FLIGHT, 4, 1.0)
    scored = set[object]()
    for message in scheduler.trace:
        if isinstance(message, RunCall):
            scored.add(message.task)
        elif isinstance(message, TaskDone):
            scored.discard(message.task)
        assert not (scored and isinstance(message, Load))
    assert shell.holds["actor", "b"] == 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_lag": 0, "streaming": 2}, "set max_lag=1"),
        ({"max_lag": 1}, "set streaming to a number of parts"),
    ],
)
def test_what_it_needs_is_said(given: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Schedule(in_flight=True, **given)  # pyright: ignore[reportArgumentType]


def test_who_asks_is_told_why_a_run_is_not_reproducible() -> None:
    assert Schedule(max_lag=3, streaming=4).why_not_reproducible == ""
    assert "order=arrival" in Schedule(order="arrival").why_not_reproducible
    both = replace(IN_FLIGHT, order="arrival").why_not_reproducible
    assert "order=arrival" in both
    assert "in_flight" in both
