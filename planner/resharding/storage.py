"""Places of slices in tensors that an engine fuses, interleaves or transposes.

None of this changes which indices a device holds, so it changes no byte of a transfer: it tells
who carries the transfer out where to read and where to write.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...dataflow.errors import PlanError
from .sharding import Pattern, Sharding, Slice, StoredParam

QKV = ("q_proj", "k_proj", "v_proj")


class _Patterns:
    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._index: dict[Pattern, int] = {p: i for i, p in enumerate(sharding.patterns)}
        self._params = {param.name: param for param in sharding.params}

    def __getitem__(self, name: str) -> StoredParam:
        return self._params[name]

    def pattern(self, name: str) -> Pattern:
        return self._sharding.patterns[self._params[name].pattern]

    def set(self, name: str, slices: Iterable[Slice], tensor: str) -> None:
        index = self._index.setdefault(tuple(slices), len(self._index))
        self._params[name] = replace(self._params[name], pattern=index, tensor=tensor)

    def sharding(self) -> Sharding:
        used = sorted({param.pattern for param in self._params.values()})
        patterns = list(self._index)
        new = {old: i for i, old in enumerate(used)}
        params = tuple(
            replace(param, pattern=new[param.pattern]) for param in self._params.values()
        )
        devices, dtype = self._sharding.devices, self._sharding.dtype
        return Sharding(devices, params, tuple(patterns[old] for old in used), dtype)


def concatenate(sharding: Sharding, members: tuple[str, ...], tensor: str) -> Sharding:
    """Lay the local slices of some parameters end to end in one tensor.

    `concatenate(s, ("q_proj", "k_proj", "v_proj"), "qkv_proj")` and the same of gate and up
    projections are what vLLM and many others store. Weights and biases are fused apart.
    """
    made = _Patterns(sharding)
    for name, group in _groups(sharding, members, tensor).items():
        filled = defaultdict[int, int](int)
        for member in group:
            slices, width = list[Slice](), defaultdict[int, int](int)
            for piece in made.pattern(member):
                first, *rest = piece.start
                slices.append(replace(piece, start=(first + filled[piece.device], *rest)))
                width[piece.device] += _rows(piece)
            made.set(member, slices, name)
            for device, rows in width.items():
                filled[device] += rows
    return made.sharding()


def interleave_qkv(sharding: Sharding, head_dim: int, tensor: str = "qkv_proj") -> Sharding:
    """Store queries, keys and values head group by head group, as Megatron does.

    For every local key-value head: the queries that share it, its key, its value. A slice that
    spans several groups becomes one slice per group.
    """
    made = _Patterns(sharding)
    for name, (query, key, value) in _groups(sharding, QKV, tensor).items():
        rows = {
            member: {piece.device: _rows(piece) for piece in made.pattern(member)}
            for member in (query, key, value)
        }
        if rows[query].keys() != rows[key].keys() or any(
            count % head_dim for held in rows.values() for count in held.values()
        ):
            raise PlanError(
                f"cannot interleave '{name}': every device must hold whole heads of {head_dim} "
                "rows, of queries and keys alike; cut it by tensor parallelism only"
            )
        shares = {
            device: count // (rows[key][device] // head_dim)
            for device, count in rows[query].items()
        }
        for place, member in enumerate((query, key, value)):
            slices: list[Slice] = []
            for piece in made.pattern(member):
                share = shares[piece.device]
                length, offset = (
                    (share, 0) if place == 0 else (head_dim, share + (place - 1) * head_dim)
                )
                (first, stop), rest = piece.box[0], piece.box[1:]
                for i, row in enumerate(range(first, stop, length)):
                    start = (offset + i * (share + 2 * head_dim), *piece.start[1:])
                    slices.append(Slice(piece.device, ((row, row + length), *rest), start))
            made.set(member, slices, name)
    return made.sharding()


def _rows(piece: Slice) -> int:
    return piece.box[0][1] - piece.box[0][0]


def _groups(
    sharding: Sharding, members: tuple[str, ...], tensor: str
) -> Mapping[str, tuple[str, ...]]:
    names = {param.name for param in sharding.params}
    first = f".{members[0]}."
    groups: dict[str, tuple[str, ...]] = {}
    for param in sharding.params:
        if first in param.name:
            group = tuple(param.name.replace(first, f".{member}.") for member in members)
            missing = [name for name in group if name not in names]
            if missing:
                raise PlanError(f"cannot fuse '{param.name}': there is no '{missing[0]}' beside it")
            groups[param.name.replace(first, f".{tensor}.")] = group
    return groups
