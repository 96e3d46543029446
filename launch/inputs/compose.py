"""From a composed configuration to typed objects: the run's sections, a step function and its cfg.

A step function is named `module:function`. The working directory is on the search path, so an
algorithm need not be installed; its config class is found from the annotation of its parameter
`cfg`, and everything is validated against it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter

from ...configs.references import load_object
from ...configs.schema import RunConfig
from ...configs.validate import validated
from ...dataflow.errors import ConfigError
from ...dataflow.graph.check import hints_of
from .data import task_spec_of

__all__ = ["dumped", "load_step", "run_config", "step_cfg"]


def run_config(composed: Mapping[str, Any]) -> RunConfig:
    """The validated configuration of a run, its algorithms' own configs included.

    Raises:
        ConfigError: For whatever in it is unknown, missing or of the wrong type.
    """
    return validated(RunConfig, composed)


def load_step(reference: str, at: str) -> Callable[..., Any]:
    """The step function that `module:function` names.

    Args:
        reference: What was configured.
        at: Under which key.

    Raises:
        ConfigError: If there is no such module or function, or the module cannot be imported.
    """
    step = load_object(reference, at)
    if not inspect.isfunction(step):
        raise ConfigError(
            f"'{at}': '{reference}' is a {type(step).__name__}\n"
            "    give a step function whose parameters are annotated with roles and tables"
        )
    return step


def step_cfg(step: Callable[..., Any], data: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The constants `build` needs: `{"cfg": ...}`, or nothing for a step without a `cfg`.

    Args:
        step: The step function.
        data: The keys given under `at`.
        at: "algorithm.cfg", for messages.

    Raises:
        ConfigError: If a key is unknown or a value does not fit.
    """
    if "cfg" not in inspect.signature(step).parameters:
        if data:
            raise ConfigError(
                f"'{at}' has keys ({', '.join(data)}), but '{step.__name__}' takes no 'cfg'\n"
                "    add a parameter 'cfg' annotated with a dataclass, or leave the keys out"
            )
        return {}
    kind = hints_of(step).get("cfg")
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ConfigError(
            f"'{at}': the parameter 'cfg' of '{step.__name__}' is annotated with {kind!r}\n"
            "    annotate it with a frozen dataclass whose fields are the algorithm's options"
        )
    return {"cfg": validated(kind, data, at)}


def dumped(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain data, every default spelt out; `run_config` reads it back."""
    data = config.model_dump(mode="json")
    _spell_out(data["algorithm"], "algorithm")
    task = task_spec_of(config)
    options = TypeAdapter(type(task)).dump_python(task, mode="json")
    data["task"] = {**options, **data["task"]}
    return data


def _spell_out(algorithm: dict[str, Any], at: str) -> None:
    step = load_step(algorithm["step"], f"{at}.step")
    for cfg in step_cfg(step, algorithm["cfg"], f"{at}.cfg").values():
        algorithm["cfg"] = TypeAdapter(type(cfg)).dump_python(cfg, mode="json")
    for name, before in algorithm["before"].items():
        _spell_out(before, f"{at}.before.{name}")
