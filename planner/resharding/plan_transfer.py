"""Plans the transfer of a model's weights from one layout to another.

It holds for any two layouts on any two sets of devices. Every device receives exactly what it needs
and lacks: nothing twice, nothing that it has. Carrying a plan out (messages, version stamps,
checksums) is the workers' business.

Two shardings are laid over each other: what stays, what must move, and who could send it. All
parameters that are alike on both sides (a kind) are treated at once: the layers of a stage differ
in name only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from ...dataflow.errors import PlanError
from ..inputs.model_shape import DTYPE_BYTES
from .sharding import Box, Grid, Pattern, Sharding, Slice, intersection, volume


@dataclass(frozen=True, slots=True)
class MovedParam:
    """A logical parameter, and the tensors it lies in on either side."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint
    source_tensor: str  # the source engine's tensor
    source_dims: tuple[int, ...]  # its dimensions, as in `StoredParam.dims`
    destination_tensor: str  # the destination engine's tensor
    destination_dims: tuple[int, ...]  # dimensions of the destination's tensor
    bucket: int  # parameters of one bucket travel together; buckets go one after another


@dataclass(frozen=True, slots=True)
class Move:
    """One box of some parameters, from one device to another; a copy if they are the same."""

    group: int  # index into `TransferPlan.groups`: of which parameters, the same box of each
    box: Box  # which indices of the logical parameter
    source: int  # the device that sends
    destination: int  # the device that receives
    source_start: tuple[int, ...]  # where the box begins in the source engine's tensor
    destination_start: tuple[int, ...]  # where it begins in the destination engine's tensor

    @property
    def is_copy(self) -> bool:
        return self.source == self.destination


@dataclass(frozen=True, slots=True)
class DeviceTraffic:
    """One device's share of a transfer, in bytes of the destination's dtype."""

    device: int  # the device's number
    needed_bytes: int = 0  # size of its destination shard
    kept_bytes: int = 0  # the part of it that the device already holds
    received_bytes: int = 0  # what arrives; equal to `lower_bound_bytes`
    sent_bytes: int = 0  # what it sends
    unused_bytes: int = 0  # what it holds of the source and does not need: redundancy, if both stay
    # the most it packs and unpacks in one bucket; a box that a group sends to several devices is
    # packed once
    staging_bytes: int = 0

    @property
    def lower_bound_bytes(self) -> int:
        return self.needed_bytes - self.kept_bytes

    @property
    def peak_bytes(self) -> int:
        return self.needed_bytes + self.staging_bytes


@dataclass(frozen=True)
class TransferPlan:
    params: tuple[MovedParam, ...]  # what is moved
    # parameters that move alike, as indices into `params`: the layers of a stage
    groups: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]  # how; copies first
    devices: tuple[DeviceTraffic, ...]  # bytes of every device of either side
    dtype: str  # in which elements travel: the destination's

    @cached_property
    def traffic(self) -> Mapping[int, DeviceTraffic]:
        return {share.device: share for share in self.devices}

    @property
    def num_buckets(self) -> int:
        return 1 + max((param.bucket for param in self.params), default=-1)

    @property
    def sent_bytes(self) -> int:
        return sum(share.sent_bytes for share in self.devices)

    @property
    def lower_bound_bytes(self) -> int:
        return sum(share.lower_bound_bytes for share in self.devices)

    def explain(self) -> str:
        busiest = max(self.devices, key=lambda share: share.received_bytes)
        lines = [
            f"{len(self.params)} parameters in {self.num_buckets} bucket(s), "
            f"{len(self.moves)} moves",
            f"sent {_size(self.sent_bytes)} in all (lower bound {_size(self.lower_bound_bytes)})",
            f"device {busiest.device} receives most: {_size(busiest.received_bytes)} of "
            f"{_size(busiest.needed_bytes)}; it sends {_size(busiest.sent_bytes)}",
            f"most memory for shard and staging: "
            f"{_size(max(share.peak_bytes for share in self.devices))}",
        ]
        return "\n".join(lines)

    def to_json(self) -> str:
        return _adapter().dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> TransferPlan:
        return _adapter().validate_json(text)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[TransferPlan]:
    return TypeAdapter(TransferPlan)


