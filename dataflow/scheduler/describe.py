"""Description of a scheduler's state in words, with the tasks that take too long."""

from __future__ import annotations

from collections import Counter

from .events import HangReport, HungTask, NodeTask, Task
from .rank_queues import Running
from .schedule import Deadline
from .state import SchedulerState, rank_names, versions_text
from .weight_versions import NO_CEILING, Instance

_MAX_BLOCKED = 8


def state_of(scheduler: SchedulerState, task: Task) -> str:
    """In what state a task is, in words that end a sentence."""
    if task in scheduler.running:
        return "running"
    if not isinstance(task, NodeTask):
        return "queued" if task in scheduler.ranks.queued() else "not asked for"
    if not scheduler.index.knows(task):
        return f"not a task of flow '{scheduler.flow.name}'"
    if task.step >= scheduler.admitted:
        return "of a step not admitted yet"
    if task.step < scheduler.completed or scheduler.steps[task.step].is_done(task):
        return "done already"
    return _why_not_started(scheduler, task)


def _why_not_started(scheduler: SchedulerState, task: NodeTask) -> str:
    i, state = scheduler.index.index[task.node], scheduler.steps[task.step]
    if not state.has_source:
        return "waiting for the step's batch"
    if i in state.parts and state.waits(i, task):
        return "waiting for its turn, or for its inputs"
    if state.waits(i, task):
        return f"waiting for {state.missing[i][task.chunk or 0]} input part(s)"
    for rule in scheduler.weights.rules_of[i]:
        instance = scheduler.weights.instances[rule.role, rule.group]
        lowest = rule.lowest(task.step)
        if instance.holds < lowest:
            return f"waiting for {rule.role}@{lowest} on {rule.group}, which holds {instance.holds}"
    if any(task in instance.blocked_trains for instance in scheduler.weights.instances.values()):
        return "waiting for readers of the weights it would overwrite"
    if not scheduler.checkpoints.may_start(task):
        return f"held until checkpoint {scheduler.checkpoints.boundary} is saved"
    if scheduler.flow.nodes[i].group in scheduler.ranks.resizing:
        return "ready and waiting for its group to have other ranks"
    if scheduler.ranks.waits_for_turn(scheduler.flow.nodes[i].group):
        return "ready and waiting for its devices, on which another group works"
    return "ready and waiting for ranks"


def _blocked(scheduler: SchedulerState) -> list[str]:
    lines: list[str] = []
    for step in sorted(scheduler.steps):
        state = scheduler.steps[step]
        for i, node in enumerate(scheduler.flow.nodes):
            if node.kind == "source":
                continue
            reasons: Counter[str] = Counter(
                _why_not_started(scheduler, task)
                for task in scheduler.index.tasks(i, step)
                if not state.is_done(task) and task not in scheduler.running
            )
            for reason, count in reasons.items():
                lines.append(f"{node.name} step {step}: {count} task(s) {reason}")
    return lines


def _instance_line(scheduler: SchedulerState, instance: Instance) -> str:
    since = "" if instance.changed_s is None else f" since {instance.changed_s:.1f} s"
    home = " (home)" if instance.is_home else ""
    line = f"{instance.role} on {instance.group}{home}  version {instance.holds}{since}"
    if instance.ceiling not in (NO_CEILING, instance.holds):
        line += f", may go to {instance.ceiling}"
    elif instance.ceiling == instance.holds:
        readers = [
            f"{scheduler.flow.nodes[rule.node].name} step {scheduler.weights.frontier[rule.node]}"
            for rule in instance.rules
            if scheduler.weights.frontier[rule.node] < scheduler.num_steps
            and rule.highest(scheduler.weights.frontier[rule.node]) == instance.holds
        ]
        line += f", kept for {', '.join(readers)}"
    return line


def _instance_lines(scheduler: SchedulerState) -> tuple[str, ...]:
    instances = scheduler.weights.instances.values()
    return tuple(_instance_line(scheduler, instance) for instance in instances)


