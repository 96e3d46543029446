"""Constants: what is allowed, and what a calibration file that is not says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from penstock.dataflow.errors import PlanError
from penstock.planner.cost.constants import (
    CPU_DEFAULTS,
    GPU_DEFAULTS,
    PUBLISHED_H100,
    Constants,
    default_constants,
)
from penstock.planner.inputs.cluster import ClusterSpec

from .time_cases import mesh

FIELDS = (
    "matmul_efficiency, memory_efficiency, network_efficiency, launch_s, hop_s, stage_s, call_s, "
    "source"
)


@pytest.mark.parametrize("constants", [CPU_DEFAULTS, GPU_DEFAULTS, PUBLISHED_H100])
def test_what_is_written_is_read_back(constants: Constants, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    constants.write(file)
    assert Constants.read(file) == constants


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"launch_s": -1}, "launch_s: Input should be greater than or equal to 0 (got -1)"),
        ({"hop_s": float("inf")}, "hop_s: Input should be a finite number (got inf)"),
        (
            {"matmul_efficiency": 1.5},
            "matmul_efficiency: Input should be less than or equal to 1 (got 1.5)",
        ),
        ({"call_s": None}, f"'call_s' is missing; there must be {FIELDS}"),
        ({"stages_s": 1e-3}, f"'stages_s' is no constant; there are {FIELDS}"),
    ],
)
def test_a_bad_value_is_named(changes: dict[str, float], message: str, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    values = {**GPU_DEFAULTS.model_dump(), **changes}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    with pytest.raises(PlanError) as caught:
        Constants.read(file)
    assert str(caught.value) == f"calibration file {file}: {message}"


def test_a_missing_file_and_one_that_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "none.json"
    with pytest.raises(PlanError) as caught:
        Constants.read(file)
    assert str(caught.value) == (
        f"calibration file {file} does not exist; `penstock profile` writes one"
    )
    file.write_text("fast")
    with pytest.raises(PlanError, match="the file: Invalid JSON"):
        Constants.read(file)


def test_replacing_checks_too() -> None:
    assert GPU_DEFAULTS.replaced(hop_s=1e-6).hop_s == 1e-6
    with pytest.raises(PlanError) as caught:
        GPU_DEFAULTS.replaced(network_efficiency=0.0)
    assert str(caught.value) == (
        "constants: network_efficiency: Input should be greater than 0 (got 0.0)"
    )


def test_a_cluster_with_cpus_gets_theirs() -> None:
    gpus = mesh(8).cluster
    group = gpus.node_groups[0]
    device = group.device.model_copy(update={"name": "cpu"})
    mixed = ClusterSpec(
        name="mixed",
        node_groups=(group, group.model_copy(update={"device": device})),
        between=gpus.between,
    )
    assert default_constants(gpus) is GPU_DEFAULTS
    assert default_constants(mixed) is CPU_DEFAULTS
