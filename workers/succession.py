"""Weights that one worker takes over from another in the same process."""

from __future__ import annotations

import torch

from ..dataflow.errors import WorkerError
from ..dataflow.worker import Trainable
from .torch_worker import TorchWorker

__all__ = ["take_over"]


def take_over(heir: TorchWorker, other: object, share: float = 1.0) -> None:
    """Move weights towards another worker's: `w + share * (other - w)`, and its own for share 1.

    Args:
        heir: Whose weights are moved.
        other: A worker of the same kind of network.
        share: How far.

    Raises:
        WorkerError: If the other one has no weights to give.
        ValueError: If names or shapes differ; nothing has been changed then.
    """
    if not isinstance(other, Trainable):
        raise WorkerError(
            f"'{heir.context.role}' was to take over weights of a {type(other).__name__}, which "
            "has none; it needs export_weights"
        )
    theirs = other.export_weights()
    if share < 1:
        own = heir.export_weights()
        if own.keys() == theirs.keys():
            theirs = {name: torch.lerp(own[name], theirs[name], share) for name in own}
    heir.load_weights(theirs)
