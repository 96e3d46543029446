"""The machine this process runs on: its cores, its memory, its name, and what is taken of it.

A device of a plan for a CPU is what one rank has: some cores and its share of the memory.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from ...configs.references import option_file, options_of
from ...configs.schema import ClusterConfig, ExecutorConfig
from ...configs.validate import validated
from ...dataflow.errors import ConfigError, PlanError, nearest
from ...planner.cost.calibration import Calibration, Constants, default_constants
from ...planner.formatting import bytes_text
from ...planner.inputs.calls import CallKind
from ...planner.inputs.cluster import ClusterSpec, LinkSpec, NodeGroup
from ...planner.inputs.model_shape import ModelShape
from ...planner.plan.plan import Plan
from ...workers.executors.assignment import Machine
from ...workers.executors.registry import PARALLEL_EXECUTOR
from ..inputs.run import Run, check_calibration, executor_kind
from ..run_dir.files import optional_field, parse_object, parsed
from ..run_dir.run_folder import RunFolder

# More ranks than this are not started unless they are asked for; each takes memory of its own.
_MOST_RANKS = 8
MEASURED = "measured"  # the cluster that a calibration file describes
CALIBRATION = "calibration.json"  # below the folder of runs: looked for if none is named
ALIKE = 1.1  # how much more memory a node may have than another that is taken for its equal


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def has_fast_bfloat16(device: str) -> bool:
    """Return whether a device computes products of bfloat16 itself, faster than float32's.

    Others compute them in float32 and round, which is slower than float32.
    """
    import torch

    if device.startswith("cuda"):
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    # torch says it of AMD's and Intel's processors nowhere else.
    has_it: Any = torch.cpu
    return bool(has_it._is_avx512_bf16_supported() or has_it._is_amx_tile_supported())


def default_ranks(device: str) -> int:
    """Ranks of this machine: one per CUDA device, or one per core up to eight."""
    if device == "cuda":
        import torch

        return torch.cuda.device_count()
    return most_ranks(num_cores())


def most_ranks(cores: int) -> int:
    """Ranks of a machine with so many cores: one per core up to eight."""
    return min(cores, _MOST_RANKS)


def threads_of(num_ranks: int) -> int:
    """Torch threads of each rank, if the cores are shared out evenly."""
    return max(1, num_cores() // num_ranks)


def machine_name(device: str = "cpu") -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def cpu_node(preset: NodeGroup, cores: int, memory_bytes: int) -> NodeGroup:
    """A node whose cores and memory are shared out evenly, from what `cluster=cpu` says of one."""
    ranks = most_ranks(cores)
    threads = cores // ranks
    device = preset.device.model_copy(
        update={
            "memory_bytes": memory_bytes // ranks,
            "flops_per_s": {k: threads * rate for k, rate in preset.device.flops_per_s.items()},
        }
    )
    own = {"num_nodes": 1, "devices_per_node": ranks, "device": device, "cores_per_node": cores}
    return preset.model_copy(update={**own, "host_bytes": memory_bytes})


def analytic_cpus() -> ClusterSpec:
    """This machine's cores as `cluster=cpu` or `cpu-bf16` describes them: nothing is measured."""
    option = "cpu-bf16" if has_fast_bfloat16("cpu") else "cpu"
    preset = cluster_spec(validated(ClusterConfig, option_file("cluster", option), "cluster"))
    own = cpu_node(preset.node_groups[0], num_cores(), psutil.virtual_memory().total)
    return preset.model_copy(update={"name": "this machine", "node_groups": (own,)})


def named_devices(section: Any) -> Any:
    if not isinstance(section, Mapping):
        return section
    data = _named(section, "cluster")
    groups = data.get("node_groups")
    if isinstance(groups, list):
        data["node_groups"] = [
            _named(group, f"cluster.node_groups.{i}") if isinstance(group, Mapping) else group
            for i, group in enumerate(groups)
        ]
    return data


def _named(section: Mapping[str, Any], at: str) -> dict[str, Any]:
    data = dict(section)
    name = data.get("device")
    if not isinstance(name, str):
        return data
    known = _preset_files()
    if name not in known:
        raise ConfigError(
            f"'{at}.device': there is no device '{name}'{nearest(name, known)}\n"
            f"    known devices are: {', '.join(known)}; for another one give its keys "
            "(name, memory_bytes, flops_per_s, memory_bytes_per_s, host_bytes_per_s)"
        )
    data["device"] = known[name]["device"]
    for key in ("within", "cores_per_node", "host_bytes"):
        data[key] = data.get(key) or known[name].get(key)
    return data


