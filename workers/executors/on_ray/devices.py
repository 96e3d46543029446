"""The devices of a run, as Ray reserves them: placement groups made from the plan.

Each device is a bundle of its own, on the node that stands for the plan's. So tensor-parallel ranks
are on one node wherever the plan has them on one, several processes that take turns on a GPU are
all on that GPU, and the order of the GPUs of a node is known before a process starts. All that
trains is one placement group. Each replica of a group that only generates is one of its own, which
can be given back alone.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import ray
from ray._private.state import (  # pyright: ignore[reportPrivateImportUsage]
    available_resources_per_node,
)
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ....dataflow.errors import PlanError
from ....dataflow.runtime.placement import DeviceGroup
from ..assignment import Device, Machine, NodeShare, NoRoom, assign, device_of, shares_of

_NODE_ID = "ray.io/node-id"  # The label that Ray gives to every node
_NAME_LABEL = "ray.io/accelerator-type"
_NAMED = "accelerator_type:"  # What the resources begin with that Ray calls after a node's GPUs
# How long all bundles may take that seemed free; afterwards another run has some of them.
_TOGETHER_S = 10.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 15.0
_ORDER_S = 60.0  # How long GPUs may take to say their index: a process is started on each

# What is reserved together: a group and its data-parallel rank, or all that trains.
_Unit = tuple[str, int]
_TRAINING: _Unit = ("", 0)


class RayDevices:
    """Devices that Ray has set aside; see `Reservation`."""

    def __init__(
        self,
        groups: Sequence[DeviceGroup],
        nodes: Mapping[Device, str],
        numbers: Mapping[int, str],
        reserved: Sequence[tuple[PlacementGroup, Sequence[Device]]],
    ) -> None:
        self.numbers = numbers
        self._nodes = nodes
        self._reserved = list(reserved)
        self._bundles = {
            device: (reservation, index)
            for reservation, devices in reserved
            for index, device in enumerate(devices)
        }
        self._users = {group.name: _devices(group) for group in groups}
        self._uses = Counter(device for devices in self._users.values() for device in devices)

    def put_in_order(self, timeout_s: float) -> None:
        """Have devices of a placement group and node stand for GPUs in order of their indices."""
        together: dict[tuple[PlacementGroup, str], list[Device]] = {}
        for device, (reservation, index) in self._bundles.items():
            if "GPU" in reservation.bundle_specs[index]:
                together.setdefault((reservation, self._nodes[device]), []).append(device)
        several = [sorted(some, key=_by_number) for some in together.values() if len(some) > 1]
        asked = [device for devices in several for device in devices]
        probe: Any = ray.remote(_gpu_index)
        answers = ray.get(
            [probe.options(num_cpus=0, **self._in_bundle(d, 1)).remote() for d in asked],
            timeout=timeout_s,
        )
        index_of = dict(zip(asked, answers, strict=True))
        for devices in several:
            bundles = [self._bundles[d] for d in sorted(devices, key=index_of.__getitem__)]
            self._bundles |= dict(zip(devices, bundles, strict=True))

    def options(self, group: DeviceGroup, process: int) -> dict[str, Any]:
        device = device_of(group, process)
        if device in self._bundles:
            return self._in_bundle(device, self._uses[device])
        if device not in self._nodes:
            return {}
        here = NodeAffinitySchedulingStrategy(self._nodes[device], soft=False)
        return {"scheduling_strategy": here}

    def _in_bundle(self, device: Device, num_uses: int) -> dict[str, Any]:
        reservation, index = self._bundles[device]
        is_gpu = "GPU" in reservation.bundle_specs[index]
        return {
            "num_gpus": 1 / num_uses if is_gpu else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                reservation, placement_group_bundle_index=index
            ),
        }

    def is_there(self, group: str) -> bool:
        devices = self._users.get(group, ())
        nodes = {self._nodes[device] for device in devices if device in self._nodes}
        return nodes <= _alive()

    def release(self, group: str) -> None:
        self._users.pop(group, None)
        used = {device for devices in self._users.values() for device in devices}
        unused = [one for one in self._reserved if not used & set(one[1])]
        self._reserved = [one for one in self._reserved if one not in unused]
        if ray.is_initialized():
            for reservation, _ in unused:
                remove_placement_group(reservation)


def _by_number(device: Device) -> tuple[str, int]:
    return ("", device) if isinstance(device, int) else device


def _devices(group: DeviceGroup) -> list[Device]:
    return [device_of(group, process) for process in range(group.num_processes)]


def _gpu_index() -> tuple[int, str]:
    (name,) = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return (int(name), "") if name.isdigit() else (-1, name)


def _gpu_names(resources: Mapping[str, float], labels: Mapping[str, str]) -> tuple[str, ...]:
    named = {name.removeprefix(_NAMED) for name in resources if name.startswith(_NAMED)}
    named |= {labels[_NAME_LABEL]} if _NAME_LABEL in labels else set()
    return tuple(sorted(named, key=lambda name: (-len(name), name)))


def _alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def ray_nodes() -> list[Machine]:
    """Ray's nodes that are alive, this process's own first and the others by address."""
    own = ray.get_runtime_context().get_node_id()
    free = available_resources_per_node()
    alive = [
        Machine(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"], {}),
            labels=node["Labels"],
            devices=_gpu_names(node["Resources"], node["Labels"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(alive, key=lambda node: (node.id != own, node.address, node.id))


def reserve(
    groups: Sequence[DeviceGroup],
    timeout_s: float,
    training: AbstractSet[str],
    held: Iterable[RayDevices],
) -> RayDevices:
    """Have Ray set the devices of all groups aside, all or none.

    Two runs that start at once may each get a part of what the other needs. Then both give it back,
    and try again after a pause whose length is random and grows.
    """
    shares = shares_of(groups)
    numbers = {number: node for one in held for number, node in one.numbers.items()}
    alive = _alive()  # another may stand for what a node stood for that is gone
    numbers = {number: node for number, node in numbers.items() if node in alive}
    try:
        assign(shares, ray_nodes(), numbers, free_only=False)
    except NoRoom as error:
        raise PlanError(
            f"{error}\n    start Ray on more or larger nodes, or plan for those that there are: "
            "placement=auto"
        ) from None
    end_s, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while True:
        try:
            nodes = assign(shares, ray_nodes(), numbers, free_only=True)
            return _take(groups, training, shares, nodes, end_s)
        except NoRoom as error:
            said = str(error)
        if time.monotonic() + pause_s > end_s:
            raise PlanError(
                f"{said}\n    it was not free within {timeout_s:g} s; wait until other runs have "
                "ended, or plan for fewer devices"
            )
        time.sleep(pause_s * random.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _take(
    groups: Sequence[DeviceGroup],
    training: AbstractSet[str],
    shares: Sequence[NodeShare],
    nodes: Mapping[Device, str],
    end_s: float,
) -> RayDevices:
    takes = {d: resource for share in shares for d, resource in share.devices.items() if resource}
    numbers = {s.number: nodes[next(iter(s.devices))] for s in shares if s.number is not None}
    reserved: list[tuple[PlacementGroup, Sequence[Device]]] = []
    for devices in _units(groups, training, takes):
        bundles = [{takes[device]: 1.0} for device in devices]
        pinned = [{_NODE_ID: nodes[device]} for device in devices]
        made = placement_group(bundles, strategy="PACK", bundle_label_selector=pinned)
        reserved.append((made, devices))
    found = RayDevices(groups, nodes, numbers, reserved)
    try:
        within_s = max(0.1, min(_TOGETHER_S, end_s - time.monotonic()))
        ray.get([one.ready() for one, _ in reserved], timeout=within_s)
        found.put_in_order(_ORDER_S)
    except RayError as error:
        for group in groups:
            found.release(group.name)
        raise NoRoom(
            f"Ray did not set {len(takes)} devices aside, though they seemed to be free"
        ) from error
    return found


def _units(
    groups: Sequence[DeviceGroup], training: AbstractSet[str], takes: Mapping[Device, str]
) -> list[list[Device]]:
    units: dict[_Unit, list[Device]] = {}
    seen = set[Device]()
    for group in sorted(groups, key=lambda group: group.name not in training):
        for process, device in enumerate(_devices(group)):
            if device in takes and device not in seen:
                seen.add(device)
                own = (group.name, group.rank_of(process))
                units.setdefault(_TRAINING if group.name in training else own, []).append(device)
    return list(units.values())
