"""The reference of all keys as Markdown, from the types that declare them.

python -m penstock.launch.cli.key_reference > docs/configuration_keys.md
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ...algorithms.grpo import GRPO
from ...algorithms.ppo import PPO
from ...algorithms.reference_grpo import ReferenceGRPO
from ...algorithms.reward_modelling import RewardModelling
from ...algorithms.sft import SFT
from ...configs.schema import (
    ClusterConfig,
    EvalConfig,
    ExportConfig,
    PlanOptions,
    ProfileConfig,
    RunConfig,
    TaskProfileConfig,
    WorkloadConfig,
)
from ...configs.validate import fields_of, key_docs
from ...workers.envs.actors.perceptron import PerceptronSpec
from ..inputs.data import TASKS
from ..inputs.engines import ENV_SPECS, FILLED_IN

_FOR = """For everybody who sets a key: all keys of the commands, with defaults and meanings.
They are generated from the types that declare them. [Configuration](configuration.md) explains how
a run is composed of them, and the keys of the other algorithms are on
[their pages](algorithms/index.md)."""


def key_reference() -> str:
    """One table per class that declares keys."""
    owners: dict[type, str] = {}
    for kind, at in (
        (RunConfig, ""),
        *((task, f"task (kind: {kind})") for kind, task in TASKS.items()),
        (PerceptronSpec, "model.architecture (model_type: perceptron)"),
        (SFT, "algorithm.cfg (algorithm=sft)"),
        (RewardModelling, "algorithm.cfg (algorithm=reward_modelling)"),
        (GRPO, "algorithm.cfg (algorithm=grpo)"),
        (ReferenceGRPO, "algorithm.cfg (algorithm=reference_grpo)"),
        (PPO, "algorithm.cfg (algorithm=ppo)"),
        (ClusterConfig, "cluster"),
        (WorkloadConfig, "workload"),
        (PlanOptions, "plan"),
        (EvalConfig, "penstock eval"),
        (ExportConfig, "penstock export"),
        (ProfileConfig, "penstock profile"),
        (TaskProfileConfig, "penstock profile algorithm=... task=..."),
    ):
        for found, where in _below(kind, at):
            owners.setdefault(found, where)
    tables = [_table(kind, where) for kind, where in owners.items()]
    for worker, kind in ENV_SPECS.items():
        options = [key for key in fields_of(kind) or {} if key not in FILLED_IN]
        if options:
            at = f"algorithm.roles.ROLE.options (worker: {worker})"
            tables.append(_table(kind, at, options))
    return f"# All keys\n\n{_FOR}\n\n" + "\n".join(tables)


def _below(kind: Any, at: str) -> Iterator[tuple[type, str]]:
    yield kind, at
    for key, annotation in (fields_of(kind) or {}).items():
        for part in _parts(annotation):
            if part is not kind:
                name = f"{at.partition(' ')[0]}.{key}".removeprefix(".")
                yield from _below(part, name)


def _parts(annotation: Any) -> Iterator[type]:
    if fields_of(annotation) is not None:
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _parts(argument)


def _table(kind: type, at: str, keys: Iterable[str] | None = None) -> str:
    title = f"`{at}`" if at and " " not in at else at or "The run"
    heads = "| key | default | meaning |\n|---|---|---|"
    lines, docs = [f"## {title}\n\n`{kind.__name__}`\n\n{heads}"], key_docs(kind)
    for key in fields_of(kind) or {} if keys is None else keys:
        doc = docs.get(key, "").replace("|", "\\|")
        lines.append(f"| `{key}` | {_default(kind, key)} | {doc} |")
    return "\n".join([*lines, ""])


def _default(kind: Any, key: str) -> str:
    fields: Any = kind.model_fields if issubclass(kind, BaseModel) else kind.__dataclass_fields__
    default, factory = fields[key].default, fields[key].default_factory
    if factory not in (None, dataclasses.MISSING):
        default = factory()
    if default in (PydanticUndefined, dataclasses.MISSING):
        return "needed"
    if fields_of(type(default)) is not None:
        return "its own"
    return f"`{as_yaml(default)}`".replace("|", "\\|")


def as_yaml(value: Any) -> str:
    """The value as one writes it in YAML or on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str) and len(value) > 40:
        return "printable ASCII"
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_yaml, typing.cast('tuple[Any, ...]', value)))}]"
    if isinstance(value, dict):
        items = typing.cast("dict[str, Any]", value).items()
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in items) + "}"
    return str(value) if value != "" else '""'


if __name__ == "__main__":
    print(key_reference(), end="")
