"""An adaptive KL coefficient as a worker: what it has become, as a multiple of the first one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...algorithms.controllers import KLController, KLTarget
from ...algorithms.roles.language_tables import TrainMetrics
from ...dataflow.graph.role import Metric
from ...dataflow.runtime.worker_protocol import WorkerContext
from .data_parallel import rank_group

_STATE = "kl_controller.json"


@dataclass(frozen=True, kw_only=True)
class KLControllerSpec:
    """Recipe for an `AdaptiveKL`."""

    def build(self, context: WorkerContext) -> AdaptiveKL:
        """Make the controller."""
        return AdaptiveKL(context)


class AdaptiveKL(KLController):
    """The controller; all ranks of a group take in all rows and hold the same number."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._group = rank_group(context, torch.device(context.device))
        self._factor = 1.0

    def follow(self, kl: Tensor, first: float, target: KLTarget) -> TrainMetrics:
        values = self._group.gather_floats(kl)
        observed = sum(values) / max(len(values), 1)
        self._factor = target.next_coef(
            self._factor, observed_kl=observed, num_sequences=len(values)
        )
        return TrainMetrics(
            {
                "kl_coef": Metric.mean(first * self._factor, 1.0),
                "observed_kl": Metric.mean(observed, 1.0),
            }
        )

    def coefficient(self, kl: Tensor, first: float) -> Tensor:
        return torch.full_like(kl, first * self._factor)

    def export_weights(self) -> dict[str, Tensor]:
        """The factor."""
        return {"factor": torch.tensor([self._factor], dtype=torch.float64)}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load the factor."""
        self._factor = float(weights["factor"].item())

    def save_state(self, folder: Path) -> None:
        """Write the factor; only process 0 does."""
        if self._context.process == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _STATE).write_text(json.dumps({"factor": self._factor}) + "\n")

    def load_state(self, folder: Path) -> None:
        """Restore what `save_state` wrote, bit for bit."""
        self._factor = float(json.loads((folder / _STATE).read_text())["factor"])
