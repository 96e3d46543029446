"""Plans side by side, as text, as data and on a page."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from penstock.planner.inputs.layout import Layout
from penstock.planner.plan.plan import Plan
from penstock.planner.report.comparison import Alternative, PlanComparison, comparison_text
from penstock.planner.report.html_report import to_html
from penstock.planner.report.json_report import to_json

from ..hand_made import ppo, predicting, prediction, split_plan

GOLDEN = """\
what if
  plan       devices    step  difference  tokens/s  memory          device-h/1,000  where
  this plan       16  30.0 s                69,905  61.5 GiB, 86 %             133  {actor, ref} on 8, {critic, reward} on 8
  slow.yaml       16  36.0 s       +20 %    58,254  61.5 GiB, 86 %             160  {actor, ref} on 8, {critic, reward} on 8
  big.yaml                                                                          no plan: 'critic' fits nowhere

slowest calls that differ
  node            this plan             slow.yaml
  actor.generate  12.0 s on 8, tp2 dp4  18.0 s on 8, tp8
"""  # noqa: E501


def slow_plan() -> Plan:
    """The same groups; generation takes half as long again."""
    nodes = prediction().nodes
    slow = nodes["actor.generate"].model_copy(update={"duration_s": 18.0})
    plan = predicting(step_time_s=36.0, nodes={**nodes, "actor.generate": slow})
    layouts = {**plan.layouts, "actor.generate": Layout(tp=8)}
    return plan.model_copy(update={"layouts": layouts})


def compared(*, by_call: bool = True) -> PlanComparison:
    others = (
        Alternative("slow.yaml", slow_plan()),
        Alternative("big.yaml", None, "'critic' fits nowhere\nand why"),
    )
    this = Alternative("this plan", split_plan())
    return PlanComparison("compare", "what if", this, others, by_call=by_call)


def test_plans_stand_side_by_side() -> None:
    assert comparison_text(ppo(), compared()) + "\n" == GOLDEN


def test_plans_that_do_the_same_say_so() -> None:
    this, other = Alternative("this plan", split_plan()), Alternative("same.yaml", split_plan())
    text = comparison_text(
        ppo(), PlanComparison("compare", "what if", this, (other,), by_call=True)
    )
    assert "  same.yaml       16  30.0 s        same " in text
    assert text.endswith("\n\nno call differs")


def test_the_answer_stands_below() -> None:
    this = Alternative("2 nodes", split_plan())
    found = PlanComparison("target_s", "nodes for a step in 30.0 s", this, (this,), "2 nodes do")
    lines = comparison_text(ppo(), found).splitlines()
    assert lines[0] == "nodes for a step in 30.0 s"
    assert [line.split()[0] for line in lines[1:]] == ["plan", "2", "2"], "no row stands twice"
    assert lines[-1] == "  2 nodes do"


def test_a_lag_and_a_search_that_was_stopped_are_named() -> None:
    plan = predicting(stopped_at_deadline=True).model_copy(update={"max_lag": 1})
    text = comparison_text(
        ppo(), PlanComparison("compare", "what if", Alternative("this plan", plan), ())
    )
    assert text.endswith("{critic, reward} on 8, max_lag 1, search stopped at its deadline")


def test_programs_read_the_same() -> None:
    shown = json.loads(json.dumps(to_json(ppo(), split_plan(), comparisons=[compared()])))
    assert shown["compare"]["base"] == "this plan"
    this, slow, big = shown["compare"]["plans"]
    assert (this["name"], this["step_time_s"], this["num_devices"]) == ("this plan", 30.0, 16)
    assert slow["device_hours_per_step"] == pytest.approx(36 * 16 / 3600)
    assert big == {"name": "big.yaml", "feasible": False,
                   "reason": "'critic' fits nowhere\nand why"}  # fmt: skip


def test_a_page_has_both_timelines_on_one_axis() -> None:
    html = to_html(ppo(), split_plan(), comparisons=[compared()])
    page = ElementTree.fromstring(html.partition("\n")[2])
    charts = {e.attrib["id"]: e for e in page.iter() if e.get("id", "").startswith("gantt")}
    assert list(charts) == ["gantt", "gantt-0", "gantt-1"]
    bars = {
        name: next(g for g in chart.iter("g") if g.get("data-node") == "actor.generate")
        for name, chart in charts.items()
    }
    assert [float(g.attrib["data-end-s"]) for g in bars.values()] == [12.0, 12.0, 18.0]
    widths = [float(next(g.iter("rect")).attrib["width"]) + 1 for g in bars.values()]
    assert widths[1] == pytest.approx(widths[0] * 30 / 36, abs=0.02), "on the slower plan's axis"
    assert widths[2] == pytest.approx(widths[1] * 18 / 12, abs=0.02)
    assert ["a step ends" in "".join(chart.itertext()) for chart in charts.values()] == [
        False, True, False,
    ]  # fmt: skip
    (table,) = [e for e in page.iter("table") if e.get("id") == "compare"]
    assert ["".join(row.itertext())[:9] for row in table.iter("tr")][1:3] == [
        "this plan", "slow.yaml",
    ]  # fmt: skip


def test_a_table_without_calls_has_no_timelines() -> None:
    html = to_html(ppo(), split_plan(), comparisons=[compared(by_call=False)])
    assert 'id="compare"' in html
    assert "gantt-0" not in html
