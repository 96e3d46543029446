"""Which executor a run's configuration names."""

from __future__ import annotations

from ...configs.references import load_object
from ...dataflow.errors import ConfigError
from ...workers.executors.executor_kind import ExecutorKind
from ...workers.executors.registry import EXECUTORS

__all__ = ["executor_kind"]


def executor_kind(name: str, at: str) -> ExecutorKind:
    """The executor that the configuration names.

    Args:
        name: What is configured.
        at: The key.

    Raises:
        ConfigError: If it is one of the user's own that cannot be loaded.
    """
    if ":" not in name:
        return EXECUTORS[name]  # the schema knows no other
    found = load_object(name, at)
    if isinstance(found, ExecutorKind):
        return found
    raise ConfigError(
        f"'{at}': '{name}' is a {type(found).__name__}\n"
        "    give an ExecutorKind (penstock.workers.executors.executor_kind)"
    )
