"""Which groups cannot be restarted exactly, why, and what to change: said before the start.

A run that goes back computes the same again, because random numbers belong to samples, data to
steps, and environments are saved or replayed. That does not hold of what is outside the run: who
answers otherwise when asked again gives other rows, and the run ends with other weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from ...dataflow.graph.graph import NodeKind, RoleRef
from ...dataflow.scheduler.schedule import Schedule
from ...workers.agents.worker import TASK_AGENTS, has_other_side, other_side
from ...workers.data.task import Task
from ...workers.envs.exactness import why_not_exact
from ...workers.envs.task import EnvTaskSpec
from .stages import Stage

_NUM_STEPS = 16
"""Steps of environments that are tried before they are saved, and after."""


def not_exact(
    stages: Sequence[Stage], schedule: Schedule, task: Task, spec: Any, *, tries: bool = False
) -> list[str]:
    """A line for every group that cannot be restarted exactly; none if all can.

    Args:
        stages: What is trained.
        schedule: How far generation may run ahead.
        task: What on.
        spec: The section it was made of.
        tries: Whether environments are started and stepped to find out; they may be slow, or change
            something outside.
    """
    found = (
        (group, reason)
        for stage in stages
        for role, reason in _reasons(stage, schedule, task, spec, tries)
        for group in _groups(stage, role)
    )
    lines = (f"group '{group}' cannot be restarted exactly: {reason}" for group, reason in found)
    return list(dict.fromkeys(lines))


def _reasons(
    stage: Stage, schedule: Schedule, task: Task, spec: Any, tries: bool
) -> Iterator[tuple[str, str]]:
    """The roles concerned, each with why and what to change."""
    for role in _sampling(stage):
        if schedule.order == "arrival":
            yield (
                role,
                "which weights its calls read depends on timing (schedule.order=arrival); to "
                "change that: schedule.order=step",
            )
        if schedule.in_flight:
            yield (
                role,
                "when new weights come while it samples depends on timing (schedule.in_flight); "
                "to change that: schedule.in_flight=false",
            )
    for role, plan in stage.roles.items():
        talks = plan.worker in TASK_AGENTS and has_other_side(task)
        if talks and not other_side(task).deterministic:
            yield (
                role,
                f"what answers in '{task.task_id}' may keep a state outside the run, or answer "
                "otherwise when a conversation is begun anew; to change that: tools and "
                "environments that follow from problem, seed and turns, and say `deterministic`",
            )
        if _asks_judge(plan.worker, plan.config.options):
            yield (
                role,
                "a judge behind an address may score the same response otherwise; to change that: "
                "a rule, or a reward model that the run computes itself",
            )
        if (
            plan.worker == "env"
            and isinstance(spec, EnvTaskSpec)
            and (why := _why_random(spec, tries))
        ):
            yield (
                role,
                f"{why}, so an episode that is replayed may show something else, which ends the "
                "run; to change that: another version of the environment, whose episodes follow "
                "from seed and actions",
            )


def _sampling(stage: Stage) -> set[str]:
    nodes = stage.graph.nodes
    return {node.role for node in nodes if node.kind is NodeKind.ROLLOUT and node.role is not None}


def _groups(stage: Stage, role: str) -> list[str]:
    """The groups in which a role is asked, or given to another that asks it."""
    nodes = [
        node.name
        for node in stage.graph.nodes
        if node.kind is not NodeKind.TRAIN
        and (
            node.role == role
            or any(isinstance(one, RoleRef) and one.role == role for _, one in node.arguments)
        )
    ]
    return list(dict.fromkeys(stage.placement.nodes[node] for node in nodes))


def _asks_judge(worker: str, options: Any) -> bool:
    """Whether a reward is a judge's, or a mixture with one."""
    if worker == "judge":
        return True
    if worker != "mixture":
        return False
    return any(value == "judge" for value in _values(options))


def _values(options: Any) -> Iterator[Any]:
    if isinstance(options, Mapping):
        for value in cast("Mapping[str, Any]", options).values():
            yield from _values(value)
    elif isinstance(options, list | tuple):
        for value in cast("Sequence[Any]", options):
            yield from _values(value)
    else:
        yield options


def _why_random(spec: EnvTaskSpec, tries: bool) -> str:
    """Why seed and actions do not make an environment's episodes: it says so, or is tried."""
    if spec.backend == "gymnasium":
        import gymnasium

        if gymnasium.spec(spec.id.rpartition(":")[2]).nondeterministic:
            return f"Gymnasium lists '{spec.id}' as nondeterministic"
    if not tries:
        return ""
    found = why_not_exact(spec.env, num_before=_NUM_STEPS, num_after=_NUM_STEPS)
    return f"two environments '{spec.id}' that were tried {found}" if found else ""
