"""What a configuration names: an entry of a registry, or `module:name` of the user's own.

The working directory is on the search path, so a module of one's own need not be installed.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

from ..dataflow.errors import ConfigError, PenstockError, nearest, raised_at

__all__ = ["entry_or_own", "load_object"]


def entry_or_own(name: str, registry: Mapping[str, Any], at: str, what: str) -> Any:
    """The entry of a registry that is called `name`, or the object that `module:name` names.

    Args:
        name: What was configured.
        registry: Name -> entry.
        at: Under which key.
        what: What the entries are, for the message: "tracker".

    Raises:
        ConfigError: If there is no such entry, module or name.
    """
    if ":" in name:
        return load_object(name, at)
    if name not in registry:
        raise ConfigError(
            f"'{at}': there is no {what} '{name}'{nearest(name, registry)}\n"
            f"    {what}s are: {', '.join(registry)}, or module:name for your own"
        )
    return registry[name]


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
    module = _import(module_name, at)
    if not hasattr(module, name):
        public = [other for other in vars(module) if not other.startswith("_")]
        raise ConfigError(
            f"'{at}': module '{module_name}' has no '{name}'{nearest(name, public)}\n"
            f"    it is {module.__file__}"
        )
    return getattr(module, name)


def _import(name: str, at: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except PenstockError:
        raise
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"'{at}': there is no module '{name}'\n    it is looked for in the working "
                f"directory ({os.getcwd()}) and among installed packages"
            ) from error
        raise ConfigError(_import_failure(name, at, error)) from error
    except Exception as error:
        raise ConfigError(_import_failure(name, at, error)) from error


def _import_failure(name: str, at: str, error: BaseException) -> str:
    where = raised_at(error)
    return (
        f"'{at}': module '{name}' cannot be imported\n{where.file}:{where.line}\n"
        f"    {where.source}\n    {type(error).__name__}: {error}"
    )
