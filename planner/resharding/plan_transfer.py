"""Plans the transfer of a model's weights from one layout to another.

It holds for any two layouts on any two sets of devices. Every device receives exactly what it needs
and lacks: nothing twice, nothing that it has. Carrying a plan out (messages, version stamps,
checksums) is the workers' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...dataflow.errors import PlanError
from ..inputs.model_shape import DTYPE_BYTES
from .box import Box, volume
from .overlay import Kept, Piece, kept_slices, kinds_of, pieces_of
from .plan import DeviceTraffic, Move, MovedParam, TransferPlan
from .sharding import Sharding, Slice


@dataclass(frozen=True)
class Traffic:
    """Bytes that each device sends, receives and stages, in the order of `devices`."""

    devices: tuple[int, ...]  # ascending
    sent: NDArray[np.int64]  # i64[devices], over all parameters
    received: NDArray[np.int64]  # the same
    staged: NDArray[np.int64]  # i64[params, devices], packed and unpacked

    def staging_bytes(self, buckets: Sequence[int]) -> list[int]:
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
    """Add up the bytes of moves."""
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
    """Return each parameter's bucket, so that no device exceeds `bucket_bytes` in one.

    Kinds take turns in proportion to their numbers, so that every bucket loads all pipeline stages
    and not one after the other.
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


MAX_PARTS = 64  # most parts of a piece: more would only make plans larger and messages smaller


class Send(NamedTuple):
    """A part of a piece, from one device to another."""

    piece: int  # index among the pieces
    params: tuple[int, ...]  # indices of the piece's parameters
    box: Box  # indices of each parameter; the piece's box or a part of it
    source: int  # the device that sends
    destination: int  # the device that receives


def choose_sources(pieces: Sequence[Piece], *, min_part_elements: int) -> tuple[Send, ...]:
    """Decide which device sends what.

    Of devices that hold the same, none sends more than another by more than the largest part times
    the number of parameters that move alike.
    """
    sent = {device: 0 for piece in pieces for device in piece.holders}
    sends: list[Send] = []
    # The largest first, so that small ones at the end even out the rest.
    sizes = [volume(piece.box) * len(piece.kind.params) for piece in pieces]
    for index in sorted(range(len(pieces)), key=lambda i: -sizes[i]):
        holders, needers = sorted(pieces[index].holders), sorted(pieces[index].needers)
        count = len(holders) // gcd(len(holders), len(needers))
        for params, box in _parts(pieces[index], index, count, min_part_elements):
            for needer in needers:
                source = min(holders, key=sent.__getitem__)
                sent[source] += len(params) * volume(box)
                sends.append(Send(index, params, box, source, needer))
    return tuple(sends)


def _parts(
    piece: Piece, index: int, count: int, min_part_elements: int
) -> Iterator[tuple[tuple[int, ...], Box]]:
    params, box = piece.kind.params, piece.box
    dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])
    begin, stop = box[dim]
    room = min(stop - begin, volume(box) // min_part_elements, MAX_PARTS)
    if room > 1:
        count = min(count, room)
        for a, b in pairwise(begin + (stop - begin) * i // count for i in range(count + 1)):
            yield params, (*box[:dim], (a, b), *box[dim + 1 :])
        return
    # Every count-th parameter, and another first one for each piece, so that neither the layers of
    # a bucket nor the pieces of a layer all load the same device.
    count = min(count, len(params))
    for i in range(count):
        yield params[(i + index) % count :: count], box


BUCKET_BYTES = 512 * 2**20
MIN_PART_BYTES = 2**18


def plan_transfer(
    source: Sharding,
    destination: Sharding,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    min_part_bytes: int = MIN_PART_BYTES,
) -> TransferPlan:
    """The moves after which every destination device has its shard."""
    for name, size in (("bucket_bytes", bucket_bytes), ("min_part_bytes", min_part_bytes)):
        if size < 1:
            raise PlanError(f"{name} is {size}; expected at least 1")
    devices = tuple(sorted({*source.devices, *destination.devices}))
    kinds = kinds_of(source, destination)
    kept = [keep for kind in kinds for keep in kept_slices(kind)]
    pieces = [piece for kind in kinds for piece in pieces_of(kind)]
    element = DTYPE_BYTES[destination.dtype]
    sends = choose_sources(pieces, min_part_elements=-(-min_part_bytes // element))
    groups: dict[tuple[int, ...], int] = {}
    moves = [_copy(keep, groups) for keep in kept]
    moves += [_move(pieces[send.piece], send, groups) for send in sends]
    traffic = traffic_of(moves, tuple(groups), len(destination.params), devices, element)
    buckets = buckets_of(traffic, [kind.params for kind in kinds], bucket_bytes)
    return TransferPlan(
        params=_params(source, destination, buckets),
        groups=tuple(groups),
        moves=tuple(moves),
        devices=_devices(source, destination, kept, traffic, buckets),
        dtype=destination.dtype,
    )


def _params(
    source: Sharding, destination: Sharding, buckets: Sequence[int]
) -> tuple[MovedParam, ...]:
    given = {param.name: param for param in source.params}
    return tuple(
        MovedParam(
            param.name, param.shape, given[param.name].tensor, given[param.name].dims,
            param.tensor, param.dims, bucket,
        )
        for param, bucket in zip(destination.params, buckets, strict=True)
    )  # fmt: skip


def _copy(keep: Kept, groups: dict[tuple[int, ...], int]) -> Move:
    kind, device = keep.kind, keep.source.device
    read = _start(keep.box, keep.source, kind.source_dims)
    written = _start(keep.box, keep.destination, kind.destination_dims)
    group = groups.setdefault(kind.params, len(groups))
    return Move(group, keep.box, device, device, read, written)


def _move(piece: Piece, send: Send, groups: dict[tuple[int, ...], int]) -> Move:
    kind = piece.kind
    read = _start(send.box, piece.holders[send.source], kind.source_dims)
    written = _start(send.box, piece.needers[send.destination], kind.destination_dims)
    group = groups.setdefault(send.params, len(groups))
    return Move(group, send.box, send.source, send.destination, read, written)


def _start(box: Box, around: Slice, dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        begin + box[dim][0] - around.box[dim][0]
        for dim, begin in zip(dims, around.start, strict=True)
    )


def _devices(
    source: Sharding, destination: Sharding, kept: Sequence[Kept], traffic: Traffic,
    buckets: Sequence[int],
) -> tuple[DeviceTraffic, ...]:  # fmt: skip
    element = DTYPE_BYTES[destination.dtype]
    same = dict.fromkeys(traffic.devices, 0)
    for keep in kept:
        same[keep.source.device] += volume(keep.box) * len(keep.kind.params) * element
    held = {d: n // DTYPE_BYTES[source.dtype] * element for d, n in source.bytes_on.items()}
    needed, staging = destination.bytes_on, traffic.staging_bytes(buckets)
    return tuple(
        DeviceTraffic(
            device=device,
            needed_bytes=needed.get(device, 0),
            kept_bytes=same[device],
            received_bytes=int(traffic.received[i]),
            sent_bytes=int(traffic.sent[i]),
            unused_bytes=held.get(device, 0) - same[device],
            staging_bytes=staging[i],
        )
        for i, device in enumerate(traffic.devices)
    )
