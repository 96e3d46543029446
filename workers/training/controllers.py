"""Controllers as workers: an adaptive KL coefficient, and a Lagrange multiplier.

Of the coefficient the state is a multiple of the first one; of the multiplier, a number and the
costs of recent responses.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...algorithms.controllers import Ascent, KLController, KLTarget, Multiplier
from ...algorithms.roles.language_tables import TrainMetrics
from ...dataflow.graph.role import Metric
from ...dataflow.options import PositiveFloat, option_class
from ...dataflow.runtime.worker_protocol import WorkerContext
from .data_parallel import rank_group

_KL_STATE = "kl_controller.json"


@dataclass(frozen=True, kw_only=True)
class KLControllerSpec:
    """Recipe for an `AdaptiveKL`."""

    def build(self, context: WorkerContext) -> AdaptiveKL:
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
        return {"factor": torch.tensor([self._factor], dtype=torch.float64)}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._factor = float(weights["factor"].item())

    def save_state(self, folder: Path) -> None:
        if self._context.process == 0:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _KL_STATE).write_text(json.dumps({"factor": self._factor}) + "\n")

    def load_state(self, folder: Path) -> None:
        self._factor = float(json.loads((folder / _KL_STATE).read_text())["factor"])


_MULTIPLIER_STATE = "multiplier.json"


@option_class
class MultiplierSpec:
    """Recipe for a `LagrangeMultiplier`."""

    initial: PositiveFloat = 1.0
    """The multiplier before the first step."""

    def build(self, context: WorkerContext) -> LagrangeMultiplier:
        return LagrangeMultiplier(self, context)


class LagrangeMultiplier(Multiplier):
    """The multiplier; all ranks of a group take in all costs and hold the same number."""

    def __init__(self, spec: MultiplierSpec, context: WorkerContext) -> None:
        self._context = context
        self._group = rank_group(context, torch.device(context.device))
        self._log_multiplier = math.log(spec.initial)
        self._costs: deque[float] = deque()
        self._steps = 0

    def update(self, cost: Tensor, ascent: Ascent) -> TrainMetrics:
        self._costs.extend(one for one in self._group.gather_floats(cost) if not math.isnan(one))
        while len(self._costs) > ascent.window:
            self._costs.popleft()
        mean_cost = sum(self._costs) / len(self._costs) if self._costs else ascent.threshold
        if self._steps >= ascent.delay_steps:
            self._log_multiplier = ascent.next_log(self._log_multiplier, mean_cost=mean_cost)
        self._steps += 1
        return TrainMetrics(
            {
                "multiplier": Metric.mean(math.exp(self._log_multiplier), 1.0),
                "recent_cost": Metric.mean(mean_cost, 1.0),
            }
        )

    def price(self, cost: Tensor) -> Tensor:
        return torch.full_like(cost, math.exp(self._log_multiplier))

    def export_weights(self) -> dict[str, Tensor]:
        """The logarithm alone: a copy elsewhere is asked for prices only."""
        return {"log_multiplier": torch.tensor([self._log_multiplier], dtype=torch.float64)}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._log_multiplier = float(weights["log_multiplier"].item())

    def save_state(self, folder: Path) -> None:
        if self._context.process != 0:
            return
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "log_multiplier": self._log_multiplier,
            "costs": list(self._costs),
            "steps": self._steps,
        }
        (folder / _MULTIPLIER_STATE).write_text(json.dumps(state) + "\n")

    def load_state(self, folder: Path) -> None:
        state: dict[str, Any] = json.loads((folder / _MULTIPLIER_STATE).read_text())
        self._log_multiplier = float(state["log_multiplier"])
        self._costs = deque(map(float, state["costs"]))
        self._steps = int(state["steps"])
