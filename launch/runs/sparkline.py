"""A curve in one line of a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["sparkline"]

_LEVELS = "▁▂▃▄▅▆▇█"


def sparkline(ys: Sequence[float], width: int = 32) -> str:
    """The values in characters of eight heights, from the lowest to the highest of them.

    Args:
        ys: Finite values, in order. Neighbors are averaged where there are more than fit.
        width: Characters at most.

    Example:
        >>> sparkline([0.0, 1.0, 2.0, 7.0])
        '▁▂▃█'
    """
    num = min(width, len(ys))
    edges = [round(at * len(ys) / num) for at in range(num + 1)] if num else []
    means = [
        math.fsum(ys[low:high]) / (high - low) for low, high in zip(edges, edges[1:], strict=False)
    ]
    low, high = min(means, default=0.0), max(means, default=0.0)
    if low == high:
        return _LEVELS[0] * num
    most = len(_LEVELS) - 1
    return "".join(_LEVELS[round((y - low) / (high - low) * most)] for y in means)
