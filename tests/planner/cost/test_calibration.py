"""Constants, measured and fitted, and the file that keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.dataflow.errors import PlanError
from penstock.planner.cost.calibration import (
    CPU_DEFAULTS,
    GPU_DEFAULTS,
    Calibration,
    DtypeConstants,
    MeasuredCall,
    default_constants,
)
from penstock.planner.cost.calibration_fit import Fit, Timed, fit_constants
from penstock.planner.inputs.calls import Call, CallKind
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, Mesh, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape

from ..shapes import model_of
from .time_cases import call as call_of
from .time_cases import call_time, mesh

FIELDS = (
    "matmul_efficiency, attention_efficiency, memory_efficiency, read_efficiency, "
    "network_efficiency, launch_s, hop_s, stage_s, call_s, update_s, "
    "micro_batch_s, generate_s, replay_s, sample_s, backward, corrections, source"
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
def test_a_bad_constant_is_named(changes: dict[str, float], message: str) -> None:
    with pytest.raises(PlanError) as caught:
        GPU_DEFAULTS.replaced(**changes)
    assert str(caught.value) == message


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


WIDTHS = (64, 128, 256)


def cluster(num_devices: int = 2) -> ClusterSpec:
    link = LinkSpec(bytes_per_s=2e9, latency_s=1e-4)
    device = DeviceSpec(
        name="cpu",
        memory_bytes=2**33,
        flops_per_s={"float32": 1e11},
        memory_bytes_per_s=3e10,
        host_bytes_per_s=1e10,
    )
    node = NodeGroup(num_nodes=1, devices_per_node=num_devices, device=device, within=link)
    return ClusterSpec(name="this machine", node_groups=(node,), between=link)


def shape(width: int) -> ModelShape:
    return model_of(
        f"width {width}", width, 4, 4, 4, 3 * width, vocab_size=64, tied_embeddings=True,
        dtype="float32",
    )  # fmt: skip


def call(kind: CallKind, width: int, rows: int, updates: int = 1, tokens: int = 32) -> Call:
    return call_of(
        kind, rows=rows, prompt=tokens, response=tokens, model=shape(width), updates=updates
    )


def calls() -> list[Call]:
    made: list[Call] = []
    for width in WIDTHS:
        made += [call("train", width, 16), call("train", width, 16, updates=4)]
        made += [call("train", width, 4, updates=4), call("train", width, 4, tokens=256)]
        made += [call("forward", width, 16), call("forward", width, 4, tokens=256)]
        made += [call("generate", width, 4), call("generate", width, 64)]
        made += [call("generate", width, 16, tokens=128)]
    return made


def taken_s(
    made: Call, efficiency: float, memory: float, launch_s: float, micro_batch: int = 16
) -> float:
    constants = CPU_DEFAULTS.replaced(
        matmul_efficiency=efficiency,
        attention_efficiency=0.3,
        memory_efficiency=memory,
        read_efficiency=memory / 2,
        launch_s=launch_s,
        update_s=2e-3,
        backward=2.5,
        call_s=0.0,
    )
    mesh = Mesh(cluster(), (1,))
    return call_time(made, Layout(micro_batch=micro_batch), mesh, constants).total_s


def fitted(seconds: list[float]) -> Fit:
    timed = [Timed(made, 16, taken) for made, taken in zip(calls(), seconds, strict=True)]
    return fit_constants(timed, cluster(), CPU_DEFAULTS)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    memory=st.floats(0.05, 0.6),
    launch_s=st.floats(2e-4, 2e-3),
    efficiencies=st.tuples(*[st.floats(0.2, 1.0)] * 3),
)
def test_times_that_follow_the_model_are_met_again(
    memory: float, launch_s: float, efficiencies: tuple[float, float, float]
) -> None:
    by_width: dict[int, float] = dict(zip(WIDTHS, efficiencies, strict=True))
    seconds = [taken_s(c, by_width[c.model.hidden_size], memory, launch_s) for c in calls()]
    for measured, predicted in zip(seconds, fitted(seconds).predicted_s, strict=True):
        assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.slow
def test_the_constants_are_those_that_made_the_times() -> None:
    seconds = [taken_s(c, 0.5, 0.2, 1e-3) for c in calls()]
    fit = fitted(seconds)
    found = fit.found.constants
    assert fit.found.matmul_efficiency == pytest.approx(dict.fromkeys(WIDTHS, 0.5), rel=0.02)
    assert found.attention_efficiency == pytest.approx(0.3, rel=0.02)
    assert found.memory_efficiency == pytest.approx(0.2, rel=0.05)
    assert found.read_efficiency == pytest.approx(0.1, rel=0.05)
    assert found.launch_s == pytest.approx(1e-3, rel=0.02)
    assert found.update_s == pytest.approx(2e-3, rel=0.05)
    assert found.backward == pytest.approx(2.5, rel=0.02)
    assert found.call_s == CPU_DEFAULTS.call_s  # no part of calls that are made directly
    assert found.hop_s == CPU_DEFAULTS.hop_s


@pytest.mark.slow
def test_noise_of_a_fifth_leaves_the_calls_predicted_within_a_fifth() -> None:
    noise = [1.2, 1 / 1.2] * len(calls())
    seconds = [
        taken_s(c, 0.5, 0.2, 1e-3) * factor for c, factor in zip(calls(), noise, strict=False)
    ]
    errors = [abs(p / m - 1) for m, p in zip(seconds, fitted(seconds).predicted_s, strict=True)]
    assert sum(errors) / len(errors) < 0.2


@pytest.mark.slow
def test_efficiencies_stay_within_their_range_whatever_was_measured() -> None:
    fit = fitted([1e-7] * len(calls()))
    assert all(0 < share <= 1 for share in fit.found.matmul_efficiency.values())
    assert 0 < fit.found.constants.memory_efficiency <= 1


# --- the file


def calibration() -> Calibration:
    constants = CPU_DEFAULTS.replaced(matmul_efficiency=0.5, source="measured")
    found = {64: 0.2, 256: 0.6}
    return Calibration(
        cluster=cluster(),
        constants=constants,
        dtypes={"float32": DtypeConstants(constants=constants, matmul_efficiency=found)},
        num_threads=1,
        executor="ray",
        machine="2 x some processor",
        date="2026-11-21",
        calls=(
            MeasuredCall(name="train", width=64, dtype="float32", measured_s=2.0, predicted_s=2.5),
        ),
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(calibration().model_dump_json())
    assert Calibration.read(file) == calibration()
    assert Calibration.read(file).device == "cpu"


@pytest.mark.parametrize(
    ("width", "efficiency"), [(16, 0.2), (64, 0.2), (128, 0.4), (256, 0.6), (1024, 0.6)]
)
def test_the_efficiency_follows_the_width(width: int, efficiency: float) -> None:
    constants = calibration().constants_for([None, shape(width)])
    assert constants.matmul_efficiency == pytest.approx(efficiency)
    assert constants.source == "measured"


def test_the_largest_model_counts() -> None:
    both = calibration().constants_for([shape(256), shape(64), None])
    assert both.matmul_efficiency == 0.6


def test_a_step_without_models_has_the_constants_of_the_middle() -> None:
    assert calibration().constants_for([None]) == calibration().constants


def test_models_unlike_those_that_were_timed_are_said() -> None:
    there = calibration()
    language = shape(256).model_copy(update={"name": "smollm2", "dtype": "bfloat16"})
    assert there.notes_for([shape(64), None]) == ()
    assert there.notes_for([None]) == ()
    assert there.notes_for([shape(64), language]) == (
        "the calibration is of models in float32, and 'smollm2' is in bfloat16; measure such "
        "models too: `penstock profile dtypes=[float32,bfloat16]`",
    )
    assert there.constants_for([language]).matmul_efficiency == 0.6  # those that there are


def test_what_a_run_has_taught_holds_for_every_model() -> None:
    learned = calibration().model_copy(update={"dtypes": {}})
    assert learned.notes_for([shape(64)]) == ()
    assert learned.constants_for([shape(64)]) == learned.constants


def test_the_error_is_that_of_the_calls() -> None:
    assert calibration().calls[0].error == pytest.approx(0.25)
    assert calibration().error == pytest.approx(0.25)


def test_a_missing_file_says_what_writes_one(tmp_path: Path) -> None:
    file = tmp_path / "none.json"
    with pytest.raises(PlanError) as caught:
        Calibration.read(file)
    assert str(caught.value) == (
        f"calibration file {file} does not exist; `penstock profile output={file}` writes one"
    )


_FLOAT32 = calibration().model_dump(mode="json")["dtypes"]["float32"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtypes": {"float32": {**_FLOAT32, "matmul_efficiency": {64: 1.5}}}},
            "dtypes.float32.matmul_efficiency.64: Input should be less than or equal to 1 (got "
            "1.5)",
        ),
        ({"num_threads": 0}, "num_threads: Input should be greater than or equal to 1 (got 0)"),
        ({"speed": 1}, "speed: Extra inputs are not permitted (got 1)"),
    ],
)
def test_a_bad_value_is_named(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({**calibration().model_dump(mode="json"), **changes}))
    with pytest.raises(PlanError) as caught:
        Calibration.read(file)
    assert str(caught.value) == (
        f"calibration file {file}: {message}; `penstock profile output={file}` writes a new one"
    )