def _preset_files() -> dict[str, dict[str, Any]]:
    return {
        option: section
        for option in options_of("cluster")
        if isinstance((section := option_file("cluster", option)).get("device"), Mapping)
    }


def presets() -> dict[str, ClusterSpec]:
    return {
        option: cluster_spec(validated(ClusterConfig, section, "cluster"))
        for option, section in _preset_files().items()
    }


def cluster_spec(config: ClusterConfig, measured: ClusterSpec | None = None) -> ClusterSpec:
    if config == ClusterConfig(name=MEASURED):
        if measured is None:
            raise ConfigError(
                "'cluster' is 'measured', but no measurement is given\n    give the file that "
                "`penstock profile` wrote: plan.calibration=runs/calibration.json"
            )
        return measured
    if config.node_groups:
        if config.device is not None:
            raise ConfigError(
                "'cluster' has both a device and node_groups\n"
                "    for a mixed cluster give node_groups alone: cluster=mixed is an example"
            )
        groups = tuple(config.node_groups)
    elif config.device is None or config.within is None:
        missing = "device" if config.device is None else "within"
        raise ConfigError(
            f"'cluster.{missing}' is missing\n    choose a cluster (cluster=h100), or describe "
            "one: num_nodes, devices_per_node, device, within and between"
        )
    else:
        groups = (
            NodeGroup(
                num_nodes=config.num_nodes,
                devices_per_node=config.devices_per_node,
                device=config.device,
                within=config.within,
                # Each device of a CPU is a core, unless it is said otherwise.
                cores_per_node=config.cores_per_node
                or (config.devices_per_node if config.device.is_cpu else None),
                host_bytes=config.host_bytes,
            ),
        )
    between = config.between
    if between is None:
        if sum(group.num_nodes for group in groups) > 1:
            raise ConfigError(
                "'cluster.between' is missing, but the cluster has several nodes\n"
                "    say how they are connected: bytes_per_s and latency_s"
            )
        between = groups[0].within  # never used: there is one node
    return ClusterSpec(name=config.name, node_groups=groups, between=between)


def with_cluster(run: Run) -> Run:
    """The run with the cluster that its executor has joined, if it has and a device is known."""
    if run.cluster is not None:
        return run
    machines = executor_kind(run.executor.kind).machines()
    device = run.executor.device.partition(":")[0]
    return replace(run, cluster=reported_cluster(machines, device) if machines else None)


def reported_cluster(machines: Sequence[Machine], device: str) -> ClusterSpec | None:
    """The machines as a cluster; None if what a GPU of them can do is not known.

    Machines without such devices are left out. Neighbors that are equal are one group of nodes,
    also where Ray gives one a little less memory than the other.
    """
    known = presets()
    nodes: list[NodeGroup] = []
    links: list[LinkSpec] = []
    for machine in machines:
        number = int(machine.total.get("CPU" if device == "cpu" else "GPU", 0))
        if not number:
            continue
        name = "cpu" if device == "cpu" else option_of(machine, known)
        if name is None:
            return None
        preset = known[name]
        node = preset.node_groups[0]
        if device == "cpu":
            memory = int(machine.total.get("memory", 0)) or node.device.memory_bytes
            node = cpu_node(node, number, memory)
        else:
            own = {"num_nodes": 1, "devices_per_node": number, "labels": labels_of(machine)}
            own |= {
                "cores_per_node": int(machine.total.get("CPU", 0)) or None,
                "host_bytes": int(machine.total.get("memory", 0)) or None,
            }
            node = node.model_copy(update=own)
        links.append(preset.between)
        if nodes and (one := _smaller(nodes[-1], node)) is not None:
            nodes[-1] = one.model_copy(update={"num_nodes": nodes[-1].num_nodes + 1})
        else:
            nodes.append(node)
    if not nodes:
        return None
    slowest = min(links, key=lambda link: link.bytes_per_s)
    return ClusterSpec(name="joined cluster", node_groups=tuple(nodes), between=slowest)


