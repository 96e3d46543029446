"""`penstock profile`: real measurements at tiny sizes, of which nothing is asked but sense."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.configs.references import option_file
from penstock.configs.schema import ProfileConfig
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.worker_protocol import drain_metrics
from penstock.launch.profile.profile import (
    MeasuredNode,
    alike,
    calibration_text,
    call_seconds,
    machine_text,
    measured_cluster,
    profile,
)
from penstock.launch.profile.rank import (
    LinkTimes,
    ProfileCall,
    RankResult,
    Together,
    across_nodes,
    architecture,
    calls_of_width,
    link_constants,
    link_of,
    make_policy,
    within_nodes,
)
from penstock.planner.cost.calibration import CPU_DEFAULTS, GPU_DEFAULTS, Calibration, Constants
from penstock.planner.cost.calibration_fit import Timed, fit_constants
from penstock.planner.cost.time_model import TimeModel
from penstock.planner.cost.time_parts import all_reduce_s, links_of
from penstock.planner.inputs.calls import Call, Lengths
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, Mesh, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import shape_of
from penstock.workers.engines.registry import DEFAULT

from ..conftest import Penstock

LINK = LinkSpec(bytes_per_s=4.5e11, latency_s=5e-6)
QUICK = ("widths=[16]", "rows=2", "seconds=0.001")


@pytest.mark.slow
def test_one_file_says_all_a_plan_needs(penstock: Penstock, tmp_path: Path) -> None:
    like = "dtypes=[bfloat16,float32]"
    said = penstock("profile", *QUICK, like, "num_ranks=2", "dispatch=in_process")
    assert said.code == 0, said.err
    calibration = Calibration.read(tmp_path / "runs" / "calibration.json")
    node = calibration.cluster.node_groups[0]
    assert (node.devices_per_node, node.device.name) == (2, "cpu")
    assert set(node.device.flops_per_s) == {"float32", "bfloat16"}
    assert list(calibration.dtypes) == ["bfloat16", "float32"]
    assert list(calibration.dtypes["float32"].matmul_efficiency) == [16]
    assert calibration.constants == calibration.dtypes["bfloat16"].constants
    assert calibration.constants.source.startswith("penstock profile, 2 x ")
    assert calibration.constants.call_s > 0
    assert [call.width for call in calibration.calls] == [16] * 16
    assert [call.dtype for call in calibration.calls] == ["bfloat16"] * 8 + ["float32"] * 8
    assert calibration.notes == ()
    assert calibration_text(calibration) in said.out
    assert "wrote runs/calibration.json after " in said.out


@pytest.mark.nightly
def test_a_single_rank_has_no_links_to_measure() -> None:
    config = ProfileConfig(
        widths=[16, 32],
        dtypes=["float32"],
        rows=1,
        seconds=1e-3,
        num_ranks=1,
        dispatch="in_process",
    )
    made = profile(config)
    assert made.notes == ("links: analytic defaults, because there is one rank only",)
    assert list(made.dtypes["float32"].matmul_efficiency) == [16, 32]
    assert made.constants.network_efficiency == CPU_DEFAULTS.network_efficiency


@pytest.mark.slow
def test_ranks_that_do_not_end_in_time_are_ended() -> None:
    with pytest.raises(WorkerError, match=r"rank 0 of the profile did not end within 0\.1 s"):
        profile(ProfileConfig(num_ranks=1, dispatch="in_process", deadline_s=0.1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_there_must_be_a_device() -> None:
    with pytest.raises(ConfigError) as caught:
        profile(ProfileConfig(device="cuda", num_ranks=1))
    assert str(caught.value) == (
        "'device' is 'cuda', but torch finds no CUDA device here\n    set device=cpu"
    )


def test_the_output_must_be_a_file(penstock: Penstock, tmp_path: Path) -> None:
    said = penstock("profile", f"output={tmp_path}")
    assert (said.code, said.err) == (
        2,
        f"penstock: 'output': '{tmp_path}' is a folder; give the name of a file\n",
    )


def test_a_key_that_does_not_exist(penstock: Penstock) -> None:
    said = penstock("profile", "rowz=3")
    assert said.code == 2
    assert said.err.startswith("penstock: there is no key 'rowz'; did you mean 'rows'?\n")


# --- parts


def test_what_is_timed_is_what_the_planner_is_asked_about() -> None:
    calls = calls_of_width(64, 16, "float32")
    assert [call.name for call in calls] == [
        "train 48 x 64 tokens",
        "train 16 x 64 tokens, 4 updates",
        "train 4 x 64 tokens, 4 updates",
        "train 4 x 192 tokens",
        "forward 48 x 64 tokens",
        "generate 16 x 64 tokens",
        "generate 16 x 192 tokens",
        "generate 64 x 64 tokens",
    ]
    timed = calls[1].timed(0.5)
    assert (timed.call.updates, timed.call.num_sequences, timed.measured_s) == (4, 16, 0.5)
    assert timed.call.model == shape_of(architecture(64), name="width 64", dtype="float32")


def test_the_models_that_are_timed_have_the_dtype_asked_for() -> None:
    call = calls_of_width(16, 4, "bfloat16")[0]
    assert call.timed(0.5).call.model.dtype == "bfloat16"
    policy = make_policy(call, "cpu")
    call.prepared(policy)()


def test_micro_batches_hold_no_more_tokens_than_a_worker_computes_at_once() -> None:
    many = ProfileCall(kind="forward", width=64, rows=1000, dtype="float32").timed(1.0)
    few = ProfileCall(kind="forward", width=64, rows=8, dtype="float32").timed(1.0)
    assert (many.micro_batch, few.micro_batch) == (64, 8)


GPU = DeviceSpec(
    name="a GPU",
    memory_bytes=150 * 10**9,
    flops_per_s={"bfloat16": 7.5e14},
    memory_bytes_per_s=4e12,
    host_bytes_per_s=5e10,
)
LARGE = shape_of(
    option_file("model", "qwen2.5-1.5b")["architecture"], name="1.5B", dtype="bfloat16"
)


def gpu_calls() -> list[ProfileCall]:
    widths = (1024, 1536, 2048)
    return [c for w in widths for c in calls_of_width(w, 16, "bfloat16", "cuda", deep=w == 1536)]


def test_large_calls_of_a_gpu_fill_the_micro_batches_of_a_run() -> None:
    most = max(DEFAULT.planned.packs_on_device(LARGE))
    fills = {call.name: call.timed(1.0) for call in gpu_calls() if call.rows >= 16}
    for timed in fills.values():
        if timed.call.kind != "generate":
            assert timed.micro_batch * timed.call.tokens_mean == most
    deep = [call.timed(1.0).call.model for call in gpu_calls() if call.layers == 12]
    assert {(shape.num_layers, shape.hidden_size) for shape in deep} == {(12, 1536)}
    assert (deep[0].num_heads, deep[0].num_key_heads, deep[0].head_dim) == (12, 3, 128)


@pytest.mark.slow
def test_every_call_of_a_gpu_runs() -> None:
    for call in calls_of_width(16, 1, "float32", "cuda", deep=True):
        if call.layers > 4 or call.kind != "generate":
            call.prepared(make_policy(call, "cpu"))()


def gpu_constants(width: int, changes: Mapping[str, float]) -> Constants:
    """A device whose products are better the wider they are, as slow to begin with as real ones."""
    usual = {
        "matmul_efficiency": 0.5 if width < 1536 else 0.6,
        "attention_efficiency": 0.35,
        "memory_efficiency": 0.7,
        "read_efficiency": 0.65,
        "launch_s": 1e-3,
        "update_s": 2e-2,
        "micro_batch_s": 8e-3,
        "generate_s": 2e-2,
        "replay_s": 4e-5,
        "sample_s": 2.5e-4,
        "backward": 2.2,
        "call_s": 0.0,
    }
    return GPU_DEFAULTS.replaced(**{**usual, **changes})


def errors_of_a_step(changes: Mapping[str, float], noise: float) -> list[float]:
    """Of a train and a generate call of a 1.5B, by constants that are fitted to a profile."""
    node = NodeGroup(num_nodes=1, devices_per_node=1, device=GPU, within=LINK)
    cluster = ClusterSpec(name="here", node_groups=(node,), between=LINK)
    mesh, random = Mesh(cluster, (1,)), Random(0)

    def seconds(constants: Constants, timed: Timed) -> float:
        layout = Layout(micro_batch=timed.micro_batch)
        return TimeModel(constants, DEFAULT.planned).call_time(timed.call, layout, mesh).total_s

    calls = [call.timed(1.0) for call in gpu_calls()]
    taken = [seconds(gpu_constants(t.width, changes), t) * (1 + random.gauss(0, noise))
             for t in calls]  # fmt: skip
    measured = [replace(t, measured_s=s) for t, s in zip(calls, taken, strict=True)]
    fit = fit_constants(measured, cluster, GPU_DEFAULTS, DEFAULT.planned)
    found = fit.found.at(1536).replaced(call_s=0.0)
    errors: list[float] = []
    for kind in ("train", "generate"):
        step = Timed(
            Call(name="", role="", kind=kind, model=LARGE, head="vocabulary", trained=True,
                 num_sequences=128, prompt=Lengths.constant(300), response=Lengths.constant(256)),
            micro_batch=29,
            measured_s=1.0,
        )  # fmt: skip
        errors.append(seconds(found, step) / seconds(gpu_constants(1536, changes), step) - 1)
    return errors


@settings(max_examples=5, deadline=None)
@given(
    launch_s=st.floats(1e-4, 2e-3),
    read=st.floats(0.3, 0.9),
    matmul=st.floats(0.3, 0.8),
    replay_s=st.floats(1e-5, 2e-4),
    generate_s=st.floats(5e-3, 6e-2),
)
def test_host_and_device_of_a_gpu_are_told_apart(
    launch_s: float, read: float, matmul: float, replay_s: float, generate_s: float
) -> None:
    changes = {"launch_s": launch_s, "read_efficiency": read, "matmul_efficiency": matmul,
               "replay_s": replay_s, "generate_s": generate_s}  # fmt: skip
    assert errors_of_a_step(changes, noise=0.0) == pytest.approx([0, 0], abs=0.05)


def test_noise_leaves_a_step_of_a_gpu_within_its_goal() -> None:
    assert errors_of_a_step({}, noise=0.05) == pytest.approx([0, 0], abs=0.15)


def test_responses_have_their_full_length() -> None:
    call = ProfileCall(kind="generate", width=16, rows=8, dtype="float32")
    policy = make_policy(call, "cpu")
    call.prepared(policy)()
    length = drain_metrics(policy)["response_length_min"]
    assert length.value == 48


def test_something_is_repeated_for_as_long_as_asked() -> None:
    done: list[None] = []
    together = Together(1, "cpu", seconds=1e-9)
    assert together.median_s(lambda: done.append(None)) > 0
    assert len(done) == 1 + 2  # once to warm up, then at least twice


def test_a_call_costs_something() -> None:
    assert call_seconds(InProcess(), num_steps=3) > 0


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_links_predict_the_sums_they_were_found_from(num_ranks: int) -> None:
    times = LinkTimes(
        num_ranks=num_ranks,
        long_bytes=2**24,
        short_message_s=1e-4,
        long_message_s=1.1e-2,
        short_sum_s=3e-3,
        long_sum_s=5e-2,
    )
    link, constants = link_constants(times, CPU_DEFAULTS)
    made = links_of(_mesh(num_ranks, link), constants)
    assert all_reduce_s(made, 0, num_ranks) == pytest.approx(times.short_sum_s)
    assert all_reduce_s(made, times.long_bytes, num_ranks) == pytest.approx(times.long_sum_s)
    assert link.latency_s == 1e-4


def test_sums_that_are_faster_than_messages_set_the_link() -> None:
    times = LinkTimes(
        num_ranks=2,
        long_bytes=2**24,
        short_message_s=1e-3,
        long_message_s=1.0,
        short_sum_s=1e-4,
        long_sum_s=1e-2,
    )
    link, constants = link_constants(times, CPU_DEFAULTS)
    assert constants.network_efficiency == 1.0
    assert constants.hop_s == 0.0
    assert link.bytes_per_s == pytest.approx(2**24 / 9.9e-3)


def test_the_link_between_nodes_predicts_the_sums_it_was_found_from() -> None:
    """With the constants of the link within: there is one share, and one software, for both."""
    within, constants = link_constants(WITHIN, CPU_DEFAULTS)
    between = link_of(BETWEEN, constants)
    made = links_of(_mesh(3, within), constants)._replace(
        within_bytes_per_s=between.bytes_per_s * constants.network_efficiency,
        within_hop_s=between.latency_s + constants.hop_s,
    )
    assert all_reduce_s(made, 0, 3) == pytest.approx(BETWEEN.short_sum_s)
    assert all_reduce_s(made, BETWEEN.long_bytes, 3) == pytest.approx(BETWEEN.long_sum_s)


def test_ranks_of_a_node_and_ranks_across_nodes() -> None:
    assert within_nodes((0, 0, 1, 1, 1)) == [[0, 1], [2, 3, 4]]
    assert across_nodes((0, 0, 1, 1, 1)) == [[0, 2], [1, 3], [4]]
    assert across_nodes((0, 0)) == [[0], [1]]


WITHIN = LinkTimes(
    num_ranks=2,
    long_bytes=2**24,
    short_message_s=1e-4,
    long_message_s=1.1e-2,
    short_sum_s=3e-3,
    long_sum_s=5e-2,
)
BETWEEN = WITHIN.model_copy(update={"num_ranks": 3, "short_sum_s": 9e-3, "long_sum_s": 2e-1})


def found(name: str, speed: float, within: LinkTimes | None = WITHIN) -> RankResult:
    return RankResult(
        device_name=name,
        memory_bytes=80 * 10**9,
        reserved_bytes=10**9,
        flops_per_s={"bfloat16": speed},
        memory_bytes_per_s=speed,
        host_bytes_per_s=speed,
        within=within,
        between=BETWEEN,
        calls_s=(),
    )


def test_nodes_with_other_devices_are_groups_of_their_own() -> None:
    fast = [
        MeasuredNode([found("H100", s), found("H100", 9.0)], "h100", cores=n)
        for s, n in ((5.0, 64), (4.0, 32))
    ]
    slow = MeasuredNode([found("A100", 2.0), found("A100", 2.0)], labels={"rack": "b"})
    kinds = alike([fast[0], slow, fast[1]])
    notes: list[str] = []
    cluster, constants = measured_cluster("joined cluster", "cuda", kinds, notes)
    assert machine_text(kinds) == "2 nodes of 2 x H100 + 1 node of 2 x A100"
    first, second = cluster.node_groups
    assert (first.num_nodes, first.devices_per_node, first.device.name) == (2, 2, "h100")
    assert (second.num_nodes, second.device.name, dict(second.labels)) == (1, "A100", {"rack": "b"})
    assert (first.cores_per_node, second.cores_per_node) == (32, None)
    assert first.device.flops_per_s == {"bfloat16": 4.0}  # of the slowest
    assert first.within == second.within == link_constants(WITHIN, constants)[0]
    assert cluster.between == link_of(BETWEEN, constants)
    assert notes == [
        "calls: of the h100 of the first kind of node; devices of other kinds are taken to reach "
        "the same shares of their peaks"
    ]


def test_nodes_of_one_device_have_the_link_between_them_alone() -> None:
    nodes = [MeasuredNode([found("H100", 1.0, within=None)]) for _ in range(3)]
    notes: list[str] = []
    cluster, constants = measured_cluster("joined cluster", "cuda", alike(nodes), notes)
    assert (cluster.between, constants) == link_constants(BETWEEN, GPU_DEFAULTS)
    assert notes == []


def test_a_cluster_where_nobody_answers(
    penstock: Penstock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    said = penstock("profile")
    assert said.code == 2
    assert said.err == (
        "penstock: RAY_ADDRESS is 127.0.0.1:9, where nothing answers: [Errno 111] Connection "
        "refused\n    start Ray there with `ray start --head`, or unset RAY_ADDRESS to start one "
        "on this machine\n"
    )


def _mesh(num_devices: int, link: object) -> Mesh:
    from ...planner.cost.test_calibration import cluster

    made = cluster(num_devices)
    node = made.node_groups[0].model_copy(update={"within": link})
    return Mesh(made.model_copy(update={"node_groups": (node,)}), (num_devices,))


@pytest.mark.slow
def test_a_rank_s_own_children_hold_up_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that it leaves behind keeps its pipe open."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])\n"
        "time.sleep(60)\n"
    )
    start = subprocess.Popen

    def started(command: list[str], **options: object) -> subprocess.Popen[str]:
        del command
        return start([sys.executable, str(script)], **options)  # pyright: ignore[reportArgumentType,reportCallIssue]

    monkeypatch.setattr(subprocess, "Popen", started)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 0 of the profile did not end within 3 s"):
        profile(ProfileConfig(num_ranks=1, dispatch="in_process", deadline_s=3))
    assert time.monotonic() - began < 15
