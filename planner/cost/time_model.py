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
from .time_decode import generate_time
from .time_parts import CallTime, Machine, Work
from .time_train import forward_time, train_time

__all__ = ["CallTime", "TimeModel", "call_time", "move_time", "offload_time"]


def call_time(
    call: Call,
    layout: Layout,
    mesh: Mesh,
    constants: Constants,
    *,
    kv_bytes: float | None = None,
) -> CallTime:
    """Predict one call. For many calls on few meshes, `TimeModel` is faster.

    Args:
        call: What is computed.
        layout: How it is spread; must be legal for the model and use no more than the mesh.
        mesh: The devices.
        constants: What a program gets out of them.
        kv_bytes: For a generation: what each device has for keys and values. Rows that do not fit
            at once run in waves; all fit if None.

    Raises:
        PlanError: If a device has no peak at the model's dtype, or `kv_bytes` holds no row.
    """
    machine = Machine.of(mesh, constants, call.model.dtype)
    return _time(Work.of(call), layout, machine, kv_bytes)


def _time(work: Work, layout: Layout, machine: Machine, kv_bytes: float | None) -> CallTime:
    if work.kind == "generate":
        return generate_time(work, layout, machine, kv_bytes)
    if work.kind == "forward":
        return forward_time(work, layout, machine)
    return train_time(work, layout, machine)


class TimeModel:
    """`call_time` for many layouts: keeps the numbers of each call and each mesh it has seen.

    Calls and meshes are told apart by identity, so build each once and pass the same object.

    Args:
        constants: What a program gets out of the devices.
        shares_prompts: Whether the engine computes a prompt once for all of its rows that it has in
            one minibatch.
    """

    def __init__(self, constants: Constants, *, shares_prompts: bool = False) -> None:
        self.constants = constants
        self._shares_prompts = shares_prompts
        self._works: dict[int, tuple[Call, Work]] = {}
        self._machines: dict[tuple[int, str], tuple[Mesh, Machine]] = {}

    def call_time(
        self, call: Call, layout: Layout, mesh: Mesh, *, kv_bytes: float | None = None
    ) -> CallTime:
        """See the function of this name."""
        known = self._works.get(id(call))
        if known is None:
            work = Work.of(call, shares_prompts=self._shares_prompts)
            known = self._works[id(call)] = (call, work)
        key = (id(mesh), call.model.dtype)
        on = self._machines.get(key)
        if on is None:
            machine = Machine.of(mesh, self.constants, call.model.dtype)
            on = self._machines[key] = (mesh, machine)
        return _time(known[1], layout, on[1], kv_bytes)


def offload_time(num_bytes: float, mesh: Mesh) -> float:
    """Seconds to move `num_bytes` of each device to its host's memory, or back."""
    return num_bytes / mesh.host_bytes_per_s


def move_time(num_bytes: float, mesh: Mesh, constants: Constants) -> float:
    """Seconds until every device of a mesh has received the weights it lacks.

    Args:
        num_bytes: What the device that lacks most receives.
        mesh: All devices that send or receive.
        constants: What a program gets out of the links.
    """
    if num_bytes <= 0:
        return 0.0
    links = links_of(mesh, constants)
    if mesh.num_devices <= mesh.node_size:
        return num_bytes / links.within_bytes_per_s + links.within_hop_s
    return num_bytes / links.between_bytes_per_s + links.between_hop_s