def window(box: Box, dims: Sequence[int], start: Sequence[int]) -> tuple[slice, ...]:
    """Index of a box in an engine's tensor.

    `tensor[window(...)]` has the box's elements with dimensions in the order of `dims`.
    """
    return tuple(
        slice(begin, begin + box[dim][1] - box[dim][0])
        for dim, begin in zip(dims, start, strict=True)
    )


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} B"


Cell = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """Parameters of one shape that are spread alike in the source and alike in the destination."""

    params: tuple[int, ...]  # their indices in the destination sharding
    names: tuple[str, ...]  # their names, in the same order
    source: Pattern  # how the source holds each
    destination: Pattern  # how the destination holds each
    # dimensions of the source engine's tensor, as in `StoredParam.dims`
    source_dims: tuple[int, ...]
    destination_dims: tuple[int, ...]  # the same of the destination


@dataclass(frozen=True)
class Kept:
    """A box that a device needs and has: it is copied, not sent."""

    kind: Kind
    box: Box
    source: Slice
    destination: Slice


@dataclass(frozen=True)
class Piece:
    """A box that some devices need and lack; no plan has to cut it further."""

    kind: Kind  # the kind of the parameters
    box: Box  # the indices of each
    holders: Mapping[int, Slice]  # device -> its slice around the box, in the source
    # device that lacks the box -> its slice around the box, in the destination
    needers: Mapping[int, Slice]


def kinds_of(source: Sharding, destination: Sharding) -> tuple[Kind, ...]:
    """Group parameters that are cut alike on both sides, so that each kind is planned once.

    Raises:
        PlanError: If the two sides differ in a parameter or its shape.
    """
    given = {param.name: param for param in source.params}
    wanted = {param.name: param for param in destination.params}
    for name in [*wanted, *given]:
        if name not in given or name not in wanted:
            side = "source" if name not in given else "destination"
            raise PlanError(
                f"cannot plan a transfer: the {side} has no parameter '{name}'; both sides must "
                "describe the same model with the same head"
            )
        if given[name].shape != wanted[name].shape:
            raise PlanError(
                f"cannot plan a transfer: parameter '{name}' is {given[name].shape} in the source "
                f"and {wanted[name].shape} in the destination"
            )
    groups = defaultdict[tuple[object, ...], list[int]](list)
    for index, param in enumerate(destination.params):
        other = given[param.name]
        key = (param.shape, other.pattern, other.dims, param.pattern, param.dims)
        groups[key].append(index)
    kinds: list[Kind] = []
    for params in groups.values():
        names = tuple(destination.params[i].name for i in params)
        one, other = given[names[0]], wanted[names[0]]
        patterns = (source.patterns[one.pattern], destination.patterns[other.pattern])
        kinds.append(Kind(tuple(params), names, *patterns, one.dims, other.dims))
    return tuple(kinds)


def kept_slices(kind: Kind) -> Iterator[Kept]:
    held = defaultdict[int, list[Slice]](list)
    for piece in kind.source:
        held[piece.device].append(piece)
    for wanted in kind.destination:
        for given in held.get(wanted.device, ()):
            shared = intersection(given.box, wanted.box)
            if shared is not None:
                yield Kept(kind, shared, given, wanted)


