"""From the roles of a stage to the specs of their workers: models, optimizers, rules.

Every role that starts from the same place starts from the same weights, so a frozen reference is
the policy as it was when the stage began.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ...algorithms.roles.language import Reward, RewardModel
from ...configs.references import load_object
from ...configs.schema import EngineConfig, ModelConfig, RolloutConfig, model_spec
from ...configs.validate import nearest_key
from ...dataflow.errors import ConfigError, one_process
from ...dataflow.graph.graph import NodeKind
from ...dataflow.graph.role import Role
from ...dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec, is_spec
from ...workers.agents.registry import TASK_AGENTS
from ...workers.agents.worker import AgentSpec
from ...workers.engines.engine import Engine
from ...workers.engines.registry import DEFAULT, ENGINES
from ...workers.models.architecture import empty_model
from ...workers.models.averaged_weights import mean_folder
from ...workers.models.heads import Head, HeadName
from ...workers.models.lora import check_lora
from ...workers.models.spec import ModelSpec
from ...workers.models.tokenizer import TokenizerSpec
from ...workers.rewards.registry import TASK_REWARDS, check_verifiers
from ...workers.rollout.generator_policy import SplitPolicySpec
from ...workers.rollout.missing_scores import CheckedRewardSpec
from ...workers.training.logprob_mismatch import MismatchLimits
from ...workers.training.optimizer import OptimizerSpec
from ..inputs.compose import Resolved
from ..inputs.data import Data
from ..inputs.engines import Engines, engines_of
from ..inputs.env_specs import ENV_SPECS, FILLED_IN, NETWORKS, env_worker, perceptron_spec
from ..inputs.own_workers import asked_for, is_own
from .stages import MODEL, RolePlan, Stage

Results = Mapping[str, tuple[Stage, Path]]
"""Name of a finished stage -> the stage, and the folder with a model folder per trained role."""

_OURS = {
    "model",
    "end_ids",
    "num_words",
    "optimizer",
    "mismatch",
    "lora",
    "shares_weights",
    "task",
    "tokenizer",
    "task_fingerprint",
    "longest_sequence",
}
"""Fields of a spec that the run fills in; the others may be set as `options`."""

_HEADS: Mapping[str, HeadName] = {
    "policy": "lm_head",
    "value": "value_head",
    "reward_model": "score",
    "process_reward": "score",
}
"""Worker -> what its model ends in."""

_OF_TASKS = {"task", "tokenizer", "task_fingerprint", "chat"}
"""The same of what looks at the task; a judge's `model` is the user's to name."""


def worker_specs(
    stage: Stage, run: Resolved, data: Data, results: Results
) -> dict[str, WorkerSpec | Role]:
    """A spec for every role of a stage.

    Args:
        stage: The stage.
        run: The run.
        data: Its task and tokenizer.
        results: The finished stages.

    Raises:
        ConfigError: If a worker of the user's own cannot be made.
    """
    return {
        role: _spec(stage, role, plan, run, data, results) for role, plan in stage.roles.items()
    }


def exporting_specs(
    stage: Stage, run: Resolved, data: Data, results: Results
) -> dict[str, WorkerSpec | Role]:
    """Specs of the same roles that read, in one process, what any engine has trained.

    Options of an engine's workers are left out: they are those of the engine that trained.
    """
    here = replace(run, engines=engines_of(EngineConfig(), RolloutConfig()))
    roles = {
        role: replace(plan, config=plan.config.model_copy(update={"options": {}}))
        if plan.worker in DEFAULT.roles
        else plan
        for role, plan in stage.roles.items()
    }
    return worker_specs(replace(stage, roles=roles, planned_options={}), here, data, results)


def check_options(stage: Stage, run: Resolved) -> None:
    """Validate the options of a stage's workers without making one.

    Raises:
        ConfigError: If an option is unknown, of the wrong type or out of range, or the engines
            cannot do what the stage asks of them.
    """
    engines = run.engines
    engines.check_generates(stage.graph)
    _check_apart(stage, engines)
    if engines.rollout is not None:
        spec = engines.rollout.rollout_spec
        _check(spec, engines.rollout_options, "rollout.options", "rollout")
    for role, plan in stage.roles.items():
        optimizer_of(stage, role, plan)
        at = f"{stage.at}.roles.{role}.options"
        if is_own(plan.worker):
            continue  # looked at when the stage was made
        if plan.worker in ENV_SPECS:
            _check(ENV_SPECS[plan.worker], plan.config.options, at, plan.worker, FILLED_IN)
            if plan.worker in NETWORKS:
                perceptron_spec(run.model)
                _check_start(stage, role, plan, run)
            continue
        if plan.worker in TASK_REWARDS:
            _check(TASK_REWARDS[plan.worker], plan.config.options, at, plan.worker, _OF_TASKS)
            check_verifiers(plan.worker, plan.config.options)
            continue
        if plan.worker in TASK_AGENTS:
            _check(TASK_AGENTS[plan.worker], plan.config.options, at, plan.worker, _OF_TASKS)
            continue
        kind = _spec_class(engines.trainer(role), plan.worker)
        _check(kind, plan.config.options, at, plan.worker)
        _check(kind, engines.options_of(role), "engine.options", plan.worker)
    _check_adapters(stage, run)


def check_groups(stages: Sequence[Stage], run: Resolved, data: Data) -> None:
    """Refuse groups on which a stage's language models could not be built, before any is trained.

    Raises:
        ConfigError: If an engine cannot share a model as the group does.
        PlanError: If the model cannot be divided so.
    """
    by_name = {stage.name: stage for stage in stages}
    for stage in stages:
        for role, plan in stage.roles.items():
            if plan.worker not in _HEADS:
                continue
            first = replace(plan, start=_first_start(plan, by_name), start_mean={})
            spec = _spec(stage, role, first, run, data, {})
            check: Callable[[WorkerContext], None] | None
            if (check := getattr(spec, "check_group", None)) is None:
                continue
            for group in stage.placement.groups:
                if role in stage.placement.hosted_roles(stage.graph, group.name):
                    methods = stage.placement.methods(stage.graph, group.name, role)
                    context = WorkerContext(
                        role,
                        num_ranks=group.num_ranks,
                        device=group.device,
                        tensor_parallel=group.tensor_parallel,
                        pipeline_parallel=group.pipeline_parallel,
                        methods=methods,
                    )
                    check(context)


def _first_start(plan: RolePlan, stages: Mapping[str, Stage]) -> str:
    """Return where the model that a role starts from came from, before any stage trained it."""
    while plan.start in stages:
        earlier = stages[plan.start]
        plan = earlier.roles[_started_from(earlier, plan.contract)]
    return plan.start


def _check_start(stage: Stage, role: str, plan: RolePlan, run: Resolved) -> None:
    """Refuse a folder whose network does not fit; that of an earlier stage is not there yet."""
    if not plan.start or plan.start in run.main.config.before:
        return
    spec = env_worker(plan.worker, run.model, run.spec, None, {}, start=plan.start)
    try:
        spec.build(WorkerContext(role))
    except ConfigError as error:
        raise ConfigError(f"'{stage.at}.roles.{role}.start': {error}") from error


def _spec_class(engine: Engine, worker: str) -> Any:
    """Return the class of a worker's spec in an engine."""
    if worker in engine.roles:
        return engine.spec(worker)
    able = [other for other in ENGINES.values() if worker in other.roles]
    others = "; ".join(f"engine={other.name} has: {', '.join(other.roles)}" for other in able)
    raise ConfigError(
        f"engine={engine.name} has no worker '{worker}'\n    it has: {', '.join(engine.roles)}; "
        f"{others}"
    )


