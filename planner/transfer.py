"""Plans the transfer of a model's weights from one layout to another.

It holds for any two layouts on any two sets of devices. Every device receives exactly what it needs
and lacks: nothing twice, nothing that it has. Carrying a plan out (messages, version stamps,
checksums) is the workers' business.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..dataflow.errors import PlanError
from .box import Box, volume
from .cluster import ClusterSpec
from .shapes import DTYPE_BYTES
from .sharding import NOT_A_DIM, Sharding, Slice
from .transfer_cost import Traffic, buckets_of, predicted_time, traffic_of
from .transfer_overlay import Kept, Piece, kept_slices, kinds_of, pieces_of
from .transfer_plan import DeviceTraffic, Move, MovedParam, TransferPlan
from .transfer_sources import Send, choose_sources

__all__ = ["plan_transfer"]

BUCKET_BYTES = 256 * 2**20


def plan_transfer(
    source: Sharding,
    destination: Sharding,
    cluster: ClusterSpec | None = None,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    relay: bool = True,
) -> TransferPlan:
    """The moves after which every destination device has its shard, and what they cost.

    Args:
        source: Who holds what.
        destination: Who is to hold what; on the same devices, others, or some of each.
        cluster: Nodes and links. Without one all devices count as one node and no time is
            predicted.
        bucket_bytes: What a device may send and receive at once; a parameter that exceeds it is
            a bucket of its own.
        relay: Whether receivers pass on what they received, see `transfer_sources.py`.

    Raises:
        PlanError: If the two are not of one model, the source lacks something, or the cluster
            does not have one of the devices.
    """
    if bucket_bytes < 1:
        raise PlanError(f"bucket_bytes is {bucket_bytes}; expected at least 1")
    devices = sorted({*source.devices, *destination.devices})
    node_of = {device: cluster.node_of(device) if cluster else 0 for device in devices}
    kinds = kinds_of(source, destination)
    kept = [keep for kind in kinds for keep in kept_slices(kind)]
    pieces = [piece for kind in kinds for piece in pieces_of(kind)]
    sends = choose_sources(pieces, node_of, relay=relay)
    moves = [_copy(keep) for keep in kept]
    moves += sorted(
        (_move(pieces[send.piece], send) for send in sends),
        key=lambda move: (move.round, move.source, move.destination, move.params, move.box),
    )
    traffic = traffic_of(moves, len(destination.params), node_of, DTYPE_BYTES[destination.dtype])
    buckets = buckets_of(traffic, bucket_bytes)
    return TransferPlan(
        params=_params(source, destination, buckets),
        moves=tuple(moves),
        devices=_devices(source, destination, kept, traffic, buckets),
        dtype=destination.dtype,
        time=predicted_time(traffic, buckets, cluster) if cluster else None,
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


def _copy(keep: Kept) -> Move:
    kind, device = keep.kind, keep.source.device
    return Move(
        kind.params, keep.box, device, device, 0,
        _start(keep.box, keep.source, kind.source_dims),
        _start(keep.box, keep.destination, kind.destination_dims),
    )  # fmt: skip


def _move(piece: Piece, send: Send) -> Move:
    kind, wanted = piece.kind, piece.needers[send.destination]
    if send.round:
        read = _start(piece.box, piece.needers[send.source], kind.destination_dims)
    else:
        read = _start(piece.box, piece.holders[send.source], kind.source_dims)
    written = _start(piece.box, wanted, kind.destination_dims)
    return Move(send.params, piece.box, send.source, send.destination, send.round, read, written)


def _start(box: Box, around: Slice, dims: Sequence[int]) -> tuple[int, ...]:
    """Where a part of a slice begins in the tensor that the slice lies in."""
    return tuple(
        begin if dim == NOT_A_DIM else begin + box[dim][0] - around.box[dim][0]
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
            received_bytes=int(traffic.received[:, i].sum()),
            received_between_bytes=int(traffic.received[1, i]),
            sent_bytes=int(traffic.sent[:, i].sum()),
            sent_between_bytes=int(traffic.sent[1, i]),
            unused_bytes=held.get(device, 0) - same[device],
            staging_bytes=staging[i],
        )
        for i, device in enumerate(traffic.devices)
    )
