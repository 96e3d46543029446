"""The JSON of a plan: what programs read of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.step_logs import read_trace
from penstock.planner.plan.simulate import simulate_plan
from penstock.planner.report.json_report import infeasible, to_json, to_trace

from ..hand_made import CALLS, GB, ppo, split_plan


def test_what_is_promised_is_there() -> None:
    shown = json.loads(json.dumps(to_json(ppo(), split_plan())))
    plain = {
        "feasible": True, "step_time_s": 30.0, "lower_bound_s": 29.4, "search_time_s": 1.25,
        "simulated_step_time_s": 30.0, "num_steps": None, "device_hours": None, "max_lag": 0,
    }  # fmt: skip
    assert {name: shown[name] for name in plain} == plain
    assert shown["gap"] == pytest.approx(0.02)
    assert shown["device_hours_per_step"] == pytest.approx(16 * 30 / 3600)
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
    assert path[1] == {"node": "reward.score", "step": 0, "seconds": 2.0, "waited_for": "input"}


def test_where_nothing_fits_the_same_keys_say_so() -> None:
    shown = infeasible("group 'all' does not fit", 0.5)
    assert shown["feasible"] is False
    assert shown["reason"] == "group 'all' does not fit"
    missing = to_json(ppo(), split_plan()).keys() - shown.keys()
    assert {"feasible", "step_time_s", "lower_bound_s", "gap", "search_time_s", "nodes",
            "memory_bytes_per_device", "runner_up"}.isdisjoint(missing)  # fmt: skip


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    file = tmp_path / "trace.json"
    file.write_text(to_trace(ppo(), split_plan(), num_steps=3))
    read = read_trace(file)
    assert read == json.loads(file.read_text())
    return read


def test_a_group_is_a_process_with_one_track(events: list[dict[str, Any]]) -> None:
    names = [(e["name"], e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        ("process_name", 1, "a"),
        ("thread_name", 1, "devices 0-7"),
        ("process_name", 2, "b"),
        ("thread_name", 2, "devices 8-15"),
    ]


def test_every_call_of_every_step_is_a_slice_of_its_duration(events: list[dict[str, Any]]) -> None:
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 3 * len(CALLS)
    for event in slices:
        assert event["dur"] == round(CALLS[event["name"]] * 1e6)
    assert [e["ts"] for e in slices if e["name"] == "actor.generate"] == [0, 30_000_000, 60_000_000]


def test_a_slice_says_which_layout_and_weights(events: list[dict[str, Any]]) -> None:
    first = next(e for e in events if e["name"] == "actor.generate" and e["step"] == 2)
    assert first["args"] == {
        "node": "actor.generate",
        "step": 2,
        "chunk": 0,
        "versions": {"actor": 2},
        "layout": "tp2 dp4",
        "parts_s": {"decode": 9.5, "prefill": 1.5, "reshard": 1.0},
    }


def test_slices_of_a_track_do_not_overlap(events: list[dict[str, Any]]) -> None:
    for pid in (1, 2):
        ends = 0
        for event in (e for e in events if e["ph"] == "X" and e["pid"] == pid):
            assert event["ts"] >= ends
            ends = event["ts"] + event["dur"]


def test_memory_is_a_counter_that_peaks_in_training(events: list[dict[str, Any]]) -> None:
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 1]
    assert {e["name"] for e in counters} == {"bytes per device, of 71.7 GiB"}
    assert max(e["args"]["value"] for e in counters) == 66 * GB
    assert min(e["args"]["value"] for e in counters) == 41 * GB


def test_the_simulation_can_be_given() -> None:
    assert to_trace(ppo(), split_plan(), simulate_plan(ppo(), split_plan())) == to_trace(
        ppo(), split_plan()
    )
