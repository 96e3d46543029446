"""What a configuration names: an option of a group, an entry of a registry, or `module:name`.

An option of a group is a YAML file of this package. For `module:name` of the user's own the working
directory is on the search path, so a module need not be installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from omegaconf import OmegaConf

from ..dataflow.errors import (
    ConfigError,
    PenstockError,
    line_of,
    nearest,
    one_process,
)
from ..dataflow.registry import Registry

_IMPORT_DEADLINE_S = 40.0
"""How long a module may take to be imported; torch and a model library take ten at worst."""

CONFIGS = "penstock.configs"
"""The package in which they are."""

_MERGED = {"codpo": "cgpo", "crraft": "cgpo", "cost_modelling": "safe_rlhf"}
"""Recipe that had a file of its own -> the paper whose file it is in now."""

_MOVED = {
    "penstock.workers.agents.tasks.conversation_task": "Task of penstock.workers.data.task",
}
"""Module that users imported -> where its name is now."""


def entry_or_own(
    name: str, registry: Registry[Any], at: str, what: str, kind: type | None = None
) -> Any:
    """The entry of a registry that is called `name`, or the object that `module:name` names.

    Args:
        name: What was configured.
        registry: What comes with Penstock.
        at: Under which key.
        what: What the entries are, for the message: "tracker".
        kind: Their class, if they are instances of one.

    Raises:
        ConfigError: If there is no such entry, module or name, or it is of another class.
    """
    path = registry.paths.get(name, name)
    if ":" not in path:
        raise ConfigError(
            f"'{at}': there is no {what} '{name}'{nearest(name, registry)}\n"
            f"    {what}s are: {', '.join(registry)}, or module:name for your own"
        )
    found = load_object(path, at)
    if kind is None or isinstance(found, kind):
        return found
    raise ConfigError(
        f"'{at}': '{name}' is a {type(found).__name__}\n"
        f"    give an {kind.__name__} ({kind.__module__})"
    )


def load_object(reference: str, at: str) -> Any:
    """Whatever `module:name` names.

    Args:
        reference: What was configured.
        at: Under which key.

    Raises:
        ConfigError: If there is no such module or name, or the module cannot be imported.
    """
    module_name, colon, name = reference.partition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"'{at}': expected 'module:name', got '{reference}'\n"
            "    such as penstock.algorithms.grpo:grpo_step"
        )
    module = _import(_moved(module_name), at)
    if not hasattr(module, name):
        public = [other for other in vars(module) if not other.startswith("_")]
        raise ConfigError(
            f"'{at}': module '{module_name}' has no '{name}'{nearest(name, public)}\n"
            f"    it is {getattr(module, '__file__', 'what this process runs')}"
        )
    return getattr(module, name)


def _moved(module: str) -> str:
    """Return where a recipe is now that lay beside the others when a run was saved."""
    package, _, name = module.rpartition(".")
    paper = f"{package}.papers.{_MERGED.get(name, name)}"
    if package != "penstock.algorithms" or find_spec(module) or not find_spec(paper):
        return module
    return paper


def see_working_directory() -> None:
    """Put the working directory on the path of modules, where users name their own."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _import(name: str, at: str) -> Any:
    see_working_directory()
    try:
        with one_process():
            return _imported(name, at)
    except PenstockError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"'{at}': there is no module '{name}'\n    it is looked for in the working "
                f"directory ({os.getcwd()}) and among installed packages"
            ) from error
        raise ConfigError(_import_failure(name, at, error)) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(_import_failure(name, at, error)) from error


def _imported(name: str, at: str) -> Any:
    # Imported here: it brings torch, which whoever names no module of his own does without.
    from ..dataflow.runtime.call_context import DeadlineExceeded, deadline

    try:
        with deadline(_IMPORT_DEADLINE_S):
            return importlib.import_module(name)
    except DeadlineExceeded as error:
        where = line_of(error)
        raise ConfigError(
            f"'{at}': importing module '{name}' takes longer than {_IMPORT_DEADLINE_S:g} s\n"
            f"{where.file}:{where.line}\n    {where.source}"
        ) from error


def _import_failure(name: str, at: str, error: BaseException) -> str:
    where = line_of(error)
    moved = isinstance(error, ModuleNotFoundError) and _MOVED.get(error.name or "")
    return (
        f"'{at}': module '{name}' cannot be imported\n{where.file}:{where.line}\n"
        f"    {where.source}\n    {type(error).__name__}: {error}"
        f"{f'; it is {moved} now' if moved else ''}"
    )


def groups() -> list[str]:
    """Names of the configuration groups."""
    return sorted(
        entry.name
        for entry in files(CONFIGS).iterdir()
        if entry.is_dir() and not entry.name.startswith("_")
    )


def options_of(group: str) -> list[str]:
    """The options of a configuration group."""
    names = (entry.name for entry in files(CONFIGS).joinpath(group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def option_file(group: str, option: str) -> dict[str, Any]:
    """The keys of an option as its file has them, nothing resolved."""
    text = files(CONFIGS).joinpath(group, f"{option}.yaml").read_text()
    data: Any = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    return data
