"""Finding the constants with which the model of time comes closest to calls that were timed.

What share of the peak products reach is another one at every width; the other constants are those
of all models in one dtype: what share attention reaches, what shares of the memory's bandwidth are
reached, what a layer's launches and an optimizer step take, and what a backward pass is. The mean
square of the logarithm of predicted over measured is made as small as can be, so that 20 % too
much and 20 % too little weigh the same, and a short call as much as a long one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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

_FINE = 1e-4  # the search ends when steps of this size, in logarithms, no longer help

_ROUNDS = 400  # and after so many rounds at the latest


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
        self._layouts = [Layout(micro_batch=one.micro_batch) for one in timed]
        points = [
            (start.attention_efficiency or start.matmul_efficiency, _SHARES),
            (start.memory_efficiency, _SHARES),
            (start.read_efficiency or start.memory_efficiency, _SHARES),
            (start.launch_s, _LAUNCHES_S),
            (start.update_s, _LAUNCHES_S),
            (start.backward, _BACKWARD),
        ]
        self._common = len(points)
        points += [(start.matmul_efficiency, _SHARES) for _ in widths]
        self.start = [math.log(max(value, low)) for value, (low, _) in points]
        self.bounds = [(math.log(low), math.log(high)) for _, (low, high) in points]

    def constants(self, point: Sequence[float], width: int) -> Constants:
        attention, memory, read, launch_s, update_s, backward = map(math.exp, point[: self._common])
        return self._start.replaced(
            attention_efficiency=min(1.0, attention),
            memory_efficiency=min(1.0, memory),
            read_efficiency=min(1.0, read),
            launch_s=launch_s,
            update_s=update_s,
            backward=min(_BACKWARD[1], backward),
            matmul_efficiency=min(1.0, math.exp(point[self._common + self._widths.index(width)])),
        )

    def predicted_s(self, point: Sequence[float]) -> list[float]:
        models = {w: TimeModel(self.constants(point, w), self._engine) for w in self._widths}
        return [
            models[one.width].call_time(one.call, layout, self._mesh).total_s
            for one, layout in zip(self._timed, self._layouts, strict=True)
        ]

    def cost(self, point: Sequence[float]) -> float:
        pairs = zip(self.predicted_s(point), self._timed, strict=True)
        return sum(math.log(p / t.measured_s) ** 2 for p, t in pairs) / len(self._timed)


def _descended(model: _Model) -> list[float]:
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
