"""The agents that a configuration can name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...dataflow.registry import Registry

if TYPE_CHECKING:
    from .worker import AgentSpec

TASK_AGENTS: Registry[type[AgentSpec]] = Registry(
    {"agent": "penstock.workers.agents.worker:AgentSpec"}
)
"""Every agent that a configuration can name, with its spec."""
