"""Measuring a task: its environments, its policy, its calls, its executor; or its verifiers.

First one process acts alone, in groups of several sizes: how long a step takes, of which it waits
and of which it computes, and how long the policy does. Then the very graph runs a few steps on the
executor in up to four placements, from which follow the times of the other calls and what the
executor adds: a call, new weights for a copy, a request to another process. The whole takes less
than a minute on an idle machine, and most of it is processes that start.

Of a step with a language model the calls are measured that score responses without one: each
response of a few prompts alone, then all of them in one process and on all cores at once.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import psutil

from ...algorithms.roles.environment import Actor
from ...algorithms.roles.language import Reward, Sampling
from ...configs.schema import EvaluationConfig
from ...dataflow.errors import ConfigError, PlanError
from ...dataflow.graph.graph import Constant, Node, Ref, RoleRef
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.call_context import step_scope
from ...dataflow.runtime.engine import Engine
from ...dataflow.runtime.worker_protocol import WorkerContext, is_spec
from ...planner.cost.verification import makespan_s
from ...planner.formatting import aligned, percent_text, seconds_text
from ...planner.inputs.task_profile import (
    CallProfile,
    ExecutorProfile,
    LoopProfile,
    TaskProfile,
    VerifierProfile,
)
from ...planner.plan.plan import GroupPlan, Plan, one_group_plan
from ...workers.data.sources import PromptSource
from ...workers.envs.overlapped_groups import LoopTimer
from ...workers.envs.task import EnvRowSource, GameRowSource
from ...workers.verifiers.pool import MOST_PROCESSES
from ..inputs.run import AUTO, Run, executor_kind
from ..inputs.sizes import stage_schedule
from ..placement.acting import acting_nodes, least_groups, num_groups, rows_of, setting_of, team_of
from ..placement.machine import machine_name, num_cores
from ..placement.models import PlanInputs
from ..placement.place import make_executor
from ..stages.prepare import prepare
from ..stages.stage_result import node_seconds
from ..stages.worker_specs import MODEL, exporting_specs, worker_specs

_QUANTILES = (0.1, 0.5, 0.9, 0.99)
_WARM_UP = 2  # steps of a run that are not looked at
_FEWEST, _MOST = 4, 40  # steps that are
_LEAST_ROLLOUTS = 2
_PROMPTS, _SAMPLES = 4, 4  # responses that verifiers are measured with, at most
_LONGEST = 5  # times the seconds given, after which no further response is measured alone
_SETTLE_S = 6.0  # longest wait for a machine at rest
_LOOK_S = 0.3  # for which its cores are looked at
_AT_REST = 25.0  # percent of all cores


def profile_task(run: Run, seconds: float) -> TaskProfile:
    """Measure the main stage of a run, each thing for about so many seconds.

    Raises:
        ConfigError: If the step acts in nothing, and verifies nothing.
    """
    nodes = acting_nodes(run.main.graph)
    setting = setting_of(run)  # before a group's size is fixed
    free = num_groups(run) is None
    # Calls that follow each other: what they do not account for is the executor's.
    schedule = replace(run.config.schedule, max_lag=0)
    run = run.having(evaluation=EvaluationConfig(num_prompts=0, num_episodes=0), schedule=schedule)
    machine: dict[str, Any] = {
        "setting": setting,
        "cores": num_cores(),
        "machine": f"{machine_name()}, {num_cores()} cores",
        "date": datetime.date.today().isoformat(),
    }
    if not nodes:
        none = ExecutorProfile(name=executor_kind(run.executor.kind).name, call_s=0.0)
        found = _verifiers(run, seconds)
        return TaskProfile(rows={}, loops={}, calls={}, verifiers=found, executor=none, **machine)
    loops = {node.name: _loops(_grouped(run, None), node, seconds, free=free) for node in nodes}
    rows = {node.name: rows_of(run.main, node) for node in nodes}
    measured = _on_executor(run, loops, rows, seconds)
    return TaskProfile(
        rows=rows,
        team=team_of(run),
        least_groups=least_groups(run.main),
        loops=loops,
        overlaps=not any(node.method == "play" for node in nodes),
        calls=measured.calls,
        corrections=measured.corrections,
        executor=measured.executor,
        process_bytes=psutil.Process().memory_info().rss,
        **machine,
    )


def _grouped(run: Run, size: int | None) -> Run:
    """The run with groups of some size, where its task leaves that to the plan."""
    spec: Any = run.spec
    if spec.group_size != AUTO:
        return run
    task = run.config.task.model_copy(update={"group_size": size})
    return replace(run.having(task=task), spec=replace(spec, group_size=size))


# --- one process that acts alone


def _loops(run: Run, node: Node, seconds: float, *, free: bool) -> tuple[LoopProfile, ...]:
    """Groups of several sizes if the plan may choose them; else of the size that the task has."""
    run = prepare(run, one_group_plan())
    rows = rows_of(run.main, node)
    team = team_of(run)
    sizes = {rows, rows // 2 // team * team, rows // 8 // team * team}
    sizes = sizes if free else {-(-rows // (num_groups(run) or 1))}
    specs = worker_specs(run.main, run, {})
    return tuple(
        _loop(run, node, specs, size, seconds / len(sizes)) for size in sorted(sizes) if size
    )


def _loop(run: Run, node: Node, specs: Any, size: int, seconds: float) -> LoopProfile:
    source = EnvRowSource if node.method == "rollout" else GameRowSource
    batch, names = source(size, size).batch(0), [node.role or "", *node.roles_given]
    tables = dict.fromkeys(run.main.graph.sources, batch)
    with ExitStack() as stack:
        workers: dict[str, Any] = {}
        for name in names:
            workers[name] = specs[name].build(WorkerContext(name, seed=run.main.seed))
            stack.callback(workers[name].close)
        found: list[LoopProfile] = []
        began_s = time.perf_counter()
        while len(found) <= _LEAST_ROLLOUTS or time.perf_counter() - began_s < seconds:
            timer = LoopTimer()
            timed = {role: timer.of(cast("Actor", workers[role])) for role in node.roles_given}
            with step_scope(len(found)):
                method = getattr(workers[node.role or ""], node.method or "")
                method(**_arguments(node, tables, workers | timed))
            found.append(_turns(size, timer))
    # The first one makes the environments. Other load only lengthens a time, so the least counts.
    return min(found[1:], key=lambda one: one.step_s + one.ask_s)


def _turns(size: int, timer: LoopTimer) -> LoopProfile:
    times, other_s = timer.times(), timer.other_cpu_s()
    quantiles = np.quantile(timer.steps_s, _QUANTILES)
    return LoopProfile(
        rows=size,
        turns=timer.num_turns,
        step_s=times.step_s,
        step_cpu_s=min(times.step_cpu_s, times.step_s),
        # A loop that never waits does all of its computing in its own thread.
        other_cpu_s=other_s if times.step_cpu_s < times.step_s / 2 else 0.0,
        ask_s=times.ask_s,
        ask_cpu_s=min(times.ask_cpu_s, times.ask_s),
        quantiles_s={f"{q:g}": float(s) for q, s in zip(_QUANTILES, quantiles, strict=True)},
        spread_s=float(np.std(timer.steps_s)),
    )


def _arguments(node: Node, tables: Mapping[str, Any], workers: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in node.arguments:
        match value:
            case Constant():
                found[name] = value.value
            case RoleRef():
                found[name] = workers[value.role]
            case Ref() if value.node in tables:
                found[name] = getattr(tables[value.node], value.column)
            case _:
                raise ConfigError(
                    f"'{node.name}' cannot be measured alone: its '{name}' is made by an op\n    "
                    "give it what a source or a rollout has"
                )
    return found


# --- verifiers of a step with a language model


def _verifiers(run: Run, seconds: float) -> dict[str, VerifierProfile]:
    run = prepare(run, one_group_plan())
    stage, graph = run.main, run.main.graph
    models = PlanInputs(run).models({})
    nodes = [
        node
        for node in graph.nodes
        if node.kind is NodeKind.FORWARD
        and issubclass(graph.roles[node.role or ""], Reward)
        and models[node.role or ""] is None
    ]
    if not nodes:
        raise ConfigError(
            f"'{graph.name}' acts in no environment or game and verifies nothing, so there is no "
            "task to measure\n    measure the machine: penstock profile, without algorithm= and "
            "task="
        )
    # A model that starts from an earlier stage's result is measured untrained.
    untrained = {"start": MODEL, "start_mean": {}}
    earlier = {stage.name for stage in run.stages[:-1]}
    roles = {
        role: section.model_copy(update=untrained) if section.start in earlier else section
        for role, section in stage.roles.items()
    }
    specs: Any = exporting_specs(replace(stage, roles=roles), run, {})
    tables = _sampled(run, specs)
    return {node.name: _verifier(node, specs[node.role], tables, seconds) for node in nodes}


def _sampled(run: Run, specs: Any) -> dict[str, Any]:
    """Tables of sources and rollouts, for a few prompts."""
    stage, graph = run.main, run.main.graph
    prompts = run.data.source(PromptSource, batch_size=_PROMPTS, seed=stage.seed)
    tables = dict.fromkeys(graph.sources, prompts.batch(0))
    with ExitStack() as stack:
        for node in (node for node in graph.nodes if node.kind is NodeKind.ROLLOUT):
            workers: dict[str, Any] = {}
            for name in (node.role or "", *node.roles_given):
                workers[name] = specs[name].build(WorkerContext(name, seed=stage.seed))
                stack.callback(workers[name].close)
            given = _arguments(node, tables, workers)
            for name, value in given.items():
                if isinstance(value, Sampling):
                    given[name] = replace(value, num_samples=min(_SAMPLES, value.num_samples))
            with step_scope(0):
                tables[node.name] = getattr(workers[node.role or ""], node.method or "")(**given)
    return tables


def _verifier(node: Node, spec: Any, tables: dict[str, Any], seconds: float) -> VerifierProfile:
    given, cores, own = _arguments(node, tables, {}), num_cores(), psutil.Process()
    rows, several = len(next(iter(given.values()))), hasattr(spec, "num_processes")

    @contextmanager
    def scorer(number: int) -> Generator[Callable[[Sequence[int]], float]]:
        made = replace(spec, num_processes=number) if several else spec
        # A factory of one's own may give the worker itself.
        worker = made.build(WorkerContext(node.role or "", seed=0)) if is_spec(made) else made

        def score(taken: Sequence[int]) -> float:
            picked = {name: column[list(taken)] for name, column in given.items()}
            began_s = time.perf_counter()
            with step_scope(0):
                getattr(worker, node.method or "")(**picked)
            return time.perf_counter() - began_s

        with closing(worker):
            score([0])  # which starts its processes
            yield score

    def cpu_s() -> float:
        total_s = 0.0
        for process in (own, *own.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total_s += sum(process.cpu_times()[:4])  # its own, and of children that ended
        return total_s

    with scorer(1) as score:
        items: list[float] = []
        spent_s = 0.0
        while (len(items) < rows and spent_s < _LONGEST * seconds) or spent_s < seconds:
            items.append(score([len(items) % rows]))
            spent_s += items[-1]
        # Other load only lengthens a time, so the least of several counts.
        least_s = [min(items[row::rows]) for row in range(min(rows, len(items)))]
        taken, before_s = range(len(least_s)), cpu_s()
        whole_s = min(score(taken), score(taken))
        item_cpu_s = (cpu_s() - before_s) / (2 * len(taken))
        num_bytes = [child.memory_info().rss for child in own.children()] if several else []
    # A response in a batch is spared what a call costs. A judge is asked for several at once.
    asks = getattr(spec, "concurrency", 1)
    spared = whole_s / sum(least_s) if asks == 1 else 1.0
    item_s = tuple(sorted(spared * seconds for seconds in least_s))
    at_once, crowded = cores if several else asks, 1.0
    if at_once > 1:
        batch = [*taken] * (cores if several else -(-asks // len(taken)))
        with scorer(cores) as score:
            crowd_s = min(score(batch), score(batch))
        crowded = max(1.0, crowd_s / makespan_s(item_s, len(batch), at_once))
    return VerifierProfile(
        item_s=item_s,
        item_cpu_s=min(item_cpu_s, sum(item_s) / len(item_s)),
        at_once=at_once,
        crowded=crowded,
        most=MOST_PROCESSES if several else None,
        process_bytes=max(num_bytes, default=0),
    )


# --- a few steps on the executor


@dataclass(frozen=True)
class Steps:
    """Some steps of a run, without the first."""

    busy_s: dict[str, float]  # call -> seconds that its busiest rank worked on it, the median
    step_s: float  # of a whole step, the median
    weights: str  # hashes of all trained roles at the end

    @property
    def rest_s(self) -> float:
        """Seconds of a step in which no call computed: calls follow each other here."""
        return max(0.0, self.step_s - sum(self.busy_s.values()))


@dataclass(frozen=True)
class _Measured:
    calls: dict[str, CallProfile]
    corrections: dict[str, float]
    executor: ExecutorProfile


def _on_executor(
    run: Run, loops: dict[str, tuple[LoopProfile, ...]], rows: dict[str, int], seconds: float
) -> _Measured:
    graph = run.main.graph
    acting = {name: loop[-1] for name, loop in loops.items()}  # the largest groups
    groups = {name: -(-rows[name] // loop.rows) for name, loop in acting.items()}
    turns_s = {
        name: loop.turns * groups[name] * (loop.step_s + loop.ask_s)
        for name, loop in acting.items()
    }
    steps = round(min(_MOST, max(_FEWEST, seconds / sum(turns_s.values()))))
    whole = _grouped(run, None)
    one = run_steps(whole, _one_by_one(whole, one_group_plan()), steps)
    names = [node.name for node in graph.nodes if node.kind is not NodeKind.SOURCE]
    call_s = max(one.rest_s / len(names), 1e-6)
    corrections = {name: max(1e-3, one.busy_s[name] / turns_s[name]) for name in acting}
    kind = executor_kind(run.executor.kind)
    executor = ExecutorProfile(name=kind.name, call_s=call_s)
    two: Steps | None = None
    if kind.has_processes:
        roles = {graph[name].role for name in acting}
        kept = [r for r, one in graph.roles.items() if one.keeps_state and r not in roles]
        size, team = min(rows.values()) // 2, team_of(run)
        halves = _grouped(run, size // team * team or None)
        if not kept and (num_groups(halves) or 1) > 1:
            both = Plan(groups=(GroupPlan(name="all", num_ranks=2),))
            with suppress(ConfigError, PlanError):  # rows that two ranks cannot share
                two = run_steps(halves, _one_by_one(whole, both), steps)
        copied = run_steps(whole, _apart(run, {}), steps)
        actors = {role for name in acting for role in graph[name].roles_given}
        served = run_steps(whole, _apart(run, dict.fromkeys(actors, "learner")), steps)
        asked_s = sum(served.busy_s[name] - copied.busy_s[name] for name in acting)
        asked_s /= sum(loop.turns * groups[name] for name, loop in acting.items())
        executor = ExecutorProfile(
            name=kind.name,
            call_s=call_s,
            publish_s=max(0.0, copied.rest_s - len(names) * call_s),
            request_s=max(0.0, asked_s),
            request_cpu_s=max(0.0, asked_s),  # messages on one machine are computed, not waited for
        )
    calls = {
        name: CallProfile(
            one_rank_s=one.busy_s[name], two_ranks_s=None if two is None else two.busy_s[name]
        )
        for name in names
        if name not in acting
    }
    return _Measured(calls, corrections, executor)


def _apart(run: Run, served: dict[str, str]) -> Plan:
    """One process that trains and one that acts."""
    roles = {node.role or "" for node in acting_nodes(run.main.graph)}
    groups = (GroupPlan(name="learner"), GroupPlan(name="acting", served=served))
    return _one_by_one(run, Plan(groups=groups, nodes=dict.fromkeys(roles, "acting")))


def _one_by_one(run: Run, plan: Plan) -> Plan:
    """The plan with groups of environments that are not overlapped."""
    roles = [n.role or "" for n in acting_nodes(run.main.graph) if n.method == "rollout"]
    return plan.model_copy(update={"role_options": {role: {"num_overlapped": 1} for role in roles}})


def run_steps(run: Run, plan: Plan, num_steps: int) -> Steps:
    """Take so many steps of a run's main stage under a plan, and two before that do not count."""
    run = prepare(run, plan)
    stage = run.main
    engine = Engine(
        stage.graph,
        stage.placement,
        workers=worker_specs(stage, run, {}),
        schedule=stage_schedule(stage.graph, run.config.schedule),
        seed=stage.seed,
        executor=make_executor(run.executor),
    )
    busy: dict[str, list[float]] = {}
    ends_s: list[float] = []
    with engine:
        if executor_kind(run.executor.kind).has_processes:
            _settle()
        for step in engine.run(run.sources[stage.name], _WARM_UP + num_steps):
            ends_s.append(time.perf_counter())
            if len(ends_s) > _WARM_UP:
                for node, seconds in node_seconds(step.spans).items():
                    busy.setdefault(node, []).append(seconds)
        roles = sorted(stage.graph.learning_roles)
        weights = " ".join(engine.call(role, "weights_sha256") for role in roles)
    times = [end - begin for begin, end in zip(ends_s, ends_s[1:], strict=False)]
    return Steps(
        {node: statistics.median(seconds) for node, seconds in busy.items()},
        statistics.median(times[_WARM_UP - 1 :]),
        weights,
    )


