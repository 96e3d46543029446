"""From a graph, models and a cluster to the plan that runs it, with its time and memory.

Nothing here starts a process; it imports `dataflow` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dataflow.pictures import draws

if TYPE_CHECKING:
    from .plan.plan import Plan


def _plan_as_html(plan: Plan) -> str:
    from .report.plan_table import plan_table

    return plan_table(plan)


draws("Plan", _plan_as_html)
