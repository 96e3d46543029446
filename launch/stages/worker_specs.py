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
from ...dataflow.graph.role import Role
from ...dataflow.kinds import NodeKind
from ...dataflow.options import check_early
from ...dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec, is_spec
from ...workers.agents.environment import AGENT, TASK_AGENTS
from ...workers.engines.engine import EngineKind
from ...workers.engines.registry import DEFAULT, ENGINES
from ...workers.models.architecture import empty_model
from ...workers.models.lora import check_lora
from ...workers.models.model_folder import mean_folder
from ...workers.models.spec import Head, HeadName, ModelSpec
from ...workers.models.tokenizer import TokenizerSpec
from ...workers.rewards.registry import TASK_REWARDS, check_verifiers
from ...workers.rollout.generator_policy import SplitPolicySpec
from ...workers.rollout.scores import CheckedRewardSpec
from ...workers.training.logprob_mismatch import MismatchLimits
from ...workers.training.optimizer import OptimizerSpec
from ..inputs.data import Data
from ..inputs.engines import Engines, engines_of
from ..inputs.env_specs import ENV_SPECS, FILLED_IN, NETWORKS, env_worker, perceptron_spec
from ..inputs.own_workers import asked_for, is_own
from ..inputs.record import Stage
from ..inputs.run import Run
from .roles import MODEL, contract_of

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


def worker_specs(stage: Stage, run: Run, results: Results) -> dict[str, WorkerSpec | Role]:
    """A spec for every role of a stage.

    Args:
        stage: The stage.
        run: The run.
        results: The finished stages.

    Raises:
        ConfigError: If a worker of the user's own cannot be made.
    """
    return {role: _spec(stage, role, run, results) for role in stage.roles}


def exporting_specs(stage: Stage, run: Run, results: Results) -> dict[str, WorkerSpec | Role]:
    """Specs of the same roles that read, in one process, what any engine has trained.

    Options of an engine's workers are left out: they are those of the engine that trained.
    """
    here = replace(run, engines=engines_of(EngineConfig(), RolloutConfig()))
    roles = {
        role: section.model_copy(update={"options": {}})
        if section.worker in DEFAULT.roles
        else section
        for role, section in stage.roles.items()
    }
    return worker_specs(replace(stage, roles=roles, planned_options={}), here, results)


def check_options(stage: Stage, run: Run) -> None:
    """Validate the options of a stage's workers without making one."""
    engines = run.engines
    engines.check_generates(stage.graph)
    _check_apart(stage, engines)
    if engines.rollout is not None:
        spec = engines.rollout.rollout_spec
        _check(spec, engines.rollout_options, "rollout.options", "rollout")
    for role, section in stage.roles.items():
        optimizer_of(stage, role)
        at, worker = f"{stage.at}.roles.{role}.options", stage.worker(role)
        if is_own(worker):
            continue  # looked at when the stage was made
        if worker in ENV_SPECS:
            _check(ENV_SPECS[worker], section.options, at, worker, FILLED_IN)
            if worker in NETWORKS:
                perceptron_spec(run.model)
                _check_start(stage, role, run)
            continue
        if worker in TASK_REWARDS:
            _check(TASK_REWARDS[worker], section.options, at, worker, _OF_TASKS)
            check_verifiers(worker, section.options)
            continue
        if worker in TASK_AGENTS:
            _check(TASK_AGENTS[worker], section.options, at, worker, _OF_TASKS)
            continue
        kind = _spec_class(engines.trainer(role), worker)
        _check(kind, section.options, at, worker)
        _check(kind, engines.options_of(role), "engine.options", worker)
    _check_adapters(stage, run)


def check_groups(run: Run) -> None:
    """Refuse groups on which a language model could not be built, before any is trained."""
    by_name = {stage.name: stage for stage in run.stages}
    for stage in run.stages:
        for role, section in stage.roles.items():
            if section.worker not in _HEADS:
                continue
            start = {"start": _first_start(stage, role, by_name), "start_mean": {}}
            first = {**stage.roles, role: section.model_copy(update=start)}
            spec = _spec(replace(stage, roles=first), role, run, {})
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


def _first_start(stage: Stage, role: str, stages: Mapping[str, Stage]) -> str | None:
    while (start := stage.roles[role].start) and start in stages:
        earlier = stages[start]
        role = _started_from(earlier, contract_of(stage, role))
        stage = earlier
    return start


def _check_start(stage: Stage, role: str, run: Run) -> None:
    """Refuse a folder whose network does not fit; that of an earlier stage is not there yet."""
    start = stage.roles[role].start
    if not start or start in run.config.algorithm.before:
        return
    spec = env_worker(stage.worker(role), run.model, run.spec, None, {}, start=start)
    try:
        spec.build(WorkerContext(role))
    except ConfigError as error:
        raise ConfigError(f"'{stage.at}.roles.{role}.start': {error}") from error