def _settle() -> None:
    """Wait until the machine rests: processes that are started in advance compute for seconds."""
    until_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < until_s and psutil.cpu_percent(_LOOK_S) > _AT_REST:
        pass


# --- a profile as text


def task_profile_text(profile: TaskProfile) -> str:
    if profile.verifiers:
        rows = [["scores", "a response", "of it waiting", "median", "longest", "on all cores"]]
        for name, one in profile.verifiers.items():
            mean_s = statistics.mean(one.item_s)
            waits = 1.0 - one.item_cpu_s / mean_s if mean_s else 0.0
            rows.append([
                name, seconds_text(mean_s), percent_text(waits),
                seconds_text(statistics.median(one.item_s)), seconds_text(one.item_s[-1]),
                f"{one.crowded:.2f} x as long",
            ])  # fmt: skip
        return "\n\n".join([profile.machine, "\n".join(aligned(rows, range(1, 6)))])
    rows = [["acts", "rows", "turns", "a step", "of it waiting", "median", "99 %", "the actor"]]
    for name, loops in profile.loops.items():
        for loop in loops:
            waits = 1.0 - loop.step_cpu_s / loop.step_s if loop.step_s else 0.0
            quantiles = (seconds_text(loop.quantiles_s.get(q, 0.0)) for q in ("0.5", "0.99"))
            rows.append([
                name, str(loop.rows), str(loop.turns), seconds_text(loop.step_s),
                percent_text(waits), *quantiles, seconds_text(loop.ask_s),
            ])  # fmt: skip
    calls = [["call", "one rank", "two ranks"]]
    for name, call in profile.calls.items():
        two = "-" if call.two_ranks_s is None else seconds_text(call.two_ranks_s)
        calls.append([name, seconds_text(call.one_rank_s), two])
    adds = profile.executor
    costs = [[f"a call ({adds.name.replace('_', ' ')})", seconds_text(adds.call_s)]]
    if adds.publish_s is not None:
        costs.append(["weights into a copy", seconds_text(adds.publish_s)])
        costs.append(["a request to another process", seconds_text(adds.request_s)])
    tables = (aligned(rows, range(1, 8)), aligned(calls, (1, 2)), aligned(costs, (1,)))
    return "\n\n".join([profile.machine, *map("\n".join, tables)])
