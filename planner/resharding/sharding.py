"""Sharding of a model by an engine: which device has which indices of which logical parameter.

A `Sharding` is plain data. It says nothing of how it came about, so an engine may describe itself
in one, and `plan_transfer.py` moves weights between any two. `shard` writes the one that a `Layout`
means; `storage.py` rewrites where the slices lie inside an engine's own tensors.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

from ...dataflow.errors import PlanError
from ..inputs.layout import Layout, check_layout
from ..inputs.model_shape import DTYPE_BYTES, Head, LogicalParam, ModelShape, logical_params

Box = tuple[tuple[int, int], ...]  # one (start, stop) per dimension of a parameter


def whole(shape: Iterable[int]) -> Box:
    """All indices of a parameter."""
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    """Elements in a box; 0 if any range is empty."""
    return prod(max(stop - start, 0) for start, stop in box)


def intersection(a: Box, b: Box) -> Box | None:
    shared = tuple(
        (max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True)
    )  # fmt: skip
    return shared if all(start < stop for start, stop in shared) else None


@dataclass(frozen=True)
class Grid:
    """The coarsest grid in which every given box is a block of whole cells."""

    cuts: tuple[tuple[int, ...], ...]  # per dimension, where cells begin and end, ascending

    @staticmethod
    def of(boxes: Iterable[Box]) -> Grid:
        columns = zip(*boxes, strict=True)
        return Grid(
            tuple(tuple(sorted({i for span in column for i in span})) for column in columns)
        )

    def cells(self, box: Box) -> Iterator[tuple[int, ...]]:
        return itertools.product(
            *(
                range(bisect_left(cuts, start), bisect_left(cuts, stop))
                for cuts, (start, stop) in zip(self.cuts, box, strict=True)
            )
        )

    def box(self, cell: tuple[int, ...]) -> Box:
        return tuple((cuts[i], cuts[i + 1]) for cuts, i in zip(self.cuts, cell, strict=True))


@dataclass(frozen=True, slots=True)
class Slice:
    device: int  # the device that holds it
    box: Box  # indices into the logical parameter
    # where the box begins in the engine's tensor on that device, in that tensor's own order of
    # dimensions
    start: tuple[int, ...]


Pattern = tuple[Slice, ...]  # how one parameter is spread. All layers of a stage share a pattern.


@dataclass(frozen=True, slots=True)
class StoredParam:
    name: str  # in the checkpoint
    shape: tuple[int, ...]  # in the checkpoint
    pattern: int  # index into `Sharding.patterns`
    tensor: str  # the engine's name for the tensor that its slices lie in
    # for each dimension of that tensor, which of the parameter's dimensions it is: (0, 1) as in the
    # checkpoint, (1, 0) transposed
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Sharding:
    devices: tuple[int, ...]  # cluster device of each rank, in rank order
    params: tuple[StoredParam, ...]  # what is held, in the order of the checkpoint
    patterns: tuple[Pattern, ...]  # how parameters are held; they refer to these
    dtype: str = "bfloat16"  # what the engine stores

    def __post_init__(self) -> None:
        if len(set(self.devices)) != len(self.devices):
            twice = next(d for d in self.devices if self.devices.count(d) > 1)
            raise PlanError(f"device {twice} is listed twice; a rank needs a device of its own")
        if self.dtype not in DTYPE_BYTES:
            raise PlanError(f"dtype is '{self.dtype}'; expected one of {', '.join(DTYPE_BYTES)}")
        for (pattern, shape, rank), name in {
            (p.pattern, p.shape, len(p.dims)): p.name for p in self.params
        }.items():
            _check_pattern(self.patterns[pattern], shape, rank, name, set(self.devices))

    @cached_property
    def bytes_on(self) -> Mapping[int, int]:
        elements = dict.fromkeys(self.devices, 0)
        uses = defaultdict[int, int](int)
        for param in self.params:
            uses[param.pattern] += 1
        for index, times in uses.items():
            for piece in self.patterns[index]:
                elements[piece.device] += times * volume(piece.box)
        return {device: count * DTYPE_BYTES[self.dtype] for device, count in elements.items()}

    def on(self, devices: Sequence[int]) -> Sharding:
        if len(devices) != len(self.devices):
            raise PlanError(f"{len(self.devices)} ranks cannot run on {len(devices)} devices")
        new = dict(zip(self.devices, devices, strict=True))
        patterns = tuple(
            tuple(Slice(new[piece.device], piece.box, piece.start) for piece in pattern)
            for pattern in self.patterns
        )
        return Sharding(tuple(devices), self.params, patterns, self.dtype)


def _check_pattern(
    pattern: Pattern, shape: tuple[int, ...], rank: int, name: str, devices: set[int]
) -> None:
    held = defaultdict[int, list[Box]](list)
    for piece in pattern:
        where = f"parameter '{name}' on device {piece.device}"
        if piece.device not in devices:
            raise PlanError(f"{where}: the sharding's devices do not include it")
        inside = len(piece.box) == len(shape) and all(
            0 <= start <= stop <= size for (start, stop), size in zip(piece.box, shape, strict=True)
        )
        if not inside:
            raise PlanError(f"{where}: slice {piece.box} does not fit in shape {shape}")
        if len(piece.start) != rank:
            raise PlanError(
                f"{where}: start {piece.start} should have {rank} indices, as many as the "
                "engine's tensor has dimensions"
            )
        held[piece.device].append(piece.box)
    for device, boxes in held.items():
        for a, b in combinations(boxes, 2):
            if intersection(a, b) is not None:
                raise PlanError(
                    f"parameter '{name}' on device {device}: slices {a} and {b} overlap"
                )


class Rank(NamedTuple):
    tp: int
    cp: int
    dp: int
    pp: int


def rank_of(index: int, layout: Layout) -> Rank:
    """Coordinates of rank `index`: tp fastest, then cp, dp, pp."""
    index, tp = divmod(index, layout.tp)
    index, cp = divmod(index, layout.cp)
    pp, dp = divmod(index, layout.dp)
    return Rank(tp, cp, dp, pp)


def unsharded(
    shapes: Mapping[str, tuple[int, ...]], devices: Sequence[int], *, dtype: str = "float32"
) -> Sharding:
    """Every device has all of every parameter, each a tensor of its own."""
    order = {shape: index for index, shape in enumerate(dict.fromkeys(shapes.values()))}
    patterns = tuple(
        tuple(Slice(d, whole(shape), (0,) * len(shape)) for d in devices) for shape in order
    )
    params = tuple(
        StoredParam(name, shape, order[shape], name, tuple(range(len(shape))))
        for name, shape in shapes.items()
    )
    return Sharding(tuple(devices), params, patterns, dtype)


def shard(
    model: ModelShape,
    layout: Layout,
    devices: Sequence[int],
    *,
    head: Head = "vocabulary",
) -> Sharding:
    """Slices of every parameter that each device holds under a layout.

    - tp cuts query, key, value, gate and up projections, embedding and head by rows, output and
      down projections by columns, experts as well; norms and routers are whole everywhere. Gate
      and up rows that are one parameter are cut apart and lie end to end. With more ranks than
      key-value heads, neighboring ranks share a head.
    - pp gives each stage a run of layers, the first also the embedding, the last the norm and head.
    - ep deals experts in runs to the dp ranks `dp % ep`.
    - `zero=3` cuts what a rank would hold once more, in the first dimension, over its dp x cp
      ranks, as `torch.chunk` does: all pieces equal, the last ones smaller or empty. Experts are
      cut over the `dp // ep` x cp ranks that share them.
    - dp and cp without `zero=3` repeat.

    Raises:
        PlanError: If the layout does not suit the model or the number of devices.
    """
    check_layout(layout, model, node_size=layout.tp)
    if len(devices) != layout.num_devices:
        raise PlanError(
            f"layout {layout} has {layout.num_devices} ranks but {len(devices)} devices were given"
        )
    ranks = [(rank_of(i, layout), device) for i, device in enumerate(devices)]
    patterns: dict[Pattern, int] = {}
    known: dict[Any, int] = {}
    params: list[StoredParam] = []
    for param in logical_params(model, head):
        stages = _stages(param, model, layout)
        key = (param.shape, param.cut_dim, param.num_units, stages, param.by_expert)
        if key not in known:
            pattern = tuple(
                Slice(device, box, start)
                for rank, device in ranks
                if rank.pp in stages
                for box, start in _boxes(param, layout, rank)
                if volume(box)
            )
            known[key] = patterns.setdefault(pattern, len(patterns))
        dims = tuple(range(len(param.shape)))
        params.append(StoredParam(param.name, param.shape, known[key], param.name, dims))
    return Sharding(tuple(devices), tuple(params), tuple(patterns), model.dtype)


def _stages(param: LogicalParam, model: ModelShape, layout: Layout) -> tuple[int, ...]:
    last = layout.pp - 1
    if param.place == "layer":
        return (param.layer * layout.pp // model.num_layers,)
    return {"first": (0,), "last": (last,), "ends": (0, last)}[param.place]


def _boxes(
    param: LogicalParam, layout: Layout, rank: Rank
) -> Iterator[tuple[Box, tuple[int, ...]]]:
    box = [(0, size) for size in param.shape]
    shared = layout.ep if param.by_expert else 1
    if param.by_expert:
        count = param.shape[0] // layout.ep
        first = rank.dp % layout.ep * count
        box[0] = (first, first + count)
    start = [0] * len(box)
    # Blocks that are not cut are neighbors already.
    blocks = param.num_blocks if layout.tp > 1 else 1
    for block in range(blocks):
        if (cut := param.cut_dim) is not None:
            width = param.shape[cut] // blocks
            unit = width * blocks // (param.num_units * param.num_blocks)
            # More ranks than key-value heads: runs of ranks share a head.
            first = rank.tp * param.num_units // layout.tp * unit
            size = max(param.num_units // layout.tp, 1) * unit * (param.num_blocks // blocks)
            box[cut] = (block * width + first, block * width + first + size)
            start[cut] = block * size
        begin, end = box[0]
        if layout.zero == 3:
            place = rank.cp + layout.cp * (rank.dp // shared)
            size = -(-(end - begin) // (layout.cp * layout.dp // shared))
            begin += place * size
            begin, end = min(begin, end), min(begin + size, end)
        yield ((begin, end), *box[1:]), tuple(start)
