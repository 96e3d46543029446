"""The stages of a run with their roles: workers, and where their weights start.

A stage is one algorithm with its graph, its placement and, for each role, who plays it and where
its weights come from. Stages named under `before` run first; one from which nothing starts is left
out, so giving a model folder, or a rule for a reward, skips the warm-up that would have made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...algorithms.roles.language import (
    Agent,
    Policy,
    ProcessReward,
    Reward,
    RewardModel,
    ValueModel,
)
from ...configs.schema import AlgorithmConfig, ModelConfig, RoleConfig
from ...configs.validate import nearest_key
from ...dataflow.errors import ConfigError
from ...dataflow.graph.check import check_lag
from ...dataflow.graph.graph import Graph
from ...dataflow.graph.role import Role
from ...dataflow.scheduler.schedule import Schedule
from ...planner.plan.plan import Plan, one_group_plan
from ...workers.agents.environment import TASK_AGENTS
from ...workers.rewards.registry import TASK_REWARDS
from ..inputs.compose import check_model
from ..inputs.env_specs import ENV_CONTRACTS, NETWORKS
from ..inputs.own_workers import asked_for, check_takes, is_own
from ..inputs.record import Stage
from ..inputs.run import Run
from ..inputs.sizes import check_sizes
from ..inputs.tables import check_tables
from ..placement.place import follow_main, placement_of, planned_options, written_plan
from .streaming import check_parts, check_streams, stage_flow, stage_schedule

MODEL = "model"
"""As a role's start: the run's model."""

CONTRACTS: Mapping[str, type[Role]] = {
    "policy": Policy,
    "value": ValueModel,
    "reward_model": RewardModel,
    **dict.fromkeys(TASK_REWARDS, Reward),
    "process_reward": ProcessReward,
    **dict.fromkeys(TASK_AGENTS, Agent),
    **ENV_CONTRACTS,
}
"""The workers that can be named, and the contract each fulfils."""


def build_stages(run: Run, plan: Plan | None = None) -> Run:
    """The run with roles and placement of its stages, without stages from which nothing starts.

    Args:
        run: The run.
        plan: Where the main stage's nodes run. By default as the configuration says; what that
            leaves to the planner is on one rank, and the run has no plan yet.

    Raises:
        ConfigError: If a key, a role, a file or a size is wrong.
        FlowError: If a step's loss cannot correct for the schedule's lag.
        PlanError: If the placement does not fit.
    """
    check_model(run.model)
    plan = plan or written_plan(run)
    stages: list[Stage] = []
    for stage in run.stages:
        stages.append(replace(stage, roles=_roles(run.model, stage, stages)))
    on_one_rank = one_group_plan(device=run.executor.device)
    run = place_stages(replace(run, stages=tuple(stages)), plan or on_one_rank)
    wanted = _wanted(run.stages)
    run = replace(run, stages=tuple(s for s in run.stages if s.name in wanted), plan=plan)
    check_streams(run.stages, run.config.schedule)
    return run


def place_stages(run: Run, plan: Plan) -> Run:
    """The run with its stages where a plan has the main one's nodes.

    Raises:
        ConfigError: If a size does not divide as the placement needs.
        FlowError: If a step's loss cannot correct for the schedule's lag.
        PlanError: If the placement does not fit.
    """
    main, keep_ranks = run.main, bool(run.executor.groups)
    placement = placement_of(main.graph, plan, run)
    stages: list[Stage] = []
    for stage in run.stages[:-1]:
        per_step = stage.config.per_step
        its = follow_main(stage.graph, main.graph, placement, per_step, keep_ranks=keep_ranks)
        stages.append(replace(stage, placement=its))
    stages.append(replace(main, placement=placement))
    for stage in stages:
        _check_placed(stage, run.config.schedule)
    stages[-1] = replace(stages[-1], planned_options=planned_options(plan, main, run.engines))
    return replace(run, stages=tuple(stages), plan=plan)


def _check_placed(stage: Stage, schedule: Schedule) -> None:
    graph, per_step = stage.graph, stage.config.per_step
    stage_flow(graph, stage.placement, schedule)
    own = stage_schedule(graph, schedule)
    check_lag(graph, own.max_lag, own.segment_tokens, in_flight=own.in_flight)
    check_tables(graph, stage.at)
    check_sizes(graph, stage.placement, per_step, stage.at)
    check_parts(graph, stage.placement, per_step, schedule, stage.at)


def contract_of(stage: Stage, role: str) -> type[Role]:
    """Return what a role's worker fulfils: it starts from an earlier role of that contract."""
    worker = stage.worker(role)
    return stage.graph.roles[role] if is_own(worker) else CONTRACTS[worker]


