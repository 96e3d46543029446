"""The ranks of `penstock profile` on a cluster that was joined, as processes of an executor.

Each device is set aside and has a process, as in a run; they meet at an address, so machines need
share no folder. What goes wrong on one machine ends all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...configs.references import options_of
from ...dataflow.errors import ConfigError, PenstockError, WorkerError
from ...dataflow.runtime.placement import ClusterNode, DeviceGroup
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
from .local_ranks import too_late
from .rank import ProfileRank, RankRequest, RankResult

_GROUP = "profile"


@dataclass(frozen=True)
class Seats:
    """The ranks of one machine.

    Attributes:
        num_ranks: How many.
        num_threads: Torch threads of each, if the cores are shared out evenly.
        device_name: What an option of `cluster=` calls its GPUs; "" if none does.
        labels: What names its GPUs.
    """

    num_ranks: int
    num_threads: int
    device_name: str
    labels: Mapping[str, str]


def seats_on(machines: Sequence[Machine], device: str, num_ranks: int | None) -> list[Seats]:
    """The ranks of every machine that has such devices.

    Args:
        machines: What the executor reports.
        device: "cpu" or "cuda".
        num_ranks: Of each machine, if that is given.

    Raises:
        ConfigError: If no machine has a device, or one has fewer than were asked for.
    """
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
    """What every rank found, measuring all at once.

    Args:
        kind: Whose processes they are.
        requests: What each is to measure.
        labels: What the machine of each node must be labeled with.

    Raises:
        ConfigError: If the executor gives its processes to nobody else.
        PlanError: If others have the devices.
        WorkerError: If a rank fails or does not end in time; none is left behind.
    """
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
    """What a method of every rank returns; the first that fails speaks for all."""
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
