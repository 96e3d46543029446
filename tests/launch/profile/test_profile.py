"""`penstock profile`: real measurements at tiny sizes, of which nothing is asked but sense."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from penstock.configs.plan_schema import ProfileConfig
from penstock.dataflow.errors import ConfigError, WorkerError
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.worker_protocol import drain_metrics
from penstock.launch.profile.calls import ProfileCall, architecture, calls_of_width, make_policy
from penstock.launch.profile.dispatch import call_seconds
from penstock.launch.profile.links import LinkTimes, link_constants
from penstock.launch.profile.profile import profile
from penstock.launch.profile.rank import Together
from penstock.launch.profile.show import calibration_text
from penstock.planner.cost.calibration import Calibration
from penstock.planner.cost.collectives import all_reduce_s, links_of
from penstock.planner.cost.constants import CPU_DEFAULTS
from penstock.planner.inputs.mesh import Mesh
from penstock.planner.inputs.model_shape import shape_of

from ..conftest import Penstock

QUICK = ("widths=[16,32]", "rows=4", "seconds=0.001")


@pytest.mark.slow
def test_one_file_says_all_a_plan_needs(penstock: Penstock, tmp_path: Path) -> None:
    like = ("dtype=bfloat16", "vocab_size=100")
    said = penstock("profile", *QUICK, *like, "num_ranks=2", "dispatch=in_process")
    assert said.code == 0, said.err
    calibration = Calibration.read(tmp_path / "runs" / "calibration.json")
    node = calibration.cluster.node_groups[0]
    assert (node.devices_per_node, node.device.name) == (2, "cpu")
    assert set(node.device.flops_per_s) == {"float32", "bfloat16"}
    assert list(calibration.matmul_efficiency) == [16, 32]
    assert calibration.constants.source.startswith("penstock profile, 2 x ")
    assert (calibration.dtype, calibration.vocab_size) == ("bfloat16", 100)
    assert calibration.constants.call_s > 0
    assert [call.width for call in calibration.calls] == [16] * 6 + [32] * 6
    assert calibration.notes == ()
    assert calibration_text(calibration) in said.out
    assert "wrote runs/calibration.json after " in said.out


@pytest.mark.slow
def test_a_single_rank_has_no_links_to_measure() -> None:
    config = ProfileConfig(widths=[16], rows=2, seconds=1e-3, num_ranks=1, dispatch="in_process")
    made = profile(config)
    assert made.notes == ("links: analytic defaults, because there is one rank only",)
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
        "train 16 x 64 tokens",
        "train 16 x 64 tokens, 4 updates",
        "train 4 x 64 tokens, 4 updates",
        "forward 16 x 64 tokens",
        "generate 4 x 64 tokens",
        "generate 64 x 64 tokens",
    ]
    timed = calls[1].timed(0.5)
    assert (timed.call.updates, timed.call.num_sequences, timed.measured_s) == (4, 16, 0.5)
    assert timed.call.model == shape_of(architecture(64), name="width 64", dtype="float32")


def test_the_models_that_are_timed_have_the_dtype_and_words_asked_for() -> None:
    call = calls_of_width(16, 4, "bfloat16", 1000)[0]
    model = call.timed(0.5).call.model
    assert (model.dtype, model.vocab_size) == ("bfloat16", 1000)
    policy = make_policy(call.width, call.dtype, "cpu", call.vocab_size)
    call.prepared(policy)()


def test_micro_batches_hold_no_more_tokens_than_a_worker_computes_at_once() -> None:
    many = ProfileCall(kind="forward", width=64, rows=1000, dtype="float32").timed(1.0)
    few = ProfileCall(kind="forward", width=64, rows=8, dtype="float32").timed(1.0)
    assert (many.micro_batch, few.micro_batch) == (64, 8)


def test_responses_have_their_full_length() -> None:
    policy = make_policy(16, "float32", "cpu")
    ProfileCall(kind="generate", width=16, rows=8, dtype="float32").prepared(policy)()
    length = drain_metrics(policy)["response_length_min"]
    assert length.value == 32


def test_something_is_repeated_for_as_long_as_asked() -> None:
    done: list[None] = []
    together = Together(1, "cpu", seconds=1e-9)
    assert together.median_s(lambda: done.append(None)) > 0
    assert len(done) == 1 + 3  # once to warm up, then at least three times


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


def _mesh(num_devices: int, link: object) -> Mesh:
    from ...planner.cost.test_calibration import cluster

    made = cluster(num_devices)
    node = made.node_groups[0].model_copy(update={"within": link})
    return Mesh(made.model_copy(update={"node_groups": (node,)}), (num_devices,))


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
