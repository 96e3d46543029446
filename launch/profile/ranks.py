"""The ranks of `penstock profile` as processes of this machine, which meet in a folder.

The ranks of `penstock profile` on a cluster that was joined, as processes of an executor.

Each device is set aside and has a process, as in a run; they meet at an address, so machines need
share no folder. What goes wrong on one machine ends all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configs.references import options_of
from ...dataflow.errors import ConfigError, PenstockError, WorkerError
from ...dataflow.runtime.placement import ClusterNode, DeviceGroup
from ...dataflow.runtime.worker_protocol import CLOSE_S
from ...workers.executors.assignment import Machine
from ...workers.executors.executor_kind import ExecutorKind
from ...workers.executors.process_backend import (
    BackendError,
    CallFailed,
    Process,
    ProcessBackend,
    Ref,
)
from ..placement.machine import labels_of, most_ranks, option_of
from .rank import ProfileRank, RankRequest, RankResult, answer_file


def too_late(rank: int, deadline_s: float) -> WorkerError:
    return WorkerError(
        f"rank {rank} of the profile did not end within {deadline_s:g} s; "
        "give it longer: deadline_s=..."
    )


def local_ranks(requests: Sequence[RankRequest]) -> list[RankResult]:
    with tempfile.TemporaryDirectory(prefix="penstock-profile-") as name:
        _run(requests, name)
        answers = [answer_file(Path(name), request.rank) for request in requests]
        return [RankResult.model_validate_json(answer.read_text()) for answer in answers]


def _run(requests: Sequence[RankRequest], folder: str) -> None:
    deadline_s = requests[0].deadline_s
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "penstock.launch.profile.rank", folder],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(request.num_threads)},
        )
        for request in requests
    ]
    try:
        for process, request in zip(processes, requests, strict=True):
            assert process.stdin is not None
            process.stdin.write(request.model_dump_json())
            process.stdin.close()
            process.stdin = None
        until_s = time.monotonic() + deadline_s
        for rank, process in enumerate(processes):
            try:
                _, said = process.communicate(timeout=max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise too_late(rank, deadline_s) from None
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


_GROUP = "profile"


@dataclass(frozen=True)
class Seats:
    """The ranks of one machine."""

    num_ranks: int
    num_threads: int  # torch threads of each, if the cores are shared out evenly
    device_name: str  # what an option of `cluster=` calls its GPUs; "" if none does
    labels: Mapping[str, str]  # what names its GPUs


def seats_on(machines: Sequence[Machine], device: str, num_ranks: int | None) -> list[Seats]:
    """The ranks of every machine that has such devices."""
    resource = "CPU" if device == "cpu" else "GPU"
    found: list[Seats] = []
    for machine in machines:
        number = int(machine.total.get(resource, 0))
        if not number:
            continue
        if num_ranks is not None and num_ranks > number:
            raise ConfigError(
                f"'num_ranks' is {num_ranks}, but {machine.address} has {number} {resource}"
                f"{'' if number == 1 else 's'}\n    it is the number of ranks on each machine"
            )
        ranks = num_ranks or (most_ranks(number) if device == "cpu" else number)
        threads = max(1, int(machine.total.get("CPU", 0)) // ranks)
        name = option_of(machine, options_of("cluster")) or ""
        found.append(Seats(ranks, threads, name, labels_of(machine)))
    if not found:
        raise ConfigError(
            f"'device' is '{device}', but none of the {len(machines)} nodes of the cluster that "
            f"was joined has a {resource}\n    set device={'cuda' if device == 'cpu' else 'cpu'}"
        )
    return found


def joined_ranks(
    kind: ExecutorKind, requests: Sequence[RankRequest], labels: Sequence[Mapping[str, str]]
) -> list[RankResult]:
    backend = kind.connect()
    if backend is None:
        raise ConfigError(
            f"'dispatch' is '{kind.name}', whose ExecutorKind.connect gives no ProcessBackend\n"
            "    measure with an executor that has one, or this machine alone: dispatch=in_process"
        )
    first = requests[0]
    nodes = tuple(ClusterNode(number, labels[number]) for number in first.nodes)
    device = first.kind
    group = DeviceGroup(
        _GROUP, len(requests), device, devices=tuple(range(len(requests))), nodes=nodes
    )
    devices = backend.reserve([group], first.deadline_s, {_GROUP})
    until_s = time.monotonic() + first.deadline_s
    ranks: list[Process] = []
    try:
        for number, request in enumerate(requests):
            ranks.append(backend.spawn(ProfileRank, (request,), group, number, devices))
        said = _all(backend, ranks, "listen", (), until_s, first.deadline_s)
        return _all(backend, ranks, "measure", (said[0],), until_s, first.deadline_s)
    finally:
        for rank in ranks:
            backend.kill(rank)
        devices.release(_GROUP)


def _all(
    backend: ProcessBackend,
    ranks: Sequence[Process],
    method: str,
    arguments: tuple[Any, ...],
    until_s: float,
    deadline_s: float,
) -> list[Any]:
    calls: dict[Ref, int] = {}
    for number, rank in enumerate(ranks):
        (call,) = backend.call(rank, method, arguments)
        calls[call] = number
    found: dict[int, Any] = {}
    while calls:
        left_s = max(0.1, until_s - time.monotonic())
        ready = backend.watch(list(calls), left_s)
        if not ready:
            raise too_late(min(calls.values()), deadline_s)
        for call in ready:
            number = calls.pop(call)
            try:
                (found[number],) = backend.get([call], left_s)
            except BackendError as error:
                if isinstance(error, CallFailed) and isinstance(error.cause, PenstockError):
                    raise error.cause from error
                last = str(error).strip().rpartition("\n")[2]
                message = f"rank {number} of the profile failed: {last}"
                raise WorkerError(message) from error
    return [found[number] for number in range(len(ranks))]
