"""Measuring this machine, for what a plan for it needs.

Every rank that a run would have is started as a process of its own, and all of them measure at the
same time: peaks, copies, links, and real calls of our engine at several widths. From the calls the
constants of the model of time are found. It takes one to two minutes; a machine that does other
work meanwhile is measured with what is left of it.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...dataflow.errors import ConfigError, WorkerError
from ...dataflow.runtime.worker_protocol import CLOSE_S

if TYPE_CHECKING:
    from ...configs.plan_schema import ProfileConfig
    from ...planner.cost.calibration import Calibration
    from ...planner.cost.constants import Constants
    from ...planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec
    from .calls import ProfileCall
    from .rank import RankResult

__all__ = ["profile"]

_WIDTHS = {"cpu": (64, 128, 256, 512), "cuda": (512, 1024, 2048, 4096)}
_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


def profile(config: ProfileConfig) -> Calibration:
    """Measure this machine.

    Raises:
        ConfigError: If there is no such device, or fewer than were asked for.
        WorkerError: If a rank fails or does not end in time.
    """
    from ...planner.cost.calibration import Calibration, MeasuredCall
    from ...planner.cost.calibration_fit import fit_constants
    from ..placement.machine import default_ranks, machine_name, threads_of
    from ..placement.place import executor_kind
    from .calls import calls_of_width

    executor_kind(config.dispatch, "dispatch")  # what is none is refused before it is measured
    num_ranks = config.num_ranks or default_ranks(config.device)
    _check_device(config.device, num_ranks)
    threads = config.num_threads or threads_of(num_ranks)
    widths = sorted(set(config.widths or _WIDTHS[config.device]))
    dtype = config.dtype or _DTYPE[config.device]
    calls = [c for w in widths for c in calls_of_width(w, config.rows, dtype, config.vocab_size)]
    ranks = _measured(config, num_ranks, threads, calls)
    notes: list[str] = []
    cluster, constants = _cluster(config.device, ranks, notes)
    executor, call_s = _call_seconds(config.dispatch, threads, notes)
    date = datetime.date.today().isoformat()
    machine = f"{num_ranks} x {machine_name(config.device)}, {threads} thread(s) each"
    constants = constants.replaced(call_s=call_s, source=f"penstock profile, {machine}, {date}")
    seconds = [max(rank.calls_s[i] for rank in ranks) for i in range(len(calls))]
    timed = [call.timed(taken) for call, taken in zip(calls, seconds, strict=True)]
    fit = fit_constants(timed, cluster, constants)
    return Calibration(
        cluster=cluster,
        constants=fit.constants,
        matmul_efficiency=fit.matmul_efficiency,
        dtype=dtype,
        vocab_size=config.vocab_size,
        num_threads=threads,
        executor=executor,
        machine=machine,
        date=date,
        notes=tuple(notes),
        calls=tuple(
            MeasuredCall(name=call.name, width=call.width, measured_s=taken, predicted_s=predicted)
            for call, taken, predicted in zip(calls, seconds, fit.predicted_s, strict=True)
        ),
    )


def _check_device(device: str, num_ranks: int) -> None:
    if device == "cpu":
        return
    import torch

    there = torch.cuda.device_count()
    if not there:
        raise ConfigError(
            "'device' is 'cuda', but torch finds no CUDA device here\n    set device=cpu"
        )
    if num_ranks > there:
        raise ConfigError(f"'num_ranks' is {num_ranks}, but there are {there} CUDA devices")


# --- ranks


def _measured(
    config: ProfileConfig, num_ranks: int, threads: int, calls: Sequence[ProfileCall]
) -> list[RankResult]:
    """What every rank found, measuring all at once."""
    from .rank import RankRequest, RankResult

    with tempfile.TemporaryDirectory(prefix="penstock-profile-") as folder:
        requests = [
            RankRequest(
                rank=rank,
                num_ranks=num_ranks,
                device=config.device,
                num_threads=threads,
                folder=folder,
                calls=tuple(calls),
                seconds=config.seconds,
                deadline_s=config.deadline_s,
            )
            for rank in range(num_ranks)
        ]
        _run([request.model_dump_json() for request in requests], config.deadline_s, threads)
        return [RankResult.model_validate_json(r.answer.read_text()) for r in requests]


def _run(requests: Sequence[str], deadline_s: float, threads: int) -> None:
    """Start a process for every request and wait for all; none is left behind."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "penstock.launch.profile.rank"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        for _ in requests
    ]
    try:
        for process, request in zip(processes, requests, strict=True):
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.close()
            process.stdin = None
        until_s = time.monotonic() + deadline_s
        for rank, process in enumerate(processes):
            try:
                _, said = process.communicate(timeout=max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise WorkerError(
                    f"rank {rank} of the profile did not end within {deadline_s:g} s; "
                    "give it longer: deadline_s=..."
                ) from None
            if process.returncode:
                last = said.strip().rpartition("\n")[2]
                message = f"rank {rank} of the profile failed: {last}"
                raise WorkerError(message) from RuntimeError(said)  # which --debug shows
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for rank, process in enumerate(processes):
            _reap(rank, process)


def _reap(rank: int, process: subprocess.Popen[str]) -> None:
    """Wait for a process that has ended or was killed, and close its pipes."""
    try:
        # Not communicate: what it started may hold its pipes open for ever.
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired as error:
        raise WorkerError(
            f"rank {rank} of the profile, process {process.pid}, is still there {CLOSE_S:g} s "
            "after it was killed"
        ) from error
    finally:
        for pipe in (process.stdin, process.stderr):
            if pipe is not None:
                pipe.close()


# --- from measurements to data


def _cluster(
    device: str, ranks: Sequence[RankResult], notes: list[str]
) -> tuple[ClusterSpec, Constants]:
    """The machine as a cluster of one node, and the constants of its links."""
    from ...planner.cost.constants import CPU_DEFAULTS, GPU_DEFAULTS
    from ...planner.inputs.cluster import ClusterSpec, NodeGroup

    constants = CPU_DEFAULTS if device == "cpu" else GPU_DEFAULTS
    link, constants = _link(device, ranks, constants, notes)
    node = NodeGroup(
        num_nodes=1, devices_per_node=len(ranks), device=_device(device, ranks), within=link
    )
    return ClusterSpec(name="this machine", node_groups=(node,), between=link), constants


def _device(device: str, ranks: Sequence[RankResult]) -> DeviceSpec:
    """Of several devices the slowest and smallest counts."""
    from ...planner.inputs.cluster import DeviceSpec

    return DeviceSpec(
        name="cpu" if device == "cpu" else ranks[0].device_name,
        memory_bytes=min(rank.memory_bytes for rank in ranks),
        flops_per_s={
            name: min(rank.flops_per_s[name] for rank in ranks) for name in ranks[0].flops_per_s
        },
        memory_bytes_per_s=min(rank.memory_bytes_per_s for rank in ranks),
        host_bytes_per_s=min(rank.host_bytes_per_s for rank in ranks),
        reserved_bytes=max(rank.reserved_bytes for rank in ranks),
    )


def _link(
    device: str, ranks: Sequence[RankResult], constants: Constants, notes: list[str]
) -> tuple[LinkSpec, Constants]:
    from ...configs.references import option_file
    from .links import link_constants

    times = [rank.links for rank in ranks if rank.links is not None]
    if times:
        slowest = max(times, key=lambda one: one.long_sum_s)
        return link_constants(slowest, constants)
    from ...planner.inputs.cluster import LinkSpec

    preset = option_file("cluster", "cpu" if device == "cpu" else "h100")["within"]
    notes.append("links: analytic defaults, because there is one rank only")
    return LinkSpec.model_validate(preset), constants


def _call_seconds(executor: str, threads: int, notes: list[str]) -> tuple[str, float]:
    """With which executor, and what a call costs there."""
    from ...workers.executors.registry import DEFAULT_EXECUTOR
    from ...workers.weight_sync.registry import DEFAULT_TRANSPORT
    from ..placement.place import executor_kind
    from .dispatch import call_seconds

    kind = executor_kind(executor, "dispatch")
    if not kind.is_installed:
        notes.append(
            f"calls: measured in one process, because the package {kind.package} is missing"
        )
        kind = DEFAULT_EXECUTOR
    try:
        return kind.name, call_seconds(kind.make(threads, DEFAULT_TRANSPORT))
    finally:
        kind.end()
