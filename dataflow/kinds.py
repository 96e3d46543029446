"""Kinds of nodes, and the weights they read, as graphs and the scheduler's flows have them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NodeKind(Enum):
    """The work of a node: bring data in, compute, make rows, evaluate a role, or train it."""

    SOURCE = "source"
    OP = "op"
    ROLLOUT = "rollout"
    FORWARD = "forward"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class WeightRead:
    """A node's read of a role's weights."""

    role: str  # The role read. Roles that are never trained have no version
    offset: int = 0  # Train calls of the role before the node in the step function
    lagged: bool = False  # True if the read may be up to `Schedule.max_lag` steps old (rollouts)
    at: str = ""  # The group whose copy is read, if that is not the node's own: it serves the node
