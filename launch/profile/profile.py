"""Measuring what a plan needs to know of this machine, or of a cluster that was joined.

Every rank that a run would have is started as a process of its own, and all of them measure at the
same time: peaks, copies, links, and real calls of our engine at several widths. From the calls the
constants of the model of time are found. It takes one to three minutes; a machine that does other
work meanwhile is measured with what is left of it.

Ranks of this machine meet in a folder. On a cluster they are processes of an executor: each device
is set aside and has a process, as in a run, and they meet at an address, so machines need share no
folder. What goes wrong on one machine ends all of them.

The cost of a call besides its work is measured with a step whose nodes do nothing: each hands a
column on to the next, so a step takes as long as its calls cost.
"""

from __future__ import annotations

import datetime
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...algorithms.roles.language_tables import Prompts, PromptTokenIds
from ...configs.references import option_file, options_of
from ...configs.schema import ProfileConfig
from ...dataflow.errors import ConfigError, PenstockError, WorkerError
from ...dataflow.graph.tracer import build, op
from ...dataflow.runtime.engine import Engine
from ...dataflow.runtime.executor import Executor
from ...dataflow.runtime.placement import ClusterNode, DeviceGroup, one_group
from ...dataflow.runtime.worker_protocol import CLOSE_S
from ...planner.cost.calibration import (
    CPU_DEFAULTS,
    GPU_DEFAULTS,
    Calibration,
    Constants,
    DtypeConstants,
    MeasuredCall,
)
from ...planner.cost.calibration_fit import fit_constants
from ...planner.formatting import aligned, bytes_text, percent_text, seconds_text
from ...planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from ...workers.engines.registry import DEFAULT
from ...workers.executors.assignment import Machine
from ...workers.executors.process_backend import (
    BackendError,
    CallFailed,
    Process,
    ProcessBackend,
    Ref,
)
from ...workers.executors.registry import DEFAULT_EXECUTOR, EXECUTORS, ExecutorKind
from ...workers.weight_sync.channel import DEFAULT_TRANSPORT
from ..inputs.run import executor_kind
from ..placement.machine import (
    ALIKE,
    default_ranks,
    has_fast_bfloat16,
    labels_of,
    most_ranks,
    num_cores,
    option_of,
    threads_of,
)
from .rank import (
    LinkTimes,
    ProfileCall,
    ProfileRank,
    RankRequest,
    RankResult,
    answer_file,
    calls_of_width,
    link_constants,
    link_of,
)

_WIDTHS = {"cpu": (64, 128, 256, 512), "cuda": (512, 1024, 2048, 4096)}


