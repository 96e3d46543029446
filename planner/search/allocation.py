"""Devices that a group may have, and groups that fit into a cluster together.

A group has whole nodes of any kinds, or a part of one node. Nodes of equal kind are
interchangeable, wherever the cluster lists them, so they are pooled, and an allocation says only
how many devices of each pool every group has. Together the groups use every device.

In the search a number of devices of a pool is an index into `Pool.sizes`: 0, the parts of a node,
then whole nodes. An `Index` has one of those per pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...dataflow.errors import PlanError
from ..inputs.cluster import ClusterSpec, Mesh

Index: TypeAlias = tuple[int, ...]  # per pool, a position in its `sizes`


@dataclass(frozen=True)
class Pool:
    node_groups: tuple[int, ...]  # the cluster's node groups of this kind
    node_size: int  # devices of a node
    nodes: tuple[int, ...]  # first device of every node, ascending

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        whole = range(self.node_size, self.num_devices + 1, self.node_size)
        return (*range(self.node_size), *whole)

    @property
    def num_devices(self) -> int:
        return len(self.nodes) * self.node_size


class Space:
    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = cluster
        self.pools = _pools(cluster)
        self.shape = tuple(len(pool.sizes) for pool in self.pools)
        self.legal = _legal(self.pools)
        self._meshes: dict[Index, Mesh] = {}

    def num_devices(self, index: Index) -> int:
        return sum(pool.sizes[k] for pool, k in zip(self.pools, index, strict=True))

    def mesh(self, index: Index) -> Mesh:
        """The devices of a group, always the same object for an index.

        Equal nodes are taken from the first node group first.
        """
        if index not in self._meshes:
            counts = [0] * len(self.cluster.node_groups)
            for pool, position in zip(self.pools, index, strict=True):
                left = pool.sizes[position]
                for group in pool.node_groups:
                    counts[group] = min(left, self.cluster.node_groups[group].num_devices)
                    left -= counts[group]
            self._meshes[index] = Mesh(self.cluster, tuple(counts))
        return self._meshes[index]

    def index_of(self, devices: Sequence[int], where: str) -> Index:
        index: list[int] = []
        for pool in self.pools:
            held = [
                sum(first <= d < first + pool.node_size for d in devices) for first in pool.nodes
            ]
            whole, part = held.count(pool.node_size), [n for n in held if 0 < n < pool.node_size]
            if part:
                if len(part) > 1 or part[0] != len(devices):
                    raise PlanError(
                        f"{where}: devices {', '.join(map(str, devices))} are neither whole nodes "
                        "nor a part of one node; a group must be one or the other"
                    )
                index.append(part[0])
            else:
                index.append(pool.node_size - 1 + whole if whole else 0)
        return tuple(index)

    def fits(self, allocation: Sequence[Index], fixed: Sequence[Sequence[int]] = ()) -> bool:
        for k, pool in enumerate(self.pools):
            if sum(pool.sizes[index[k]] for index in allocation) != pool.num_devices:
                return False
            if self._bins(k, allocation, fixed) is None:
                return False
        return True

    def devices(
        self, allocation: Sequence[Index], fixed: Sequence[Sequence[int]] = ()
    ) -> tuple[tuple[int, ...], ...]:
        given = fixed or [()] * len(allocation)
        found = [sorted(devices) for devices in given]
        taken = {device for devices in found for device in devices}
        for k, pool in enumerate(self.pools):
            free = [first for first in pool.nodes if taken.isdisjoint(_node(pool, first))]
            for group, index in enumerate(allocation):
                if index[k] >= pool.node_size and not given[group]:
                    num_nodes = pool.sizes[index[k]] // pool.node_size
                    found[group] += [d for first in free[:num_nodes] for d in _node(pool, first)]
                    del free[:num_nodes]
            bins = self._bins(k, allocation, fixed)
            assert bins is not None, "the allocation does not fit"
            for first, groups in bins:
                left = [d for d in _node(pool, free.pop(0) if first is None else first)
                        if d not in taken]  # fmt: skip
                for group in groups:
                    size = pool.sizes[allocation[group][k]]
                    found[group] += left[:size]
                    del left[:size]
        return tuple(tuple(devices) for devices in found)

    def _bins(
        self, k: int, allocation: Sequence[Index], fixed: Sequence[Sequence[int]]
    ) -> list[tuple[int | None, list[int]]] | None:
        pool = self.pools[k]
        parts: dict[int, int] = {}
        begun: dict[int, int] = {}
        for group, index in enumerate(allocation):
            if not 0 < index[k] < pool.node_size:  # not a part of a node
                continue
            if fixed and fixed[group]:
                first = next(n for n in pool.nodes if fixed[group][0] in _node(pool, n))
                begun[first] = begun.get(first, pool.node_size) - len(fixed[group])
            else:
                parts[group] = pool.sizes[index[k]]
        new = (sum(parts.values()) - sum(begun.values())) // pool.node_size
        rooms = [*begun.values(), *[pool.node_size] * new]
        packed = pack(parts, rooms)
        if packed is None:
            return None
        return list(zip([*begun, *[None] * new], packed, strict=True))


def pack(parts: dict[int, int], rooms: Sequence[int]) -> list[list[int]] | None:
    """Put parts into rooms so that every room is exactly full."""
    if sum(parts.values()) != sum(rooms):
        return None
    order = sorted(parts, key=lambda key: (-parts[key], key))
    left, inside = list(rooms), [list[int]() for _ in rooms]

    def place(position: int) -> bool:
        if position == len(order):
            return True
        key = order[position]
        tried: set[int] = set()
        for room, space in enumerate(left):
            if space < parts[key] or space in tried:
                continue
            tried.add(space)
            left[room] -= parts[key]
            inside[room].append(key)
            if place(position + 1):
                return True
            left[room] += parts[key]
            inside[room].pop()
        return False

    return inside if place(0) else None


def _node(pool: Pool, first: int) -> range:
    return range(first, first + pool.node_size)


def _pools(cluster: ClusterSpec) -> tuple[Pool, ...]:
    kinds: dict[int, list[int]] = {}
    for i, group in enumerate(cluster.node_groups):
        # Nodes with a network of their own are not as near to equal ones of another group.
        one = None if group.between else group.model_copy(update={"num_nodes": 1})
        same = (
            j for j in kinds if cluster.node_groups[j].model_copy(update={"num_nodes": 1}) == one
        )
        kinds.setdefault(next(same, i), []).append(i)
    firsts = [0, *accumulate(group.num_devices for group in cluster.node_groups)]
    pools: list[Pool] = []
    for kind, members in kinds.items():
        size = cluster.node_groups[kind].devices_per_node
        nodes = [n for i in members for n in range(firsts[i], firsts[i + 1], size)]
        pools.append(Pool(tuple(members), size, tuple(nodes)))
    return tuple(pools)


def _legal(pools: Sequence[Pool]) -> NDArray[np.bool_]:
    shape = [len(pool.sizes) for pool in pools]
    assert prod(shape) < 1 << 26, "more meshes than can be looked at"
    legal = np.ones(shape, np.bool_)
    for axis, pool in enumerate(pools):
        at: list[slice | int] = [slice(None)] * len(pools)
        at[axis] = slice(1, pool.node_size)
        legal[tuple(at)] = False
    for axis, pool in enumerate(pools):
        alone: list[slice | int] = [0] * len(pools)
        alone[axis] = slice(1, pool.node_size)
        legal[tuple(alone)] = True
    legal[(0,) * len(pools)] = False
    return legal


Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


class RangeMin:
    """A sparse table: minima of all boxes whose sides are powers of two."""

    def __init__(self, values: Floats) -> None:
        sides = values.shape[1:]
        self._levels = tuple(int(side).bit_length() for side in sides)
        self._table = np.full((*self._levels, *values.shape), np.inf)
        for level in product(*(range(count) for count in self._levels)):
            axis = next((a for a, exponent in enumerate(level) if exponent), None)
            if axis is None:
                self._table[level] = values
                continue
            half = self._table[(*level[:axis], level[axis] - 1, *level[axis + 1 :])]
            step = 1 << (level[axis] - 1)
            left: list[Any] = [slice(None)] * values.ndim
            right = list(left)
            left[axis + 1], right[axis + 1] = slice(None, -step), slice(step, None)
            self._table[level] = half
            np.minimum(half[tuple(left)], half[tuple(right)], out=self._table[level][tuple(left)])

    def __call__(self, low: Ints, high: Ints) -> Floats:
        # frexp gives the bit length, hence the largest power of two that fits.
        exponent = np.frexp((high - low + 1).astype(np.float64))[1] - 1
        last = high - (1 << exponent) + 1
        least: Floats | None = None
        for corner in product((0, 1), repeat=low.shape[1]):
            at = [(last if end else low)[:, axis] for axis, end in enumerate(corner)]
            found = self._table[(*exponent.T, slice(None), *at)]
            least = found if least is None else np.minimum(least, found)
        assert least is not None
        return least


# the first and the last position of boxes: boxes x groups x pools
Corners: TypeAlias = tuple[Ints, Ints]


@dataclass(frozen=True)
class Boxes:
    low: Ints  # boxes x groups x pools, the first position
    high: Ints  # the last
    bound: Floats  # boxes; nothing inside has a lower value

    def __len__(self) -> int:
        return len(self.bound)

    def where(self, rows: NDArray[np.bool_] | Ints) -> Boxes:
        return Boxes(self.low[rows], self.high[rows], self.bound[rows])

    def plus(self, other: Boxes) -> Boxes:
        return Boxes(
            np.concatenate((self.low, other.low)),
            np.concatenate((self.high, other.high)),
            np.concatenate((self.bound, other.bound)),
        )

    def best_first(self) -> Boxes:
        return self.where(np.argsort(self.bound, kind="stable"))

    @property
    def is_point(self) -> NDArray[np.bool_]:
        return (self.low == self.high).all((1, 2))

    def point(self, row: int) -> tuple[Index, ...]:
        return tuple(tuple(int(k) for k in index) for index in self.low[row])


class AllocationGrid:
    def __init__(self, space: Space, fixed: Sequence[Sequence[int]]) -> None:
        self._space, self._fixed = space, fixed
        self._sizes = [np.array(pool.sizes) for pool in space.pools]

    def nothing(self) -> Boxes:
        empty = np.zeros((0, len(self._fixed), len(self._sizes)), np.int64)
        return Boxes(empty, empty, np.zeros(0))

    def root(self) -> Corners:
        low = np.zeros((1, len(self._fixed), len(self._sizes)), np.int64)
        high = low + np.array(self._space.shape) - 1
        for k, devices in enumerate(self._fixed):
            if devices:
                low[0, k] = high[0, k] = self._space.index_of(devices, "pin devices")
        return self._tightened(low, high)

    def split(self, boxes: Boxes) -> Corners:
        rows = np.arange(len(boxes))
        ends = [
            [np.maximum(sizes[at[:, :, k]], 0.5) for k, sizes in enumerate(self._sizes)]
            for at in (boxes.low, boxes.high)
        ]
        num_ranges = len(self._fixed) * len(self._sizes)
        low, high = (np.stack(end, 2).reshape(-1, num_ranges) for end in ends)
        widest = (high / low).argmax(1)
        group, pool = np.divmod(widest, len(self._sizes))
        middle = np.sqrt(low[rows, widest] * high[rows, widest])
        cut = np.zeros(len(boxes), np.int64)
        for k, sizes in enumerate(self._sizes):
            cut = np.where(pool == k, np.searchsorted(sizes, middle, "right") - 1, cut)
        cut = np.clip(cut, boxes.low[rows, group, pool], boxes.high[rows, group, pool] - 1)
        below, above = boxes.high.copy(), boxes.low.copy()
        below[rows, group, pool], above[rows, group, pool] = cut, cut + 1
        return self._tightened(
            np.concatenate((boxes.low, above)), np.concatenate((below, boxes.high))
        )

    def _tightened(self, low: Ints, high: Ints) -> Corners:
        low, high = low.copy(), high.copy()
        while True:
            before = low.copy(), high.copy()
            for k, (pool, sizes) in enumerate(zip(self._space.pools, self._sizes, strict=True)):
                least, most = sizes[low[:, :, k]], sizes[high[:, :, k]]
                can = pool.num_devices - (least.sum(1, keepdims=True) - least)
                must = pool.num_devices - (most.sum(1, keepdims=True) - most)
                low[:, :, k] = np.maximum(low[:, :, k], np.searchsorted(sizes, must, "left"))
                high[:, :, k] = np.minimum(high[:, :, k], np.searchsorted(sizes, can, "right") - 1)
            good = (low <= high).all((1, 2))
            if good.all() and (low == before[0]).all() and (high == before[1]).all():
                return low, high
            low, high = low[good], high[good]
