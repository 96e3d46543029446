"""Processes that give whole weights to engines that take them whole, and such engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from penstock.dataflow.graph.role import Worker
from penstock.planner.resharding.sharding import Sharding, unsharded
from penstock.workers.executors.process_backend import ProcessHome
from penstock.workers.weight_sync.channel import CHANNELS, ChannelEnd, Offer, Transport
from penstock.workers.weight_sync.packets import SliceTraffic
from penstock.workers.weight_sync.shared_device import SharedDeviceChannel
from torch import Tensor

SHAPES = {f"layers.{number}.weight": (512, 1024) for number in range(8)}
MODEL_BYTES = 8 * 512 * 1024 * 4
RECEIVERS = {"rollout": 2, "acting": 1}
"""Processes of each group that takes all of the weights in each: as two of one tensor-parallel
engine do, and one of another engine."""


class WholePeer(Worker):
    """One process of a group that has, or takes, all weights of a model of 16 MiB."""

    def __init__(
        self, home: ProcessHome, group: str, process: int, transport: Transport, device: str = "cpu"
    ) -> None:
        self._group, self._device = group, device
        self._traffic = SliceTraffic(process, (0,))
        end = ChannelEnd(group, process, 60.0, home.put, home.get)
        self._channel = CHANNELS[transport](end)
        self._taken: Mapping[str, Tensor] = {}
        self.version = 0

    # --- as a worker that trains

    def local_tensors(self) -> Mapping[str, Tensor]:
        random = torch.Generator().manual_seed(self.version)
        made = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
        return {name: tensor.to(self._device) for name, tensor in made.items()}

    def weights_changed(self) -> None:
        raise AssertionError

    def weights_layout(self) -> Sharding:
        return _layout(self._group)

    def publish(self, version: int) -> Offer:
        self.version = version
        receivers = {group: _layout(group) for group in RECEIVERS}
        packets = self._traffic.export(self, receivers, version, self._channel.room)
        return self._channel.publish(packets)

    def shared_bytes(self) -> int:
        assert isinstance(self._channel, SharedDeviceChannel)
        return self._channel.num_bytes

    def forget(self, number: int) -> None:
        self._channel.forget(number)

    # --- as one that takes them

    def take(self, offers: Sequence[Offer], version: int) -> bool:
        """Whether what an engine is given is the trainer's, bit for bit."""
        packets = [packet for packet in map(self._channel.obtain, offers) if packet is not None]
        self._traffic.write("actor", _Receiver(self), _layout("train"), packets, version)
        self.version = version
        expected = self.local_tensors()
        return self._taken.keys() == expected.keys() and all(
            torch.equal(self._taken[name].cpu(), expected[name].cpu()) for name in expected
        )

    def taken(self) -> set[str]:
        """On which devices that lay."""
        return {tensor.device.type for tensor in self._taken.values()}

    def receive(self, tensors: Mapping[str, Tensor], version: int) -> None:
        del version
        self._taken = dict(tensors)


class _Receiver(Worker):
    """Takes whole tensors."""

    def __init__(self, peer: WholePeer) -> None:
        self._peer = peer

    def weights_layout(self) -> Sharding:
        return self._peer.weights_layout()

    def receive(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self._peer.receive(tensors, version)


def _layout(group: str) -> Sharding:
    return unsharded(SHAPES, range(RECEIVERS.get(group, 1)))