def _check(
    kind: Any, options: Mapping[str, Any], at: str, worker: str, ours: Set[str] = _OURS
) -> None:
    """Refuse options that a spec does not have, or not of this type or value."""
    hints = get_type_hints(kind)
    free = [name for name in hints if name not in ours]
    for key, value in options.items():
        if key not in free:
            raise ConfigError(
                f"there is no key '{at}.{key}'{nearest_key(key, free, at)}\n"
                f"    a '{worker}' worker has: {', '.join(free) or 'none'}"
            )
        try:
            TypeAdapter(hints[key]).validate_python(value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"'{at}.{key}': {error.errors()[0]['msg']}, got {value!r}") from None
    # What the run fills in is not known yet; the spec itself says which values it takes.
    required = (f for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    unknown = {field.name: None for field in required if field.name in ours}
    try:
        kind(**unknown, **options)
    except ValueError as error:
        raise ConfigError(f"'{at}': {error}") from None


def _check_apart(stage: Stage, engines: Engines) -> None:
    """An engine that only generates needs a group of its own."""
    for node in stage.graph.nodes:
        ours = stage.roles[node.role].worker == "policy" if node.role else False
        if not ours or not engines.apart(stage.graph, node):
            continue
        group = stage.placement.nodes[node.name]
        asked = stage.placement.methods(stage.graph, group, node.role or "")
        others = sorted(asked - {node.method})
        if others:
            rollout = engines.runs(stage.graph, node).name
            raise ConfigError(
                f"rollout={rollout}: '{node.name}' is on group '{group}', which "
                f"is also asked for {node.role}.{others[0]}\n    give generation a group of its "
                f"own: executor=ray_split, or executor.nodes.{node.name}=GROUP"
            )


def _spec(
    stage: Stage,
    role: str,
    plan: RolePlan,
    run: Resolved,
    data: Data,
    results: Results,
) -> WorkerSpec | Role:
    options = dict(plan.config.options)
    if is_own(plan.worker):
        return _own(stage, role, plan, run, data, results)
    if plan.worker in TASK_REWARDS:
        return TASK_REWARDS[plan.worker](
            task=data.spec,
            tokenizer=stage_tokenizer(stage, data),
            task_fingerprint=data.fingerprint,
            **options,
        )
    if plan.worker in TASK_AGENTS:
        return agent_spec(plan.worker, data, stage_tokenizer(stage, data), options)
    if plan.worker in ENV_SPECS:
        optimizer = optimizer_of(stage, role, plan)
        start = _folder(plan.start, plan.contract, results) if plan.start else None
        offset = plan.config.init_offset
        return env_worker(plan.worker, run.model, data.spec, optimizer, options, offset, start)
    model = _model(plan, run, data, results)
    planned = stage.planned_options.get(role, {})
    options = {**planned, **run.engines.options_of(role), **options, "model": model}
    if plan.trained:
        options["optimizer"] = optimizer_of(stage, role, plan)
    spec = _spec_class(run.engines.trainer(role), plan.worker)
    known = get_type_hints(spec)
    adapters = _adapters(stage, role, run, waits=bool(options.get("offload")))
    options |= {key: value for key, value in adapters.items() if key in known}
    if "tokenizer" in known:
        options["tokenizer"] = stage_tokenizer(stage, data)
    if "num_words" in known:
        options["num_words"] = data.tokenizer.vocab_size
    if plan.worker != "policy":
        return spec(**options)
    made = spec(**options, end_ids=data.tokenizer.end.ids, mismatch=_limits(run))
    rollout = run.engines.generator(role)
    if rollout is None:
        return made
    options = {**run.engines.rollout_options_of(role), "model": model}
    options["end_ids"] = data.tokenizer.end.ids
    generator = rollout.rollout_spec
    options |= {key: value for key, value in adapters.items() if key == "lora"}
    hints = get_type_hints(generator)
    if "longest_sequence" in hints:
        options["longest_sequence"] = run.longest_sequence
    if "num_words" in hints:
        options["num_words"] = data.tokenizer.vocab_size
    if "tokenizer" in hints:
        options["tokenizer"] = data.tokenizer_spec
    return SplitPolicySpec(train=made, rollout=generator(**options))


def check_agents(datas: Sequence[Data], options: Mapping[str, Any]) -> None:
    """Refuse problems whose conversations could not be rendered or read.

    Args:
        datas: Each with problems; those that are not answered in conversation are passed over.
        options: Options of the agent.

    Raises:
        ConfigError: Naming what is missing.
    """
    for data in {id(data): data for data in datas if data.task.converses}.values():
        spec = AgentSpec(task=data.spec, tokenizer=data.tokenizer_spec, chat=data.chat, **options)
        spec.ways(data.task, data.tokenizer)


def stage_tokenizer(stage: Stage, data: Data) -> TokenizerSpec:
    """Return the run's tokenizer, with responses ending as the stage samples them."""
    spec, sampling = data.tokenizer_spec, stage.sampling
    return spec if sampling is None else spec.sampled_by(sampling)


def agent_spec(
    worker: str, data: Data, tokenizer: TokenizerSpec, options: Mapping[str, Any]
) -> WorkerSpec:
    """What answers a policy about the problems of a task."""
    return TASK_AGENTS[worker](
        task=data.spec,
        tokenizer=tokenizer,
        task_fingerprint=data.fingerprint,
        chat=data.chat,
        **options,
    )


def _adapters(stage: Stage, role: str, run: Resolved, *, waits: bool) -> dict[str, Any]:
    """What a role's spec says of adapters: its own, or that it is what those of others stand on.

    A role whose weights never change is the model below the adapters of those that start where it
    does; with a folder's adapter, or where it `waits` in host memory, it has a copy. The folder's
    belongs to the run's model: other starts have it merged in already, or never had it.
    """
    lora = run.model.lora
    if not lora:
        return {}
    if stage.roles[role].start != MODEL:
        lora = replace(lora, folder=None)
    if role in _changed(stage) or lora.folder is not None:
        return {"lora": lora}
    return {"shares_weights": True} if stage.roles[role].worker == "policy" and not waits else {}


def _changed(stage: Stage) -> set[str]:
    """Roles whose weights the step changes."""
    following = {node.role for node in stage.graph.nodes if node.method == "follow" and node.role}
    return following | {role for role, plan in stage.roles.items() if plan.trained}


def _check_adapters(stage: Stage, run: Resolved) -> None:
    """Adapters are for engines that have them."""
    if not run.model.lora:
        return
    for node in stage.graph.nodes:
        if node.role is None or stage.roles[node.role].worker not in _HEADS:
            continue
        engine = run.engines.runs(stage.graph, node)
        spec = engine.rollout_spec if run.engines.apart(stage.graph, node) else None
        spec = spec or _spec_class(engine, stage.roles[node.role].worker)
        if "lora" not in get_type_hints(spec):
            raise ConfigError(
                f"'model.lora.rank' is {run.model.lora.rank}, but '{node.name}' runs on the engine "
                f"'{engine.name}', which has no adapters\n    train the weights themselves "
                "(model.lora.rank=0), or take engine=torch or engine=fsdp"
            )


def optimizer_of(stage: Stage, role: str, plan: RolePlan) -> OptimizerSpec | None:
    """Return the optimizer of a role; None if nothing trains it.

    Raises:
        ConfigError: If its schedule falls over the stage's calls, and all of them warm up.
    """
    if not plan.trained:
        return None
    spec = plan.config.optimizer or stage.config.optimizer
    try:
        spec = spec.over(stage.config.num_steps * stage.graph.trains_per_step[role])
    except ValueError as error:
        at = f"{stage.at}.roles.{role}" if plan.config.optimizer else stage.at
        raise ConfigError(f"'{at}.optimizer.warmup_calls': {error}") from None
    return replace(spec, frozen=(*spec.frozen, *plan.config.frozen))


def _limits(run: Resolved) -> MismatchLimits:
    return MismatchLimits(every=run.mismatch.every, stop_above=run.mismatch.stop_above)


def _model(plan: RolePlan, run: Resolved, data: Data, results: Results) -> ModelSpec:
    if plan.start == MODEL:
        made = first_model(run.model, data)
        return replace(made, init_seed=made.init_seed + plan.config.init_offset)
    folders = {
        _folder(start, plan.contract, results): share
        for start, share in (plan.start_mean or {plan.start: 1.0}).items()
    }
    if len(folders) == 1:
        return ModelSpec(folder=next(iter(folders)), dtype=run.model.precision)
    earlier = next((results[start][1] for start in plan.start_mean if start in results), None)
    mean = mean_folder(folders, run.placement.runs if earlier is None else earlier.parent)
    return ModelSpec(folder=str(mean), dtype=run.model.precision)


def first_model(model: ModelConfig, data: Data) -> ModelSpec:
    """The run's model before anything is trained."""
    tokenizer = data.tokenizer
    made = model_spec(
        model,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_id,
        pad_token_id=tokenizer.pad_id,
        bos_token_id=tokenizer.bos_id,
    )
    return made if made.folder is not None else replace(made, num_words=tokenizer.vocab_size)


def _folder(start: str, contract: type[Role], results: Results) -> str:
    """The model folder of a start: a folder, or what a finished stage made."""
    if start not in results:
        return start
    earlier, folder = results[start]
    return str(folder / _started_from(earlier, contract))


def _started_from(earlier: Stage, contract: type[Role]) -> str:
    """The role of an earlier stage that a worker of this contract starts from."""
    role = earlier.trained(contract) or earlier.policy
    return role or next(iter(earlier.graph.trains_per_step))


def model_positions(
    stage: Stage, stages: Mapping[str, Stage], model: ModelConfig, num_tokens: int
) -> dict[str, int]:
    """Look at the models that roles start from, without their weights.

    Args:
        stage: The stage.
        stages: All stages by name; one that starts from another has the other's model.
        model: The section of the run's model.
        num_tokens: Size of the tokenizer's vocabulary; 0 if there is no text.

    Returns:
        Role -> longest sequence its model is made for, in tokens; roles without a limit left out.

    Raises:
        ConfigError: If a model cannot be made, a folder does not hold exactly its model's weights,
            or a model knows fewer tokens than the tokenizer.
    """
    found: dict[str, int] = {}
    looked_at: set[tuple[str, str | None]] = set()
    for role, plan in stage.roles.items():
        if plan.worker in ENV_SPECS:
            continue
        head = _HEADS.get(plan.worker)
        for start in plan.start_mean or (plan.start,):
            if start and start not in stages and (start, head) not in looked_at:
                looked_at.add((start, head))
                _check_model(f"{stage.at}.roles.{role}.start", start, head, model, num_tokens)
            if head == "score" and role not in _changed(stage):
                _check_has_score(f"{stage.at}.roles.{role}", start, stages.get(start), model)
        while plan.start in stages:
            earlier = stages[plan.start]
            plan = earlier.roles[_started_from(earlier, plan.contract)]
        if not plan.start:
            continue
        positions = _started_model(plan.start, model).num_positions
        if positions is not None:
            found[role] = positions
    return found


def _check_has_score(at: str, start: str, earlier: Stage | None, model: ModelConfig) -> None:
    """Require that a reward model that is not trained here was trained before: its head, too."""
    if earlier is None:
        trained = Head("score").is_saved(_started_model(start, model).folder)
    else:
        trained = earlier.trained(RewardModel) is not None
    if not trained:
        raise ConfigError(
            f"'{at}' is a reward model that starts from '{start}', which has no head that scores: "
            "all scores would be random\n    train one in a stage before (algorithm.before), give "
            f"the folder of one ({at}.start=PATH), or set {at}.worker=rule"
        )


_LARGE = 20_000_000
"""Parameters from which on the rates of the algorithms' YAML, made for a million, are too high."""
_RATES = {"lora": 2e-4, "sampling": 1e-5, "reference": 5e-6, "data": 5e-5}
"""Usual learning rates of large pretrained models: of adapters, of all weights where a policy
learns from what it samples, in comparison with a reference, and from data alone."""


def high_rates(stage: Stage, model: ModelConfig) -> list[str]:
    """Describe learning rates that a pretrained model of its size does not survive."""
    started = {r: p for r, p in stage.roles.items() if p.trained and p.worker in _HEADS}
    if model.folder is None or not started:
        return []
    parameters = empty_model(model_spec(model).config).parameters()
    millions = sum(parameter.numel() for parameter in parameters) / 1e6
    kinds = {node.kind for node in stage.graph.nodes}
    compares = "reference" if NodeKind.FORWARD in kinds else "data"
    usual = _RATES["lora" if model.lora else "sampling" if NodeKind.ROLLOUT in kinds else compares]
    highest = max(spec.lr for r, p in started.items() if (spec := optimizer_of(stage, r, p)))
    if millions * 1e6 < _LARGE or highest <= 4 * usual:
        return []
    return [
        f"warning: stage '{stage.name}' trains a model of {millions:,.0f}M parameters with a "
        f"learning rate of {highest:g}, which suits one of a million; {usual:g} is usual: "
        f"{stage.at}.optimizer.lr={usual:g}"
    ]


def rounded_adapters(stages: Sequence[Stage], run: Resolved) -> str:
    """Say where adapters are merged into bfloat16 weights; "" if they are nowhere."""
    if not run.model.lora or run.model.precision != "bfloat16":
        return ""
    names, engines = {stage.name for stage in stages}, run.engines
    where = [
        f"for '{node.name}' ({engine.name})"
        for stage in stages
        for node in stage.graph.nodes
        if (engine := engines.runs(stage.graph, node)).merges_adapters
    ]
    started = {plan.start: None for stage in stages for plan in stage.roles.values()}
    where += [f"for what starts from '{start}'" for start in started if start in names]
    if not where:
        return ""
    return (
        f"note: adapters are merged into bfloat16 weights {' and '.join(dict.fromkeys(where))}, "
        "which rounds small updates away: model.dtype=float32 keeps them"
    )


def _started_model(start: str, model: ModelConfig) -> ModelSpec:
    return model_spec(model) if start == MODEL else ModelSpec(folder=start)


def _check_model(
    at: str, start: str, head: HeadName | None, model: ModelConfig, num_tokens: int
) -> None:
    """Look at one model under a role's head; a worker of the user's own may read what it likes."""
    spec = _started_model(start, model)
    at = "model.folder" if start == MODEL else at
    try:
        vocab_size: int | None = getattr(spec.config, "vocab_size", None)
        if head is not None:
            Head(head).check(spec)
            if model.lora:
                check_lora(model.lora, empty_model(spec.config))
    except ConfigError as error:
        # What is wrong with an architecture is said with its key.
        raise ConfigError(str(error) if spec.folder is None else f"'{at}': {error}") from error
    if vocab_size is not None and vocab_size < num_tokens:
        key = "model.architecture.vocab_size" if spec.folder is None else at
        raise ConfigError(
            f"'{key}': the model knows {vocab_size} tokens, and the tokenizer has {num_tokens}\n"
            "    give the model's own tokenizer, or an architecture without vocab_size, which then "
            "is the tokenizer's"
        )


def _own(
    stage: Stage, role: str, plan: RolePlan, run: Resolved, data: Data, results: Results
) -> WorkerSpec | Role:
    """What a factory of the user's makes of its options and of what it asks for."""
    at = f"{stage.at}.roles.{role}"
    factory = load_object(plan.worker, f"{at}.worker")
    given: dict[str, Callable[[], Any]] = {
        "model": lambda: _model(plan, run, data, results),
        "optimizer": lambda: optimizer_of(stage, role, plan),
        "tokenizer": lambda: stage_tokenizer(stage, data),
        "end_ids": lambda: data.tokenizer.end.ids,
        "mismatch": lambda: _limits(run),
        "task": lambda: data.spec,
        "task_fingerprint": lambda: data.fingerprint,
    }
    asked = asked_for(plan.worker, plan.config, at)
    arguments = {name: make() for name, make in given.items() if name in asked}
    try:
        with one_process():
            made = factory(**arguments, **plan.config.options)
    except TypeError as error:
        raise ConfigError(f"'{at}.worker': '{plan.worker}' cannot be called: {error}") from error
    if is_spec(made) or isinstance(made, Role):
        only_scores = issubclass(plan.contract, Reward) and not plan.trained
        return CheckedRewardSpec(plan.worker, made) if only_scores else made
    raise ConfigError(
        f"'{at}.worker': '{plan.worker}' returned a {type(made).__name__}\n"
        "    it must return a worker (a Role) or its spec (with a method build)"
    )
