"""A 7B with rows of 16k tokens: what is refused on devices of 80 GB, with which way out."""

from __future__ import annotations

from typing import Any

import pytest
from penstock.algorithms.grpo import GRPO, grpo_step
from penstock.configs.references import option_file
from penstock.dataflow import PlanError, build
from penstock.planner.cost.calibration import GPU_DEFAULTS
from penstock.planner.cost.engine_model import RoleEngines
from penstock.planner.inputs.calls import Lengths, Workload
from penstock.planner.inputs.model_shape import ModelShape, adapter_params, shape_of
from penstock.planner.plan.plan import Plan
from penstock.planner.plan.planner import plan_step
from penstock.planner.search.pins import Pins
from penstock.workers.engines.fsdp_engine.declaration import FSDP
from penstock.workers.engines.vllm_engine.declaration import VLLM

from ..hand_made import h100

QWEN_7B = shape_of(option_file("model", "qwen2.5-7b")["architecture"])
GRAPH = build(grpo_step, cfg=GRPO())


def plan(devices: int, model: ModelShape = QWEN_7B, rows: int = 64, **layout: Any) -> Plan:
    """Of rows of 1k + 15k tokens on so many devices; `layout` is what training must have."""
    return plan_step(
        GRAPH,
        {"actor": model, "reward": None},
        h100(1, devices),
        Workload(
            num_prompts=rows,
            samples_per_prompt=8,
            prompt=Lengths.constant(1024),
            response=Lengths.constant(15 * 1024),
        ),
        max_lag=0,
        constants=GPU_DEFAULTS,
        engines=RoleEngines(FSDP.planned, VLLM.planned),
        pins=Pins(layouts={"actor.train": layout} if layout else {}),
    )


ZERO_3: dict[str, Any] = {"dp": 8, "tp": 1, "zero": 3, "micro_batch": 1}


def test_zero_3_on_eight_devices_without_computing_activations_again() -> None:
    with pytest.raises(PlanError) as refused:
        plan(8, **ZERO_3, checkpointing=False)
    assert str(refused.value) == (
        "'actor' fits nowhere on cluster 'h100'. At best: 'actor' alone on 8 x h100: 122 GiB per "
        "device are needed, 71.7 GiB are there, 50.4 GiB are lacking\n"
        "group 'all' does not fit: during 'actor.train' each of its 8 devices needs 122 GiB, but "
        "roles can use 71.7 GiB; 50.4 GiB (54121240448 bytes) are missing. The largest part is "
        "activations, 96.3 GiB\n"
        "group                           weights  gradients  optimizer  activations    logits  "
        "kv cache     total\n"
        "all x8  always: actor          1.77 GiB   3.55 GiB   10.6 GiB            -         -  "
        "       -  16.0 GiB\n"
        "        while: actor.generate  3.55 GiB          -          -      334 MiB  11.6 MiB  "
        "7.00 GiB  10.9 GiB\n"
        "        while: actor.train     2.90 GiB   2.32 GiB          -     96.3 GiB  4.64 GiB  "
        "       -   106 GiB\n"
        "        peak                   4.67 GiB   5.86 GiB   10.6 GiB     96.3 GiB  4.64 GiB  "
        "       -   122 GiB\n"
        "the cheapest change that makes it fit: plan.pins.layouts.actor.train.checkpointing=true "
        "(now false)"
    )


def test_zero_3_on_eight_devices_fits_with_activations_computed_again() -> None:
    made = plan(8, **ZERO_3, checkpointing=True)
    assert made.prediction is not None
    (memory,) = made.prediction.memory.values()
    held = memory.resident_total_bytes + sum(memory.transient_bytes["actor.train"].values())
    assert held == pytest.approx(31e9, rel=0.05)


def test_whoever_pins_nothing_gets_what_fits() -> None:
    layout = plan(8).layouts["actor.train"]
    assert layout.checkpointing or layout.tp > 1


@pytest.mark.parametrize("layout", [{}, {"checkpointing": True}])
def test_one_device_is_refused_whatever_is_computed_again(layout: dict[str, Any]) -> None:
    with pytest.raises(PlanError) as refused:
        plan(1, rows=1, **layout)
    lines = str(refused.value).splitlines()
    assert lines[0].startswith(
        "'actor' fits nowhere on cluster 'h100'. At best: 'actor' alone on 1 x h100: 135 GiB per "
        "device are needed, 71.7 GiB are there, 63.7 GiB are lacking"
    )
    assert lines[-1] == (
        "the cheapest change that makes it fit: cluster.devices_per_node=3 (now 1); or "
        "model.lora.rank=16, which trains adapters"
    )


def test_one_device_has_room_for_adapters() -> None:
    model = QWEN_7B.model_copy(update={"adapter_params": adapter_params(QWEN_7B, 16)})
    made = plan(1, model, rows=1)
    assert made.prediction is not None
    assert made.prediction.memory


def test_what_is_suggested_is_accepted() -> None:
    assert plan(3, rows=1).prediction is not None
