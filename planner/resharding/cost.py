"""Bytes and buckets of a set of moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .box import Box, volume
from .plan import Move


@dataclass(frozen=True)
class Traffic:
    """Bytes of every device, in the order of `devices`.

    Attributes:
        devices: Ascending.
        sent: i64[devices], over all parameters.
        received: The same.
        staged: i64[params, devices], packed and unpacked.
    """

    devices: tuple[int, ...]
    sent: NDArray[np.int64]
    received: NDArray[np.int64]
    staged: NDArray[np.int64]

    def staging_bytes(self, buckets: Sequence[int]) -> list[int]:
        """The most that each device packs and unpacks in one bucket."""
        staged = np.zeros((1 + max(buckets), len(self.devices)), np.int64)
        np.add.at(staged, list(buckets), self.staged)
        return staged.max(axis=0).tolist()


def traffic_of(
    moves: Sequence[Move],
    groups: tuple[tuple[int, ...], ...],
    num_params: int,
    devices: tuple[int, ...],
    element_bytes: int,
) -> Traffic:
    """Add up moves.

    Args:
        moves: The moves of one plan.
        groups: What they refer to.
        num_params: Parameters in the plan; at least 1.
        devices: All of either side, ascending.
        element_bytes: Bytes of one element on the way.
    """
    column = {device: i for i, device in enumerate(devices)}
    sent, received = (np.zeros(len(devices), np.int64) for _ in range(2))
    staged_of_group = np.zeros((len(groups), len(devices)), np.int64)
    packed: set[tuple[int, int, Box]] = set()
    for move in moves:
        if move.is_copy:
            continue
        size, group = volume(move.box) * element_bytes, move.group
        source, destination = column[move.source], column[move.destination]
        sent[source] += size * len(groups[group])
        received[destination] += size * len(groups[group])
        staged_of_group[group, destination] += size
        if (group, source, move.box) not in packed:
            packed.add((group, source, move.box))
            staged_of_group[group, source] += size
    staged = np.zeros((num_params, len(devices)), np.int64)
    for group, params in enumerate(groups):
        staged[list(params)] += staged_of_group[group]
    return Traffic(devices, sent, received, staged)


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
        row = traffic.staged[param]
        if filled.any() and row.any() and int((filled + row).max()) > bucket_bytes:
            last, filled = last + 1, np.zeros_like(filled)
        filled = filled + row
        buckets[param] = last
    return buckets