def describe(scheduler: SchedulerState) -> str:
    lines = [
        f"flow '{scheduler.flow.name}': {scheduler.completed} of {scheduler.num_steps} steps "
        f"complete, {len(scheduler.steps)} in flight, {len(scheduler.running)} task(s) running"
    ]
    for task, run in scheduler.running.items():
        lines.append(f"    running {task} on {', '.join(rank_names(run.group, run.ranks))}")
    lines += [f"    waiting for {what}" for what in scheduler.awaited]
    lines += [f"    {line}" for line in _blocked(scheduler)]
    lines += [f"    {line}" for line in _instance_lines(scheduler)]
    return "\n".join(lines)


def hang_report(scheduler: SchedulerState, at_s: float, progress_s: float) -> HangReport | None:
    """A report if something has taken longer than the deadline, else None."""
    deadline = scheduler.schedule.deadline()
    hung: list[tuple[HungTask, Deadline]] = []
    for task, run in scheduler.running.items():  # the oldest first
        since_s = max(run.since_s, progress_s) if scheduler.one_at_a_time else run.since_s
        own = _deadline(scheduler, task)
        if at_s - since_s > own.limit_s:
            hung.append((_hung_task(scheduler, task, run, at_s - since_s), own))
        if scheduler.one_at_a_time:
            break  # the others have not begun
    awaited = [
        f"{what} has been awaited for {at_s - since_s:.1f} s"
        for what, since_s in scheduler.awaited.items()
        if at_s - since_s > deadline.limit_s
    ]
    stalled = not scheduler.running and at_s - progress_s > deadline.limit_s
    if not hung and not awaited and not stalled:
        return None
    if not hung and not awaited:
        awaited = [f"nothing has run for {at_s - progress_s:.1f} s"]
    blocked = _blocked(scheduler)
    if len(blocked) > _MAX_BLOCKED:
        blocked[_MAX_BLOCKED:] = [f"and {len(blocked) - _MAX_BLOCKED} more"]
    return HangReport(
        at_s=at_s,
        deadline=hung[0][1] if hung else deadline,
        hung=tuple(task for task, _ in hung),
        awaited=tuple(awaited),
        blocked=tuple(blocked),
        ranks=scheduler.log.rank_lines(),
        instances=_instance_lines(scheduler),
    )


def _deadline(scheduler: SchedulerState, task: Task) -> Deadline:
    if not isinstance(task, NodeTask):
        return scheduler.schedule.deadline()
    node = scheduler.flow.nodes[scheduler.index.index[task.node]]
    return scheduler.schedule.deadline(node.predicted_s)


def _hung_task(scheduler: SchedulerState, task: Task, run: Running, running_s: float) -> HungTask:
    ranks = tuple(rank_names(run.group, run.ranks))
    if not isinstance(task, NodeTask):
        return HungTask(str(task), None, (), ranks, running_s, None, "")
    node = scheduler.flow.nodes[scheduler.index.index[task.node]]
    frozen = [read.role for read in node.reads if read.role not in scheduler.flow.homes]
    versions = versions_text(run.versions)
    roles = (*([versions] if versions else []), *frozen)
    i, state = scheduler.index.index[task.node], scheduler.steps[task.step]
    chunks = tuple(state.chunks_of(i, task))
    num_rows = _rows(scheduler, task, chunks)
    return HungTask(
        task.node, task.step, roles, ranks, running_s, num_rows, _missing(scheduler, task)
    )


def _missing(scheduler: SchedulerState, task: NodeTask) -> str:
    i, state = scheduler.index.index[task.node], scheduler.steps[task.step]
    if task.chunk is None or i in state.parts:
        return ""
    tasks = scheduler.index.tasks(i, task.step)
    chunks = tuple(t.chunk for t in tasks if not state.is_done(t) and t.chunk is not None)
    rows = _rows(scheduler, task, chunks)
    text = f"chunk(s) {', '.join(map(str, chunks))} of {len(tasks)}"
    return text if rows is None else f"{text} ({rows} rows)"


def _rows(scheduler: SchedulerState, task: NodeTask, chunks: tuple[int, ...]) -> int | None:
    i, state = scheduler.index.index[task.node], scheduler.steps[task.step]
    for producer in scheduler.index.inputs[i]:
        known = [state.rows.get((producer, chunk)) for chunk in chunks]
        counts = [count for count in known if count is not None]
        if len(counts) == len(chunks):
            return sum(counts)
    return None
