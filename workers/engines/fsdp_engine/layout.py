"""How the FSDP engine stores a model, in terms of the checkpoint's parameters.

Tensor parallelism cuts first, then what a process would hold is cut once more by rows over the
shards, as `torch.chunk` does: all pieces equal, the last ones smaller or empty. Every piece is a
tensor of its own under the parameter's name, so the description is the planner's of `zero=3`,
written down for parameters of any family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ....planner.resharding.box import Box, volume
from ....planner.resharding.sharding import Pattern, Sharding, Slice, StoredParam

_BY_ROWS = re.compile(r"(.*\.)?(embed_tokens|lm_head|[qkv]_proj|gate_proj|up_proj)\.(weight|bias)")
_BY_COLUMNS = re.compile(r"(.*\.)?(o_proj|down_proj)\.weight")


def tensor_cut(name: str) -> int | None:
    """The dimension in which tensor parallelism cuts a parameter of Llama, Qwen2 or Qwen3.

    None if every process has all of it.
    """
    if _BY_ROWS.fullmatch(name):
        return 0
    return 1 if _BY_COLUMNS.fullmatch(name) else None


def held_box(
    name: str, shape: tuple[int, ...], shard: int, shards: int, place: int, tensor: int
) -> Box:
    """What one process holds of a parameter; may be empty.

    Args:
        name: The parameter.
        shape: Its shape; `tensor` divides the dimension it is cut in.
        shard: This process's shard, one of `shards`.
        shards: Processes that divide rows.
        place: This process's place, one of `tensor`.
        tensor: Processes that divide matrix products.
    """
    box = [(0, size) for size in shape]
    cut = tensor_cut(name) if tensor > 1 else None
    if cut is not None:
        width = shape[cut] // tensor
        box[cut] = (place * width, (place + 1) * width)
    start, stop = box[0]
    size = -(-(stop - start) // shards)
    begin = start + shard * size
    box[0] = (min(begin, stop), min(begin + size, stop))
    return tuple(box)


def fsdp_sharding(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    shards: int,
    tensor: int,
    replicas: int = 1,
    first: int = 0,
    dtype: str,
) -> Sharding:
    """Which process of an FSDP group stores what.

    Args:
        shapes: Parameter -> its shape, in the order of the checkpoint.
        shards: Processes that divide rows.
        tensor: Processes that divide matrix products.
        replicas: Ranks, which hold the same.
        first: The first process; the others follow, tensor place fastest, then shard, then rank.
        dtype: Data type of the weights.
    """
    patterns: dict[Pattern, int] = {}
    params: list[StoredParam] = []
    for name, shape in shapes.items():
        slices: list[Slice] = []
        for process in range(replicas * shards * tensor):
            beside, place = divmod(process, tensor)
            box = held_box(name, shape, beside % shards, shards, place, tensor)
            if volume(box):
                slices.append(Slice(first + process, box, (0,) * len(shape)))
        index = patterns.setdefault(tuple(slices), len(patterns))
        params.append(StoredParam(name, shape, index, name, tuple(range(len(shape)))))
    devices = tuple(range(first, first + replicas * shards * tensor))
    return Sharding(devices, tuple(params), tuple(patterns), dtype)
