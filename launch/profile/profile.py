"""Measuring what a plan needs to know of this machine, or of a cluster that was joined.

Every rank that a run would have is started as a process of its own, and all of them measure at the
same time: peaks, copies, links, and real calls of our engine at several widths. From the calls the
constants of the model of time are found. It takes two to three minutes; a machine that does other
work meanwhile is measured with what is left of it.

The cost of a call besides its work is measured with a step whose nodes do nothing: each hands a
column on to the next, so a step takes as long as its calls cost.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ...algorithms.roles.language_tables import Prompts, PromptTokenIds
from ...configs.references import option_file
from ...dataflow.errors import ConfigError
from ...dataflow.graph.tracer import build, op
from ...dataflow.runtime.engine import Engine
from ...dataflow.runtime.executor import Executor
from ...dataflow.runtime.placement import one_group
from ...planner.cost.calibration import CPU_DEFAULTS, GPU_DEFAULTS, Constants
from ...planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from ..placement.machine import ALIKE
from .links import LinkTimes, link_constants, link_of
from .rank import RankResult

if TYPE_CHECKING:
    from ...configs.plan_schema import ProfileConfig
    from ...planner.cost.calibration import Calibration, DtypeConstants, MeasuredCall
    from ...workers.executors.assignment import Machine
    from ...workers.executors.executor_kind import ExecutorKind
    from .calls import ProfileCall


@dataclass(frozen=True)
class MeasuredNode:
    """One machine and what was measured on it."""

    ranks: Sequence[RankResult]  # results of its ranks
    device_name: str = ""  # its GPUs' name in an option of `cluster=`; "" for the maker's name
    # labels that a machine needs to have such devices
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

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
    """Return the nodes, grouped with those that are like them."""
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
    ranks = [rank for kind in kinds for node in kind for rank in node.ranks]
    between = _slowest([rank.between for rank in ranks])
    decisive = _slowest([rank.within for rank in ranks]) or between
    preset = LinkSpec.model_validate(
        option_file("cluster", "cpu" if device == "cpu" else "h100")["within"]
    )
    if decisive is None:
        notes.append("links: analytic defaults, because there is one rank only")
        link = preset
    else:
        link, constants = link_constants(decisive, constants)
    groups = tuple(_group(device, kind, preset, decisive, link, constants) for kind in kinds)
    if len(kinds) > 1:
        notes.append(
            f"calls: of the {groups[0].device.name} of the first kind of node; devices of other "
            "kinds are taken to reach the same shares of their peaks"
        )
    network = link if between is None or between is decisive else link_of(between, constants)
    return ClusterSpec(name=name, node_groups=groups, between=network), constants


def _slowest(times: Sequence[LinkTimes | None]) -> LinkTimes | None:
    found = [one for one in times if one is not None]
    return max(found, key=lambda one: one.long_sum_s, default=None)


def _group(
    device: str,
    kind: Sequence[MeasuredNode],
    preset: LinkSpec,
    decisive: LinkTimes | None,
    link: LinkSpec,
    constants: Constants,
) -> NodeGroup:
    ranks = [rank for node in kind for rank in node.ranks]
    own = _slowest([rank.within for rank in ranks])
    within = link if own is not None and own is decisive else preset
    if own is not None and own is not decisive:
        within = link_of(own, constants)
    return NodeGroup(
        num_nodes=len(kind),
        devices_per_node=len(kind[0].ranks),
        device=_device(device, kind[0].device_name, ranks),
        within=within,
        labels=kind[0].labels,
    )


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


_WIDTHS = {"cpu": (64, 128, 256, 512), "cuda": (512, 1024, 2048, 4096)}


def profile(config: ProfileConfig) -> Calibration:
    """Measure the cluster that the executor has joined, or else this machine."""
    from ...planner.cost.calibration import Calibration
    from ..inputs.run import executor_kind
    from .calls import calls_of_width

    kind = executor_kind(config.dispatch, "dispatch")  # refused before anything is measured
    widths = sorted(set(config.widths or _WIDTHS[config.device]))
    dtypes = list(dict.fromkeys(config.dtypes or _dtypes(config.device)))
    calls = [c for d in dtypes for w in widths for c in calls_of_width(w, config.rows, d)]
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
    executor, call_s = _call_seconds(kind, threads, notes)
    date = datetime.date.today().isoformat()
    machine = f"{machine_text(kinds)}, {threads} thread(s) each"
    constants = constants.replaced(call_s=call_s, source=f"penstock profile, {machine}, {date}")
    ranks = [rank for node in kinds[0] for rank in node.ranks]
    seconds = [max(rank.calls_s[i] for rank in ranks) for i in range(len(calls))]
    found, measured = _fitted(calls, seconds, cluster, constants)
    return Calibration(
        cluster=cluster,
        constants=found[dtypes[0]].constants,
        dtypes=found,
        num_threads=threads,
        executor=executor,
        machine=machine,
        date=date,
        notes=tuple(notes),
        calls=tuple(measured),
    )


def _fitted(
    calls: Sequence[ProfileCall], seconds: Sequence[float], cluster: ClusterSpec, start: Constants
) -> tuple[dict[str, DtypeConstants], list[MeasuredCall]]:
    from ...planner.cost.calibration import MeasuredCall
    from ...planner.cost.calibration_fit import fit_constants
    from ...workers.engines.registry import DEFAULT

    found: dict[str, DtypeConstants] = {}
    measured: list[MeasuredCall] = []
    for dtype in dict.fromkeys(call.dtype for call in calls):
        own = [(c, s) for c, s in zip(calls, seconds, strict=True) if c.dtype == dtype]
        fit = fit_constants([c.timed(s) for c, s in own], cluster, start, DEFAULT.planned)
        found[dtype] = fit.found
        measured += [
            MeasuredCall(
                name=call.name, width=call.width, dtype=dtype, measured_s=s, predicted_s=expected
            )
            for (call, s), expected in zip(own, fit.predicted_s, strict=True)
        ]
    return found, measured


def _dtypes(device: str) -> list[str]:
    from ..placement.machine import has_fast_bfloat16

    if device == "cuda":
        return ["bfloat16"]
    return ["float32", "bfloat16"] if has_fast_bfloat16(device) else ["float32"]


# --- ranks


def _on_this_machine(
    config: ProfileConfig, calls: Sequence[ProfileCall]
) -> tuple[list[MeasuredNode], int]:
    from ..placement.machine import default_ranks, threads_of
    from .rank import RankRequest
    from .ranks import local_ranks

    num_ranks = config.num_ranks or default_ranks(config.device)
    _check_device(config.device, num_ranks)
    threads = config.num_threads or threads_of(num_ranks)
    requests = [
        RankRequest(
            rank=rank,
            nodes=(0,) * num_ranks,
            device=f"cuda:{rank}" if config.device == "cuda" else "cpu",
            num_threads=threads,
            calls=tuple(calls),
            seconds=config.seconds,
            deadline_s=config.deadline_s,
        )
        for rank in range(num_ranks)
    ]
    return [MeasuredNode(local_ranks(requests))], threads


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


def _on_cluster(
    config: ProfileConfig,
    kind: ExecutorKind,
    machines: Sequence[Machine],
    calls: Sequence[ProfileCall],
) -> tuple[list[MeasuredNode], int]:
    from .rank import RankRequest
    from .ranks import joined_ranks, seats_on

    try:
        seats = seats_on(machines, config.device, config.num_ranks)
        threads = config.num_threads or min(seat.num_threads for seat in seats)
        nodes = tuple(number for number, seat in enumerate(seats) for _ in range(seat.num_ranks))
        requests = [
            RankRequest(
                rank=rank,
                nodes=nodes,
                device="cuda:0" if config.device == "cuda" else "cpu",  # each process sees its own
                num_threads=threads,
                calls=tuple(calls),
                seconds=config.seconds,
                deadline_s=config.deadline_s,
            )
            for rank in range(len(nodes))
        ]
        found = joined_ranks(kind, requests, [seat.labels for seat in seats])
    except BaseException:
        kind.end()
        raise
    return [
        MeasuredNode(
            [rank for rank, own in zip(found, nodes, strict=True) if own == number],
            seat.device_name,
            seat.labels,
        )
        for number, seat in enumerate(seats)
    ], threads


def _call_seconds(kind: ExecutorKind, threads: int, notes: list[str]) -> tuple[str, float]:
    from ...workers.executors.registry import DEFAULT_EXECUTOR, EXECUTORS
    from ...workers.weight_sync.registry import DEFAULT_TRANSPORT

    if not kind.is_installed:
        notes.append(
            f"calls: measured in one process, because the package {kind.package} is missing"
        )
        kind = EXECUTORS[DEFAULT_EXECUTOR]
    try:
        return kind.name, call_seconds(kind.make(threads, DEFAULT_TRANSPORT))
    finally:
        kind.end()


_CALLS = 8
_ROWS, _TOKENS = 64, 64
_WARM_UP = 3


@op(scope="row")
def hand_on(prompt: PromptTokenIds) -> PromptTokenIds:
    return prompt


def relay_step(prompts: Prompts) -> PromptTokenIds:
    """Hand the prompts on from node to node."""
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
