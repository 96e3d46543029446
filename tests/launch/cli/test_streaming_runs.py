"""Runs whose steps stream, from the command line: what they change, and what they leave alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.step_logs import read_trace

from ..conftest import Penstock
from .test_run import GRPO

pytestmark = pytest.mark.slow

NUM_PARTS = 4
SMALL = (*GRPO, "algorithm.num_steps=2", "algorithm.before.sft.num_steps=1", "tracker=none")


def run(penstock: Penstock, name: str, *words: str) -> Path:
    said = penstock("run", *SMALL, f"runs={name}", *words)
    assert said.code == 0, said.err
    (folder,) = Path(name).iterdir()
    return folder


def spans(folder: Path, node: str) -> list[dict[str, Any]]:
    events = [event for event in read_trace(folder / "trace.json") if event.get("ph") == "X"]
    return [event["args"] for event in events if event["args"].get("node") == node]


def test_only_what_streams_is_done_in_parts(penstock: Penstock) -> None:
    """The stage before keeps its rows together, and the evaluation answers the same."""
    plain = run(penstock, "plain")
    parts = run(penstock, "parts", f"schedule.streaming={NUM_PARTS}")
    one, two = (json.loads((f / "stages/sft/summary.json").read_text()) for f in (plain, parts))
    assert one["weights_sha256"] == two["weights_sha256"]
    trained = [span["chunk"] for span in spans(parts, "actor.train")]
    assert trained == [0, 1, 2, 3] * 2
    assert len(spans(plain, "actor.train")) == 2
    first = [(f / "evaluations" / "step-00000000.json").read_text() for f in (plain, parts)]
    assert first[0] == first[1]


def test_it_streams_in_order_of_arrival_too(penstock: Penstock) -> None:
    words = ("schedule.max_lag=1", "schedule.order=arrival", f"schedule.streaming={NUM_PARTS}")
    folder = run(penstock, "arrival", *words)
    sampled = [span["versions"]["actor"] for span in spans(folder, "actor.generate")]
    assert len(sampled) == 2 * NUM_PARTS
    assert set(sampled) <= {0, 1}


APART = ("executor.groups={train:1,rollout:1}", "executor.nodes={actor.generate:rollout}")


def test_weights_in_flight_are_marked_wherever_the_run_is_shown(penstock: Penstock) -> None:
    words = (*SMALL[:-1], *APART, "schedule=in_flight", f"schedule.streaming={NUM_PARTS}")
    reason = "in_flight: when weights come while rows are sampled depends on timing"
    dry = penstock("run", "--dry-run", *words)
    assert f"not reproducible: {reason}" in dry.out
    said = penstock("run", *words, "runs=flying")
    assert said.code == 0, said.err
    lines = said.err.splitlines()
    assert lines.count(f"not reproducible: {reason}") == 2  # at the start and at the end
    assert ", not reproducible, " in " ".join(lines[-3:])
    (folder,) = Path("flying").iterdir()
    for file in ("run.json", "summary.json"):
        assert json.loads((folder / file).read_text())["not_reproducible"] == reason
    assert "not reproducible" in (folder / "curve.svg").read_text()
    assert penstock("export", f"run={folder}", "output=model").code == 0
    assert f"| not reproducible | {reason} |" in Path("model/README.md").read_text()
    assert f"this run is not reproducible: {reason}" in penstock("samples", f"run={folder}").out
    shown = penstock("graph", "algorithm=grpo", "schedule=in_flight")
    assert f"not reproducible: {reason}" in shown.out
    assert "not reproducible" not in penstock("graph", "algorithm=grpo").out
