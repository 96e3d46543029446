"""Plans side by side on a plan's page: their table, and their devices over one common time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ...dataflow.graph.graph import Graph
from ..plan.simulate import simulate_plan
from .comparison import HEADS, Comparison, rows_of
from .gantt import gantt

_NUMBERS = range(1, 7)
"""Columns whose cells end at the same place."""


def comparison_sections(graph: Graph, comparisons: Sequence[Comparison]) -> str:
    """A card for each question; where calls are compared, with the timelines over one another.

    Args:
        graph: The step.
        comparisons: Of the plan that the page is about.
    """
    return "".join(_section(graph, one) for one in comparisons)


def _section(graph: Graph, comparison: Comparison) -> str:
    head = "".join(_cell("th", i, name) for i, name in enumerate(HEADS))
    rows = "".join(
        f"<tr>{''.join(_cell('td', i, cell) for i, cell in enumerate(cells))}</tr>"
        for cells in rows_of(graph, comparison)
    )
    answer = f'<p class="soft">{escape(comparison.answer)}</p>' if comparison.answer else ""
    return (
        f'<section class="card"><h2>{escape(comparison.title.capitalize())}</h2>{answer}'
        f'<div class="scroll"><table id="{comparison.key}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
        f"{_timelines(graph, comparison) if comparison.by_call else ''}</section>"
    )


def _cell(tag: str, column: int, text: str) -> str:
    mark = ' class="number"' if column in _NUMBERS else ""
    return f"<{tag}{mark}>{escape(text)}</{tag}>"


def _timelines(graph: Graph, comparison: Comparison) -> str:
    """The devices of every plan over time, all on the axis of the slowest."""
    played = [
        (one.name, plan, one.simulation or simulate_plan(graph, plan))
        for one, plan, _ in comparison.plans
    ]
    cycles = 2 if any(plan.max_lag for _, plan, _ in played) else 1
    axis_s = cycles * max(simulation.end_s - simulation.start_s for _, _, simulation in played)
    return "".join(
        f'<p style="margin-top:14px"><b>{escape(name)}</b></p><div class="scroll">'
        f"{gantt(graph, plan, simulation, cycles=cycles, axis_s=axis_s, name=f'gantt-{i}')}</div>"
        for i, (name, plan, simulation) in enumerate(played)
    )
