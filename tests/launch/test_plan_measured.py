"""Planning for the machine that `penstock profile` measured."""

from __future__ import annotations

from pathlib import Path

from penstock.planner.calibration import Calibration
from penstock.planner.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from penstock.planner.constants import CPU_DEFAULTS

from .conftest import Penstock


def test_a_measured_cluster_is_planned_for_with_its_own_constants(penstock: Penstock) -> None:
    cluster = ClusterSpec(
        name="here",
        node_groups=(
            NodeGroup(
                num_nodes=1,
                devices_per_node=2,
                device=DeviceSpec(
                    name="cpu",
                    memory_bytes=4 * 10**9,
                    flops_per_s={"float32": 5e10},
                    memory_bytes_per_s=1e10,
                    host_bytes_per_s=1e10,
                ),
                within=LinkSpec(bytes_per_s=1e9, latency_s=1e-4),
            ),
        ),
        between=LinkSpec(bytes_per_s=1e9, latency_s=1e-4),
    )
    Calibration(
        cluster=cluster,
        constants=CPU_DEFAULTS.replaced(source="penstock profile, here"),
        matmul_efficiency={64: 0.25, 256: 0.5},
        num_threads=1,
        executor="in_process",
        machine="here",
        date="2026-11-21",
    ).write(Path("calibration.json"))
    words = ("cluster=measured", "plan.calibration=calibration.json", "plan.engine=torch")
    sizes = ("model=tiny", "model.architecture.vocab_size=20", "workload.prompt=8")
    said = penstock("plan", *words, *sizes, "workload.response=8")
    assert said.code == 0, said.err
    assert said.out.startswith("plan of grpo on here: 1 node x 2 cpu = 2 devices, max_lag 0\n")
    assert "  calibration  penstock profile, here\n" in said.out


def test_a_calibration_file_that_does_not_exist(penstock: Penstock) -> None:
    said = penstock("plan", "plan.calibration=no/such.json")
    assert said.code == 2
    assert said.err == (
        "penstock: calibration file no/such.json does not exist; `penstock profile "
        "output=no/such.json` writes one\n"
    )