def _smaller(one: NodeGroup, other: NodeGroup) -> NodeGroup | None:
    low, high = sorted(node.device.memory_bytes for node in (one, other))
    if high > ALIKE * low:
        return None
    least, most = (
        n.model_copy(
            update={
                "num_nodes": 1,
                "device": n.device.model_copy(update={"memory_bytes": low}),
                "host_bytes": min(
                    (s for s in (one.host_bytes, other.host_bytes) if s), default=None
                ),
            }
        )
        for n in (one, other)
    )
    return least if least == most else None


def option_of(machine: Machine, options: Collection[str]) -> str | None:
    """The option of `cluster=` that describes a machine's GPUs, if one does."""
    names = map(str.lower, machine.devices)
    return next((name for name in names if name in options), None)


def labels_of(machine: Machine) -> Mapping[str, str]:
    return {key: value for key, value in machine.labels.items() if value in machine.devices}


def read_calibration(path: Path) -> Calibration:
    """The calibration of a file, or what the run of a folder has measured."""
    if not path.is_dir():
        return Calibration.read(path)
    check_calibration(path)
    folder = RunFolder(path)
    plan = Plan.read(folder.plan)
    prediction, cluster = plan.prediction, plan.cluster
    if prediction is None or prediction.constants is None or not isinstance(cluster, ClusterSpec):
        raise _unusable(path, "its plan predicts nothing", "take a run that the planner has placed")
    measured = parsed(folder.summary, node_seconds_of)
    if measured is None:
        raise _unusable(path, "the run has not ended", "wait for it, or take another")
    constants, logs = prediction.constants, dict[CallKind, list[float]]()
    verifiers = prediction.task.verifiers if prediction.task else {}
    for name, seconds in measured.items():
        if name in verifiers:
            continue  # a task's profile learns from them, not a machine's
        if predicted := prediction.durations_s.get(name):
            method = name.rpartition(".")[2].partition("#")[0]  # `actor.train#2` trains
            kind: CallKind = method if method == "train" or method == "generate" else "forward"
            logs.setdefault(kind, []).append(math.log(seconds / predicted))
    if not logs:
        raise _unusable(path, "no predicted call was measured", "take a run that made a step")
    corrections = dict(constants.corrections)
    for kind, found in logs.items():  # the geometric mean of measured over predicted
        corrections[kind] = corrections.get(kind, 1.0) * math.exp(sum(found) / len(found))
    return Calibration(
        cluster=cluster,
        constants=constants.replaced(corrections=corrections, source=f"learned from {path.name}"),
        num_threads=threads_of(cluster.node_groups[0].devices_per_node),
        executor=PARALLEL_EXECUTOR,
        machine=machine_name(cluster.device_type),
        date=datetime.fromtimestamp(folder.summary.stat().st_mtime, UTC).date().isoformat(),
    )


def node_seconds_of(summary: bytes) -> dict[str, float]:
    """Call -> seconds that its busiest rank worked on it, of a run's summary."""
    nodes = optional_field(parse_object(summary), "nodes", dict) or {}
    found = {name: optional_field(node, "measured_s", float) for name, node in nodes.items()}
    return {name: seconds for name, seconds in found.items() if seconds and seconds > 0}


def _unusable(path: Path, why: str, fix: str) -> PlanError:
    return PlanError(f"calibration {path}: {why}\n    {fix}")


