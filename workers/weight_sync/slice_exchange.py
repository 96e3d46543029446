"""Export of weights in slices, and writing of those received, in one process.

The transfer plan follows from the two groups' layouts and is the same wherever it is computed.
Devices of the exporting group are numbered as its processes, those of a receiver behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from ...dataflow.errors import WorkerError
from ...dataflow.graph.role import Worker
from ...dataflow.runtime.messages import HeldLayout
from ...planner.resharding.plan import TransferPlan
from ...planner.resharding.plan_transfer import plan_transfer
from ...planner.resharding.sharding import Sharding
from .packets import (
    HeldWeights,
    Packed,
    Packet,
    Room,
    WeightsError,
    host_room,
    pack,
    unpack,
    unpack_whole,
)


class SliceTraffic:
    """The slices that one process sends and receives, and what it holds of them."""

    def __init__(self, process: int, senders: tuple[int, ...]) -> None:
        self._process = process
        self._senders = senders
        self._held: dict[str, HeldWeights] = {}

    def layout(self, worker: Worker) -> HeldLayout | None:
        layout = worker.weights_layout()
        if layout is None:
            return None
        return HeldLayout(_only(layout, self._senders), layout)

    def export(
        self,
        worker: Worker,
        receivers: Mapping[str, Sharding],
        version: int,
        room: Room = host_room,
    ) -> dict[tuple[str, int], Packet]:
        """The packet of this process for each process of the receivers, by (group, process).

        What goes to several of them alike is one bucket in all their packets.
        """
        tensors = worker.local_tensors()
        if tensors is None:
            raise WorkerError(
                f"a {type(worker).__name__} cannot export its weights in slices; it needs "
                "weights_layout, local_tensors and weights_changed"
            )
        source = _only(worker.weights_layout(), self._senders)
        found: dict[tuple[str, int], Packet] = {}
        packed: Packed = {}
        for group, layout in receivers.items():
            plan, first = _plan(source, layout)
            made = pack(plan, self._process, tensors, version, room=room, packed=packed)
            found |= {(group, device - first): packet for device, packet in made.items()}
        return found

    def expect(self, role: str, worker: Worker) -> None:
        """From now on the role's weights come from outside: those it was built with are none.

        To be told before packets are asked for, so that a call is refused if they never come.
        """
        if role not in self._held:
            self._held[role] = HeldWeights.of(worker.weights_layout(), self._process)

    def write(
        self, role: str, worker: Worker, source: Sharding, packets: Sequence[Packet], version: int
    ) -> None:
        """Write what has come into the worker's tensors: all of it or nothing."""
        layout: Sharding = worker.weights_layout()
        plan, first = _plan(source, layout)
        self.expect(role, worker)
        held, device = self._held[role], first + self._process
        try:
            tensors = worker.local_tensors()
            if tensors is not None:
                unpack(plan, device, packets, tensors, version, held)
                worker.weights_changed()
            else:
                whole = unpack_whole(plan, device, packets, version, held)
                given = {param.tensor: whole[param.tensor] for param in layout.params}
                worker.receive(given, version)
        except WeightsError:
            raise  # nothing was written
        except BaseException:  # what the worker holds now is not known
            del self._held[role]
            self.expect(role, worker)
            raise
        _await(packets)

    def check(self, role: str, version: int) -> None:
        """Refuse a call that must see a version which this copy does not wholly have."""
        held = self._held.get(role)
        if held is not None:
            held.check(version)


def _await(packets: Sequence[Packet]) -> None:
    buckets = (bucket for packet in packets for bucket in packet.buckets)
    for device in {bucket.device for bucket in buckets if isinstance(bucket, Tensor)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


@lru_cache(maxsize=16)
def _plan(sent: Sharding, received: Sharding) -> tuple[TransferPlan, int]:
    first = max(sent.devices) + 1
    moved = received.on([first + device for device in received.devices])
    return plan_transfer(sent, moved), first


def _only(sharding: Sharding, devices: tuple[int, ...]) -> Sharding:
    patterns = tuple(
        tuple(piece for piece in pattern if piece.device in devices)
        for pattern in sharding.patterns
    )
    return replace(sharding, devices=tuple(sorted(devices)), patterns=patterns)