def _roles(model: ModelConfig, stage: Stage, earlier: list[Stage]) -> dict[str, RoleConfig]:
    """Every role's section with its worker and where its weights come from."""
    for given in stage.config.roles:
        if given not in stage.graph.roles:
            raise ConfigError(
                f"'{stage.at}.roles' names a role '{given}', which {stage.graph.name} does not have"
                f"{nearest_key(given, stage.graph.roles)}\n"
                f"    its roles are: {', '.join(stage.graph.roles)}"
            )
    return {role: _role(model, stage, role, earlier) for role in stage.graph.roles}


def _role(model: ModelConfig, stage: Stage, role: str, earlier: list[Stage]) -> RoleConfig:
    at, graph = f"{stage.at}.roles.{role}", stage.graph
    given = stage.config.roles.get(role, RoleConfig())
    contract = graph.roles[role]
    worker = given.worker or _default_worker(contract, earlier, given)
    if worker is None:
        raise ConfigError(
            f"{graph.name} has a role '{role}' ({contract.__name__}) that nobody provides\n"
            f"    say who plays it: {at}.worker=module:factory, a function that returns a worker "
            "or its spec"
        )
    for key in ("optimizer", "frozen"):
        if getattr(given, key) and role not in graph.learning_roles:
            learning = [name for name in graph.roles if name in graph.learning_roles]
            raise ConfigError(
                f"'{at}.{key}' is set, but {graph.name} does not train '{role}' with a loss\n"
                f"    leave it out; roles with a loss are: {', '.join(learning) or 'none'}"
            )
    without = given.model_copy(update={"worker": worker, "start": None, "start_mean": {}})
    if is_own(worker):
        asked = asked_for(worker, given, at)
        check_takes(worker, given, asked, at)
        if "model" not in asked:
            return without
        return without.model_copy(update=_started(model, at, contract, given, earlier))
    _check_worker(at, role, contract, worker)
    if worker in ENV_CONTRACTS:
        start = _env_start(at, worker, graph, role, stage.config, earlier)
        return without.model_copy(update={"start": start})
    if worker in TASK_REWARDS or worker in TASK_AGENTS:
        _check_weightless(at, worker, given)
        return without
    return without.model_copy(update=_started(model, at, CONTRACTS[worker], given, earlier))


def _check_weightless(at: str, worker: str, given: RoleConfig) -> None:
    for key in ("start", "start_mean", "init_offset"):
        if getattr(given, key):
            raise ConfigError(
                f"'{at}.{key}' is set, but '{worker}' has no weights\n"
                "    leave it out"
                + (f", or set {at}.worker=reward_model" if worker in TASK_REWARDS else "")
            )


def _started(
    model: ModelConfig, at: str, contract: type[Role], given: RoleConfig, earlier: list[Stage]
) -> dict[str, Any]:
    """Where the weights of a role with a language model come from: `start` and `start_mean`."""
    if not given.start_mean:
        start = _start(model, at, contract, given, earlier)
        if given.init_offset and (start != MODEL or model.folder is not None):
            raise ConfigError(
                f"'{at}.init_offset' is set, but the role starts from '{start}', which is trained\n"
                "    leave it out; it seeds random weights"
            )
        return {"start": start}
    _check_mean(at, given)
    mean = {
        _start(model, f"{at}.start_mean", contract, RoleConfig(start=start), earlier): share
        for start, share in given.start_mean.items()
    }
    return {"start": next(iter(mean)), "start_mean": mean}


def _check_mean(at: str, given: RoleConfig) -> None:
    shares = given.start_mean
    if given.start is not None:
        raise ConfigError(f"'{at}' has both start and start_mean\n    set one of them")
    if MODEL in shares or len(shares) < 2 or sum(shares.values()) <= 0:
        raise ConfigError(
            f"'{at}.start_mean' is {shares}; it averages the weights of earlier stages or folders\n"
            "    give two or more and how much of each, as in {sft: 0.5, sft_b: 0.5}"
        )


def _default_worker(contract: type[Role], earlier: list[Stage], given: RoleConfig) -> str | None:
    if contract is Reward:
        started = given.start is not None or bool(given.start_mean)
        learned = started or any(stage.trained(RewardModel) for stage in earlier)
        return "reward_model" if learned else "rule"
    named = next((name for name, known in CONTRACTS.items() if contract is known), None)
    return named or contract.default_worker


