"""Specs of a stage's workers: the players of its roles, their options, where their weights start.

Every role that starts from the same place starts from the same weights, so a frozen reference is
the policy as it was when the stage began.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ...algorithms.roles import environment
from ...algorithms.roles.language import (
    Agent,
    Policy,
    ProcessReward,
    Reward,
    RewardModel,
    ValueModel,
)
from ...configs.references import load_object
from ...configs.schema import EngineConfig, ModelConfig, RoleConfig, RolloutConfig, model_spec
from ...configs.validate import validated
from ...dataflow.errors import ConfigError, nearest, one_process
from ...dataflow.graph.role import Role
from ...dataflow.options import check_early
from ...dataflow.runtime.placement import sharing
from ...dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec, is_spec
from ...workers.agents.environment import TASK_AGENTS
from ...workers.engines.engine import EngineKind
from ...workers.engines.registry import DEFAULT, ENGINES
from ...workers.engines.roles import RecipeByGroup
from ...workers.models.model_folder import mean_folder
from ...workers.models.spec import Head, HeadName, ModelSpec
from ...workers.models.tokenizer import TokenizerSpec
from ...workers.models.tokenizer_trial import check_tokenizer
from ...workers.rewards.own_text import OwnText
from ...workers.rewards.registry import TASK_REWARDS, check_verifiers
from ...workers.rollout.generator_policy import SplitPolicySpec
from ...workers.rollout.scores import CheckedRewardSpec
from ...workers.training.optimizer import OptimizerSpec
from ...workers.weight_sync.channel import ON_DEVICE, Transport
from ..inputs.data import Data, acted_in, env_task, game_task
from ..inputs.engines import (
    ENV_SPECS,
    FILLED_IN,
    MODEL_TYPE,
    NETWORKS,
    Engines,
    asked_for,
    check_takes,
    engines_of,
    is_own,
)
from ..inputs.record import Stage
from ..inputs.run import Run

MODEL = "model"  # as a role's start: the run's model

CONTRACTS: Mapping[str, type[Role]] = {
    "policy": Policy,
    "value": ValueModel,
    "reward_model": RewardModel,
    **dict.fromkeys(TASK_REWARDS, Reward),
    "process_reward": ProcessReward,
    **dict.fromkeys(TASK_AGENTS, Agent),
    "env": environment.Env,
    "board": environment.BoardGame,
    "actor_critic": environment.ActorCritic,
    "team_critic": environment.TeamCritic,
    "q_network": environment.QNetwork,
    "replay": environment.Replay,
}
"""The workers that can be named, and the contract each fulfils."""

HEADS: Mapping[str, HeadName] = {
    "policy": "lm_head",
    "value": "value_head",
    "reward_model": "score",
    "process_reward": "score",
}
"""Worker -> what its model ends in."""

# Fields of a spec that the run fills in; the others may be set as `options`.
_OF_MODELS = {"model", "lora", "shares_weights", "num_words", "end_ids", "own_text"}
_OF_GROUPS = {"sleeping_beside", "sent_from", "longest_sequence"}
_OURS = {*_OF_MODELS, *_OF_GROUPS, "optimizer", "mismatch", "task", "tokenizer", "task_fingerprint"}
# The same of what looks at the task; a judge's `model` is the user's to name.
_OF_TASKS = {"task", "tokenizer", "task_fingerprint", "chat", "samples_folder"}


def head_of(section: RoleConfig) -> Head | None:
    """Return what the model of a role ends in; None if its worker has no model."""
    name, words = HEADS.get(section.worker or ""), section.options.get("words", ())
    of_steps = section.worker == "process_reward"
    return name and Head(name, labels=1 + of_steps, words=tuple(words) if of_steps else ())


def own_text_of(stage: Stage, role: str, run: Run) -> OwnText | None:
    """Return what writes responses anew for a reward model with tokens of its own; else None."""
    section, start = stage.roles[role], next(iter(stage.starts(role)), MODEL)
    stages = [stage.name for stage in run.stages]
    if HEADS.get(section.worker or "") != "score" or start in (MODEL, *stages):
        return None
    data = run.data
    own = OwnText(
        folder=start,
        task=data.spec,
        tokenizer=data.tokenizer_spec,
        task_fingerprint=data.fingerprint,
    )
    if not (own.differs or section.options.get("step_tag")):
        return None
    check_tokenizer(Path(start))
    if role in stage.graph.learning_roles or data.task.converses:
        raise ConfigError(
            f"'{stage.at}.roles.{role}.start': the tokenizer or the chat template in '{start}' is "
            "not the run's, and responses can be written anew neither to be trained on nor of "
            f"several turns\n    train it in a run of its own (model={start}), or give a reward "
            "model with the policy's tokenizer"
        )
    return own


Results = Mapping[str, tuple[Stage, Path]]
"""Name of a finished stage -> the stage, and the folder with a model folder per trained role."""


def with_roles(stage: Stage, model: ModelConfig, earlier: list[Stage]) -> Stage:
    """The stage with every role's section: its worker, and where its weights come from."""
    for given in stage.config.roles:
        if given not in stage.graph.roles:
            raise ConfigError(
                f"'{stage.at}.roles' names a role '{given}', which {stage.graph.name} does not have"
                f"{nearest(given, stage.graph.roles)}\n"
                f"    its roles are: {', '.join(stage.graph.roles)}"
            )
    roles = {role: _role(model, stage, role, earlier) for role in stage.graph.roles}
    return replace(stage, roles=roles)


