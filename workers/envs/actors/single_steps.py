"""Rows of many steps as the networks of actors and critics see them: one state at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, get_type_hints

import torch
from torch import Tensor

from ....algorithms.roles.environment import TIME, Values
from ....dataflow.graph.axes import spec_of
from ...training.microbatch import columns

__all__ = ["single_steps", "state_values"]


def single_steps(batch: Any) -> Any:
    """The steps that count as rows of one step each: [rows, T, ...] to [steps, 1, ...].

    Columns without steps, [rows, ...], become [steps, ...].
    """
    found, stepless = columns(batch), _stepless(type(batch))
    width = found["mask"].shape[1]
    kept = found["mask"].flatten().nonzero()[:, 0]
    parts = {
        name: column[kept // width] if name in stepless else column.flatten(0, 1)[kept, None]
        for name, column in found.items()
    }
    return dataclasses.replace(batch, **parts)


@cache
def _stepless(kind: type) -> frozenset[str]:
    """The columns of a batch dataclass that have no axis of time."""
    specs = {name: spec_of(hint) for name, hint in get_type_hints(kind, None, None, True).items()}
    return frozenset(name for name, spec in specs.items() if spec and TIME not in spec.axes)


def state_values(
    value: Callable[[Tensor], Tensor], obs: Tensor, last_obs: Tensor, device: torch.device
) -> Values:
    """What a critic says of every state, without gradients.

    Args:
        value: Maps f32[states, features] to f32[states].
        obs: f32[rows, T, features].
        last_obs: f32[rows, features].
        device: The critic's.
    """
    every = torch.zeros(obs.shape[0], obs.shape[1] + 1)
    with torch.no_grad():
        # A row at a time: what a product of matrices rounds to may depend on how many there are,
        # and rows are batched differently with another number of workers.
        for row, (before, last) in enumerate(zip(obs, last_obs, strict=True)):
            every[row] = value(torch.cat([before, last[None]]).to(device))
    return Values(value=every[:, :-1].contiguous(), bootstrap_value=every[:, -1].contiguous())
