"""Finding the constants with which the model of time comes closest to calls that were timed.

Three of the constants are found here: what share of the peak products reach, what share of the
memory's bandwidth, and what a layer's launches take. Products reach another share at every width,
the other two belong to the machine. The mean square of the logarithm of predicted over measured is
made as small as can be, so that 20 % too much and 20 % too little weigh the same, and a short call
as much as a long one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..inputs.calls import Call
from ..inputs.cluster import ClusterSpec
from ..inputs.layout import Layout
from ..inputs.mesh import Mesh
from .constants import Constants
from .time_model import TimeModel

__all__ = ["Fit", "Timed", "fit_constants"]

_LEAST, _MOST = 1e-3, 1.0
"""Between which an efficiency is looked for."""

_LEAST_LAUNCH_S, _MOST_LAUNCH_S = 1e-6, 0.1
"""Between which the launches of a layer are looked for."""

_FINE = 1e-4
"""The search ends when steps of this size, in logarithms, no longer help."""

_ROUNDS = 400
"""And after so many rounds at the latest."""


@dataclass(frozen=True)
class Timed:
    """A call on one device, and how long it took.

    Attributes:
        call: What was called.
        micro_batch: Sequences that were computed at once in forward and train calls.
        measured_s: Seconds.
    """

    call: Call
    micro_batch: int
    measured_s: float

    @property
    def width(self) -> int:
        """Hidden size of its model."""
        return self.call.model.hidden_size


@dataclass(frozen=True)
class Fit:
    """What was found.

    Attributes:
        constants: With the efficiency of the middle width.
        matmul_efficiency: Width -> efficiency.
        predicted_s: What each call takes with them, in the order given.
    """

    constants: Constants
    matmul_efficiency: Mapping[int, float]
    predicted_s: tuple[float, ...]


def fit_constants(timed: Sequence[Timed], cluster: ClusterSpec, start: Constants) -> Fit:
    """Find the constants of one device's computation.

    Args:
        timed: Calls of one device, some of them for every width.
        cluster: The peaks.
        start: Where to begin; network constants and `call_s` are kept as they are. The calls were
            made directly, so `call_s` is no part of them.

    Raises:
        PlanError: If a device has no peak at a model's dtype.
    """
    widths = sorted({one.width for one in timed})
    model = _Model(timed, widths, Mesh(cluster, _one_device(cluster)), start)
    found = _descended(model)
    constants = [model.constants(found, width) for width in widths]
    return Fit(
        constants[len(widths) // 2],
        {width: made.matmul_efficiency for width, made in zip(widths, constants, strict=True)},
        tuple(model.predicted_s(found)),
    )


def _one_device(cluster: ClusterSpec) -> tuple[int, ...]:
    return (1, *(0 for _ in cluster.node_groups[1:]))


class _Model:
    """Constants as a list of logarithms: memory efficiency, launch, then an efficiency per width.

    The bounds keep them within what `Constants` allows.
    """

    def __init__(
        self, timed: Sequence[Timed], widths: Sequence[int], mesh: Mesh, start: Constants
    ) -> None:
        self._timed, self._widths, self._mesh = timed, widths, mesh
        self._start = start.replaced(call_s=0.0)
        self._layouts = [Layout(micro_batch=one.micro_batch) for one in timed]
        self.call_s = start.call_s
        efficiencies = [math.log(start.matmul_efficiency)] * len(widths)
        launch = math.log(max(start.launch_s, _LEAST_LAUNCH_S))
        self.start = [math.log(start.memory_efficiency), launch, *efficiencies]
        share, seconds = (_LEAST, _MOST), (_LEAST_LAUNCH_S, _MOST_LAUNCH_S)
        bounds = [share, seconds, *(share for _ in widths)]
        self.bounds = [(math.log(low), math.log(high)) for low, high in bounds]

    def constants(self, point: Sequence[float], width: int, *, direct: bool = False) -> Constants:
        """The constants at a point for one width; of a direct call, nothing is dispatched."""
        return self._start.replaced(
            memory_efficiency=min(1.0, math.exp(point[0])),
            launch_s=math.exp(point[1]),
            matmul_efficiency=min(1.0, math.exp(point[2 + self._widths.index(width)])),
            call_s=0.0 if direct else self.call_s,
        )

    def predicted_s(self, point: Sequence[float]) -> list[float]:
        """Seconds of every call at a point."""
        models = {w: TimeModel(self.constants(point, w, direct=True)) for w in self._widths}
        return [
            models[one.width].call_time(one.call, layout, self._mesh).total_s
            for one, layout in zip(self._timed, self._layouts, strict=True)
        ]

    def cost(self, point: Sequence[float]) -> float:
        """Mean square of the logarithms of predicted over measured."""
        pairs = zip(self.predicted_s(point), self._timed, strict=True)
        return sum(math.log(p / t.measured_s) ** 2 for p, t in pairs) / len(self._timed)


def _descended(model: _Model) -> list[float]:
    """Downhill along one axis after the other, with steps that grow where they help."""
    point, cost = list(model.start), model.cost(model.start)
    steps = [0.5] * len(point)
    for _ in range(_ROUNDS):
        if max(map(abs, steps)) < _FINE:
            break
        for axis, (low, high) in enumerate(model.bounds):
            for step in (steps[axis], -steps[axis]):
                tried = [*point]
                tried[axis] = min(max(point[axis] + step, low), high)
                now = model.cost(tried)
                if now < cost:
                    point, cost, steps[axis] = tried, now, 1.5 * step
                    break
            else:
                steps[axis] *= 0.5
    return point
