"""`placement=auto`: the planner chooses where the main stage's nodes run.

That is on the cluster that the executor has joined or, if it has joined none, on this machine: as
`penstock profile` found it, or by analytic defaults for its cores or its GPUs. Of several
GPUs something must be known, so that they are not left idle for want of it. What is chosen is which
roles share devices, how many, and in which layouts their calls run, of those that the run's engines
run. Calls of one group that need different processes take turns; see `divide.py`. Not all devices
need be used: a step too short to be worth the ranks gets fewer.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm
from pathlib import Path

from ...configs.plan_schema import WorkloadConfig
from ...configs.schema import ExecutorConfig
from ...dataflow.errors import ConfigError, PlanError
from ...dataflow.graph.graph import Graph
from ...planner.cost.calibration import Calibration
from ...planner.cost.constants import Constants, default_constants
from ...planner.formatting import bytes_text, seconds_text
from ...planner.inputs.calls import calls_of
from ...planner.inputs.cluster import ClusterSpec
from ...planner.inputs.cluster_variants import halvings, part
from ...planner.inputs.model_shape import ModelShape
from ...planner.inputs.workload import Workload
from ...planner.plan.plan import Plan, one_group_plan
from ...planner.plan.planner import plan_step
from ...planner.report.plan_texts import placement_text
from ...planner.search.options import Option
from ...planner.search.pins import Pins
from ...workers.executors.assignment import Machine
from ..inputs.compose import PlacementInputs, Resolved
from ..inputs.sizes import train_items
from .cluster_inputs import presets
from .divide import divided
from .learned import read_calibration
from .machine import analytic_cpus
from .place import executor_kind
from .plan_inputs import PlanInputs

_FORM = frozenset(["nvidia", "geforce", "sxm", "sxm4", "sxm5", "hbm2", "hbm2e", "hbm3", "hbm3e"])
"""Words of a device's name that its preset does not depend on."""


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as it reports itself.

    Attributes:
        name: As its driver calls it: "NVIDIA H100 80GB HBM3".
        memory_bytes: All of its memory.
    """

    name: str
    memory_bytes: int


def gpus_here() -> list[Gpu]:
    """Return the CUDA devices that this process sees; none without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [Gpu(one.name, one.total_memory) for one in found]


def preset_of(name: str, options: Iterable[str]) -> str | None:
    """Return the option of `cluster=` that describes a device, if one does.

    Args:
        name: As its driver calls it.
        options: Names of options.

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
    """Return the lower-case words of a name; "80GB" becomes "80g"."""
    found = re.findall(r"[a-z0-9.]+", name.lower())
    return {re.sub(r"^(\d+)gb$", r"\1g", word) for word in found}


def as_cluster(
    gpus: Iterable[Gpu], known: Mapping[str, ClusterSpec] | None = None
) -> ClusterSpec | None:
    """Return one node of the devices; None if they differ or no option describes them.

    Args:
        gpus: The devices, at least one.
        known: Option of `cluster=` -> the cluster it describes; all options by default.
    """
    known = presets() if known is None else known
    several = list(gpus)
    options = {preset_of(gpu.name, known) for gpu in several}
    (option, *others) = options
    if option is None or others:
        return None
    node = known[option].node_groups[0]
    # A plan is for equal devices, so the smallest counts.
    memory_bytes = min(gpu.memory_bytes for gpu in several)
    device = node.device.model_copy(update={"memory_bytes": memory_bytes})
    own = node.model_copy(
        update={"num_nodes": 1, "devices_per_node": len(several), "device": device}
    )
    between = known[option].between  # never used: there is one node
    return ClusterSpec(name="this machine", node_groups=(own,), between=between)


def said_of(gpus: Iterable[Gpu]) -> str:
    """Describe the devices for people.

    Example:
        >>> said_of([Gpu("NVIDIA H200", 150 * 10**9)] * 8)
        '8 x NVIDIA H200 (140 GiB)'
    """
    counted = Counter(f"{gpu.name} ({bytes_text(gpu.memory_bytes)})" for gpu in gpus)
    return " and ".join(f"{number} x {text}" for text, number in counted.items())


CALIBRATION = "calibration.json"
"""Below the folder of runs: where a calibration is looked for if none is named."""

_DEADLINE_S = 5.0
"""For all searches together; afterwards the best plan so far is taken."""


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        plan: Where nodes run.
        num_threads: Torch threads of each rank, if the calibration says; None to share out cores.
        note: A line about it, and one for each role that was left out.
    """

    plan: Plan
    num_threads: int | None
    note: str


@dataclass(frozen=True)
class _Machine:
    """What is planned for.

    Attributes:
        cluster: Its devices.
        calibration: What was measured of them; None if nothing was.
        note: What they are taken for, where that was not configured; "" if there is no more to say.
    """

    cluster: ClusterSpec
    calibration: Calibration | None
    note: str = ""

    def constants(self, models: Mapping[str, ModelShape | None]) -> Constants:
        """Of the model of time."""
        if self.calibration is None:
            return default_constants(self.cluster)
        return self.calibration.constants_for(models.values())


