"""What is Ray's own: which Ray is joined or started, and what it is called in messages."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import one_group
from penstock.workers.executors.on_ray.executor import RayExecutor

from ....algorithms import runs

SCRIPT = """
import os, signal, sys, time
before = dict(os.environ)
from penstock.workers.executors.on_ray.executor import connect_ray, shutdown_ray
assert os.environ == before, "the import changed the environment"
assert "ray" not in sys.modules, "the import loaded ray"
handled = []
signal.signal(signal.SIGTERM, lambda *_: handled.append(1))
connect_ray()
os.kill(os.getpid(), signal.SIGTERM)
assert handled, "Ray has taken the signal away"
import ray
ray.get(ray.remote(lambda: None).remote())
time.sleep(1.5)  # after a second Ray would report the call
assert ray.timeline() == [], "Ray keeps a record of calls"
print(ray.get_runtime_context().gcs_address)
shutdown_ray()
"""


@pytest.mark.slow
def test_a_ray_that_somebody_else_started_here_is_left_alone() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a socket's path must be short
        (Path(folder) / "ray").mkdir()
        for name in ("ray_current_cluster", "ray/ray_current_cluster"):
            (Path(folder) / name).write_text("127.0.0.1:9")  # where `ray start` notes its address
        environment = {**os.environ, "RAY_TMPDIR": folder}
        environment.pop("RAY_ADDRESS", None)
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=environment,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("127.0.0.1:")
    assert done.stdout.strip() != "127.0.0.1:9"


def test_a_live_worker_is_refused() -> None:
    run = runs.make("grpo")
    live = {**run.workers, "reward": runs.LengthReward()}
    engine = Engine(run.graph, one_group(run.graph), workers=live, executor=RayExecutor(1))
    with pytest.raises(ConfigError) as raised:
        engine.start()
    assert str(raised.value) == (
        "role 'reward' is given as a live LengthReward; on Ray it must be built where it runs: "
        "give a WorkerSpec"
    )
