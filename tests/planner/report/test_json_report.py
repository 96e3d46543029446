"""The JSON of a plan: what programs read of it."""

from __future__ import annotations

import json

import pytest
from penstock.planner.report.json_report import infeasible, to_json

from ..hand_made import CALLS, GB, ppo, split_plan


def test_what_is_promised_is_there() -> None:
    shown = json.loads(json.dumps(to_json(ppo(), split_plan())))
    assert shown["feasible"] is True
    assert shown["step_time_s"] == 30.0
    assert shown["lower_bound_s"] == 29.4
    assert shown["gap"] == pytest.approx(0.02)
    assert shown["search_time_s"] == 1.25
    assert shown["simulated_step_time_s"] == 30.0
    assert shown["device_hours_per_step"] == pytest.approx(16 * 30 / 3600)
    assert (shown["num_steps"], shown["device_hours"]) == (None, None)
    assert shown["max_lag"] == 0
    assert list(shown["nodes"]) == list(CALLS)
    train = shown["nodes"]["actor.train"]
    assert (train["group"], train["devices"], train["model"]) == ("a", list(range(8)), "llama-7b")
    assert train["duration_s"] == 14.0
    assert train["parts_s"] == {"compute": 12.0, "gradient_sync": 2.0}
    layout = train["layout"]
    assert (layout["tp"], layout["pp"], layout["dp"], layout["zero"]) == (1, 1, 8, 1)
    assert shown["memory_bytes_per_device"]["0"] == 66 * GB
    assert len(shown["memory_bytes_per_device"]) == 16
    assert shown["runner_up"]["step_time_s"] == 34.5
    assert shown["other_schedules"] == [
        {"max_lag": 1, "segment_tokens": 0, "step_time_s": 33.0, "factor": 1.1}
    ]


def test_groups_say_who_shares_what() -> None:
    groups = to_json(ppo(), split_plan())["groups"]
    assert groups["b"]["roles"] == ["critic", "reward"]
    assert groups["b"]["idle_share"] == pytest.approx(13 / 30)
    assert groups["a"]["memory"]["peak_bytes"] == 66 * GB
    assert groups["a"]["memory"]["peak_call"] == "actor.train"


def test_the_critical_path_is_as_long_as_a_step() -> None:
    path = to_json(ppo(), split_plan())["critical_path"]
    assert sum(item["seconds"] for item in path) == 30.0
    assert path[1] == {
        "node": "reward.score",
        "step": 0,
        "seconds": 2.0,
        "waited_for": "input",
    }


def test_where_nothing_fits_the_same_keys_say_so() -> None:
    shown = infeasible("group 'all' does not fit", 0.5)
    assert shown["feasible"] is False
    assert shown["reason"] == "group 'all' does not fit"
    missing = to_json(ppo(), split_plan()).keys() - shown.keys()
    assert {"feasible", "step_time_s", "lower_bound_s", "gap", "search_time_s", "nodes",
            "memory_bytes_per_device", "runner_up"}.isdisjoint(missing)  # fmt: skip
