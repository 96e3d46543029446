"""Finding the constants with which the model of time comes closest to calls that were timed.

What share of the peak products reach is another one at every width; the other constants are those
of all models in one dtype: what share attention reaches, what shares of the memory's bandwidth are
reached, what a layer's launches and an optimizer step take, and what a backward pass is. The mean
square of the logarithm of predicted over measured is made as small as can be, so that 20 % too
much and 20 % too little weigh the same, and a short call as much as a long one.

A GPU has more constants: what the host does for a micro-batch and a generation, and what a replayed
decode step waits for. What its calls leave open stays near where the search begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..inputs.calls import Call
from ..inputs.cluster import ClusterSpec, Mesh
from ..inputs.layout import Layout
from .calibration import Constants, DtypeConstants
from .engine_model import ANY, EngineModel
from .time_model import TimeModel

_SHARES = (1e-3, 1.0)  # between which an efficiency is looked for

# between which the launches of a layer are looked for, and the costs of an optimizer step
_LAUNCHES_S = (1e-6, 0.1)

_BACKWARD = (1.0, 10.0)  # between which a backward pass is looked for, in forward passes

# a GPU's constants to begin with
_ON_GPU = {
    "launch_s": 5e-4,
    "update_s": 5e-3,
    "micro_batch_s": 2e-3,
    "generate_s": 1e-2,
    "replay_s": 3e-5,
    "sample_s": 2e-4,
}
_PRIOR = 0.05  # the error that weighs as much as a GPU's constant e times as large as it began
_USUAL = 0.1  # error of a call on a GPU above which it counts less than its square

_FINE = 1e-4  # step by which slopes are found, in logarithms
_LEAST_GAIN = 1e-9  # of the sum of squares: the search ends below it
_MOST_DAMPING = 1e9
_ROUNDS = 100  # and after so many rounds at the latest


@dataclass(frozen=True)
class Timed:
    call: Call  # what was called
    micro_batch: int  # sequences that were computed at once in forward and train calls
    measured_s: float  # seconds

    @property
    def width(self) -> int:
        return self.call.model.hidden_size


@dataclass(frozen=True)
class Fit:
    found: DtypeConstants  # the constants
    predicted_s: tuple[float, ...]  # what each call takes with them, in the order given


def fit_constants(
    timed: Sequence[Timed], cluster: ClusterSpec, start: Constants, engine: EngineModel = ANY
) -> Fit:
    """Fit constants of one dtype to timed calls on one device, beginning at `start`.

    The matmul efficiency is one per hidden size; the others hold for all.
    """
    widths = sorted({one.width for one in timed})
    one_device = Mesh(cluster, (1, *(0 for _ in cluster.node_groups[1:])))
    model = _Model(timed, widths, one_device, start, engine)
    point = _descended(model)
    constants = [model.constants(point, width) for width in widths]
    found = DtypeConstants(
        constants=constants[len(widths) // 2].replaced(call_s=start.call_s),
        matmul_efficiency={
            width: made.matmul_efficiency for width, made in zip(widths, constants, strict=True)
        },
    )
    return Fit(found, tuple(model.predicted_s(point)))


class _Model:
    """Constants as a list of logarithms: those of all widths, then an efficiency per width.

    The bounds keep them within what `Constants` allows.
    """

    def __init__(
        self,
        timed: Sequence[Timed],
        widths: Sequence[int],
        mesh: Mesh,
        start: Constants,
        engine: EngineModel,
    ) -> None:
        self._timed, self._widths, self._mesh, self._engine = timed, widths, mesh, engine
        self._start = start.replaced(call_s=0.0)  # of a direct call, nothing is dispatched
        self._measured_s = np.array([one.measured_s for one in timed])
        self._layouts = [Layout(micro_batch=one.micro_batch) for one in timed]
        self._prior = 0.0 if mesh.is_cpu else _PRIOR
        points = {
            "attention_efficiency": start.attention_efficiency or start.matmul_efficiency,
            "memory_efficiency": start.memory_efficiency,
            "read_efficiency": start.read_efficiency or start.memory_efficiency,
            "launch_s": start.launch_s,
            "update_s": start.update_s,
            "backward": start.backward,
            **({} if mesh.is_cpu else _ON_GPU),
        }
        self._names = [*points]
        bounds = [
            _BACKWARD if name == "backward" else _LAUNCHES_S if name.endswith("_s") else _SHARES
            for name in points
        ]
        bounds += [_SHARES for _ in widths]
        values = [*points.values(), *(start.matmul_efficiency for _ in widths)]
        self.start = [
            math.log(max(value, low)) for value, (low, _) in zip(values, bounds, strict=True)
        ]
        self.bounds = [(math.log(low), math.log(high)) for low, high in bounds]

    def constants(self, point: Sequence[float], width: int) -> Constants:
        found = dict(zip(self._names, map(math.exp, point), strict=False))
        of_width = point[len(self._names) + self._widths.index(width)]
        found["matmul_efficiency"] = math.exp(of_width)
        return self._start.replaced(
            **{
                name: value if name.endswith("_s")
                else min(_BACKWARD[1] if name == "backward" else 1.0, value)
                for name, value in found.items()
            }
        )  # fmt: skip

    def predicted_s(self, point: Sequence[float]) -> list[float]:
        models = {w: TimeModel(self.constants(point, w), self._engine) for w in self._widths}
        return [
            models[one.width].call_time(one.call, layout, self._mesh).total_s
            for one, layout in zip(self._timed, self._layouts, strict=True)
        ]

    def errors(self, point: Any) -> Any:
        """Numbers with small squares: an error for each call, on a GPU for each constant too."""
        predicted = np.array(self.predicted_s(point))
        error = np.log(predicted / self._measured_s)
        if not self._prior:
            return error
        bent = np.sqrt(2.0 * (np.hypot(1.0, error / _USUAL) - 1.0)) * _USUAL
        away = self._prior * (np.array(point) - self.start)
        return np.concatenate([np.copysign(bent, error), away])


def _descended(model: _Model) -> list[float]:
    """Levenberg and Marquardt's method, within bounds."""
    point, (low, high) = np.array(model.start), np.array(model.bounds).T
    errors, damping = model.errors(point), 1e-2
    for _ in range(_ROUNDS):
        tried, now = point, errors
        steps = np.where(point + _FINE > high, -_FINE, _FINE)  # a bound may be where it begins
        moved = np.array([model.errors(point + step) for step in np.diag(steps)])
        slopes = (moved - errors).T / steps
        uphill = slopes.T @ errors
        slopes[:, ((point >= high) & (uphill < 0)) | ((point <= low) & (uphill > 0))] = 0.0
        squares = slopes.T @ slopes + 1e-9 * np.eye(len(point))
        gained = 0.0
        while not gained and damping < _MOST_DAMPING:
            damped = squares + damping * np.diag(np.diag(squares))
            step = np.linalg.solve(damped, -slopes.T @ errors)
            tried = np.clip(point + np.clip(step, -1.0, 1.0), low, high)
            now = model.errors(tried)
            gained = max(0.0, float(errors @ errors - now @ now))
            damping *= 0.2 if gained else 5.0
        if gained <= _LEAST_GAIN:
            break
        point, errors = tried, now
    return point.tolist()
