"""Flows that cannot run and schedules out of range are refused with a message that says why."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from penstock.dataflow.scheduler.schedule import Flow, FlowNode, Schedule

PROMPTS = FlowNode("prompts", "source")
FLOW = Flow(
    "step", (PROMPTS, FlowNode("score", "op", group="a", inputs=("prompts",))), {"a": 1}, {}, {}
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": {"a": 0}}, "group 'a' must have at least 1 rank, got 0"),
        (
            {"nodes": (replace(FLOW.nodes[1], inputs=()),)},
            "flow 'step' has no source node: its rows come from nowhere",
        ),
    ],
)
def test_a_flow_that_cannot_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        replace(FLOW, **change)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_lag": -1},
            "Schedule.max_lag must be 0 to 1000, got -1; the samples of as many steps are kept at "
            "once",
        ),
        ({"streaming": -1}, "Schedule.streaming must be at least 0 parts, got -1"),
        ({"order": "random"}, "Schedule.order must be 'step' or 'arrival', got 'random'"),
        ({"deadline_s": 0.0}, "Schedule.deadline_s must be a positive number of seconds, got 0.0"),
    ],
)
def test_a_schedule_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Schedule(**fields)
