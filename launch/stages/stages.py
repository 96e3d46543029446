"""What a run consists of, worked out before any model is built: its stages, graphs and roles.

A stage is one algorithm with its graph, its placement and, for each role, who plays it and where
its weights come from. Stages named under `before` run first; one from which nothing starts is left
out, so giving a model folder, or a rule for a reward, skips the warm-up that would have made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...algorithms.roles.agents import Agent
from ...algorithms.roles.language import Policy, ProcessReward, Reward, RewardModel, ValueModel
from ...configs.schema import AlgorithmConfig, ModelConfig, RoleConfig
from ...configs.validate import nearest_key
from ...dataflow.errors import ConfigError
from ...dataflow.graph.check import check_lag
from ...dataflow.graph.graph import Graph
from ...dataflow.graph.role import Role
from ...dataflow.runtime.placement import Placement
from ...planner.plan.plan import Plan, one_group_plan
from ...workers.agents.registry import TASK_AGENTS
from ...workers.rewards.registry import TASK_REWARDS
from ..inputs.compose import Resolved, check_model
from ..inputs.env_specs import ENV_CONTRACTS, NETWORKS
from ..inputs.own_workers import asked_for, check_takes, is_own
from ..inputs.record import Recorded
from ..inputs.sizes import check_sizes
from ..inputs.tables import check_tables
from ..placement.place import followed, placement_of, written_plan
from ..placement.worker_options import planned_options
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


@dataclass(frozen=True)
class RolePlan:
    """Who plays a role.

    Attributes:
        worker: A name of `CONTRACTS`, or `module:factory`.
        start: `MODEL`, the name of an earlier stage, a folder, or "" for a worker without weights,
            or with random ones of its own seed.
        config: What was configured for the role.
        trained: Whether the step trains it by a loss, so that it needs an optimizer.
        contract: What it fulfils, by which the role of an earlier stage is found to start from.
        start_mean: Starts and their shares, the first of them `start`, whose weights' mean the role
            starts from; empty for `start` alone.
    """

    worker: str
    start: str
    config: RoleConfig
    trained: bool
    contract: type[Role]
    start_mean: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Stage(Recorded):
    """One algorithm of a run, ready to be carried out.

    Attributes:
        placement: Where its nodes run.
        roles: Role name -> who plays it.
        planned_options: Role -> fields of its worker's spec that the plan decides.
    """

    placement: Placement
    roles: Mapping[str, RolePlan]
    planned_options: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict[str, Mapping[str, Any]]
    )

    @property
    def policy(self) -> str | None:
        """The policy that the stage trains."""
        return self.trained(Policy)


def stages_of(run: Resolved, plan: Plan | None = None) -> tuple[Stage, ...]:
    """The stages of a run in order, the main one last.

    Args:
        run: The run.
        plan: Where the main stage's nodes run. By default as the configuration says; what that
            leaves to the planner is on one rank.

    Raises:
        ConfigError: If a key, a role, a file or a size is wrong.
        FlowError: If a step's loss cannot correct for the schedule's lag.
        PlanError: If the placement does not fit.
    """
    check_model(run.model)
    where, graph = run.placement, run.main.graph
    plan = plan or written_plan(where, run.engines) or one_group_plan(device=where.executor.device)
    placement = placement_of(graph, plan, where, run.engines)
    keep_ranks = bool(where.executor.groups)
    earlier: list[Stage] = []
    for before in run.stages[:-1]:
        per_step = before.config.per_step
        its = followed(before.graph, graph, placement, per_step, keep_ranks=keep_ranks)
        earlier.append(_stage(run, before, its, earlier))
    main = _stage(run, run.main, placement, earlier)
    main = replace(main, planned_options=planned_options(plan, run.main, run.engines))
    wanted = _wanted(main, earlier)
    stages = (*(stage for stage in earlier if stage.name in wanted), main)
    check_streams(stages, run.schedule)
    return stages


def _stage(run: Resolved, algorithm: Recorded, placement: Placement, earlier: list[Stage]) -> Stage:
    at, graph, section = algorithm.at, algorithm.graph, algorithm.config
    for given in section.roles:
        if given not in graph.roles:
            raise ConfigError(
                f"'{at}.roles' names a role '{given}', which {graph.name} does not have"
                f"{nearest_key(given, graph.roles)}\n    its roles are: {', '.join(graph.roles)}"
            )
    roles = {role: _role(run.model, algorithm, role, earlier) for role in graph.roles}
    stage_flow(graph, placement, run.schedule)
    schedule = stage_schedule(graph, run.schedule)
    check_lag(graph, schedule.max_lag, schedule.segment_tokens, in_flight=schedule.in_flight)
    check_tables(graph, at)
    check_sizes(graph, placement, section.per_step, at)
    check_parts(graph, placement, section.per_step, run.schedule, at)
    return Stage(algorithm.name, at, section, graph, algorithm.seed, placement, roles)


def _role(model: ModelConfig, algorithm: Recorded, role: str, earlier: list[Stage]) -> RolePlan:
    at, graph = f"{algorithm.at}.roles.{role}", algorithm.graph
    given = algorithm.config.roles.get(role, RoleConfig())
    contract = graph.roles[role]
    trained = role in graph.learning_roles
    worker = given.worker or _default_worker(contract, earlier, given)
    if worker is None:
        raise ConfigError(
            f"{graph.name} has a role '{role}' ({contract.__name__}) that nobody provides\n"
            f"    say who plays it: {at}.worker=module:factory, a function that returns a worker "
            "or its spec"
        )
    for key in ("optimizer", "frozen"):
        if getattr(given, key) and not trained:
            learning = [name for name in graph.roles if name in graph.learning_roles]
            raise ConfigError(
                f"'{at}.{key}' is set, but {graph.name} does not train '{role}' with a loss\n"
                f"    leave it out; roles with a loss are: {', '.join(learning) or 'none'}"
            )
    if is_own(worker):
        asked = asked_for(worker, given, at)
        check_takes(worker, given, asked, at)
        plan = RolePlan(worker, "", given, trained, contract)
        return _started(model, at, plan, earlier) if "model" in asked else plan
    _check_worker(at, role, contract, worker)
    plan = RolePlan(worker, "", given, trained, CONTRACTS[worker])
    if worker in ENV_CONTRACTS:
        start = _env_start(at, worker, graph, role, algorithm.config, earlier)
        return replace(plan, start=start)
    if worker in TASK_REWARDS or worker in TASK_AGENTS:
        _check_weightless(at, worker, given)
        return plan
    return _started(model, at, plan, earlier)


def _check_weightless(at: str, worker: str, given: RoleConfig) -> None:
    for key in ("start", "start_mean", "init_offset"):
        if getattr(given, key):
            raise ConfigError(
                f"'{at}.{key}' is set, but '{worker}' has no weights\n"
                "    leave it out"
                + (f", or set {at}.worker=reward_model" if worker in TASK_REWARDS else "")
            )


def _started(model: ModelConfig, at: str, plan: RolePlan, earlier: list[Stage]) -> RolePlan:
    """The plan of a role with a language model, with where its weights come from."""
    given, contract = plan.config, plan.contract
    if not given.start_mean:
        start = _start(model, at, contract, given, earlier)
        if given.init_offset and (start != MODEL or model.folder is not None):
            raise ConfigError(
                f"'{at}.init_offset' is set, but the role starts from '{start}', which is trained\n"
                "    leave it out; it seeds random weights"
            )
        return replace(plan, start=start)
    _check_mean(at, given)
    mean = {
        _start(model, f"{at}.start_mean", contract, RoleConfig(start=start), earlier): share
        for start, share in given.start_mean.items()
    }
    return replace(plan, start=next(iter(mean)), start_mean=mean)


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
) -> str:
    """Where an actor or a critic in environments begins; "" for random weights, or for none.

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
        return ""
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
    return "" if start == MODEL else start


def _wanted(main: Stage, earlier: list[Stage]) -> set[str]:
    """Names of the stages from which the main one starts, directly or through others."""
    by_name = {stage.name: stage for stage in earlier}
    wanted: set[str] = set()
    todo = [main]
    while todo:
        for role in todo.pop().roles.values():
            for start in (role.start, *role.start_mean):
                if start in by_name and start not in wanted:
                    wanted.add(start)
                    todo.append(by_name[start])
    return wanted
