"""The table of environments: which there are, and which step together."""

from __future__ import annotations

import torch

from ...algorithms.env_roles import EnvRows

__all__ = ["EnvRowSource"]


class EnvRowSource:
    """The same environments for every step.

    Args:
        num_envs: How many.
        group_size: How many step together; the last group may have fewer.

    Raises:
        ValueError: If either is below 1.
    """

    def __init__(self, num_envs: int, group_size: int) -> None:
        if num_envs < 1 or group_size < 1:
            raise ValueError(
                f"num_envs is {num_envs} and group_size {group_size}; expected at least 1"
            )
        env = torch.arange(num_envs)
        self._rows = EnvRows(env=env, group=env // group_size)

    def batch(self, step: int) -> EnvRows:
        """All of them, whatever the step."""
        del step
        return self._rows
