"""The search's objective is what the engine's scheduler does: the two are compared call by call."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.algorithms.reference_grpo import ReferenceGRPO, reference_grpo_step
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.kinds import NodeKind
from penstock.planner.inputs.calls import Call, Lengths, Workload, calls_of
from penstock.planner.plan.planner import place_ops
from penstock.planner.plan.simulate import simulate
from penstock.planner.search.option_table import call_nodes

from ..hand_made import ppo
from ..shapes import model_of
from .graphs import groups_of
from .tables import period

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
