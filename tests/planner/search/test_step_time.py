"""The planner's objective against the scheduler itself."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.events import RunCall, RunTrain
from penstock.dataflow.scheduler.schedule import Flow, FlowNode, Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler
from penstock.dataflow.scheduler.simulate import dry_run
from penstock.planner.search.options import CallNode
from penstock.planner.search.step_time import StepTimer

from .graphs import groups_of, steps
from .tables import period


def flow_of(calls: tuple[CallNode, ...], group_of: Mapping[str, int]) -> Flow:
    """The step as the scheduler takes it: one rank per group, nothing cut into chunks."""
    trained = dict.fromkeys((call.role for call in calls if call.trains), 0)
    homes = {call.role: f"g{group_of[call.call_group]}" for call in calls if call.trains}
    nodes = [FlowNode("source", "source")]
    for call in calls:
        reads = (
            (WeightRead(call.role, trained[call.role], call.reads_older),)
            if call.role in trained and not call.trains
            else ()
        )
        nodes.append(
            FlowNode(
                call.name,
                "train" if call.trains else "rollout" if call.reads_older else "forward",
                chunked=False,
                group=f"g{group_of[call.call_group]}",
                inputs=call.after or ("source",),
                reads=reads,
                trains=call.role if call.trains else None,
            )
        )
        if call.trains:
            trained[call.role] += 1
    groups = {f"g{group}": 1 for group in sorted(set(group_of.values()))}
    return Flow("random", tuple(nodes), groups, homes, trained)


def completions_s(
    flow: Flow, durations_s: Mapping[str, float], max_lag: int, num_steps: int
) -> list[float]:
    """When each step was complete, by the scheduler."""
    scheduler = Scheduler(flow, Schedule(max_lag=max_lag), num_steps)
    seconds = dry_run(
        scheduler,
        lambda work: durations_s[work.node] if isinstance(work, RunCall | RunTrain) else 0.0,
    ).spans
    ends: dict[int, float] = {}
    for span in seconds:
        step = getattr(span.task, "step", None)
        if step is not None:
            ends[step] = max(ends.get(step, 0.0), span.end_s)
    complete, latest = [], 0.0
    for step in range(num_steps):
        latest = max(latest, ends[step])
        complete.append(latest)
    return complete


@pytest.mark.slow
@settings(max_examples=400)
@given(steps(), st.integers(0, 3), st.data())
def test_equals_the_schedulers_long_run_time_per_step(
    calls: tuple[CallNode, ...], max_lag: int, data: st.DataObject
) -> None:
    group_of = groups_of(calls, data)
    rng = random.Random(data.draw(st.integers(0, 10_000), "seed"))
    durations_s = {call.name: rng.choice([0.1, 1.0, 1.0, 5.0]) * rng.random() for call in calls}
    timer = StepTimer(calls, [group_of[call.call_group] for call in calls], max_lag)
    cycle = timer.cycle([durations_s[call.name] for call in calls])
    event(f"repeats after {cycle.steps} step(s)")
    event(f"for the first time after {cycle.after}")

    # Two cycles in the middle of a run: at its end nobody reads what trainings make.
    first = cycle.after + 2
    last = first + 2 * cycle.steps
    ends_s = completions_s(flow_of(calls, group_of), durations_s, max_lag, last + max_lag + 6)
    assert ends_s[last] - ends_s[first] == pytest.approx(2 * cycle.seconds, rel=1e-9)
    assert period(calls, group_of, durations_s, max_lag) == pytest.approx(
        (ends_s[last] - ends_s[first]) / (2 * cycle.steps), rel=1e-9
    )
