"""The planner's objective against the scheduler itself."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.reference_grpo import ReferenceGRPO, reference_grpo_step
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.kinds import NodeKind, WeightRead
from penstock.dataflow.scheduler.events import RunCall, RunTrain
from penstock.dataflow.scheduler.schedule import Flow, FlowNode, Schedule
from penstock.dataflow.scheduler.scheduler import Scheduler
from penstock.dataflow.scheduler.simulate import dry_run
from penstock.planner.inputs.calls import Call, Lengths, Workload, calls_of
from penstock.planner.plan.planner import place_ops
from penstock.planner.plan.simulate import simulate
from penstock.planner.search.option_table import call_nodes
from penstock.planner.search.options import CallNode
from penstock.planner.search.step_time import StepTimer

from ..hand_made import ppo
from ..shapes import model_of
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


# --- whole graphs, with the ops that had to be placed

GRAPHS = (
    ppo(),
    build(grpo_step, cfg=GRPO(), name="grpo"),
    build(reference_grpo_step, cfg=ReferenceGRPO(), name="reference_grpo"),
)
SHAPE = model_of("small", 8, 1, 1, 1, 16, vocab_size=32)
WORKLOAD = Workload(num_prompts=4, prompt=Lengths.constant(4), response=Lengths.constant(4))


def calls(graph: Graph) -> tuple[Call, ...]:
    return calls_of(graph, WORKLOAD, dict.fromkeys(graph.roles, SHAPE))


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data(), max_lag=st.integers(0, 3))
def test_the_objective_equals_the_simulation(data: st.DataObject, max_lag: int) -> None:
    graph = data.draw(st.sampled_from(GRAPHS), label="graph")
    found = calls(graph)
    group_of = groups_of(call_nodes(found), data)
    durations_s = {c.name: float(data.draw(st.integers(1, 40), label=c.name)) for c in found}
    expected_s = period(call_nodes(found), group_of, durations_s, max_lag)
    placed = place_ops(
        graph,
        {call.name: "abc"[group_of[call.call_group]] for call in found},
        durations_s,
        max_lag=max_lag,
        target_s=expected_s,
    )
    simulated = simulate(graph, placed, durations_s, max_lag=max_lag)
    assert simulated.step_time_s == pytest.approx(expected_s)


def test_every_graph_has_ops_that_had_to_be_placed() -> None:
    for graph in GRAPHS:
        assert any(node.kind is NodeKind.OP for node in graph.nodes)
