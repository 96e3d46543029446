"""An object's attributes: numbers and texts as JSON, and whether all else is unchanged."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MethodType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

_KINDS = "biufU"
"""The kinds of numpy types that JSON can hold: truth values, whole and other numbers, texts."""


def can_save(value: object) -> bool:
    """Whether `to_json` can say it."""
    if isinstance(value, (np.ndarray, np.generic)):
        return cast("NDArray[Any]", value).dtype.kind in _KINDS
    return value is None or isinstance(value, (bool, int, float, str))


def to_json(value: Any) -> Any:
    """An array, a number of numpy's or Python's, a text or None as JSON."""
    if isinstance(value, (np.ndarray, np.generic)):
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        values = value.reshape(-1).tolist()
        return {"dtype": value.dtype.str, "shape": shape, "values": values}
    return value


def from_json(value: Any) -> Any:
    """What `to_json` was given."""
    if not isinstance(value, dict):
        return value
    array = np.array(value["values"], dtype=value["dtype"])
    return array[0] if value["shape"] is None else array.reshape(value["shape"])


def copied(value: Any) -> Any:
    """A copy to compare with later; the thing itself if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - a class may refuse in any way; then only another is noticed
        return value


def same(one: Any, other: Any, known: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two things are equal, or of one kind with parts that are.

    Args:
        one: The one.
        other: The other.
        known: Pairs being compared, taken to be equal: things may refer to each other in circles.
    """
    pair = (id(one), id(other))
    if one is other or pair in known:
        return True
    if type(one) is not type(other):
        return False
    known = known | {pair}
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        pairs = zip(cast("list[Any]", one), other, strict=False)
        return len(one) == len(other) and all(same(a, b, known) for a, b in pairs)
    if isinstance(one, Mapping):
        whole = cast("Mapping[Any, Any]", one)
        return whole.keys() == other.keys() and all(same(whole[k], other[k], known) for k in whole)
    if isinstance(one, np.random.Generator):
        return same(one.bit_generator.state, other.bit_generator.state, known)
    if isinstance(one, MethodType):
        return one.__func__ is other.__func__
    parts = getattr(one, "__dict__", None)
    return _equal(one, other) or (bool(parts) and same(parts, vars(other), known))


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - as that of several truth values; then it is not a yes
        return False
