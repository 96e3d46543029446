"""A plan by itself: what its table says, and that every text in it is text."""

from __future__ import annotations

from xml.etree import ElementTree

from penstock.planner.plan.plan import GroupPlan, Plan, one_group_plan
from penstock.planner.report.plan_texts import plan_table

from ..hand_made import split_plan


def rows(page: str) -> list[list[str]]:
    """The cells of the table's rows, without its head."""
    body = ElementTree.fromstring(page).find("table/tbody")
    assert body is not None
    return [["".join(cell.itertext()) for cell in row] for row in body]


def test_each_named_call_has_a_row_under_its_group() -> None:
    plan = split_plan()
    found = rows(plan_table(plan))
    assert [row[2] for row in found if row[2] in plan.nodes] == [
        name for group in plan.groups for name, where in plan.nodes.items() if where == group.name
    ]
    assert [row[0] for row in found if row[0]] == [group.name for group in plan.groups]
    prediction = plan.prediction
    assert prediction is not None
    for row in found:
        assert (row[4] != "") == (row[2] in prediction.nodes)
        assert row[3] == str(plan.layouts.get(row[2], ""))


def test_the_longest_call_has_the_longest_bar() -> None:
    plan = split_plan()
    assert plan.prediction is not None
    page = ElementTree.fromstring(plan_table(plan))
    widths = {int(bar.get("width", "0")) for bar in page.iter("rect")}
    assert max(widths) == 160
    assert len(widths) > 1


def test_a_plan_of_one_group_says_where_every_call_runs() -> None:
    assert rows(plan_table(one_group_plan(2))) == [["all", "2 cpu", "every call", "", "", ""]]


def test_names_are_text() -> None:
    plan = Plan(groups=(GroupPlan(name="a"),), nodes={"<script>": "a"}, cluster="<b>")
    page = plan_table(plan)
    assert "&lt;script&gt;" in page
    assert not list(ElementTree.fromstring(page).iter("script"))
