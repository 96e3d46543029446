"""Which device plays which rank of a destination layout, so that least must be sent.

`strided_generation` is HybridFlow's grouping in closed form (section 5.3): with it, whatever a
device trained is part of what it generates with. `fewest_bytes` finds the best order for any two
shardings by exact assignment, with the Hungarian method.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dataflow.errors import PlanError
from ..inputs.cluster import ClusterSpec
from ..inputs.layout import Layout
from ..inputs.model_shape import DTYPE_BYTES
from .box import Box, intersection, volume
from .overlay import kinds_of
from .sharding import Pattern, Rank, Sharding, rank_of

__all__ = ["assign", "fewest_bytes", "kept_bytes", "strided_generation"]

Bytes = NDArray[np.int64]


def strided_generation(train: Layout, generate: Layout, devices: Sequence[int]) -> tuple[int, ...]:
    """Devices in the order of generation ranks, each generating with what it trained.

    Generation tensor-parallel groups consist of training ranks at a stride of `train.tp /
    generate.tp`, and generation pipelines of stages at a stride of `train.pp / generate.pp`; the
    ranks between become data-parallel replicas of each other.

    Args:
        train: The layout that holds the weights.
        generate: The layout that needs them; its sizes divide those of training.
        devices: In the order of training ranks.

    Raises:
        PlanError: If the sizes do not divide or the numbers of devices differ.
    """
    for name in ("tp", "pp"):
        many, few = getattr(train, name), getattr(generate, name)
        if many % few:
            raise PlanError(
                f"generation {name}={few} does not divide training {name}={many}; strided groups "
                "need it to, use fewest_bytes for any two layouts"
            )
    if not train.num_devices == generate.num_devices == len(devices):
        raise PlanError(
            f"training has {train.num_devices} ranks, generation {generate.num_devices}, and "
            f"{len(devices)} devices were given; strided groups need all three equal"
        )
    tp_stride, pp_stride = train.tp // generate.tp, train.pp // generate.pp

    def place(index: int) -> tuple[int, int, tuple[int, ...]]:
        rank: Rank = rank_of(index, train)
        inner = (rank.dp, rank.cp, rank.pp % pp_stride, rank.tp % tp_stride)
        return rank.pp // pp_stride, rank.tp // tp_stride, inner

    # Generation ranks run tp fastest, then replicas, then stages.
    order = sorted(range(len(devices)), key=lambda i: (place(i)[0], place(i)[2], place(i)[1]))
    return tuple(devices[i] for i in order)


def fewest_bytes(
    source: Sharding, destination: Sharding, cluster: ClusterSpec | None = None
) -> Sharding:
    """The destination with its ranks on those of its devices that make the transfer smallest.

    Without a cluster the order is the best of all. With one, ranks that shared a node still do
    (tensor parallelism stays inside): whole nodes change places, then ranks inside each node; the
    order is the best of those.

    Args:
        source: Which device holds what.
        destination: Ranks on devices in some order, a node's devices together.
        cluster: Says which devices share a node.
    """
    devices = destination.devices
    kept = kept_bytes(source, destination)
    if cluster is None:
        return destination.on([devices[c] for c in assign(-kept)[0]])
    blocks = _blocks([cluster.node_of(device) for device in devices])
    inner: dict[tuple[int, int], tuple[int, ...]] = {}
    # 1 where sizes differ, at most 0 where they agree: sizes that differ are then never paired,
    # because rows and columns of each size are equally many.
    outer = np.ones((len(blocks), len(blocks)), np.int64)
    known: dict[tuple[int, bytes], tuple[tuple[int, ...], int]] = {}
    for i, ranks in enumerate(blocks):
        for j, slots in enumerate(blocks):
            if len(ranks) == len(slots):
                cost = -kept[np.ix_(ranks, slots)]
                key = (len(ranks), cost.tobytes())
                if key not in known:
                    known[key] = assign(cost)
                columns, outer[i, j] = known[key]
                inner[i, j] = tuple(slots[c] for c in columns)
    order = [0] * len(devices)
    for i, j in enumerate(assign(outer)[0]):
        for rank, slot in zip(blocks[i], inner[i, j], strict=True):
            order[rank] = slot
    return destination.on([devices[slot] for slot in order])


def kept_bytes(source: Sharding, destination: Sharding) -> Bytes:
    """What each destination rank would find on each destination device.

    Returns:
        i64[ranks, devices], in bytes of the destination's dtype.
    """
    index = {device: i for i, device in enumerate(destination.devices)}
    total = np.zeros((len(index), len(index)), np.int64)
    for kind in kinds_of(source, destination):
        given, wanted = _replicas(kind.source, index), _replicas(kind.destination, index)
        elements = np.array(
            [[_shared(want, give) for give in given] for want in wanted], np.int64
        ).reshape(len(wanted), len(given))
        for row, ranks in enumerate(wanted.values()):
            for column, slots in enumerate(given.values()):
                if elements[row, column]:
                    total[np.ix_(ranks, slots)] += elements[row, column] * len(kind.params)
    return total * DTYPE_BYTES[destination.dtype]


def _replicas(pattern: Pattern, index: Mapping[int, int]) -> Mapping[tuple[Box, ...], list[int]]:
    """The boxes that a device holds -> indices of the devices that hold just these."""
    boxes = defaultdict[int, list[Box]](list)
    for piece in pattern:
        if piece.device in index:
            boxes[index[piece.device]].append(piece.box)
    replicas = defaultdict[tuple[Box, ...], list[int]](list)
    for device, held in boxes.items():
        replicas[tuple(held)].append(device)
    return replicas


def _shared(some: Sequence[Box], others: Sequence[Box]) -> int:
    """Elements in both."""
    return sum(
        volume(shared)
        for one in some
        for other in others
        if (shared := intersection(one, other)) is not None
    )


def _blocks(nodes: Sequence[int]) -> list[list[int]]:
    """Runs of ranks whose devices share a node."""
    blocks: list[list[int]] = []
    for rank, node in enumerate(nodes):
        if rank and node == nodes[rank - 1]:
            blocks[-1].append(rank)
        else:
            blocks.append([rank])
    return blocks


def assign(cost: NDArray[np.int64]) -> tuple[tuple[int, ...], int]:
    """Give each row a column of its own so that the sum of costs is least.

    Shortest augmenting paths with potentials, in integers and therefore exact; n^2 steps of
    vectors of length n. Ties go to the lower column, so the result is deterministic.

    Args:
        cost: i64[n, n].

    Returns:
        The column of each row, and the sum.
    """
    n = len(cost)
    row_price, column_price = np.zeros(n, np.int64), np.zeros(n, np.int64)
    row_of = np.full(n, -1)
    for start in range(n):
        best = np.full(n, np.iinfo(np.int64).max)
        before, done = np.full(n, -1), np.zeros(n, bool)
        reached: list[int] = []
        row, column = start, -1
        # Grow a tree of tight edges from `start` until it reaches a free column.
        while row >= 0:
            slack: NDArray[Any] = cost[row] - row_price[row] - column_price
            nearer = ~done & (slack < best)
            best[nearer], before[nearer] = slack[nearer], column
            open_columns = np.flatnonzero(~done)
            column = int(open_columns[np.argmin(best[open_columns])])
            step = best[column]
            row_price[[start, *(row_of[c] for c in reached)]] += step
            column_price[reached] -= step
            best[open_columns] -= step
            done[column] = True
            reached.append(column)
            row = int(row_of[column])
        # Shift every match along the path by one.
        while column >= 0:
            previous = int(before[column])
            row_of[column] = start if previous < 0 else row_of[previous]
            column = previous
    columns = np.argsort(row_of)
    return tuple(columns.tolist()), int(cost[np.arange(n), columns].sum())
