"""Bytes, buckets and seconds of a set of moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..inputs.cluster import ClusterSpec, LinkSpec
from .box import Box, volume
from .plan import Move, TransferTime

__all__ = ["Traffic", "buckets_of", "predicted_time", "traffic_of"]


@dataclass(frozen=True)
class Traffic:
    """Bytes of every device, in the order of `devices`.

    Attributes:
        devices: Ascending.
        groups: Which parameters move alike; the arrays below are for one parameter of each group.
        loads: i64[groups, rounds, 2, 2, devices]: inside the node and between nodes; sent and
            received.
        staged: i64[groups, devices], packed and unpacked.
        copied: i64[groups, devices], copied on the device.
        per_param: i64[params, devices], packed and unpacked over all groups.
    """

    devices: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    loads: NDArray[np.int64]
    staged: NDArray[np.int64]
    copied: NDArray[np.int64]
    per_param: NDArray[np.int64]

    @cached_property
    def totals(self) -> NDArray[np.int64]:
        """i64[2, 2, devices]: inside the node and between nodes; sent and received."""
        sizes = [len(group) for group in self.groups]
        return np.einsum("g,grfsd->fsd", np.array(sizes, np.int64), self.loads)

    def staging_bytes(self, buckets: Sequence[int]) -> list[int]:
        """The most that each device packs and unpacks in one bucket."""
        staged = np.zeros((1 + max(buckets), len(self.devices)), np.int64)
        np.add.at(staged, list(buckets), self.per_param)
        return staged.max(axis=0).tolist()


def traffic_of(
    moves: Sequence[Move],
    groups: tuple[tuple[int, ...], ...],
    num_params: int,
    node_of: Mapping[int, int],
    element_bytes: int,
) -> Traffic:
    """Add up moves.

    Args:
        moves: The moves of one plan.
        groups: What they refer to.
        num_params: Parameters in the plan; at least 1.
        node_of: Every device -> its node.
        element_bytes: Bytes of one element on the way.
    """
    devices = tuple(sorted(node_of))
    column = {device: i for i, device in enumerate(devices)}
    num_rounds = 1 + max((move.round for move in moves), default=0)
    loads = np.zeros((len(groups), num_rounds, 2, 2, len(devices)), np.int64)
    staged = np.zeros((len(groups), len(devices)), np.int64)
    copied = np.zeros_like(staged)
    packed: set[tuple[int, int, Box]] = set()
    for move in moves:
        size, group = volume(move.box) * element_bytes, move.group
        source, destination = column[move.source], column[move.destination]
        if move.is_copy:
            copied[group, source] += size
            continue
        far = int(node_of[move.source] != node_of[move.destination])
        loads[group, move.round, far, 0, source] += size
        loads[group, move.round, far, 1, destination] += size
        staged[group, destination] += size
        if (group, source, move.box) not in packed:
            packed.add((group, source, move.box))
            staged[group, source] += size
    per_param = np.zeros((num_params, len(devices)), np.int64)
    for group, params in enumerate(groups):
        per_param[list(params)] += staged[group]
    return Traffic(devices, groups, loads, staged, copied, per_param)


def buckets_of(traffic: Traffic, kinds: Sequence[Sequence[int]], bucket_bytes: int) -> list[int]:
    """The bucket of every parameter: as many as no device exceeds `bucket_bytes` with.

    Kinds take turns in proportion to their numbers, so that every bucket loads all pipeline stages
    and not one after the other.

    Args:
        traffic: What a parameter costs each device.
        kinds: Parameters of one kind, as indices; together all parameters.
        bucket_bytes: The bound; a parameter that exceeds it is alone.
    """
    turns = [
        ((i + 0.5) / len(kind), param) for kind in kinds for i, param in enumerate(kind)
    ]  # fmt: skip
    buckets, last, filled = [0] * len(turns), 0, np.zeros(len(traffic.devices), np.int64)
    for _, param in sorted(turns):
        row = traffic.per_param[param]
        if filled.any() and row.any() and int((filled + row).max()) > bucket_bytes:
            last, filled = last + 1, np.zeros_like(filled)
        filled = filled + row
        buckets[param] = last
    return buckets


def predicted_time(traffic: Traffic, buckets: Sequence[int], cluster: ClusterSpec) -> TransferTime:
    """Seconds by the links' figures, see `TransferTime`."""
    within = [_within(cluster, device) for device in traffic.devices]
    between = [cluster.between] * len(within)
    # [2, devices]: bandwidth inside the node, and between nodes.
    speed = np.array([[link.bytes_per_s for link in links] for links in (within, between)])
    latency = np.array([max(link.latency_s for link in within), cluster.between.latency_s])
    memory = [cluster.spec_of(device).memory_bytes_per_s for device in traffic.devices]
    # [groups, buckets]: how many parameters of each group a bucket has.
    counts = np.zeros((len(traffic.groups), 1 + max(buckets)))
    for group, params in enumerate(traffic.groups):
        np.add.at(counts[group], [buckets[param] for param in params], 1)
    # [buckets, rounds, 2, 2, devices]: seconds that a device's link is busy, either direction.
    steps = np.tensordot(counts, traffic.loads / speed[:, None, :], axes=(0, 0))
    sizes = [len(group) for group in traffic.groups]
    return TransferTime(
        send_s=float(steps.max(axis=(2, 3, 4)).sum()),
        copy_s=float((2 * (np.array(sizes) @ traffic.copied) / memory).max()),
        latency_s=float(((steps > 0).any(axis=(3, 4)) * latency).max(axis=2).sum()),
        floor_s=float((traffic.totals / speed[:, None, :]).max()),
    )


def _within(cluster: ClusterSpec, device: int) -> LinkSpec:
    """The link of a device to the others of its node."""
    last = len(cluster.node_groups) - 1
    group = next(i for i in range(last, -1, -1) if device >= cluster.first_device(i))
    return cluster.node_groups[group].within
