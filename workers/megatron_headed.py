"""Writing value and reward models as the torch engine's are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from torch import nn

from .megatron_worker import MegatronWorker
from .model import save_headed

__all__ = ["save_trunk"]


def save_trunk(worker: MegatronWorker, folder: Path, name: Literal["value_head", "score"]) -> None:
    """Write a trunk in Hugging Face's layout and its head beside it (one process does).

    All processes of the rank must call this.
    """
    weights = worker.weights_to_write()
    if not weights:
        return
    head = nn.Linear(weights[f"{name}.weight"].shape[1], 1).to(weights[f"{name}.weight"].dtype)
    head.load_state_dict({part: weights.pop(f"{name}.{part}") for part in ("weight", "bias")})
    trunk: Any = worker.model.trunk("cpu")
    trunk.load_state_dict({key.removeprefix("model."): value for key, value in weights.items()})
    save_headed(folder, trunk, head, name)
