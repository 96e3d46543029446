"""A process that sends or receives weights by a channel: what `test_channels` starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from penstock.dataflow.graph.role import Worker
from penstock.planner.inputs.layout import Layout
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.sharding import Sharding, shard
from penstock.planner.resharding.storage import concatenate
from penstock.workers.executors.process_backend import ProcessHome
from penstock.workers.weight_sync.channel import CHANNELS, ChannelEnd, Offer, Receiver, Transport
from penstock.workers.weight_sync.packets import Packet, SliceTraffic, messages_of
from torch import Tensor

from ...planner.transfers import TINY
from .transfer_engines import empty, engine, expected, is_same

LAYOUTS: Mapping[str, Sharding] = {
    "train": shard(TINY, Layout(tp=2), [0, 1]),
    "rollout": concatenate(
        shard(TINY, Layout(dp=2), [0, 1]), ("q_proj", "k_proj", "v_proj"), "qkv_proj"
    ),
}
"""How each group holds the weights; both senders have something for both receivers."""

Packets = Mapping[Receiver, Packet]
Pack = Callable[[int], Packets]
"""Of a version."""


@dataclass
class Holder(Worker):
    """Tensors that a test can know by their version."""

    layout: Sharding
    tensors: Mapping[str, Tensor]

    def weights_layout(self) -> Sharding:
        return self.layout

    def local_tensors(self) -> Mapping[str, Tensor]:
        return self.tensors

    def weights_changed(self) -> None:
        pass


class Peer:
    """One process of a group, with one role's weights."""

    def __init__(
        self, home: ProcessHome, group: str, process: int, transport: Transport, deadline_s: float
    ) -> None:
        self._process, self._layout = process, LAYOUTS[group]
        begin = engine(self._layout) if group == "train" else empty(self._layout)
        self._worker = Holder(self._layout, begin[process])
        self._traffic = SliceTraffic(process, (0, 1))
        end = ChannelEnd(group, process, deadline_s, home.put, home.get)
        self._channel = CHANNELS[transport](end)

    def pid(self) -> int:
        return os.getpid()

    def publish(self, version: int, fault: str = "") -> Offer:
        """Export the weights of a version for both receivers, with something wrong in them."""
        packets = FAULTS[fault](self._packets, version) if fault else self._packets(version)
        return self._channel.publish(packets)

    def publish_large(self, num_bytes: int) -> Offer:
        """For receiver 0: too much for what the network holds while nobody reads."""
        packet = next(iter(self._packets(1).values()))
        bucket = np.zeros(num_bytes, np.uint8)
        return self._channel.publish({("rollout", 0): replace(packet, buckets=(bucket,))})

    def _packets(self, version: int) -> Packets:
        self._worker.tensors = engine(self._layout, version=version)[self._process]
        receivers = {"rollout": LAYOUTS["rollout"]}
        return self._traffic.export(self._worker, receivers, version, self._channel.room)

    def receive(self, offers: Sequence[Offer], version: int) -> None:
        """As a rank process does: obtain all packets, and write them."""
        self._traffic.expect("actor", self._worker)
        found = [self._channel.obtain(offer) for offer in offers]
        packets = [packet for packet in found if packet is not None]
        self._traffic.write("actor", self._worker, LAYOUTS["train"], packets, version)

    def check(self, version: int) -> None:
        """As before a call that must see this version."""
        self._traffic.check("actor", version)

    def holds(self, version: int | None) -> bool:
        """Whether the tensors are those of a version, or still empty, bit for bit."""
        made = empty(self._layout)
        if version is not None:
            made = expected(self._layout, LAYOUTS["train"].dtype, version=version)
        return is_same({0: dict(self._worker.tensors)}, {0: made[self._process]})

    def forget(self, number: int) -> None:
        self._channel.forget(number)

    def close(self) -> None:
        self._channel.close()


# --- what can be wrong with what arrives at receiver 0; receiver 1 gets what it should

FIRST = ("rollout", 0)


def _altered(alter: Callable[[Packet], Packet]) -> Callable[[Pack, int], Packets]:
    def fault(pack: Pack, version: int) -> Packets:
        packets = pack(version)
        return {**packets, FIRST: alter(packets[FIRST])}

    return fault


def _no_packet(pack: Pack, version: int) -> Packets:
    return {receiver: packet for receiver, packet in pack(version).items() if receiver != FIRST}


def _older(pack: Pack, version: int) -> Packets:
    old = pack(version - 1)[FIRST]
    return {**pack(version), FIRST: old}


def _older_under_the_new_number(pack: Pack, version: int) -> Packets:
    packets = _older(pack, version)
    return {**packets, FIRST: replace(packets[FIRST], version=version)}


def _of_the_other_receiver(pack: Pack, version: int) -> Packets:
    packets = pack(version)
    return {**packets, FIRST: packets["rollout", 1]}


def _bit_flipped(packet: Packet) -> Packet:
    bucket = packet.buckets[-1].copy()
    bucket[len(bucket) // 2] ^= 4
    return replace(packet, buckets=(*packet.buckets[:-1], bucket))


def _cut_short(packet: Packet) -> Packet:
    return replace(packet, buckets=(*packet.buckets[:-1], packet.buckets[-1][:-2]))


def _slice_missing(packet: Packet) -> Packet:
    """Neither its bytes nor its entries are there, as if it had never been."""
    return _arranged(packet, slice(1, None))


def _reordered(packet: Packet) -> Packet:
    """From the last slice to the first, each with its own entries."""
    return _arranged(packet, slice(None, None, -1))


def _arranged(packet: Packet, order: slice) -> Packet:
    """Some slices of the packet's first bucket, in some order."""
    plan = plan_transfer(LAYOUTS["train"], LAYOUTS["rollout"].on([2, 3]))
    message = next(m for m in messages_of(plan, [2])[2] if m.source == packet.source)
    count = len(message.parts)
    assert count > 1
    slices = np.split(packet.buckets[0], message.ends[:-1])[order]
    return replace(
        packet,
        checksums=np.concatenate([packet.checksums[:count][order], packet.checksums[count:]]),
        buckets=(np.concatenate(slices), *packet.buckets[1:]),
    )


FAULTS: Mapping[str, Callable[[Pack, int], Packets]] = {
    "no packet": _no_packet,
    "an older version": _older,
    "an older version under the new number": _older_under_the_new_number,
    "the packet of the other receiver": _of_the_other_receiver,
    "a flipped bit": _altered(_bit_flipped),
    "a bucket cut short": _altered(_cut_short),
    "a missing slice": _altered(_slice_missing),
    "reordered slices": _altered(_reordered),
}
"""Name -> makes a version's packets from what packs one."""