def profile(config: ProfileConfig) -> Calibration:
    """Measure the cluster that the executor has joined, or else this machine."""
    kind = executor_kind(config.dispatch, "dispatch")  # refused before anything is measured
    widths = sorted(set(config.widths or _WIDTHS[config.device]))
    dtypes = ["bfloat16"]
    if config.device == "cpu":
        dtypes = ["float32", *(dtypes if has_fast_bfloat16(config.device) else ())]
    dtypes = list(dict.fromkeys(config.dtypes or dtypes))
    middle = widths[len(widths) // 2] if config.device == "cuda" else None
    calls = [
        call
        for dtype in dtypes
        for width in widths
        for call in calls_of_width(width, config.rows, dtype, config.device, deep=width == middle)
    ]
    notes: list[str] = []
    machines = kind.machines() if kind.is_installed else ()
    if machines:
        nodes, threads = _on_cluster(config, kind, machines, calls)
    else:
        nodes, threads = _on_this_machine(config, calls)
    kinds = alike(nodes)
    cluster, constants = measured_cluster(
        "joined cluster" if machines else "this machine", config.device, kinds, notes
    )
    if not kind.is_installed:
        notes.append(
            f"calls: measured in one process, because the package {kind.package} is missing"
        )
        kind = EXECUTORS[DEFAULT_EXECUTOR]
    try:
        call_s = call_seconds(kind.make(threads, DEFAULT_TRANSPORT))
    finally:
        kind.end()
    date = datetime.date.today().isoformat()
    machine = f"{machine_text(kinds)}, {threads} thread(s) each"
    constants = constants.replaced(call_s=call_s, source=f"penstock profile, {machine}, {date}")
    ranks = [rank for node in kinds[0] for rank in node.ranks]
    seconds = [max(rank.calls_s[i] for rank in ranks) for i in range(len(calls))]
    found: dict[str, DtypeConstants] = {}
    measured: list[MeasuredCall] = []
    for dtype in dtypes:
        own = [(c, s) for c, s in zip(calls, seconds, strict=True) if c.dtype == dtype]
        fit = fit_constants([c.timed(s) for c, s in own], cluster, constants, DEFAULT.planned)
        found[dtype] = fit.found
        measured += [
            MeasuredCall(
                name=c.name, width=c.width, dtype=dtype, measured_s=s, predicted_s=expected
            )
            for (c, s), expected in zip(own, fit.predicted_s, strict=True)
        ]
    return Calibration(
        cluster=cluster,
        constants=found[dtypes[0]].constants,
        dtypes=found,
        num_threads=threads,
        executor=kind.name,
        machine=machine,
        date=date,
        notes=tuple(notes),
        calls=tuple(measured),
    )


# --- what the measurements say of the cluster


@dataclass(frozen=True)
class MeasuredNode:
    """One machine and what was measured on it."""

    ranks: Sequence[RankResult]  # results of its ranks
    device_name: str = ""  # its GPUs' name in an option of `cluster=`; "" for the maker's name
    # labels that a machine needs to have such devices
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    cores: int | None = None  # processor cores of the machine; None if that is not known

    def is_like(self, other: MeasuredNode) -> bool:
        first, second = self.ranks[0], other.ranks[0]
        low, high = sorted((first.memory_bytes, second.memory_bytes))
        return (
            len(self.ranks) == len(other.ranks)
            and first.device_name == second.device_name
            and self.labels == other.labels
            and high <= ALIKE * low
        )


def alike(nodes: Sequence[MeasuredNode]) -> list[list[MeasuredNode]]:
    kinds: list[list[MeasuredNode]] = []
    for node in nodes:
        same = next((kind for kind in kinds if kind[0].is_like(node)), None)
        if same is None:
            kinds.append([node])
        else:
            same.append(node)
    return kinds


def machine_text(kinds: Sequence[Sequence[MeasuredNode]]) -> str:
    """Describe nodes: "2 nodes of 8 x NVIDIA H100", or the devices alone if there is one node."""
    texts: list[str] = []
    for kind in kinds:
        devices = f"{len(kind[0].ranks)} x {kind[0].ranks[0].device_name}"
        nodes = f"{len(kind)} nodes of " if len(kind) > 1 else "1 node of "
        texts.append(f"{nodes if len(kind) > 1 or len(kinds) > 1 else ''}{devices}")
    return " + ".join(texts)


def measured_cluster(
    name: str, device: str, kinds: Sequence[Sequence[MeasuredNode]], notes: list[str]
) -> tuple[ClusterSpec, Constants]:
    """Return the cluster, and the constants of its links.

    The share of bandwidth that collectives reach is that of the slowest node's link, or of the link
    between nodes if they have one device each.
    """
    constants = CPU_DEFAULTS if device == "cpu" else GPU_DEFAULTS
    ranks_of = [[rank for node in kind for rank in node.ranks] for kind in kinds]
    between = _slowest([rank.between for ranks in ranks_of for rank in ranks])
    decisive = _slowest([rank.within for ranks in ranks_of for rank in ranks]) or between
    preset = LinkSpec.model_validate(
        option_file("cluster", "cpu" if device == "cpu" else "h100")["within"]
    )
    if decisive is None:
        notes.append("links: analytic defaults, because there is one rank only")
        link = preset
    else:
        link, constants = link_constants(decisive, constants)
    groups: list[NodeGroup] = []
    for kind, ranks in zip(kinds, ranks_of, strict=True):
        own = _slowest([rank.within for rank in ranks])
        within = preset
        if own is not None:
            within = link if own is decisive else link_of(own, constants)
        groups.append(
            NodeGroup(
                num_nodes=len(kind),
                devices_per_node=len(kind[0].ranks),
                device=_device(device, kind[0].device_name, ranks),
                within=within,
                cores_per_node=min((node.cores for node in kind if node.cores), default=None),
                labels=kind[0].labels,
            )
        )
    if len(kinds) > 1:
        notes.append(
            f"calls: of the {groups[0].device.name} of the first kind of node; devices of other "
            "kinds are taken to reach the same shares of their peaks"
        )
    network = link if between is None or between is decisive else link_of(between, constants)
    return ClusterSpec(name=name, node_groups=tuple(groups), between=network), constants


def _slowest(times: Sequence[LinkTimes | None]) -> LinkTimes | None:
    found = [one for one in times if one is not None]
    return max(found, key=lambda one: one.long_sum_s, default=None)


def _device(device: str, name: str, ranks: Sequence[RankResult]) -> DeviceSpec:
    return DeviceSpec(
        name="cpu" if device == "cpu" else name or ranks[0].device_name,
        memory_bytes=min(rank.memory_bytes for rank in ranks),
        flops_per_s={
            dtype: min(rank.flops_per_s[dtype] for rank in ranks) for dtype in ranks[0].flops_per_s
        },
        memory_bytes_per_s=min(rank.memory_bytes_per_s for rank in ranks),
        host_bytes_per_s=min(rank.host_bytes_per_s for rank in ranks),
        reserved_bytes=max(rank.reserved_bytes for rank in ranks),
    )


# --- ranks


def _request(
    config: ProfileConfig,
    calls: Sequence[ProfileCall],
    rank: int,
    nodes: tuple[int, ...],
    device: int,
    threads: int,
) -> RankRequest:
    return RankRequest(
        rank=rank,
        nodes=nodes,
        device=f"cuda:{device}" if config.device == "cuda" else "cpu",
        num_threads=threads,
        calls=tuple(calls),
        seconds=config.seconds,
        deadline_s=config.deadline_s,
    )


def _too_late(rank: int, deadline_s: float) -> WorkerError:
    return WorkerError(
        f"rank {rank} of the profile did not end within {deadline_s:g} s; "
        "give it longer: deadline_s=..."
    )


def _on_this_machine(
    config: ProfileConfig, calls: Sequence[ProfileCall]
) -> tuple[list[MeasuredNode], int]:
    num_ranks = config.num_ranks or default_ranks(config.device)
    there = torch.cuda.device_count() if config.device == "cuda" else num_ranks
    if not there:
        raise ConfigError(
            "'device' is 'cuda', but torch finds no CUDA device here\n    set device=cpu"
        )
    if num_ranks > there:
        raise ConfigError(f"'num_ranks' is {num_ranks}, but there are {there} CUDA devices")
    threads, nodes = config.num_threads or threads_of(num_ranks), (0,) * num_ranks
    requests = [_request(config, calls, r, nodes, r, threads) for r in range(num_ranks)]
    with tempfile.TemporaryDirectory(prefix="penstock-profile-") as name:
        _run(requests, name)
        answers = [answer_file(Path(name), rank).read_text() for rank in range(num_ranks)]
    results = [*map(RankResult.model_validate_json, answers)]
    return [MeasuredNode(results, cores=num_cores())], threads


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
                raise _too_late(rank, deadline_s) from None
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


@dataclass(frozen=True)
class Seats:
    """The ranks of one machine."""

    num_ranks: int
    num_threads: int  # torch threads of each, if the cores are shared out evenly
    device_name: str  # what an option of `cluster=` calls its GPUs; "" if none does
    labels: Mapping[str, str]  # what names its GPUs
    cores: int | None  # processor cores of the machine; None if it offers none


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
        cores = int(machine.total.get("CPU", 0))
        threads = max(1, cores // ranks)
        name = option_of(machine, options_of("cluster")) or ""
        found.append(Seats(ranks, threads, name, labels_of(machine), cores or None))
    if not found:
        raise ConfigError(
            f"'device' is '{device}', but none of the {len(machines)} nodes of the cluster that "
            f"was joined has a {resource}\n    set device={'cuda' if device == 'cpu' else 'cpu'}"
        )
    return found


def _on_cluster(
    config: ProfileConfig,
    kind: ExecutorKind,
    machines: Sequence[Machine],
    calls: Sequence[ProfileCall],
) -> tuple[list[MeasuredNode], int]:
    try:
        seats = seats_on(machines, config.device, config.num_ranks)
        threads = config.num_threads or min(seat.num_threads for seat in seats)
        nodes = tuple(number for number, seat in enumerate(seats) for _ in range(seat.num_ranks))
        # Each process sees its own device alone.
        requests = [_request(config, calls, r, nodes, 0, threads) for r in range(len(nodes))]
        found = joined_ranks(kind, requests, [seat.labels for seat in seats])
    except BaseException:
        kind.end()
        raise
    measured: list[MeasuredNode] = []
    for number, seat in enumerate(seats):
        own = [rank for rank, node in zip(found, nodes, strict=True) if node == number]
        measured.append(MeasuredNode(own, seat.device_name, seat.labels, seat.cores))
    return measured, threads


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
    all_devices = tuple(range(len(requests)))
    group = DeviceGroup("profile", len(requests), first.kind, devices=all_devices, nodes=nodes)
    devices = backend.reserve([group], first.deadline_s, {group.name})
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
        devices.release(group.name)


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
            raise _too_late(min(calls.values()), deadline_s)
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


# --- the cost of a call

_CALLS = 8
_ROWS, _TOKENS = 64, 64
_WARM_UP = 3


@op(scope="row")
def hand_on(prompt: PromptTokenIds) -> PromptTokenIds:
    return prompt


def relay_step(prompts: Prompts) -> PromptTokenIds:
    column = prompts.prompt
    for _ in range(_CALLS):
        column = hand_on(column)
    return column


class _Rows:
    def batch(self, step: int) -> Prompts:
        return Prompts(
            prompt=torch.zeros(_ROWS, _TOKENS, dtype=torch.int64), prompt_id=torch.arange(_ROWS)
        )


def call_seconds(executor: Executor, num_steps: int = 20) -> float:
    """Seconds that one call costs on an executor, one rank and nothing else running."""
    graph = build(relay_step, name="relay")
    ends_s: list[float] = []
    with Engine(graph, one_group(graph), workers={}, executor=executor) as engine:
        for _ in engine.run({"prompts": _Rows()}, num_steps + _WARM_UP):
            ends_s.append(time.perf_counter())
    taken = [end - begin for begin, end in zip(ends_s, ends_s[1:], strict=False)]
    return statistics.median(taken[_WARM_UP - 1 :]) / _CALLS


# --- a calibration as text

_MOST_ERROR = 0.2  # mean error over the calls above which a measurement should be repeated


def calibration_text(calibration: Calibration) -> str:
    common = calibration.constants
    calls = [["dtype", "width", "call", "measured", "predicted", "error"]]
    for call in calibration.calls:
        times = seconds_text(call.measured_s), seconds_text(call.predicted_s)
        calls.append([call.dtype, str(call.width), call.name, *times, f"{call.error:+.0%}"])
    tables = [
        aligned([*_device_rows(calibration.cluster)]),
        aligned(_constant_rows(calibration)),
        aligned(
            [
                ["network efficiency", percent_text(common.network_efficiency)],
                ["software's share of a hop", seconds_text(common.hop_s)],
                [f"a call ({calibration.executor.replace('_', ' ')})", seconds_text(common.call_s)],
            ]
        ),
        aligned(calls, (1, 3, 4, 5)),
    ]
    parts = [
        calibration.machine,
        *map("\n".join, tables),
        f"mean error over the calls: {percent_text(calibration.error)}",
        *(f"note: {note}" for note in calibration.notes),
    ]
    if calibration.error > _MOST_ERROR:
        parts.append(
            "warning: the calls are predicted with a mean error above "
            f"{percent_text(_MOST_ERROR)}, so plans will be as far off; the machine may have been "
            "busy: measure again while it does nothing else"
        )
    return "\n\n".join(parts)


def _device_rows(cluster: ClusterSpec) -> Iterator[list[str]]:
    several = sum(node.num_nodes for node in cluster.node_groups) > 1
    for node in cluster.node_groups:
        device = node.device
        if several:
            yield ["nodes", str(node.num_nodes)]
        yield ["devices", str(node.num_devices)]
        yield ["memory of each", bytes_text(device.memory_bytes)]
        yield ["held before any model", bytes_text(device.reserved_bytes)]
        for name, rate in device.flops_per_s.items():
            yield [f"{name} products", _rate(rate, "FLOP")]
        yield ["memory bandwidth", _rate(device.memory_bytes_per_s, "B")]
        yield ["to host memory", _rate(device.host_bytes_per_s, "B")]
        yield from _link_rows("link", node.within)
    if several:
        yield from _link_rows("link between nodes", cluster.between)


def _link_rows(name: str, link: LinkSpec) -> Iterator[list[str]]:
    yield [name, _rate(link.bytes_per_s, "B")]
    yield [f"latency of the {name}", seconds_text(link.latency_s)]


_ON_GPU = (
    ("the host, of a micro-batch besides", "micro_batch_s"),
    ("a generation besides", "generate_s"),
    ("a layer of a replayed step besides", "replay_s"),
    ("a replayed step besides", "sample_s"),
)


def _constant_rows(calibration: Calibration) -> list[list[str]]:
    by_width = [models.matmul_efficiency.items() for models in calibration.dtypes.values()]
    found = [models.constants for models in calibration.dtypes.values()]
    attention = [one.attention_efficiency or one.matmul_efficiency for one in found]
    reads = [one.read_efficiency or one.memory_efficiency for one in found]
    return [
        ["", *calibration.dtypes],
        [
            "matmul efficiency by width",
            *(", ".join(f"{share:.0%} at {width}" for width, share in one) for one in by_width),
        ],
        ["attention efficiency", *map(percent_text, attention)],
        ["memory efficiency", *(percent_text(one.memory_efficiency) for one in found)],
        ["of what products read", *map(percent_text, reads)],
        ["launches of a layer", *(seconds_text(one.launch_s) for one in found)],
        ["a backward pass", *(f"{one.backward:.2g} forward passes" for one in found)],
        ["an optimizer step besides", *(seconds_text(one.update_s) for one in found)],
        *(
            [text, *(seconds_text(getattr(one, name) or 0.0) for one in found)]
            for text, name in _ON_GPU
            if any(one.replay_s is not None for one in found)
        ),
    ]


def _rate(rate: float, unit: str) -> str:
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}{unit}/s"
    return f"{rate:.3g} {unit}/s"
