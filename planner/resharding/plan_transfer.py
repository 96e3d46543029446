"""Plans the transfer of a model's weights from one layout to another.

It holds for any two layouts on any two sets of devices. Every device receives exactly what it needs
and lacks: nothing twice, nothing that it has. Carrying a plan out (messages, version stamps,
checksums) is the workers' business.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...dataflow.errors import PlanError
from ..inputs.model_shape import DTYPE_BYTES
from .box import Box, volume
from .cost import Traffic, buckets_of, traffic_of
from .overlay import Kept, Piece, kept_slices, kinds_of, pieces_of
from .plan import DeviceTraffic, Move, MovedParam, TransferPlan
from .sharding import Sharding, Slice
from .sources import Send, choose_sources

BUCKET_BYTES = 512 * 2**20
MIN_PART_BYTES = 2**18


def plan_transfer(
    source: Sharding,
    destination: Sharding,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    min_part_bytes: int = MIN_PART_BYTES,
) -> TransferPlan:
    """The moves after which every destination device has its shard.

    Args:
        source: Which device holds what.
        destination: Who is to hold what; on the same devices, others, or some of each.
        bucket_bytes: What a device may pack and unpack at once; a parameter that exceeds it is a
            bucket of its own.
        min_part_bytes: A slice may be cut to share it among senders, but not smaller than this.

    Raises:
        PlanError: If the two are not of one model, or the source lacks something.
    """
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
    """Where a part of a slice begins in the tensor that the slice lies in."""
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
