"""Constants: what is allowed, and what replacing one by a value that is not says."""

from __future__ import annotations

import pytest
from penstock.dataflow.errors import PlanError
from penstock.planner.cost.constants import (
    CPU_DEFAULTS,
    GPU_DEFAULTS,
    default_constants,
)
from penstock.planner.inputs.cluster import ClusterSpec

from .time_cases import mesh

FIELDS = (
    "matmul_efficiency, attention_efficiency, memory_efficiency, read_efficiency, "
    "network_efficiency, launch_s, hop_s, stage_s, call_s, update_s, backward, corrections, source"
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"launch_s": -1},
            "constant launch_s: Input should be greater than or equal to 0 (got -1)",
        ),
        ({"hop_s": float("inf")}, "constant hop_s: Input should be a finite number (got inf)"),
        (
            {"matmul_efficiency": 1.5},
            "constant matmul_efficiency: Input should be less than or equal to 1 (got 1.5)",
        ),
        ({"stages_s": 1e-3}, f"'stages_s' is no constant; there are {FIELDS}"),
    ],
)
def test_a_bad_value_is_named(changes: dict[str, float], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        GPU_DEFAULTS.replaced(**changes)
    assert str(caught.value) == message


def test_good_values_are_replaced() -> None:
    assert GPU_DEFAULTS.replaced(hop_s=1e-6).hop_s == 1e-6


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