def _role(model: ModelConfig, stage: Stage, role: str, earlier: list[Stage]) -> RoleConfig:
    at, graph = f"{stage.at}.roles.{role}", stage.graph
    given = stage.config.roles.get(role, RoleConfig())
    contract = graph.roles[role]
    worker = given.worker or _default_worker(contract, earlier, given)
    if worker is None:
        raise ConfigError(
            f"{graph.name} has a role '{role}' ({contract.__name__}) that is not provided\n"
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
    played = given.model_copy(update={"worker": worker, "start": None, "start_mean": {}})
    if is_own(worker):
        asked = asked_for(worker, given, at)
        check_takes(worker, given, asked, at)
        if "model" not in asked:
            return played
        return played.model_copy(update=_started(model, at, contract, given, earlier))
    if worker not in CONTRACTS:
        raise ConfigError(
            f"'{at}.worker': there is no worker '{worker}'{nearest(worker, CONTRACTS)}\n"
            f"    workers are: {', '.join(CONTRACTS)}, or module:factory for your own"
        )
    if not issubclass(CONTRACTS[worker], contract):
        fitting = [name for name, known in CONTRACTS.items() if issubclass(known, contract)]
        raise ConfigError(
            f"'{at}.worker': role '{role}' is a {contract.__name__}, which '{worker}' is not\n"
            f"    use {' or '.join([*fitting, 'module:factory'])}"
        )
    if worker in ENV_SPECS:
        start = _env_start(at, worker, stage, role, earlier)
        return played.model_copy(update={"start": start})
    if worker in TASK_REWARDS or worker in TASK_AGENTS:
        for key in ("start", "start_mean", "init_offset"):
            if getattr(given, key):
                other = f", or set {at}.worker=reward_model" if worker in TASK_REWARDS else ""
                raise ConfigError(
                    f"'{at}.{key}' is set, but '{worker}' has no weights\n    leave it out{other}"
                )
        return played
    return played.model_copy(update=_started(model, at, CONTRACTS[worker], given, earlier))


def _default_worker(contract: type[Role], earlier: list[Stage], given: RoleConfig) -> str | None:
    if contract is Reward:
        started = given.start is not None or given.start_mean
        learned = any(stage.trained(RewardModel) for stage in earlier)
        return "reward_model" if started or learned else "rule"
    named = next((name for name, known in CONTRACTS.items() if contract is known), None)
    return named or contract.default_worker


def _started(
    model: ModelConfig, at: str, contract: type[Role], given: RoleConfig, earlier: list[Stage]
) -> dict[str, Any]:
    shares = given.start_mean
    if not shares:
        start = _start(model, at, contract, given.start, earlier)
        if given.init_offset and (start != MODEL or model.folder is not None):
            raise ConfigError(
                f"'{at}.init_offset' is set, but the role starts from '{start}', which is trained\n"
                "    leave it out; it seeds random weights"
            )
        return {"start": start}
    if given.start is not None:
        raise ConfigError(f"'{at}' has both start and start_mean\n    set one of them")
    if MODEL in shares or len(shares) < 2 or sum(shares.values()) <= 0:
        raise ConfigError(
            f"'{at}.start_mean' is {shares}; it averages the weights of earlier stages or folders\n"
            "    give two or more and how much of each, as in {sft: 0.5, sft_b: 0.5}"
        )
    mean = {
        _start(model, f"{at}.start_mean", contract, start, earlier): share
        for start, share in shares.items()
    }
    return {"start": next(iter(mean)), "start_mean": mean}


def _start(
    model: ModelConfig, at: str, contract: type[Role], start: str | None, earlier: list[Stage]
) -> str:
    names = [stage.name for stage in earlier]
    policies = [stage.name for stage in earlier if stage.policy]
    if start is not None and start not in (MODEL, *names):
        _check_folder(at, start, names)
    elif start is not None and issubclass(contract, Policy) and start not in (MODEL, *policies):
        raise ConfigError(
            f"'{at}.start': stage '{start}' trains no policy, so a policy cannot start "
            f"from it\n    stages that do: {', '.join(policies) or 'none'}"
        )
    if start is not None:
        return start
    if issubclass(contract, (Reward, ProcessReward)):
        learned = [stage.name for stage in earlier if stage.trained(RewardModel)]
        if learned:
            return learned[-1]
    return policies[-1] if policies and model.folder is None else MODEL


def _check_folder(at: str, start: str, names: list[str]) -> None:
    if not (Path(start) / "config.json").is_file():
        inside = sorted(str(file.parent) for file in Path(start).glob("*/config.json"))
        raise ConfigError(
            f"'{at}.start': '{start}' is neither a stage nor a model folder"
            f"{nearest(start, [MODEL, *names])}\n    stages are: "
            f"{', '.join(names) or 'none'}; a model folder holds config.json and safetensors"
            f"{', as do: ' if inside else ''}{', '.join(inside)}"
        )


def _env_start(at: str, worker: str, stage: Stage, role: str, earlier: list[Stage]) -> str | None:
    """Start of an actor or a critic in environments; None for random weights, or for none.

    By default at the latest earlier stage that trained such a one. A role that learns from no loss
    begins where the one of its contract does that learns: it is a copy of that, or follows it.
    """
    graph, sections = stage.graph, stage.config.roles
    given = sections.get(role, RoleConfig())
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
    starts = [sections[name].start for name in (role, *leaders) if name in sections]
    learned = [one.name for one in earlier if one.trained(CONTRACTS[worker])]
    start = next((start for start in starts if start is not None), "".join(learned[-1:]))
    if start in {one.name for one in earlier} - set(learned):
        raise ConfigError(
            f"'{at}.start': stage '{start}' trains no '{worker}', so none can start from it\n"
            f"    stages that do: {', '.join(learned) or 'none'}"
        )
    if start and start not in (MODEL, *learned):
        _check_folder(at, start, [one.name for one in earlier])
    return None if start in ("", MODEL) else start


def contract_of(stage: Stage, role: str) -> type[Role]:
    worker = stage.worker(role)
    return stage.graph.roles[role] if is_own(worker) else CONTRACTS[worker]


def started_from(earlier: Stage, contract: type[Role]) -> str:
    """The role of an earlier stage that a worker of this contract starts from."""
    role = earlier.trained(contract) or earlier.policy
    return role or next(iter(earlier.graph.trains_per_step))


def worker_specs(stage: Stage, run: Run, results: Results) -> dict[str, WorkerSpec | Role]:
    return {role: worker_spec(stage, role, run, results) for role in stage.roles}


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


def worker_spec(stage: Stage, role: str, run: Run, results: Results) -> WorkerSpec | Role:
    """The spec of one role's worker: its options, and what its kind asks the run for."""
    data, section, worker = run.data, stage.roles[role], stage.worker(role)
    options = dict(section.options)
    given: dict[str, Callable[[], Any]] = {
        "model": lambda: _model(stage, role, run, results),
        "optimizer": lambda: optimizer_of(stage, role),
        "tokenizer": lambda: stage_tokenizer(stage, data),
        "end_ids": lambda: data.tokenizer.end.ids,
        "num_words": lambda: data.tokenizer.vocab_size,
        "mismatch": lambda: run.config.mismatch,
        "longest_sequence": lambda: run.longest_sequence,
        "task": lambda: data.spec,
        "task_fingerprint": lambda: data.fingerprint,
        "own_text": lambda: own_text_of(stage, role, run),
    }
    if is_own(worker):
        return _own(stage, role, given)
    if worker in TASK_REWARDS or worker in ENV_SPECS:
        for planned in stage.planned_options.get(role, {}).values():
            options = {**planned, **options}
    if worker in TASK_REWARDS:
        names = ("task", "tokenizer", "task_fingerprint")
        return TASK_REWARDS[worker](**{name: given[name]() for name in names}, **options)
    if worker in TASK_AGENTS:
        return agent_spec(worker, data, stage_tokenizer(stage, data), options)
    if worker in ENV_SPECS:
        optimizer = optimizer_of(stage, role)
        start = section.start and _folder(section.start, contract_of(stage, role), results)
        return env_worker(worker, run, start, optimizer, options, section.init_offset)
    model, engines = given["model"](), run.engines
    given["model"] = lambda: model
    options = {**engines.options_of(role), **options}
    planned = {g: {**p, **options} for g, p in stage.planned_options.get(role, {}).items()}
    if planned:  # of what trains, or the first
        home = stage.placement.home(stage.graph, role) or next(iter(planned))
        options = planned.pop(home, options)
    adapters = _adapters(stage, role, run, waits=bool(options.get("offload")))
    given |= {name: (lambda value=value: value) for name, value in adapters.items()}
    if role not in stage.graph.learning_roles:
        del given["optimizer"]
    kind = spec_class(engines.trainer(role), worker)
    trained = _filled(kind, options, given)
    others = {g: _filled(kind, own, given) for g, own in planned.items() if own != options}
    if others:
        trained = RecipeByGroup(trained, others)
    rollout = engines.generator(role) if worker == "policy" else None
    if rollout is None:
        return trained
    beside, senders = _beside(stage, role, run.executor.transport)
    given |= {"sleeping_beside": lambda: beside, "sent_from": lambda: senders}
    # Without the stage's sampling, which each call brings.
    given["tokenizer"] = lambda: data.tokenizer_spec
    generator = _filled(rollout.rollout_spec, engines.rollout_options_of(role), given)
    return SplitPolicySpec(train=trained, rollout=generator)


def _beside(stage: Stage, role: str, transport: Transport) -> tuple[int, int]:
    """Groups that what generates takes turns with, and processes that keep what they sent it."""
    placement = stage.placement
    home, turns = placement.home(stage.graph, role), sharing(placement.groups)
    hosts = [name for name in placement.hosts(stage.graph, role) if name != home]
    beside = max((turns.get(name, frozenset()) for name in hosts), key=len, default=frozenset())
    if home is None or home not in beside or transport not in ON_DEVICE:
        return len(beside), 0
    trained = placement.group(home)
    return len(beside), trained.tensor_parallel * trained.pipeline_parallel


def _filled(kind: Any, options: Mapping[str, Any], given: Mapping[str, Callable[[], Any]]) -> Any:
    """Make a spec with its options and those of its fields that the run gives."""
    hints = get_type_hints(kind)
    return kind(**{**options, **{name: make() for name, make in given.items() if name in hints}})


def perceptron_spec(model: ModelConfig, init_offset: int = 0) -> Any:
    architecture = dict(model.architecture)
    kind = architecture.pop("model_type", None)
    if kind != MODEL_TYPE:
        raise ConfigError(
            f"'model' is {'a folder' if kind is None else repr(kind)}, and an actor in an "
            f"environment needs model_type {MODEL_TYPE!r}\n    choose model=mlp"
        )
    from ...workers.envs.actors.perceptron import PerceptronSpec  # few runs act

    seeded = {"init_seed": model.init_seed + init_offset, **architecture}
    return validated(PerceptronSpec, seeded, "model.architecture")


def env_worker(
    worker: str,
    run: Run,
    start: str | None,
    optimizer: OptimizerSpec | None = None,
    options: Mapping[str, Any] | None = None,
    init_offset: int = 0,
) -> WorkerSpec:
    """The spec of a worker that acts in environments."""
    reader, options = f"a worker '{worker}'", options or {}
    if worker == "board":
        return game_task(run.spec, reader).env
    kind = ENV_SPECS[worker]
    if worker == "replay":
        return kind(**options)
    if worker == "env":
        return kind(env=env_task(run.spec, reader).env, **options)
    acted = acted_in(run.spec) if worker == "actor_critic" else None
    env = (acted or env_task(run.spec, reader)).env
    network = perceptron_spec(run.model, init_offset)
    return kind(env=env, network=network, start=start, optimizer=optimizer, **options)


def spec_class(engine: EngineKind, worker: str) -> Any:
    if worker in engine.roles:
        return engine.spec(worker)
    able = [other for other in ENGINES.values() if worker in other.roles]
    others = "; ".join(f"engine={other.name} has: {', '.join(other.roles)}" for other in able)
    raise ConfigError(
        f"engine={engine.name} has no worker '{worker}'\n    it has: {', '.join(engine.roles)}; "
        f"{others}"
    )


def stage_tokenizer(stage: Stage, data: Data) -> TokenizerSpec:
    """Return the run's tokenizer, with responses ending as the stage samples them."""
    spec, sampling = data.tokenizer_spec, stage.sampling
    return spec if sampling is None else spec.sampled_by(sampling)


def agent_spec(
    worker: str, data: Data, tokenizer: TokenizerSpec, options: Mapping[str, Any]
) -> Any:
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
    if role in stage.changed_roles or lora.folder is not None:
        return {"lora": lora}
    return {"shares_weights": True} if stage.worker(role) == "policy" and not waits else {}


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
    mean = mean_folder(folders, Path(run.config.runs) if earlier is None else earlier.parent)
    return ModelSpec(folder=str(mean), dtype=run.model.precision)


def first_model(model: ModelConfig, data: Data) -> ModelSpec:
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
    return str(folder / started_from(earlier, contract))


def _own(stage: Stage, role: str, given: Mapping[str, Callable[[], Any]]) -> WorkerSpec | Role:
    at, section, worker = f"{stage.at}.roles.{role}", stage.roles[role], stage.worker(role)
    factory, asked = load_object(worker, f"{at}.worker"), asked_for(worker, section, at)
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


def check_options(stage: Stage, run: Run) -> None:
    """Validate the options of a stage's workers without making one."""
    engines = run.engines
    engines.check_generates(stage.graph)
    _check_apart(stage, engines)
    if engines.rollout is not None:
        kind = engines.rollout.rollout_spec
        _check(kind, engines.rollout_options, "rollout.options", "rollout")
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
        if worker in TASK_REWARDS or worker in TASK_AGENTS:
            kind = (TASK_REWARDS if worker in TASK_REWARDS else TASK_AGENTS)[worker]
            _check(kind, section.options, at, worker, _OF_TASKS)
            if worker in TASK_REWARDS:
                check_verifiers(worker, section.options)
            continue
        kind = spec_class(engines.trainer(role), worker)
        _check(kind, section.options, at, worker)
        _check(kind, engines.options_of(role), "engine.options", worker)
    _check_adapters(stage, run)


def _check(
    kind: Any, options: Mapping[str, Any], at: str, worker: str, ours: Set[str] = _OURS
) -> None:
    hints = get_type_hints(kind)
    free = [name for name in hints if name not in ours]
    for key, value in options.items():
        if key not in free:
            raise ConfigError(
                f"there is no key '{at}.{key}'{nearest(key, free, at)}\n"
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


def _check_start(stage: Stage, role: str, run: Run) -> None:
    start = stage.roles[role].start
    if not start or start in run.config.algorithm.before:
        return
    spec = env_worker(stage.worker(role), run, start)
    try:
        spec.build(WorkerContext(role))
    except ConfigError as error:
        raise ConfigError(f"'{stage.at}.roles.{role}.start': {error}") from error


def _check_apart(stage: Stage, engines: Engines) -> None:
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


def _check_adapters(stage: Stage, run: Run) -> None:
    if not run.model.lora:
        return
    for node in stage.graph.nodes:
        if node.role is None or stage.roles[node.role].worker not in HEADS:
            continue
        engine = run.engines.runs(stage.graph, node)
        spec = engine.rollout_spec if run.engines.apart(stage.graph, node) else None
        spec = spec or spec_class(engine, stage.worker(node.role))
        if "lora" not in get_type_hints(spec):
            raise ConfigError(
                f"'model.lora.rank' is {run.model.lora.rank}, but '{node.name}' runs on the engine "
                f"'{engine.name}', which has no adapters\n    train the weights themselves "
                "(model.lora.rank=0), or take engine=torch or engine=fsdp"
            )


def check_groups(run: Run) -> None:
    """Refuse groups on which a language model could not be built, before any is trained."""
    by_name = {stage.name: stage for stage in run.stages}
    for stage in run.stages:
        for role, section in stage.roles.items():
            if section.worker not in HEADS:
                continue
            start = {"start": first_start(stage, role, by_name), "start_mean": {}}
            first = {**stage.roles, role: section.model_copy(update=start)}
            spec = worker_spec(replace(stage, roles=first), role, run, {})
            check: Callable[[WorkerContext], None] | None = getattr(spec, "check_group", None)
            for group in stage.placement.groups:
                if check and role in stage.placement.hosted_roles(stage.graph, group.name):
                    context = WorkerContext(
                        role,
                        num_ranks=group.num_ranks,
                        device=group.device,
                        tensor_parallel=group.tensor_parallel,
                        pipeline_parallel=group.pipeline_parallel,
                        methods=stage.placement.methods(stage.graph, group.name, role),
                        group=group.name,
                    )
                    check(context)


def first_start(stage: Stage, role: str, stages: Mapping[str, Stage]) -> str | None:
    while (start := stage.roles[role].start) and start in stages:
        earlier = stages[start]
        role = started_from(earlier, contract_of(stage, role))
        stage = earlier
    return start
