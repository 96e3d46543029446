"""What graphs and the scheduler's flows both say of a node: its kind, and the weights it reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NodeKind(Enum):
    """What a node does: bring data in, compute, make rows, evaluate a role, or train it."""

    SOURCE = "source"
    OP = "op"
    ROLLOUT = "rollout"
    FORWARD = "forward"
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class WeightRead:
    """A node's read of a role's weights.

    Attributes:
        role: The role read. Roles that are never trained have no version.
        offset: How many train calls of the role precede the node in the step function.
        lagged: True if the read may be up to `Schedule.max_lag` steps old (rollouts).
        at: The group whose copy is read, if that is not the node's own: it serves the node.
    """

    role: str
    offset: int = 0
    lagged: bool = False
    at: str = ""
