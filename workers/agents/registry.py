"""The agents that a configuration can name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...dataflow.errors import ConfigError
from ...dataflow.registry import Registry

if TYPE_CHECKING:
    from ..data.task import Task

AGENT = "agent"

TASK_AGENTS = Registry[Any]({AGENT: "penstock.workers.agents.worker:AgentSpec"})
"""Every agent that a configuration can name, with its spec."""


def check_converses(task: Task) -> None:
    """Require a task whose problems are answered in conversation."""
    if not task.converses:
        raise ConfigError(
            f"task '{task.task_id}' has no environments to talk with\n    choose one that has, "
            "such as task=calculator, or give your task a method `environment`"
        )
