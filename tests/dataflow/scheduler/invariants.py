"""The invariants of a scheduler, recomputed from first principles and compared with its books.

Called after every event; it costs far more than handling one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.dataflow.errors import StateError
from penstock.dataflow.scheduler.events import Load, NodeTask, Output, Task
from penstock.dataflow.scheduler.state import SchedulerState
from penstock.dataflow.scheduler.steps import StepState

_TOLD = 50  # Transitions told with an invariant that does not hold


def validate(scheduler: SchedulerState) -> None:
    checks = (
        _ranks_exclusive,
        _devices_exclusive,
        _admission_bound,
        _every_task_in_one_place,
        _queue_order,
        _versions_of_running,
        _instances,
        _snapshots,
        _checkpoint_boundary,
        _sizes,
        _not_stalled,
    )
    found = [text for check in checks for text in check(scheduler)]
    of_steps = (_counts, _outputs)
    found += [
        text for one in scheduler.steps.values() for c in of_steps for text in c(scheduler, one)
    ]
    if found:
        story = scheduler.log.story()[-_TOLD:]
        raise StateError("broken invariants:\n    " + "\n    ".join(found), story)


def _ranks_exclusive(scheduler: SchedulerState) -> Iterator[str]:
    busy = {
        (group, rank): tasks
        for group, state in scheduler.ranks.groups.items()
        for rank, tasks in enumerate(state.running)
        if tasks
    }
    for place, tasks in busy.items():
        if len(tasks) > 1 and not _together(scheduler, tasks):
            yield f"{len(tasks)} tasks run on {place}"
    claimed = 0
    for task, run in scheduler.running.items():
        claimed += len(run.ranks)
        for rank in run.ranks:
            if task not in busy.get((run.group, rank), ()):
                yield f"{task} runs on {run.group}[{rank}], which has another task or none"
    held = sum(map(len, busy.values()))
    if held != claimed:
        yield f"ranks are busy with {held} tasks, but running tasks claim {claimed}"
    for group, state in scheduler.ranks.groups.items():
        if state.num_free != sum(not tasks for tasks in state.running):
            yield f"group {group} counts {state.num_free} free ranks, not the true number"


def _together(scheduler: SchedulerState, tasks: list[Task]) -> bool:
    loads = [task for task in tasks if isinstance(task, Load)]
    if scheduler.schedule.in_flight and len(loads) == 1:
        tasks = [task for task in tasks if task not in loads]
    first = tasks[0]
    if not isinstance(first, NodeTask):
        return False
    streams = scheduler.flow.nodes[scheduler.index.index[first.node]].streams
    return streams and all(
        isinstance(task, NodeTask) and (task.node, task.step) == (first.node, first.step)
        for task in tasks
    )


def _devices_exclusive(scheduler: SchedulerState) -> Iterator[str]:
    working = {run.group for run in scheduler.running.values()}
    for group, others in scheduler.flow.sharing.items():
        for other in sorted(others & working):
            if group in working and group < other:
                yield f"'{group}' and '{other}' work on the same devices at the same time"


def _admission_bound(scheduler: SchedulerState) -> Iterator[str]:
    s = scheduler
    if not 0 <= s.completed <= s.admitted <= s.num_steps:
        yield f"{s.completed} complete, {s.admitted} admitted of {s.num_steps} steps"
    if s.admitted > s.completed + s.schedule.max_lag + 1:
        yield f"step {s.admitted - 1} is admitted with only {s.completed} steps complete"
    if sorted(s.steps) != list(range(s.completed, s.admitted)):
        yield f"books are kept of steps {sorted(s.steps)}"


def _counts(scheduler: SchedulerState, state: StepState) -> Iterator[str]:
    index = scheduler.index
    if state.remaining != sum(state.left):
        yield f"step {state.step}: {state.remaining} tasks remain, but nodes count {state.left}"
    for i, node in enumerate(scheduler.flow.nodes):
        tasks = index.tasks(i, state.step)
        left = sum(not state.is_done(task) for task in tasks)
        if state.left[i] != left:
            yield f"step {state.step}: {node.name} counts {state.left[i]} tasks left, not {left}"
        if i in state.parts:
            yield from _parts(scheduler, state, i)
        for slot, task in enumerate(tasks if i not in state.parts else ()):
            chunks = index.chunks if task.chunk is None else (task.chunk,)
            made = [_made(scheduler, state, p, c) for p in index.inputs[i] for c in chunks]
            missing = made.count(False)
            if state.missing[i][slot] != missing:
                yield f"{task} counts {state.missing[i][slot]} missing inputs, not {missing}"
            if missing and (state.is_done(task) or task in scheduler.running):
                yield f"{task} ran without all its inputs"
        frontier = scheduler.weights.frontier[i]
        if left == 0 and frontier == state.step:
            yield f"{node.name} is done in step {state.step}, its frontier"
        if left and frontier > state.step:
            yield f"{node.name} is not done in step {state.step}, before its frontier {frontier}"


def _parts(scheduler: SchedulerState, state: StepState, i: int) -> Iterator[str]:
    index, name = scheduler.index, scheduler.flow.nodes[i].name
    consumption = state.consumption[index.order_of[i] or 0]
    sizes, order = consumption.sizes, consumption.order
    expected = sorted(sizes, key=lambda chunk: (sizes[chunk], chunk))[: len(order)]
    if (sorted(order) if consumption.by_arrival else order) != (
        sorted(sizes) if consumption.by_arrival else expected
    ):
        yield f"step {state.step}: {name} takes chunks {order}, whose sizes are {sizes}"
    if len(sizes) == len(index.chunks) and len(order) < len(sizes):
        yield f"step {state.step}: all chunks are sampled, but {name} knows the places of {order}"
    tasks = index.tasks(i, state.step)
    for number, task in enumerate(tasks):
        chunks = state.chunks_of(i, task)
        full = len(chunks) == index.per_part[i]
        made = all(_made(scheduler, state, p, c) for p in index.inputs[i] for c in chunks)
        before = number == 0 or number <= state.parts[i]
        if (number < state.parts[i]) != (full and made and before):
            yield f"{task} takes chunks {list(chunks)}, but {state.parts[i]} parts may run"
        if number >= state.parts[i] and (state.is_done(task) or task in scheduler.running):
            yield f"{task} ran without its inputs"


def _made(scheduler: SchedulerState, state: StepState, producer: int, chunk: int) -> bool:
    name = scheduler.flow.nodes[producer].name
    own = chunk if scheduler.index.chunked[producer] else None
    return state.is_done(NodeTask(name, state.step, own))


def _outputs(scheduler: SchedulerState, state: StepState) -> Iterator[str]:
    index, kept = scheduler.index, set(state.stored())
    for i, node in enumerate(scheduler.flow.nodes):
        for chunk in index.chunks:
            users = index.consumers[i]
            open_users = [c for c in users if not _has_taken(scheduler, state, c, chunk)]
            if state.refs[i][chunk] != len(open_users):
                yield f"{node.name} chunk {chunk} counts {state.refs[i][chunk]} users"
            made = node.kind != "train" and _made(scheduler, state, i, chunk)
            needed = bool(open_users) or not users
            stored = Output(node.name, state.step, chunk) in kept
            if stored != (made and needed):
                yield f"{node.name} step {state.step} chunk {chunk}: stored is {stored}"


def _has_taken(scheduler: SchedulerState, state: StepState, i: int, chunk: int) -> bool:
    return any(
        state.is_done(task) and chunk in state.chunks_of(i, task)
        for task in scheduler.index.tasks(i, state.step)
    )


def _every_task_in_one_place(scheduler: SchedulerState) -> Iterator[str]:
    queued, weights = Counter(scheduler.ranks.queued()), scheduler.weights
    blocked: Counter[Task] = Counter()
    for instance in weights.instances.values():
        blocked.update(instance.blocked_trains)
        for tasks in instance.blocked.values():
            blocked.update(tasks)
    for state in scheduler.steps.values():
        for i, node in enumerate(scheduler.flow.nodes):
            if node.kind == "source":
                continue
            for task in scheduler.index.tasks(i, state.step):
                waits = state.waits(i, task)
                places = (
                    int(waits) + queued[task] + blocked[task]
                    + (task in scheduler.running) + state.is_done(task)
                )  # fmt: skip
                if places != 1:
                    yield f"{task} is in {places} places at once"
    for task in [*queued, *blocked]:
        if isinstance(task, NodeTask) and task.step not in scheduler.steps:
            yield f"{task} is queued, but its step is not in flight"


def _queue_order(scheduler: SchedulerState) -> Iterator[str]:
    for name, group in scheduler.ranks.groups.items():
        if scheduler.ranks.waits_for_turn(name) or name in scheduler.ranks.resizing:
            continue
        for rank, tasks in enumerate(group.running):
            heap = group.single[rank]
            if not tasks and heap and not (group.whole and group.whole[0] < heap[0]):
                yield f"{name}[{rank}] is idle while {heap[0][2]} is ready"
        if group.whole and scheduler.ranks.may_take(name, group.whole[0][2]):
            yield f"group {name} could take {group.whole[0][2]}, which is ready"


def _versions_of_running(scheduler: SchedulerState) -> Iterator[str]:
    for task, run in scheduler.running.items():
        if not isinstance(task, NodeTask):
            continue
        rules = scheduler.weights.rules_of[scheduler.index.index[task.node]]
        for rule, (role, version) in zip(rules, run.versions, strict=True):
            holds = scheduler.weights.instances[rule.role, rule.group].holds
            newest = rule.highest(task.step) if _in_flight(scheduler, task) else version
            if role != rule.role or not version <= holds <= newest:
                yield f"{task} reads {role}@{version}, but {rule.group} holds {rule.role}@{holds}"
            if not rule.lowest(task.step) <= version <= rule.highest(task.step):
                yield f"{task} reads {role}@{version}, outside its bounds"
            lag = rule.current(task.step) - version
            if not 0 <= lag <= scheduler.schedule.max_lag * rule.per_step:
                yield f"{task} reads {role}@{version}, {lag} versions old"


def _in_flight(scheduler: SchedulerState, task: NodeTask) -> bool:
    node = scheduler.flow.nodes[scheduler.index.index[task.node]]
    return node.streams and scheduler.schedule.in_flight


def _instances(scheduler: SchedulerState) -> Iterator[str]:
    weights, running = scheduler.weights, scheduler.running
    for instance in weights.instances.values():
        what = f"{instance.role} on {instance.group}"
        if instance.ceiling != weights.ceiling(instance):
            yield f"{what}: ceiling {instance.ceiling} is out of date"
        if instance.holds > instance.ceiling:
            yield f"{what} holds {instance.holds}, but {instance.ceiling} is still to be read"
        if any(version <= instance.holds for version in instance.blocked):
            yield f"{what} holds {instance.holds}, but tasks still wait for an older version"
        if instance.is_home and (instance.loading is not None):
            yield f"{what} is home and loads"
        if instance.is_home and instance.holds < weights.publishing.get(instance.role, 0):
            yield f"{what} publishes a version it does not hold"
        if instance.holds > weights.home(instance.role).holds:
            yield f"{what} is ahead of its home"
        load = instance.loading
        if load is not None and not instance.holds < load.version <= instance.ceiling:
            yield f"{what} loads {load.version}, holds {instance.holds}, may {instance.ceiling}"
    for task in running:
        i = scheduler.index.index[task.node] if isinstance(task, NodeTask) else None
        role = None if i is None else scheduler.flow.nodes[i].trains
        if (
            role is None
            or not isinstance(task, NodeTask)
            or not scheduler.index.is_last(i or 0, task)
        ):
            continue
        home = weights.home(role)
        if role in weights.publishing or home.ceiling <= home.holds:
            yield f"{task} overwrites weights that are still needed"


def _snapshots(scheduler: SchedulerState) -> Iterator[str]:
    weights = scheduler.weights
    for role, held in weights.snapshots.items():
        for version, groups in held.items():
            if not groups:
                yield f"snapshot {role}@{version} is kept for nobody"
            if version > weights.home(role).holds:
                yield f"snapshot {role}@{version} is newer than its home"
            for group in groups:
                if weights.instances[role, group].holds >= version:
                    yield f"snapshot {role}@{version} is kept for {group}, which is past it"


def _checkpoint_boundary(scheduler: SchedulerState) -> Iterator[str]:
    boundary = scheduler.checkpoints.boundary
    if scheduler.completed > boundary:
        yield f"{scheduler.completed} steps complete, past the checkpoint due at {boundary}"
    if scheduler.checkpoints.draining and scheduler.completed != boundary:
        yield f"draining for {boundary} with {scheduler.completed} steps complete"
    for instance in scheduler.weights.instances.values():
        limit = boundary * scheduler.flow.trains_per_step[instance.role]
        if instance.holds > limit:
            yield f"{instance.role}@{instance.holds} is past the checkpoint due at {limit}"
    if any(awaited.what == "checkpoint" for awaited in scheduler.awaited) and scheduler.running:
        yield f"{len(scheduler.running)} task(s) run while a checkpoint is written"


def _sizes(scheduler: SchedulerState) -> Iterator[str]:
    for name, group in scheduler.ranks.groups.items():
        if scheduler.index.num_ranks[name] != len(group.running):
            yield f"group {name} has {len(group.running)} ranks, not {scheduler.index.num_ranks}"
    if scheduler.ranks.resizing != scheduler.resizing.keys():
        yield f"{scheduler.ranks.resizing} rest, but {scheduler.resizing} are to have other ranks"
    for awaited in scheduler.awaited:
        if awaited.what == "ranks" and scheduler.ranks.is_busy(awaited.group):
            yield f"group {awaited.group} works while its ranks change"


def _not_stalled(scheduler: SchedulerState) -> Iterator[str]:
    left = scheduler.ranks.queued() or scheduler.steps
    if scheduler.done and (scheduler.running or (left and not scheduler.checkpoints.stopped)):
        yield "finished with work left"
    if not (scheduler.done or scheduler.aborted or scheduler.running or scheduler.awaited):
        yield "unfinished, but nothing runs and nothing is awaited"
