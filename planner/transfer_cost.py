"""Bytes, buckets and seconds of a set of moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .box import volume
from .cluster import ClusterSpec, LinkSpec
from .transfer_plan import Move, TransferTime

__all__ = ["Traffic", "buckets_of", "predicted_time", "traffic_of"]


@dataclass(frozen=True)
class Traffic:
    """Bytes of every device, in the order of `devices`.

    Attributes:
        devices: Ascending.
        per_param: i64[params, devices], sent and received.
        sent: i64[2, devices]; row 0 inside the node, row 1 to other nodes.
        received: i64[2, devices]; the same of what is received.
        copied: i64[devices], copied on the device.
        hops: bool[params, rounds, 2], whether anything of it is sent in that round, inside nodes
            and between them.
    """

    devices: tuple[int, ...]
    per_param: NDArray[np.int64]
    sent: NDArray[np.int64]
    received: NDArray[np.int64]
    copied: NDArray[np.int64]
    hops: NDArray[np.bool_]

    def staging_bytes(self, buckets: Sequence[int]) -> list[int]:
        """The most that each device sends and receives in one bucket."""
        begins = np.flatnonzero(np.diff(buckets, prepend=-1))
        return np.add.reduceat(self.per_param, begins, axis=0).max(axis=0).tolist()


def traffic_of(
    moves: Sequence[Move], num_params: int, node_of: Mapping[int, int], element_bytes: int
) -> Traffic:
    """Add up moves.

    Args:
        moves: Of one plan.
        num_params: Parameters in it; at least 1.
        node_of: Every device -> its node.
        element_bytes: Bytes of one element on the way.
    """
    devices = tuple(sorted(node_of))
    nodes = np.array([node_of[device] for device in devices])
    figures = np.array(
        [(m.source, m.destination, len(m.params), volume(m.box), m.round) for m in moves], np.int64
    ).reshape(-1, 5)
    source, destination = np.searchsorted(devices, figures[:, :2].T)
    counts, size, round_ = figures[:, 2], figures[:, 3] * element_bytes, figures[:, 4]
    far = (nodes[source] != nodes[destination]).astype(np.int64)
    is_sent = source != destination

    def totals(rows: NDArray[Any], columns: NDArray[Any], count: int) -> NDArray[np.int64]:
        made = np.zeros((count, len(devices)), np.int64)
        np.add.at(made, (rows[is_sent], columns[is_sent]), (size * counts)[is_sent])
        return made

    copied = np.zeros(len(devices), np.int64)
    np.add.at(copied, source[~is_sent], (size * counts)[~is_sent])
    # One entry per parameter of each move that sends.
    param = np.fromiter(chain.from_iterable(m.params for m in moves if not m.is_copy), np.int64)
    entry = np.repeat(np.flatnonzero(is_sent), counts[is_sent])
    per_param = np.zeros((num_params, len(devices)), np.int64)
    np.add.at(per_param, (param, source[entry]), size[entry])
    np.add.at(per_param, (param, destination[entry]), size[entry])
    hops = np.zeros((num_params, 1 + int(round_.max(initial=0)), 2), bool)
    hops[param, round_[entry], far[entry]] = True
    sent, received = totals(far, source, 2), totals(far, destination, 2)
    return Traffic(devices, per_param, sent, received, copied, hops)


def buckets_of(traffic: Traffic, bucket_bytes: int) -> list[int]:
    """The bucket of every parameter: as many in a row as no device exceeds `bucket_bytes` with."""
    buckets: list[int] = []
    filled = np.zeros(len(traffic.devices), np.int64)
    for row in traffic.per_param:
        filled = filled + row
        full = bool(buckets) and bool(row.any()) and int(filled.max()) > bucket_bytes
        if full:
            filled = row
        buckets.append(buckets[-1] + full if buckets else 0)
    return buckets


def predicted_time(traffic: Traffic, buckets: Sequence[int], cluster: ClusterSpec) -> TransferTime:
    """Seconds by the links' figures, see `TransferTime`."""
    within = [_within(cluster, device) for device in traffic.devices]
    memory = [cluster.spec_of(device).memory_bytes_per_s for device in traffic.devices]
    busiest = np.maximum(traffic.sent, traffic.received)
    # bool[buckets, rounds, 2]: which messages there are.
    messages = np.logical_or.reduceat(
        traffic.hops, np.flatnonzero(np.diff(buckets, prepend=-1)), axis=0
    )
    latency = np.array([max(link.latency_s for link in within), cluster.between.latency_s])
    return TransferTime(
        between_s=float(busiest[1].max()) / cluster.between.bytes_per_s,
        within_s=float((busiest[0] / [link.bytes_per_s for link in within]).max()),
        copy_s=float((2 * traffic.copied / memory).max()),
        latency_s=float((messages * latency).max(axis=2).sum()),
    )


def _within(cluster: ClusterSpec, device: int) -> LinkSpec:
    """The link of a device to the others of its node."""
    last = len(cluster.node_groups) - 1
    group = next(i for i in range(last, -1, -1) if device >= cluster.first_device(i))
    return cluster.node_groups[group].within
