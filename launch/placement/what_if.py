"""The plan that is asked for, and beside it those of other pins, fewer nodes and better hardware.

Every plan is one of its own search, under the same deadline. Nothing is taken over from one to the
next, so each row of a table is what `penstock plan` says of that case alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...dataflow.errors import InfeasibleError, PlanError
from ...planner.formatting import change_text, seconds_text
from ...planner.inputs.cluster import ClusterSpec
from ...planner.inputs.cluster_variants import improved, smaller
from ...planner.plan.plan import Plan
from ...planner.report.comparison import Alternative, Comparison
from ...planner.search.pins import Pins
from .plan_request import PlanRequest


def answered(request: PlanRequest) -> tuple[Plan, tuple[Comparison, ...]]:
    """The plan, and the tables that were asked for.

    With a time to reach (`target_s`) it is the plan for the fewest nodes that reach it, or else for
    the number of nodes that is fastest; what else is asked is asked of those nodes.

    Raises:
        PlanError: If no plan fits, or none under the pins of a file.
    """
    tables: list[Comparison] = []
    if request.target_s is None:
        plan = request.plan()
    else:
        plan, table = _sized(request, request.target_s)
        tables.append(table)
        assert isinstance(plan.cluster, ClusterSpec), "the planner says what it planned for"
        request = replace(request, cluster=plan.cluster)
    this = Alternative("this plan", plan)
    if request.compared:
        others = tuple(_under(request, file, pins) for file, pins in request.compared.items())
        tables.append(Comparison("compare", "what if", this, others, by_call=True))
    if request.sensitivity:
        tables.append(_improved(request, this))
    return plan, tuple(tables)


def _under(request: PlanRequest, file: str, pins: Pins | Alternative) -> Alternative:
    if isinstance(pins, Alternative):
        return pins
    try:
        return Alternative(file, replace(request, pins=pins).plan())
    except PlanError as error:
        raise type(error)(f"'plan.compare': '{file}':\n{error}") from None


def _sized(request: PlanRequest, target_s: float) -> tuple[Plan, Comparison]:
    """Return the plan of the fewest nodes that are fast enough; the fastest if none is."""
    sizes = _planned(request, smaller(request.cluster))
    fits = [one for one in sizes if one.plan is not None]
    if not fits:
        raise InfeasibleError(sizes[-1].why)
    best = min(fits, key=lambda one: one.step_s)
    enough = next((one for one in fits if one.step_s <= target_s), None)
    chosen = enough or best
    assert chosen.plan is not None
    if enough is None:
        answer = (
            f"none makes a step in {seconds_text(target_s)}: the fastest, {best.name}, takes "
            f"{seconds_text(best.step_s)}"
        )
    else:
        answer = (
            f"{enough.name} ({chosen.plan.num_devices:,} devices) is the least of these that makes "
            f"a step in {seconds_text(target_s)}"
        )
    title = f"nodes for a step in {seconds_text(target_s)}"
    return chosen.plan, Comparison("target_s", title, chosen, sizes, answer)


def _improved(request: PlanRequest, this: Alternative) -> Comparison:
    others = _planned(request, improved(request.cluster))
    best = min(others, key=lambda one: one.step_s)
    change = change_text(best.step_s / this.step_s - 1)
    answer = f"most is gained by {best.name}: {seconds_text(best.step_s)}, {change}"
    if best.step_s > this.step_s * 0.9995:
        answer = "none of these makes a step faster"
    return Comparison("sensitivity", "what better hardware gives", this, others, answer)


def _planned(request: PlanRequest, clusters: Mapping[str, ClusterSpec]) -> tuple[Alternative, ...]:
    """A row for each cluster: its best plan, or why it has none."""
    rows: list[Alternative] = []
    for name, cluster in clusters.items():
        try:
            rows.append(Alternative(name, replace(request, cluster=cluster).plan()))
        except PlanError as error:
            rows.append(Alternative(name, None, str(error)))
    return tuple(rows)