# Words of a device's name that its preset does not depend on.
_FORM = frozenset(["nvidia", "geforce", "sxm", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"])


@dataclass(frozen=True)
class Gpu:
    name: str  # as its driver calls it: "NVIDIA H100 80GB HBM3"
    memory_bytes: int  # all of its memory


def gpus_here() -> list[Gpu]:
    """Return the CUDA devices that this process sees; none without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Gpu(one.name, one.total_memory) for one in found]


def preset_of(name: str, options: Iterable[str]) -> str | None:
    """Return the option of `cluster=` that describes a device, if one does.

    Example:
        >>> preset_of("NVIDIA A100-SXM4-80GB", ["a100-80g", "h100"])
        'a100-80g'
        >>> preset_of("NVIDIA H100 PCIe", ["a100-80g", "h100"])
    """
    words = _words(name) - _FORM
    for option in options:
        own = _words(option)
        # What is left may say how much memory it has, which it reports itself.
        if own <= words and all(re.fullmatch(r"\d+g", word) for word in words - own):
            return option
    return None


def _words(name: str) -> set[str]:
    found = re.findall(r"[a-z0-9.]+", name.lower())
    return {re.sub(r"^(\d+)gb$", r"\1g", word) for word in found}


def said_of(gpus: Iterable[Gpu]) -> str:
    """Describe the devices for people.

    Example:
        >>> said_of([Gpu("NVIDIA H200", 150 * 10**9)] * 8)
        '8 x NVIDIA H200 (140 GiB)'
    """
    counted = Counter(f"{gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in gpus)
    return " and ".join(f"{number} x {text}" for text, number in counted.items())


@dataclass(frozen=True)
class PlannedMachine:
    cluster: ClusterSpec  # its devices
    calibration: Calibration | None  # what was measured of them; None if nothing was
    # what they are taken for, where that was not configured; "" if there is no more to say
    note: str = ""

    def constants(self, models: Mapping[str, ModelShape | None]) -> Constants:
        if self.calibration is None:
            return default_constants(self.cluster)
        return self.calibration.constants_for(models.values())


def planned_machine(run: Run) -> PlannedMachine | str:
    """The machine as measured, or as it is by default; or why nothing can be planned for it."""
    kind, given = run.executor.device.partition(":")[0], run.config.calibration
    if run.cluster is not None and given is None:
        return PlannedMachine(run.cluster, None)
    file = Path(given or Path(run.config.runs) / CALIBRATION)
    if given is not None or file.is_file():
        calibration = read_calibration(file)
        if calibration.device == kind:
            return PlannedMachine(calibration.cluster, calibration)
        if given is not None:
            raise ConfigError(
                f"'calibration': {file} is of '{calibration.device}' devices, but "
                f"'executor.device' is '{run.executor.device}'\n"
                f"    measure them: penstock profile device={kind} output=FILE"
            )
    return PlannedMachine(analytic_cpus(), None) if kind == "cpu" else _gpus(run.executor)


def _gpus(section: ExecutorConfig) -> PlannedMachine | str:
    nodes = [n for n in executor_kind(section.kind).machines() if _num_gpus(n)]
    gpus, known = [] if nodes else gpus_here(), presets()
    options = {preset_of(gpu.name, known) for gpu in gpus}
    option = options.pop() if len(options) == 1 else None
    if option is not None:  # they are equal, and known
        preset = known[option]
        node = preset.node_groups[0]
        # A plan is for equal devices, so the smallest counts.
        memory_bytes = min(gpu.memory_bytes for gpu in gpus)
        device = node.device.model_copy(update={"memory_bytes": memory_bytes})
        own = {"num_nodes": 1, "devices_per_node": len(gpus), "device": device}
        groups = (node.model_copy(update=own),)  # one node, so what is between them is never used
        cluster = ClusterSpec(name="this machine", node_groups=groups, between=preset.between)
        note = f"this machine has {said_of(gpus)}, planned as {device.name}"
        return PlannedMachine(cluster, None, note)
    number = len(gpus) + sum(map(_num_gpus, nodes))
    if not number:
        raise ConfigError(
            f"'executor.device' is '{section.device}' and 'placement' is 'auto', but there is no "
            "CUDA device here to plan for\n    say for which: penstock run --dry-run cluster=h100; "
            "or give a plan: placement=plan.json"
        )
    kinds = dict.fromkeys(", ".join(node.devices) or "GPUs without a name" for node in nodes)
    there = said_of(gpus) or f"{number} x {' and '.join(kinds)}"
    why = f"no option of cluster= describes {there}"
    if number == 1:
        return why
    raise ConfigError(
        f"'placement' is 'auto', but {why}\n    measure them: penstock profile device=cuda; or "
        "take them for others: penstock plan cluster=h100 output=plan.json, and "
        "placement=plan.json; or say yourself what runs where: executor.groups"
    )


def idle_gpus(section: ExecutorConfig) -> str:
    """Describe GPUs that a run in one process leaves idle; "" if there are none."""
    gpus = gpus_here() if section.device == "cuda" else []
    if len(gpus) < 2 or executor_kind(section.kind).has_processes:
        return ""
    return (
        f"placement: one of {said_of(gpus)} is used, because executor={section.kind} is one "
        "process; executor=ray uses them all"
    )


def _num_gpus(node: Machine) -> int:
    return int(node.total.get("GPU", 0))
