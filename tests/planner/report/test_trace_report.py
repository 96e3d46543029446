"""The trace of a plan has the format of a run's trace, and the times of the simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.step_logs import read_trace
from penstock.planner.plan.simulate import simulate_plan
from penstock.planner.report.trace_report import to_trace

from ..hand_made import CALLS, GB, ppo, split_plan


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