def _spec_class(engine: EngineKind, worker: str) -> Any:
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
    required = (f for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING)
    try:
        check_early(kind, options, [field.name for field in required if field.name in ours])
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
    run: Run,
    results: Results,
) -> WorkerSpec | Role:
    data, section, worker = run.data, stage.roles[role], stage.worker(role)
    options = dict(section.options)
    if is_own(worker):
        return _own(stage, role, run, results)
    if worker in TASK_REWARDS:
        return TASK_REWARDS[worker](
            task=data.spec,
            tokenizer=stage_tokenizer(stage, data),
            task_fingerprint=data.fingerprint,
            **options,
        )
    if worker in TASK_AGENTS:
        return agent_spec(worker, data, stage_tokenizer(stage, data), options)
    if worker in ENV_SPECS:
        optimizer = optimizer_of(stage, role)
        start = section.start and _folder(section.start, contract_of(stage, role), results)
        offset = section.init_offset
        return env_worker(worker, run.model, data.spec, optimizer, options, offset, start)
    model = _model(stage, role, run, results)
    planned = stage.planned_options.get(role, {})
    options = {**planned, **run.engines.options_of(role), **options, "model": model}
    if role in stage.graph.learning_roles:
        options["optimizer"] = optimizer_of(stage, role)
    spec = _spec_class(run.engines.trainer(role), worker)
    known = get_type_hints(spec)
    adapters = _adapters(stage, role, run, waits=bool(options.get("offload")))
    options |= {key: value for key, value in adapters.items() if key in known}
    if "tokenizer" in known:
        options["tokenizer"] = stage_tokenizer(stage, data)
    if "num_words" in known:
        options["num_words"] = data.tokenizer.vocab_size
    if worker != "policy":
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
    """Refuse problems whose conversations could not be rendered or read."""
    for data in {id(data): data for data in datas if data.task.converses}.values():
        spec = TASK_AGENTS[AGENT](
            task=data.spec, tokenizer=data.tokenizer_spec, chat=data.chat, **options
        )
        spec.ways(data.task, data.tokenizer)


def stage_tokenizer(stage: Stage, data: Data) -> TokenizerSpec:
    """Return the run's tokenizer, with responses ending as the stage samples them."""
    spec, sampling = data.tokenizer_spec, stage.sampling
    return spec if sampling is None else spec.sampled_by(sampling)


def agent_spec(
    worker: str, data: Data, tokenizer: TokenizerSpec, options: Mapping[str, Any]
) -> WorkerSpec:
    """Make the spec of the worker that answers a policy in conversation."""
    return TASK_AGENTS[worker](
        task=data.spec,
        tokenizer=tokenizer,
        task_fingerprint=data.fingerprint,
        chat=data.chat,
        **options,
    )


