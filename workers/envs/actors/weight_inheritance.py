"""Weight inheritance: one worker takes the weights of another in the same process."""

from __future__ import annotations

import numpy as np
import torch

from ....dataflow.errors import WorkerError
from ....dataflow.runtime.worker_protocol import Trainable
from ...training.model_worker import ModelWorker

__all__ = ["inherit_weights"]


def inherit_weights(
    worker: ModelWorker,
    other: object,
    *,
    share: float = 1.0,
    mutation: float = 0.0,
    random: np.random.Generator | None = None,
) -> None:
    """Move weights towards another worker's.

    To `w + share * (other - w)`, which is its own for share 1, times `1 + mutation * noise`.

    Args:
        worker: Whose weights are moved.
        other: A worker of the same kind of network.
        share: How far.
        mutation: Deviation of the noise.
        random: Where it comes from; needed if there is a mutation.

    Raises:
        WorkerError: If the other one has no weights to give.
        ValueError: If names or shapes differ; nothing has been changed then.
    """
    if not isinstance(other, Trainable):
        raise WorkerError(
            f"'{worker.context.role}' was to inherit the weights of a {type(other).__name__}, "
            "which has none; it needs export_weights"
        )
    taken = dict(other.export_weights())
    own = worker.export_weights()
    if share < 1 and own.keys() == taken.keys():
        taken = {name: torch.lerp(own[name], taken[name], share) for name in own}
    if mutation and random is not None:
        for name, weight in taken.items():
            noise = torch.from_numpy(random.standard_normal(tuple(weight.shape)))
            taken[name] = (weight * (1 + mutation * noise)).to(weight.dtype)
    worker.load_weights(taken)
