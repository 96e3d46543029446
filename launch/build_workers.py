"""From the roles of a stage to the specs of their workers: models, optimizers, rules.

Every role that starts from the same place starts from the same weights, so a frozen reference is
the policy as it was when the stage began.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..configs.schema import RunConfig, model_spec
from ..configs.validate import nearest_key
from ..dataflow.errors import ConfigError
from ..dataflow.role import Role
from ..dataflow.worker import WorkerSpec
from ..workers.model import ModelSpec
from ..workers.rule_reward import RuleRewardSpec
from ..workers.torch_policy import TorchPolicySpec
from ..workers.torch_reward import TorchRewardModelSpec
from ..workers.torch_value import TorchValueSpec
from .compose import load_object
from .data import Data
from .stages import CONTRACTS, MODEL, RolePlan, Stage

__all__ = ["Results", "check_options", "model_positions", "worker_specs"]

Results = Mapping[str, tuple[Stage, Path]]
"""Name of a finished stage -> the stage, and the folder with a model folder per trained role."""

_SPECS: Mapping[str, Any] = {
    "policy": TorchPolicySpec,
    "value": TorchValueSpec,
    "reward_model": TorchRewardModelSpec,
    "rule": RuleRewardSpec,
}

_OURS = {"model", "eos_token_id", "optimizer", "task", "tokenizer", "task_fingerprint"}
"""Fields of a spec that the run fills in; the others may be set as `options`."""


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


def check_options(stage: Stage) -> None:
    """Validate the options of a stage's workers without making one.

    Raises:
        ConfigError: If an option is unknown, of the wrong type or out of range.
    """
    for role, plan in stage.roles.items():
        at = f"{stage.at}.roles.{role}.options"
        if ":" in plan.worker:
            load_object(plan.worker, f"{stage.at}.roles.{role}.worker")
            continue
        kind = _SPECS[plan.worker]
        hints = get_type_hints(kind)
        free = [name for name in hints if name not in _OURS]
        for key, value in plan.config.options.items():
            if key not in free:
                raise ConfigError(
                    f"there is no key '{at}.{key}'{nearest_key(key, free, at)}\n"
                    f"    a '{plan.worker}' worker has: {', '.join(free)}"
                )
            try:
                TypeAdapter(hints[key]).validate_python(value, strict=True)
            except ValidationError as error:
                raise ConfigError(
                    f"'{at}.{key}': {error.errors()[0]['msg']}, got {value!r}"
                ) from None
        # What the run fills in is not known yet; the spec itself says which values it takes.
        unknown = {name: None for name in hints if name in _OURS}
        try:
            kind(**unknown, **plan.config.options)
        except ValueError as error:
            raise ConfigError(f"'{at}': {error}") from None


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
    if plan.worker == "rule":
        return RuleRewardSpec(
            task=data.spec,
            tokenizer=data.tokenizer_spec,
            task_fingerprint=data.fingerprint,
            **options,
        )
    options["model"] = _model(stage, plan, config, data, results)
    if plan.trained:
        options["optimizer"] = plan.config.optimizer or stage.config.optimizer
    if plan.worker == "policy":
        options["eos_token_id"] = data.tokenizer.eos_id
    return _SPECS[plan.worker](**options)


def _model(
    stage: Stage, plan: RolePlan, config: RunConfig, data: Data, results: Results
) -> ModelSpec:
    if plan.start == MODEL:
        tokenizer = data.tokenizer
        return model_spec(
            config.model,
            vocab_size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_id,
            pad_token_id=tokenizer.pad_id,
            bos_token_id=tokenizer.bos_id,
        )
    if plan.start not in results:
        return ModelSpec(folder=plan.start, dtype=config.model.dtype)
    earlier, folder = results[plan.start]
    role = _started_from(earlier, plan.worker)
    return ModelSpec(folder=str(folder / role), dtype=config.model.dtype)


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
