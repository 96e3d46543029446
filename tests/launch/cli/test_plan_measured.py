"""Planning for the machine that `penstock profile` measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from penstock.launch.profile.profile import calibration_text
from penstock.planner.cost.calibration import CPU_DEFAULTS, Calibration, MeasuredCall
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup

from ..conftest import Penstock


def measured() -> Calibration:
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
    return Calibration(
        cluster=cluster,
        constants=CPU_DEFAULTS.replaced(source="penstock profile, here"),
        num_threads=1,
        executor="in_process",
        machine="here",
        date="2026-11-21",
    )


def test_a_measured_cluster_is_planned_for_with_its_own_constants(penstock: Penstock) -> None:
    Path("calibration.json").write_text(measured().model_dump_json())
    words = (
        "cluster=measured",
        "plan.calibration=calibration.json",
        "engine=torch",
        "rollout=same",
    )
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


@pytest.mark.parametrize(("off", "warned"), [(0.15, False), (0.25, True)])
def test_a_measurement_that_predicts_badly_should_be_repeated(off: float, warned: bool) -> None:
    calls = (
        MeasuredCall(
            name="train", width=64, dtype="float32", measured_s=1.0, predicted_s=1.0 + off
        ),
        MeasuredCall(
            name="generate", width=64, dtype="float32", measured_s=1.0, predicted_s=1.0 - off
        ),
    )
    text = calibration_text(measured().model_copy(update={"calls": calls}))
    warning = (
        "warning: the calls are predicted with a mean error above 20 %, so plans will be as far "
        "off; the machine may have been busy: measure again while it does nothing else"
    )
    assert (warning in text) == warned