def pieces_of(kind: Kind) -> Iterator[Piece]:
    """Yield the boxes that a device needs and lacks; each device has one whole or not at all.

    Raises:
        PlanError: If a device needs a box that no source device holds.
    """
    sources, wanted = _by_box(kind.source), _by_box(kind.destination)
    if not wanted:
        return
    grid = Grid.of([*sources, *wanted])
    holders, needers = _by_cell(grid, sources), _by_cell(grid, wanted)
    for cell in sorted(needers):
        have = _merged(holders.get(cell, []))
        # What a device holds already is copied in place; see `kept_slices`.
        lack = {d: s for d, s in _merged(needers[cell]).items() if d not in have}
        if not have:
            raise PlanError(
                f"cannot plan a transfer: no source device holds {grid.box(cell)} of parameter "
                f"'{kind.names[0]}', which device {min(lack)} needs"
            )
        if lack:
            yield Piece(kind, grid.box(cell), have, lack)


def _by_box(pattern: Pattern) -> Mapping[Box, dict[int, Slice]]:
    held = defaultdict[Box, dict[int, Slice]](dict)
    for piece in pattern:
        if volume(piece.box):
            held[piece.box][piece.device] = piece
    return held


def _by_cell(
    grid: Grid, held: Mapping[Box, dict[int, Slice]]
) -> Mapping[Cell, list[dict[int, Slice]]]:
    cells = defaultdict[Cell, list[dict[int, Slice]]](list)
    for box, replicas in held.items():
        for cell in grid.cells(box):
            cells[cell].append(replicas)
    return cells


def _merged(groups: list[dict[int, Slice]]) -> Mapping[int, Slice]:
    if len(groups) == 1:
        return groups[0]
    return {device: piece for group in groups for device, piece in group.items()}


@dataclass(frozen=True)
class Traffic:
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
    """Sum the bytes that each device sends, receives and stages for the moves of a plan."""
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
        # Packed once, however many devices it goes to.
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
        # A parameter larger than a bucket has one for itself; one that is not moved fits any.
        if filled.any() and row.any() and int((filled + row).max()) > bucket_bytes:
            last, filled = last + 1, np.zeros_like(filled)
        filled = filled + row
        buckets[param] = last
    return buckets


MAX_PARTS = 64  # most parts of a piece: more would only make plans larger and messages smaller


def _sends(
    pieces: Sequence[Piece], min_part_elements: int, groups: dict[tuple[int, ...], int]
) -> Iterator[Move]:
    # Of devices that hold the same, none sends more than another by more than the largest part
    # times the number of parameters that move alike.
    sent = {device: 0 for piece in pieces for device in piece.holders}
    # The largest first, so that small ones at the end even out the rest.
    sizes = [volume(piece.box) * len(piece.kind.params) for piece in pieces]
    for index in sorted(range(len(pieces)), key=lambda i: -sizes[i]):
        piece = pieces[index]
        holders, needers = sorted(piece.holders), sorted(piece.needers)
        # The fewest parts that can be shared out evenly: parts times needers is a multiple of
        # holders.
        count = len(holders) // gcd(len(holders), len(needers))
        for params, box in _parts(piece, index, count, min_part_elements):
            for needer in needers:
                source = min(holders, key=sent.__getitem__)
                sent[source] += len(params) * volume(box)
                given, wanted = piece.holders[source], piece.needers[needer]
                yield _move(piece.kind, params, box, given, wanted, groups)


def _parts(
    piece: Piece, index: int, count: int, min_part_elements: int
) -> Iterator[tuple[tuple[int, ...], Box]]:
    params, box = piece.kind.params, piece.box
    # The longest side allows the most equal parts.
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
    groups: dict[tuple[int, ...], int] = {}
    moves = [_move(k.kind, k.kind.params, k.box, k.source, k.destination, groups) for k in kept]
    moves += _sends(pieces, -(-min_part_bytes // element), groups)
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


def _move(
    kind: Kind, params: tuple[int, ...], box: Box, given: Slice, wanted: Slice,
    groups: dict[tuple[int, ...], int],
) -> Move:  # fmt: skip
    read = _start(box, given, kind.source_dims)
    written = _start(box, wanted, kind.destination_dims)
    group = groups.setdefault(params, len(groups))
    return Move(group, box, given.device, wanted.device, read, written)


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
