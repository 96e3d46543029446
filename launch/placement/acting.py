"""Placing a step that acts in environments or games: its profile, and what a plan decides of it.

Where an automatic plan is made without a language model, the costs are those that `penstock profile
task=... algorithm=...` measured of the very same task. So are those of verifiers beside one.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ...algorithms.roles.environment import Actor
from ...configs.schema import RoleConfig
from ...dataflow.errors import PlanError
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from ...planner.cost.acting import NOT_WORK
from ...planner.cost.calibration import read_model
from ...planner.inputs.cluster import ClusterSpec
from ...planner.inputs.task_profile import ActingPins, TaskProfile
from ...planner.plan.plan import Plan
from ..inputs.data import acted_in
from ..inputs.record import Stage
from ..inputs.run import AUTO, Run, executor_kind
from ..run_dir.files import parsed
from ..run_dir.run_folder import RunFolder
from .machine import node_seconds_of

TASK_PROFILE = "task_profile.json"  # below the folder of runs: looked for if none is named
# what plans decide, so that no time depends on it
_CHOSEN = ("group_size", "num_overlapped", "num_processes")
_SLOW = ("code", "math", "instructions", "judge", "mixture")  # rewards that may take long


def acting_nodes(graph: Graph) -> list[Node]:
    """Calls that act: they are given a role that acts, and ask it again and again."""
    return [
        node
        for node in graph.nodes
        if node.kind is NodeKind.ROLLOUT
        and any(issubclass(graph.roles[role], Actor) for role in node.roles_given)
    ]


def rows_of(stage: Stage, node: Node) -> int:
    """Environments or games that a step acts in."""
    above = stage.graph.ancestors(node.name)
    return stage.config.per_step[next(name for name in stage.graph.sources if name in above)]


def setting_of(run: Run) -> dict[str, str]:
    """Everything that the times of a step depend on, as keys of a configuration and values."""
    stage, spec = run.main, run.spec
    found: dict[str, Any] = {
        "algorithm.step": stage.config.step,
        "algorithm.per_step": stage.config.per_step,
        "algorithm.cfg": {},
        "model": run.model.architecture or run.model.folder,
    }
    if stage.cfg is not None:
        found["algorithm.cfg"] = TypeAdapter(type(stage.cfg)).dump_python(stage.cfg, mode="json")
    for role, section in stage.config.roles.items():
        options = {key: value for key, value in section.options.items() if key not in _CHOSEN}
        found[f"algorithm.roles.{role}"] = {"worker": section.worker, "options": options}
    if dataclasses.is_dataclass(spec):
        for field in dataclasses.fields(spec):
            if field.name not in _CHOSEN:
                found[f"task.{field.name}"] = getattr(spec, field.name)
    return {
        key: json.dumps(value, sort_keys=True, default=_plain)
        for key, value in found.items()
        if value not in (None, {})
    }


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)  # pyright: ignore[reportArgumentType] - an instance


def measure_command(run: Run) -> str:
    """The command that profiles a run's task, for messages."""
    return f"penstock profile algorithm={run.main.name} task=..., and the other keys of the run"


def task_profile(run: Run) -> TaskProfile | str:
    """The profile of a run's task, or why there is none.

    Raises:
        PlanError: If the run names a file that is missing, or one of another task.
    """
    given = run.config.task_profile
    file = Path(given or Path(run.config.runs) / TASK_PROFILE)
    measure = measure_command(run)
    if given is None and not file.is_file():
        return f"what {run.main.graph.name} costs in this task is not known; measure it: {measure}"
    try:
        found = _learned(file, measure) if file.is_dir() else read_model(
            TaskProfile, file, "task profile", f"\n    measure the task: {measure}",
            f"\n    measure it again: {measure}",
        )  # fmt: skip
        found.check(setting_of(run), str(file), measure)
        own = found.executor.name
        if executor_kind(run.executor.kind).has_processes and own != run.executor.kind:
            raise PlanError(
                f"task profile {file} was measured with executor={own}, and this run has "
                f"executor={run.executor.kind}\n    measure it with that: {measure}"
            )
    except PlanError as error:
        if given is not None:
            raise
        return str(error)
    verifiers = dict(found.verifiers)
    for name, one in verifiers.items():
        section = run.main.config.roles.get(name.partition(".")[0], RoleConfig())
        number = {"num_processes": section.options.get("num_processes")}
        verifiers[name] = one.model_copy(update=number)
    return found.model_copy(update={"verifiers": verifiers})


def verifier_costs(run: Run) -> tuple[TaskProfile | None, list[str]]:
    """The profile of a run's verifiers; without one, notes on those that are counted as free."""
    found = task_profile(run)
    if not isinstance(found, str):
        return found, []
    slow = [role for role, x in run.main.config.roles.items() if x.worker in _SLOW]
    return None, [f"'{role}' is counted as free: {found}" for role in slow]


def _learned(path: Path, measure: str) -> TaskProfile:
    """The profile that a run was planned with, corrected by what the run measured."""
    folder = RunFolder(path)
    prediction = Plan.read(folder.plan).prediction
    measured_s = parsed(folder.summary, node_seconds_of)
    if prediction is None or prediction.task is None or measured_s is None:
        raise PlanError(
            f"task profile {path}: the run was not planned with a profile of its task, or has not "
            f"ended\n    give a run that was, or measure the task: {measure}"
        )
    expected_s = {
        name: sum(s for part, s in node.parts_s.items() if part not in NOT_WORK)
        for name, node in prediction.nodes.items()
    }
    return prediction.task.learned(path.name, expected_s, measured_s)


def team_of(run: Run) -> int:
    """Rows that a group holds together: the agents of an environment."""
    return getattr(run.spec, "num_agents", 1)


def least_groups(stage: Stage) -> int:
    return max(stage.config.num_groups.values(), default=1)


def num_groups(run: Run) -> int | None:
    """Groups that the rows of a step fall into; None if the planner is to choose."""
    stage, acted = run.main, acted_in(run.spec)
    if acted is None or acted.group_size == AUTO:
        return None
    rows = math.gcd(*(rows_of(stage, node) for node in acting_nodes(stage.graph)))
    given = acted.group_size
    size = given if isinstance(given, int) else rows // least_groups(stage)
    return -(-rows // max(1, size))


def acting_plan(
    run: Run,
    profile: TaskProfile,
    cluster: ClusterSpec,
    *,
    max_lag: Sequence[int] = (),
    pins: ActingPins = ActingPins(),
) -> Plan:
    """The plan of a run's main stage; lags are compared, and the run's own is taken without any."""
    # Imported here: a run in one process plans nothing.
    from ...planner.plan.acting_plan import plan_acting

    for node in acting_nodes(run.main.graph):
        section = run.main.config.roles.get(node.role or "", RoleConfig())
        given = section.options.get("num_overlapped")
        if isinstance(given, int) and pins.num_overlapped is None:
            pins = pins.model_copy(update={"num_overlapped": given})
    return plan_acting(
        run.main.graph,
        profile,
        cluster,
        max_lag=max_lag or (run.config.schedule.max_lag,),
        num_groups=num_groups(run),
        pins=pins,
    )


def with_group_size(run: Run, plan: Plan) -> Run:
    """The run with the size of groups that its plan has, where the task leaves it to the plan.

    From here on the configuration says it, and a run that is resumed goes on with it.
    """
    acted = acted_in(run.spec)
    if acted is None or acted.group_size != AUTO:
        return run
    spec: Any = replace(acted, group_size=plan.group_size)
    task = run.config.task.model_copy(update={"group_size": plan.group_size})
    return replace(run.having(task=task), spec=spec)
