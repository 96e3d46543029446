"""Why one plan lost against another, in a sentence made from what both are predicted to do."""

from __future__ import annotations

from ..dataflow.graph import Graph
from .plan import Plan
from .prediction import RunnerUp
from .simulate import Simulation, simulate_plan
from .wording import placement_text, seconds_text

__all__ = ["runner_up"]


def runner_up(graph: Graph, best: Plan, other: Plan) -> RunnerUp:
    """What `best` should say of the best plan that is placed differently.

    Args:
        graph: The step that both are for.
        best: The plan that won.
        other: The plan that lost; like `best` with a prediction.

    Raises:
        PlanError: If one of them has no prediction or does not fit the graph.
    """
    lost = simulate_plan(graph, other)
    return RunnerUp(
        description=placement_text(graph, other),
        step_time_s=lost.step_time_s,
        why=_why(graph, best, other, simulate_plan(graph, best), lost),
    )


def _why(graph: Graph, best: Plan, other: Plan, won: Simulation, lost: Simulation) -> str:
    if placement_text(graph, best) == placement_text(graph, other):
        return _slowest_call(best, other)
    group = lost.busiest
    busy_s, step_s = lost.busy_s(group), lost.step_time_s
    if busy_s >= won.step_time_s:
        return f"its group '{group}' is busy {seconds_text(busy_s)} of {seconds_text(step_s)}"
    chain = [f"{i.node} {seconds_text(i.seconds)}" for i in lost.critical_path]
    return (
        f"no group of it is busy for more than {seconds_text(busy_s)}, but a step waits for "
        f"{', then '.join(chain)}"
    )


def _slowest_call(best: Plan, other: Plan) -> str:
    """The call that loses most, where only layouts differ."""
    ours = best.prediction.durations_s if best.prediction else {}
    theirs = other.prediction.durations_s if other.prediction else {}
    call = max(theirs, key=lambda name: theirs[name] - ours.get(name, 0.0))
    return (
        f"its {call} in {other.layouts.get(call, 'another layout')} takes "
        f"{seconds_text(theirs[call])} instead of {seconds_text(ours.get(call, 0.0))}"
    )
