"""`penstock profile` on a cluster that was joined: a real Ray of two nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.launch.profile.profile import joined_ranks, seats_on
from penstock.launch.profile.rank import RankRequest
from penstock.planner.cost.calibration import Calibration
from penstock.planner.report.plan_texts import cluster_text
from penstock.workers.executors.assignment import Machine
from penstock.workers.executors.registry import (
    DEFAULT_EXECUTOR,
    EXECUTORS,
    PARALLEL_EXECUTOR,
    ExecutorKind,
)

from ...workers.executors.on_ray.two_nodes import ray_folder, two_nodes
from ..conftest import Penstock

QUICK = ("widths=[16]", "rows=2", "seconds=0.001")
PENSTOCK = "import sys; from penstock.launch.main import main; sys.exit(main(sys.argv[1:]))"


def profiled(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it ends with the Ray that it has joined."""
    return subprocess.run(
        [sys.executable, "-c", PENSTOCK, "profile", *QUICK, *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes((0, 0), num_cpus=2) as address:
        yield address


@pytest.mark.nightly
def test_a_plan_uses_what_both_nodes_measured(
    address: str, penstock: Penstock, tmp_path: Path
) -> None:
    said = profiled("output=calibration.json")
    assert said.returncode == 0, said.stderr
    made = Calibration.read(tmp_path / "calibration.json")
    assert cluster_text(made.cluster) == "joined cluster: 2 nodes x 2 cpu = 4 devices"
    assert made.machine.startswith("2 nodes of 2 x ")
    assert made.notes == ()
    (node,) = made.cluster.node_groups
    assert node.within != made.cluster.between  # each was measured
    planned = penstock(
        *("plan", "algorithm=grpo", "model=tiny", "cluster=measured"),
        *("plan.calibration=calibration.json", "engine=torch", "rollout=same"),
    )
    assert planned.code == 0, planned.err
    assert "joined cluster: 2 nodes x 2 cpu = 4 devices" in planned.out
    assert "penstock profile, 2 nodes of 2 x " in planned.out
    words = ("run", "--dry-run", "executor=ray", "executor.device=cpu")
    started = penstock(*words, "calibration=calibration.json")
    assert started.code == 0, started.err
    assert "penstock profile, 2 nodes of 2 x " in started.out


@pytest.mark.slow
def test_a_rank_that_does_not_end_in_time(address: str) -> None:
    with pytest.raises(WorkerError) as caught:
        joined_ranks(EXECUTORS[PARALLEL_EXECUTOR], [request(deadline_s=0.05)], [{}])
    assert str(caught.value) == (
        "rank 0 of the profile did not end within 0.05 s; give it longer: deadline_s=..."
    )


# --- refusals


def machine(address: str, **total: float) -> Machine:
    return Machine(address, address, total, total)


def test_what_machines_have_not_is_refused() -> None:
    machines = [machine("10.0.0.1", CPU=8.0), machine("10.0.0.2", CPU=1.0)]
    with pytest.raises(ConfigError) as caught:
        seats_on(machines, "cpu", 2)
    assert str(caught.value) == (
        "'num_ranks' is 2, but 10.0.0.2 has 1 CPU\n    it is the number of ranks on each machine"
    )
    with pytest.raises(ConfigError) as caught:
        seats_on(machines, "cuda", None)
    assert str(caught.value) == (
        "'device' is 'cuda', but none of the 2 nodes of the cluster that was joined has a GPU\n"
        "    set device=cpu"
    )


def test_every_machine_with_such_devices_has_ranks() -> None:
    name = {"ray.io/accelerator-type": "H100"}
    eight = Machine("a", "a", {"GPU": 8.0, "CPU": 64.0}, {}, name, ("H100",))
    seats = seats_on([machine("head", CPU=4.0), eight, machine("c", GPU=2.0)], "cuda", None)
    assert [(one.num_ranks, one.num_threads) for one in seats] == [(8, 8), (2, 1)]
    assert [(one.device_name, dict(one.labels)) for one in seats] == [("h100", name), ("", {})]
    assert [one.cores for one in seats] == [64, None]
    cpus = seats_on([machine("a", CPU=32.0), machine("b", CPU=2.0)], "cpu", None)
    assert [(one.num_ranks, one.num_threads) for one in cpus] == [(8, 4), (2, 1)]


def test_an_executor_that_gives_its_processes_to_nobody() -> None:
    kind = ExecutorKind(name="own:EXECUTOR", create=EXECUTORS[DEFAULT_EXECUTOR].create)
    with pytest.raises(ConfigError) as caught:
        joined_ranks(kind, [request()], [{}])
    assert str(caught.value) == (
        "'dispatch' is 'own:EXECUTOR', whose ExecutorKind.connect gives no ProcessBackend\n"
        "    measure with an executor that has one, or this machine alone: dispatch=in_process"
    )


def request(deadline_s: float = 60.0) -> RankRequest:
    return RankRequest(
        rank=0,
        nodes=(0,),
        device="cpu",
        num_threads=1,
        calls=(),
        seconds=1.0,
        deadline_s=deadline_s,
    )


NO_PACKAGE = """
import os, sys
from ray.cluster_utils import Cluster
cluster = Cluster()
cluster.add_node(num_cpus=1, include_dashboard=False, temp_dir=sys.argv[1])
os.environ["PYTHONPATH"] = sys.argv[2]
cluster.add_node(num_cpus=1)
print(cluster.address, flush=True)
sys.stdin.readline()
cluster.shutdown()
"""


@pytest.mark.nightly
def test_a_machine_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "penstock.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'penstock'\", name='penstock')\n"
    )
    with ray_folder() as folder:
        head = subprocess.Popen(
            [sys.executable, "-c", NO_PACKAGE, folder, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert head.stdout is not None
            address = head.stdout.readline().strip()
            said = profiled(RAY_ADDRESS=address)
        finally:
            head.communicate("\n", timeout=60)
    host = address.partition(":")[0]
    assert said.returncode == 1
    assert said.stderr.endswith(
        f"penstock: the machine {host} cannot import what runs there: ModuleNotFoundError: No "
        "module named 'penstock'\n    install the same versions of Penstock and of its "
        "requirements on every machine\n"
    )