def _adapters(stage: Stage, role: str, run: Run, *, waits: bool) -> dict[str, Any]:
    """Return a role's adapters, or that others' adapters stand on its weights.

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
    return {"shares_weights": True} if stage.worker(role) == "policy" and not waits else {}


def _changed(stage: Stage) -> set[str]:
    following = {node.role for node in stage.graph.nodes if node.method == "follow" and node.role}
    return following | set(stage.graph.learning_roles)


def _check_adapters(stage: Stage, run: Run) -> None:
    if not run.model.lora:
        return
    for node in stage.graph.nodes:
        if node.role is None or stage.roles[node.role].worker not in _HEADS:
            continue
        engine = run.engines.runs(stage.graph, node)
        spec = engine.rollout_spec if run.engines.apart(stage.graph, node) else None
        spec = spec or _spec_class(engine, stage.worker(node.role))
        if "lora" not in get_type_hints(spec):
            raise ConfigError(
                f"'model.lora.rank' is {run.model.lora.rank}, but '{node.name}' runs on the engine "
                f"'{engine.name}', which has no adapters\n    train the weights themselves "
                "(model.lora.rank=0), or take engine=torch or engine=fsdp"
            )


def optimizer_of(stage: Stage, role: str) -> OptimizerSpec | None:
    """Return the optimizer of a role; None if nothing trains it."""
    if role not in stage.graph.learning_roles:
        return None
    section = stage.roles[role]
    spec = section.optimizer or stage.config.optimizer
    try:
        spec = spec.over(stage.config.num_steps * stage.graph.trains_per_step[role])
    except ValueError as error:
        at = f"{stage.at}.roles.{role}" if section.optimizer else stage.at
        raise ConfigError(f"'{at}.optimizer.warmup_calls': {error}") from None
    return replace(spec, frozen=(*spec.frozen, *section.frozen))


def _limits(run: Run) -> MismatchLimits:
    given = run.config.mismatch
    return MismatchLimits(every=given.every, stop_above=given.stop_above)


def _model(stage: Stage, role: str, run: Run, results: Results) -> ModelSpec:
    section, contract = stage.roles[role], contract_of(stage, role)
    if section.start == MODEL:
        made = first_model(run.model, run.data)
        return replace(made, init_seed=made.init_seed + section.init_offset)
    starts = stage.starts(role)
    folders = {_folder(start, contract, results): share for start, share in starts.items()}
    if len(folders) == 1:
        return ModelSpec(folder=next(iter(folders)), dtype=run.model.precision)
    earlier = next((results[start][1] for start in starts if start in results), None)
    mean = mean_folder(folders, run.folder if earlier is None else earlier.parent)
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
    """Look at the models that roles start from, without their weights."""
    found: dict[str, int] = {}
    looked_at: set[tuple[str, str | None]] = set()
    for role in stage.roles:
        worker = stage.worker(role)
        if worker in ENV_SPECS:
            continue
        head = _HEADS.get(worker)
        for start in stage.starts(role):
            if start not in stages and (start, head) not in looked_at:
                looked_at.add((start, head))
                _check_model(f"{stage.at}.roles.{role}.start", start, head, model, num_tokens)
            if head == "score" and role not in _changed(stage):
                _check_has_score(f"{stage.at}.roles.{role}", start, stages.get(start), model)
        first = _first_start(stage, role, stages)
        if not first:
            continue
        positions = _started_model(first, model).num_positions
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
    learning = stage.graph.learning_roles
    started = [role for role in stage.roles if role in learning and stage.worker(role) in _HEADS]
    if model.folder is None or not started:
        return []
    parameters = empty_model(model_spec(model).config).parameters()
    millions = sum(parameter.numel() for parameter in parameters) / 1e6
    kinds = {node.kind for node in stage.graph.nodes}
    compares = "reference" if NodeKind.FORWARD in kinds else "data"
    usual = _RATES["lora" if model.lora else "sampling" if NodeKind.ROLLOUT in kinds else compares]
    highest = max(spec.lr for role in started if (spec := optimizer_of(stage, role)))
    if millions * 1e6 < _LARGE or highest <= 4 * usual:
        return []
    return [
        f"warning: stage '{stage.name}' trains a model of {millions:,.0f}M parameters with a "
        f"learning rate of {highest:g}, which suits one of a million; {usual:g} is usual: "
        f"{stage.at}.optimizer.lr={usual:g}"
    ]


def rounded_adapters(run: Run) -> str:
    """Say where adapters are merged into bfloat16 weights; "" if they are nowhere."""
    if not run.model.lora or run.model.precision != "bfloat16":
        return ""
    names, engines = {stage.name for stage in run.stages}, run.engines
    where = [
        f"for '{node.name}' ({engine.name})"
        for stage in run.stages
        for node in stage.graph.nodes
        if (engine := engines.runs(stage.graph, node)).merges_adapters
    ]
    started = {section.start: None for stage in run.stages for section in stage.roles.values()}
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


def _own(stage: Stage, role: str, run: Run, results: Results) -> WorkerSpec | Role:
    at, section, worker = f"{stage.at}.roles.{role}", stage.roles[role], stage.worker(role)
    factory = load_object(worker, f"{at}.worker")
    given: dict[str, Callable[[], Any]] = {
        "model": lambda: _model(stage, role, run, results),
        "optimizer": lambda: optimizer_of(stage, role),
        "tokenizer": lambda: stage_tokenizer(stage, data),
        "end_ids": lambda: data.tokenizer.end.ids,
        "mismatch": lambda: _limits(run),
        "task": lambda: data.spec,
        "task_fingerprint": lambda: data.fingerprint,
    }
    asked, data = asked_for(worker, section, at), run.data
    arguments = {name: make() for name, make in given.items() if name in asked}
    try:
        with one_process():
            made = factory(**arguments, **section.options)
    except TypeError as error:
        raise ConfigError(f"'{at}.worker': '{worker}' cannot be called: {error}") from error
    if is_spec(made) or isinstance(made, Role):
        contract, learning = stage.graph.roles[role], stage.graph.learning_roles
        only_scores = issubclass(contract, Reward) and role not in learning
        return CheckedRewardSpec(worker, made) if only_scores else made
    raise ConfigError(
        f"'{at}.worker': '{worker}' returned a {type(made).__name__}\n"
        "    it must return a worker (a Role) or its spec (with a method build)"
    )