def choose(run: Resolved) -> Choice:
    """Plan the main stage for this machine.

    Where the planner knows the model, an infeasible run is refused. Where it does not, everything
    is placed on one rank, and the note says why.

    Args:
        run: The run.

    Raises:
        ConfigError: If a calibration is named that is for other devices, nothing is known of
            several GPUs, or nothing generates.
        PlanError: If the run needs more memory than there is, or the calibration cannot be read.
    """
    graph, section = run.main.graph, run.placement.executor
    run.engines.check_generates(graph)
    inputs = PlanInputs(run)
    try:
        models = inputs.models({})
        workload = inputs.workload(WorkloadConfig())
        calls = calls_of(graph, workload, models)
    except (ConfigError, PlanError) as error:
        return _one_rank(section, str(error).splitlines()[0])
    if not calls:
        return _one_rank(section, f"no role of {graph.name} has a model")
    machine = _machine(run.placement)
    if isinstance(machine, str):
        return _one_rank(section, machine)
    plan = _best(run, models, workload, machine)
    threads = machine.calibration.num_threads if machine.calibration else None
    dtypes = (model.dtype for model in models.values() if model is not None)
    measured = machine.calibration.notes_for(models.values()) if machine.calibration else ()
    said = (
        *filter(None, [machine.note]),
        *inputs.left_out(models),
        *machine.cluster.notes(dtypes),
        *measured,
    )
    notes = "".join(f"\nplacement: {note}" for note in said)
    return Choice(plan, threads, _said(graph, plan) + notes)


def _one_rank(section: ExecutorConfig, why: str) -> Choice:
    plan = one_group_plan(device=section.device)
    return Choice(plan, None, f"placement: everything on one rank; nothing was planned: {why}")


def _said(graph: Graph, plan: Plan) -> str:
    assert plan.prediction is not None
    return (
        f"placement: {placement_text(graph, plan)}; {seconds_text(plan.prediction.step_time_s)} "
        f"per step predicted ({plan.prediction.calibration})"
    )


def _machine(inputs: PlacementInputs) -> _Machine | str:
    """The machine as measured, or as it is by default; or why nothing can be planned for it."""
    kind = inputs.executor.device.partition(":")[0]
    named = inputs.calibration is not None
    if inputs.cluster is not None and not named:
        return _Machine(inputs.cluster, None)
    file = Path(inputs.calibration or inputs.runs / CALIBRATION)
    if named or file.is_file():
        calibration = read_calibration(file)
        if calibration.device == kind:
            return _Machine(calibration.cluster, calibration)
        if named:
            raise ConfigError(
                f"'calibration': {file} is of '{calibration.device}' devices, but "
                f"'executor.device' is '{inputs.executor.device}'\n"
                f"    measure them: penstock profile device={kind} output=FILE"
            )
    return _Machine(analytic_cpus(), None) if kind == "cpu" else _gpus(inputs.executor)


def _gpus(section: ExecutorConfig) -> _Machine | str:
    """Return GPUs that were not measured: those of joined nodes, or of this machine."""
    nodes = [n for n in executor_kind(section.kind, "executor.kind").machines() if _num_gpus(n)]
    gpus = [] if nodes else gpus_here()
    cluster = as_cluster(gpus) if gpus else None
    if cluster is not None:
        option = cluster.node_groups[0].device.name
        return _Machine(cluster, None, f"this machine has {said_of(gpus)}, planned as {option}")
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
    """What to say of a run in one process on a machine with several GPUs; "" if it has not."""
    gpus = gpus_here() if section.device == "cuda" else []
    if len(gpus) < 2 or executor_kind(section.kind, "executor.kind").has_processes:
        return ""
    return (
        f"placement: one of {said_of(gpus)} is used, because executor={section.kind} is one "
        "process; executor=ray uses them all"
    )


def _num_gpus(node: Machine) -> int:
    return int(node.total.get("GPU", 0))


def _best(
    run: Resolved,
    models: Mapping[str, ModelShape | None],
    workload: Workload,
    machine: _Machine,
) -> Plan:
    """Return the fastest plan over all devices, half of them, a quarter, ... and one."""
    graph = run.main.graph
    items = train_items(graph, run.main.config.per_step)
    engines, others = run.engines.planned()
    pins = Pins(allows=_Divides(items, workload))
    found: list[Plan] = []
    refused: list[PlanError] = []
    sizes = halvings(machine.cluster.num_devices)
    until_s = time.monotonic() + _DEADLINE_S
    for left, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        try:
            plan = plan_step(
                graph,
                models,
                part(machine.cluster, size),
                workload,
                max_lag=run.schedule.max_lag,
                constants=machine.constants(models),
                engines=engines,
                others=others,
                pins=pins,
                deadline_s=max(0.5, (until_s - time.monotonic()) / left),
            )
        except PlanError as error:
            refused.append(error)
        else:
            found.append(plan)
    if not found:
        raise refused[0]
    best = min(found, key=_step_time_s)
    ranks = [group.device_group.num_ranks for group in divided(best, graph, run.engines).groups]
    chunks = lcm(*ranks) // max(ranks)
    return best.model_copy(update={"cluster": machine.cluster, "chunks_per_rank": chunks})


def _step_time_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.step_time_s


@dataclass(frozen=True)
class _Divides:
    """Whether a step's prompts divide by the ranks that would share them."""

    items: Mapping[str, int]
    workload: Workload

    def __call__(self, call_group: str, option: Option) -> bool:
        return all(
            self.items.get(name, layout.dp) % layout.dp == 0
            and layout.dp <= self.workload.num_prompts
            for name, layout in option.layouts.items()
        )