def _check_worker(at: str, role: str, contract: type[Role], worker: str) -> None:
    if worker not in CONTRACTS:
        raise ConfigError(
            f"'{at}.worker': there is no worker '{worker}'{nearest_key(worker, CONTRACTS)}\n"
            f"    workers are: {', '.join(CONTRACTS)}, or module:factory for your own"
        )
    if not issubclass(CONTRACTS[worker], contract):
        fitting = [name for name, known in CONTRACTS.items() if issubclass(known, contract)]
        raise ConfigError(
            f"'{at}.worker': role '{role}' is a {contract.__name__}, which '{worker}' is not\n"
            f"    use {' or '.join([*fitting, 'module:factory'])}"
        )


def _start(
    model: ModelConfig, at: str, contract: type[Role], given: RoleConfig, earlier: list[Stage]
) -> str:
    names = [stage.name for stage in earlier]
    policies = [stage.name for stage in earlier if stage.policy]
    if given.start in (MODEL, *names):
        if issubclass(contract, Policy) and given.start not in (MODEL, *policies):
            raise ConfigError(
                f"'{at}.start': stage '{given.start}' trains no policy, so a policy cannot start "
                f"from it\n    stages that do: "
                f"{', '.join(policies) or 'none'}"
            )
        return str(given.start)
    if given.start is not None:
        _check_folder(at, given.start, names)
        return given.start
    if issubclass(contract, (Reward, ProcessReward)):
        learned = [stage.name for stage in earlier if stage.trained(RewardModel)]
        if learned:
            return learned[-1]
    if model.folder is not None:
        return MODEL
    return policies[-1] if policies else MODEL


def _check_folder(at: str, start: str, names: list[str]) -> None:
    if not (Path(start) / "config.json").is_file():
        inside = sorted(str(file.parent) for file in Path(start).glob("*/config.json"))
        raise ConfigError(
            f"'{at}.start': '{start}' is neither a stage nor a model folder"
            f"{nearest_key(start, [MODEL, *names])}\n    stages are: "
            f"{', '.join(names) or 'none'}; a model folder holds config.json and safetensors"
            f"{', as do: ' if inside else ''}{', '.join(inside)}"
        )


def _env_start(
    at: str,
    worker: str,
    graph: Graph,
    role: str,
    algorithm: AlgorithmConfig,
    earlier: list[Stage],
) -> str | None:
    """Where an actor or a critic in environments begins; None for random weights, or for none.

    By default at the latest earlier stage that trained such a one. A role that learns from no loss
    begins where the one of its contract does that learns: it is a copy of that, or follows it.
    """
    given = algorithm.roles.get(role, RoleConfig())
    if given.start_mean or (given.start is not None and worker not in NETWORKS):
        has = "starts from one folder or stage" if worker in NETWORKS else "has no weights"
        raise ConfigError(
            f"'{at}.{'start_mean' if given.start_mean else 'start'}' is set, but '{worker}' {has}"
            "\n    leave it out"
        )
    if worker not in NETWORKS:
        return None
    learning = graph.learning_roles
    alike = [name for name in graph.roles if graph.roles[name] is graph.roles[role]]
    leaders = [] if role in learning else [name for name in alike if name in learning]
    starts = [algorithm.roles[name].start for name in (role, *leaders) if name in algorithm.roles]
    learned = [stage.name for stage in earlier if stage.trained(CONTRACTS[worker])]
    start = next((start for start in starts if start is not None), "".join(learned[-1:]))
    if start in {stage.name for stage in earlier} - set(learned):
        raise ConfigError(
            f"'{at}.start': stage '{start}' trains no '{worker}', so none can start from it\n"
            f"    stages that do: {', '.join(learned) or 'none'}"
        )
    if start and start not in (MODEL, *learned):
        _check_folder(at, start, [stage.name for stage in earlier])
    return None if start in ("", MODEL) else start


def _wanted(stages: tuple[Stage, ...]) -> set[str]:
    """The main stage, and those from which it starts, directly or through others."""
    by_name = {stage.name: stage for stage in stages[:-1]}
    wanted, todo = {stages[-1].name}, [stages[-1]]
    while todo:
        stage = todo.pop()
        for start in (start for role in stage.roles for start in stage.starts(role)):
            if start in by_name and start not in wanted:
                wanted.add(start)
                todo.append(by_name[start])
    return wanted
