"""Weights & Biases: what is logged is in its own file bit for bit, and nothing is asked or sent."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.launch.run_dir.shipped_trackers import WandbTracker

from .logged import SAMPLES, SUMMARY, bits, info, odd_rows

wandb = pytest.importorskip("wandb", reason="wandb is not installed")

_MAGIC_BYTES, _BLOCK_BYTES, _HEAD = 7, 32768, struct.Struct("<IHB")


def records(path: Path) -> Iterator[Any]:
    """What a `.wandb` file holds: a log as LevelDB writes it, of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    record: Any = vars(wandb_internal_pb2)["Record"]
    content, at, parts = path.read_bytes(), _MAGIC_BYTES, b""
    assert content.startswith(b":W&B")
    while at + _HEAD.size <= len(content):
        if _BLOCK_BYTES - at % _BLOCK_BYTES < _HEAD.size:  # too little is left of the block
            at += _BLOCK_BYTES - at % _BLOCK_BYTES
            continue
        _, size, kind = _HEAD.unpack_from(content, at)
        parts += content[at + _HEAD.size : at + _HEAD.size + size]
        at += _HEAD.size + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record.FromString(parts)
            parts = b""


def written(folder: Path) -> list[Path]:
    return sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))


def history(path: Path) -> list[dict[str, Any]]:
    """Its rows, without the fields that the package adds."""
    rows: list[dict[str, Any]] = []
    for record in records(path):
        if record.HasField("history"):
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json, parse_int=float)
                for item in record.history.item
            }
            rows.append({key: value for key, value in row.items() if key[0] != "_"})
    return rows


@pytest.mark.slow
def test_every_metric_is_there_bit_for_bit(tmp_path: Path) -> None:
    rows = odd_rows(40)
    tracker = WandbTracker(group="seeds", tags=["a"])
    place = tracker.start(info(tmp_path, {"algorithm": {"lr": 1e-5}, "seed": 0}))
    assert place == f"wandb sync {tmp_path}/wandb/offline-run-*"
    tracker.rewind(0, "sft")
    tracker.log(0, "sft", {"loss": 3.0})
    tracker.rewind(0, "grpo")
    for step, row in enumerate(rows):
        tracker.log(step, "grpo", row)
    tracker.log(40, "grpo", {"odd": math.nan, "high": math.inf, "low": -math.inf})
    tracker.finish(SUMMARY)

    (path,) = written(tmp_path)
    found = history(path)
    assert found[0] == {"sft/loss": 3.0, "sft/step": 0}
    for step, row in enumerate(rows):
        read = found[1 + step]
        assert read.pop("step") == step
        assert bits(read) == bits(row)
    last = found[-1]
    assert math.isnan(last["odd"])
    assert (last["high"], last["low"], last["step"]) == (math.inf, -math.inf, 40)
    everything = [*records(path)]
    (run,) = (record.run for record in everything if record.HasField("run"))
    assert (run.run_id, run.project, run.run_group, [*run.tags]) == (
        "20261121-031454-grpo-seed0",
        "penstock",
        "seeds",
        ["a"],
    )
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["algorithm"], config["seed"]) == ({"lr": 1e-5}, 0)
    summary = {
        item.key or ".".join(item.nested_key): json.loads(item.value_json)
        for record in everything
        for item in record.summary.update
    }
    assert (summary["accuracy"], summary["suites.change"]) == (0.1, 0.25)
    assert "examples" not in summary
    assert [record.exit.exit_code for record in everything if record.HasField("exit")] == [0]


@pytest.mark.slow
def test_the_process_exits_as_before(tmp_path: Path) -> None:
    before = (sys.exit, sys.excepthook)
    tracker = WandbTracker()
    tracker.start(info(tmp_path))
    assert (sys.exit, sys.excepthook) == before
    tracker.finish(None)
    assert (sys.exit, sys.excepthook) == before


@pytest.mark.slow
def test_a_resumed_run_goes_on_under_the_same_name(tmp_path: Path) -> None:
    for first, last in ((0, 4), (2, 3)):
        tracker = WandbTracker()
        tracker.start(info(tmp_path))
        tracker.rewind(first, "grpo")
        for step in range(first, last):
            tracker.log(step, "grpo", {"reward": 0.1 * step})
        tracker.finish(None)
    found = [row for path in written(tmp_path) for row in history(path)]
    assert found == [{"reward": 0.1 * step, "step": step} for step in (0, 1, 2, 3, 2)]
    assert all(path.name.endswith("-seed0.wandb") for path in written(tmp_path))


@pytest.mark.slow
def test_samples_are_a_table_of_text(tmp_path: Path) -> None:
    tracker = WandbTracker()
    tracker.start(info(tmp_path))
    tracker.log_samples(2, "grpo", SAMPLES)
    tracker.finish(None)
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.table.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["response"] for row in rows] == ["<b>2</b>", "5,\n'no'"]
    assert [row["rule.score"] for row in rows] == [1.0, None]


_KILLED = """
import sys, warnings
from pathlib import Path
import psutil
from penstock.configs.schema import TrackerConfig
from penstock.launch.run_dir.trackers import Trackers
from penstock.launch.run_dir.trackers import RunInfo
folder = Path(sys.argv[1])
warnings.simplefilter("always")
with Trackers(TrackerConfig(kind="wandb")) as trackers:
    trackers.start(RunInfo("it", {"grpo": folder}, {}, resumed=False))
    trackers.rewind(0, "grpo")
    trackers.log(0, "grpo", {"reward": 0.5})
    own = psutil.Process().children(recursive=True)
    assert own
    for process in own:
        process.kill()
    psutil.wait_procs(own, timeout=30)
    for step in range(1, 200):
        trackers.log(step, "grpo", {"reward": 0.5})
    trackers.finish({})
print("the run has ended")
"""


@pytest.mark.slow
def test_one_that_fails_in_the_middle_stops_no_run(tmp_path: Path) -> None:
    """Its own process is killed: the run goes on, and its record has every step.

    In a process of its own: the package does not end its threads then.
    """
    ran = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert (ran.returncode, ran.stdout) == (0, "the run has ended\n"), ran.stderr
    assert re.search("tracker 'wandb' failed at (log|finish)", ran.stderr)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 200


def test_another_mode_is_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        WandbTracker(mode="of-line")  # type: ignore[arg-type]
    assert str(raised.value) == (
        "'tracker.options.mode': expected one of offline, online, got 'of-line'"
    )
