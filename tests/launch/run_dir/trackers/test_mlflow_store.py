"""MLflow: what is logged stands in its SQLite store, as far as that can say it."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from penstock.launch.run_dir.shipped_trackers import MlflowTracker

from .logged import SAMPLES, SUMMARY, bits, info, odd_rows

pytestmark = pytest.mark.slow

pytest.importorskip("alembic", reason="mlflow is not installed")


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store as MLflow makes it, which takes it seconds."""
    folder = tmp_path_factory.mktemp("store")
    tracker = MlflowTracker()
    tracker.start(info(folder / "first", name="first"))
    tracker.finish(None)
    return folder / "mlflow.db"


@pytest.fixture
def run(empty_store: Path, tmp_path: Path) -> Path:
    """Where a run's folder would be, in a folder of runs that has a store."""
    shutil.copy(empty_store, tmp_path)
    return tmp_path / "run"


def stored(run: Path) -> tuple[Any, Any]:
    """MLflow's own client, and the run that was made last."""
    from mlflow import MlflowClient

    client: Any = MlflowClient(tracking_uri=f"sqlite:///{run.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("penstock").experiment_id
    return client, client.search_runs([experiment], order_by=["start_time DESC"])[0]


def histories(run: Path, *names: str) -> list[list[tuple[int, float]]]:
    """Step and value of each point of some metrics, in the order in which they came."""
    client, found = stored(run)
    metrics = [client.get_metric_history(found.info.run_id, name) for name in names]
    return [
        [(point.step, point.value) for point in sorted(points, key=lambda p: p.timestamp)]
        for points in metrics
    ]


def history(run: Path, name: str) -> list[tuple[int, float]]:
    return histories(run, name)[0]


def test_every_metric_is_there_bit_for_bit(run: Path) -> None:
    rows = odd_rows(8)
    tracker = MlflowTracker(tags={"team": "a"})
    place = tracker.start(info(run, {"algorithm": {"lr": 1e-5, "kl": None}, "seed": 0}))
    assert place == f"mlflow ui --backend-store-uri sqlite:///{run.parent}/mlflow.db"
    tracker.rewind(0, "sft")
    tracker.log(0, "sft", {"loss": 3.0})
    tracker.rewind(0, "grpo")
    for step, row in enumerate(rows):
        tracker.log(step, "grpo", row)
    tracker.log(8, "grpo", {"odd": math.nan, "high": math.inf, "low": -math.inf})
    tracker.finish(SUMMARY)

    assert history(run, "sft/loss") == [(0, 3.0)]
    names = [name.replace("#", ":") for name in rows[0]]
    for name, found in zip(rows[0], histories(run, *names), strict=True):
        assert [step for step, _ in found] == [*range(8)]
        for (_, value), row in zip(found, rows, strict=True):
            logged = row[name] + 0.0  # a SQLite file has no -0.0
            logged = min(logged, sys.float_info.max)
            assert bits({name: value}) == bits({name: logged})
    assert math.isnan(history(run, "odd")[0][1])
    assert history(run, "high") == [(8, sys.float_info.max)]
    assert history(run, "low") == [(8, -sys.float_info.max)]

    _, found = stored(run)
    assert (found.info.run_name, found.info.status) == ("20261121-031454-grpo-seed0", "FINISHED")
    assert found.data.params == {"algorithm.lr": "1e-05", "algorithm.kl": "null", "seed": "0"}
    assert found.data.tags["team"] == "a"
    assert found.data.tags["summary/weights_sha256"] == "ab12"
    came_out = {k: v for k, v in found.data.metrics.items() if k.startswith("summary/")}
    assert came_out == {"summary/accuracy": 0.1, "summary/suites.change": 0.25}


def test_a_resumed_run_goes_on_in_the_same_one(run: Path) -> None:
    for first, last in ((0, 4), (2, 3)):
        tracker = MlflowTracker()
        tracker.start(info(run, {"seed": first}, resumed=first > 0))
        tracker.rewind(first, "grpo")
        for step in range(first, last):
            tracker.log(step, "grpo", {"reward": 0.1 * step + first})
        tracker.finish(None)
    client, found = stored(run)
    assert len(client.search_runs([found.info.experiment_id])) == 2  # and that of the fixture
    assert sorted(history(run, "reward")) == [(0, 0.0), (1, 0.1), (2, 0.2), (2, 2.2), (3, 0.1 * 3)]
    assert max(history(run, "reward")[-2:])[0] == 3
    assert (found.data.params, found.info.status) == ({"seed": "0"}, "FAILED")


def test_samples_are_tables_of_text(empty_store: Path, run: Path) -> None:
    tracker = MlflowTracker()
    tracker.start(info(run))
    for step in range(150):  # MLflow has room for the names of 134 in a tag
        tracker.log_samples(step, "grpo", SAMPLES)
    tracker.log_samples(2, "grpo", SAMPLES)  # as a resumed run does
    tracker.finish(None)
    files = empty_store.parent / "mlflow-artifacts"  # of the experiment, which was made there
    assert len([*files.glob("*/artifacts/samples/*.json")]) == 150
    (path,) = files.glob("*/artifacts/samples/grpo-step-000002.json")
    table = json.loads(path.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["response"] for row in rows] == ["<b>2</b>", "5,\n'no'"]
    assert [row["rule.score"] for row in rows] == [1.0, None]


_QUIET = """
import os, socket, sys, threading, time
from pathlib import Path
for name in ("CI", "GITHUB_ACTIONS", "PYTEST_CURRENT_TEST"):
    os.environ.pop(name, None)
asked = []
def refused(*args, **kwargs):
    asked.append(args)
    raise OSError("there is no network here")
socket.socket.connect = socket.getaddrinfo = refused
from penstock.launch.run_dir.trackers import TRACKERS
from penstock.launch.run_dir.trackers import RunInfo
folder = Path(sys.argv[1])
for kind in ("mlflow", "trackio"):
    tracker = TRACKERS[kind]()
    tracker.start(RunInfo("it", {"grpo": folder}, {"seed": 0}, resumed=False))
    tracker.rewind(0, "grpo")
    tracker.log(0, "grpo", {"reward": 0.5})
    tracker.finish({"accuracy": 1.0})
time.sleep(0.5)
print(asked, [thread.name for thread in threading.enumerate()])
"""


@pytest.mark.nightly
def test_nothing_asks_for_the_network(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names and addresses are asked of the socket module alone; a thread would show as well."""
    monkeypatch.setenv("TRACKIO_DIR", str(run.parent / "trackio"))
    ran = subprocess.run(
        [sys.executable, "-c", _QUIET, str(run)], capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout) == (0, "[] ['MainThread']\n"), ran.stderr
    assert ran.stderr == ""
