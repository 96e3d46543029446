"""How long a call takes in a layout on a mesh, and how long it takes to move weights.

`call_time` is the question; `TimeModel` asks it many times and keeps what depends on the call or
the mesh alone. The formulas are in `time_train` and `time_decode`.
"""

from __future__ import annotations

from ..inputs.calls import Call
from ..inputs.layout import Layout
from ..inputs.mesh import Mesh
from .collectives import links_of
from .constants import Constants
from .engine_model import ANY, EngineModel
from .time_decode import generate_time, kv_bytes_per_row
from .time_parts import CallTime, MachineRates, Work
from .time_train import forward_time, pipeline_time, train_time

__all__ = ["CallTime", "TimeModel", "call_time", "move_time", "offload_time"]


def call_time(
    call: Call,
    layout: Layout,
    mesh: Mesh,
    constants: Constants,
    *,
    kv_bytes: float | None = None,
) -> CallTime:
    """Predict one call. For many calls on few meshes, `TimeModel` is faster."""
    work, machine = Work.of(call), MachineRates.of(mesh, constants, call.model.dtype)
    found = _without_states(work, layout, machine, kv_bytes)
    found = train_time(work, layout, machine, found) if work.kind == "train" else found
    return _corrected(found, constants.corrections.get(work.kind, 1.0))


def _corrected(time: CallTime, factor: float) -> CallTime:
    return time if factor == 1.0 else CallTime(*[factor * part for part in time])


def _without_states(
    work: Work, layout: Layout, machine: MachineRates, kv_bytes: float | None
) -> CallTime:
    if work.kind == "generate":
        return generate_time(work, layout, machine, kv_bytes)
    pipeline = pipeline_time(work, layout, machine)
    return forward_time(work, layout, machine, pipeline) if work.kind == "forward" else pipeline


class TimeModel:
    """`call_time` for many layouts: keeps the numbers of each call and each mesh it has seen.

    Calls and meshes are told apart by identity, so build each once and pass the same object. Ask
    for everything on a mesh before another one: what layouts have in common is kept for one mesh.
    """

    def __init__(self, constants: Constants, engine: EngineModel = ANY) -> None:
        self.constants = constants
        self._engine = engine
        self._works: dict[int, tuple[Call, Work]] = {}
        self._same: dict[Work, Work] = {}
        # Of the mesh that was asked for last.
        self._mesh: Mesh | None = None
        self._here: dict[int, tuple[Work, MachineRates]] = {}
        self._kept: dict[tuple[float | None, ...], CallTime] = {}

    def call_time(
        self, call: Call, layout: Layout, mesh: Mesh, *, kv_bytes: float | None = None
    ) -> CallTime:
        if self._mesh is not mesh:
            self._mesh = mesh
            self._here.clear()
            self._kept.clear()
        known = self._here.get(id(call))
        if known is None:
            machine = MachineRates.of(mesh, self.constants, call.model.dtype)
            known = self._here[id(call)] = (self._work(call), machine)
        work, machine = known
        # A forward pass and a generation are the same whatever training has chosen, but for
        # gathered weights; a pipeline of training is the same for every ZeRO stage.
        train = work.kind == "train"
        key = (id(work), layout.tp, layout.pp, layout.dp, layout.cp, layout.ep,
               layout.sequence_parallel, layout.micro_batch, kv_bytes,
               layout.checkpointing if train else max(layout.zero, 1))  # fmt: skip
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = _without_states(work, layout, machine, kv_bytes)
        found = train_time(work, layout, machine, found) if train else found
        return _corrected(found, self.constants.corrections.get(work.kind, 1.0))

    def kv_bytes_per_row(self, call: Call, layout: Layout) -> float:
        return kv_bytes_per_row(self._work(call), layout)

    def _work(self, call: Call) -> Work:
        known = self._works.get(id(call))
        if known is None:
            work = Work.of(call, self._engine)
            # Calls that differ by name alone share what is kept.
            known = self._works[id(call)] = (call, self._same.setdefault(work, work))
        return known[1]


def offload_time(num_bytes: float, mesh: Mesh) -> float:
    """Seconds to move `num_bytes` of each device to its host's memory, or back."""
    return num_bytes / mesh.host_bytes_per_s


def move_time(num_bytes: float, mesh: Mesh, constants: Constants) -> float:
    """Seconds until every device of a mesh has received the weights it lacks."""
    if num_bytes <= 0:
        return 0.0
    links = links_of(mesh, constants)
    if mesh.num_devices <= mesh.node_size:
        return num_bytes / links.within_bytes_per_s + links.within_hop_s
    return num_bytes / links.between_bytes_per_s + links.between_hop_s
