"""Ranges of options, checked when they are made: long before anything is built or trained."""

from __future__ import annotations

import math
import operator

_MOST_BITS = 63  # Most bits of an integer: a larger one is a typing error, and no tensor holds it


def check_range(
    options: object,
    *names: str,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Require fields of some options to be finite and within bounds.

    A field that is None is not set and may be; of a tuple every item is checked.
    """
    bounds = [
        (words, bound, holds)
        for words, bound, holds in (
            ("at least", at_least, operator.ge),
            ("above", above, operator.gt),
            ("at most", at_most, operator.le),
            ("below", below, operator.lt),
        )
        if bound is not None
    ]
    for name in names:
        value = getattr(options, name)
        for item in value if isinstance(value, tuple) else (value,):
            if item is None:
                continue
            if not isinstance(item, int | float):
                raise ValueError(f"{name} is {value!r}; expected a number")
            if isinstance(item, int) and item.bit_length() > _MOST_BITS:
                bits = item.bit_length()
                raise ValueError(f"{name} is of {bits} bits; expected at most {_MOST_BITS}")
            if not math.isfinite(item):
                raise ValueError(f"{name} is {value}; expected a finite number")
            if not all(holds(item, bound) for _, bound, holds in bounds):
                expected = " and ".join(f"{words} {bound:g}" for words, bound, _ in bounds)
                raise ValueError(f"{name} is {value}; expected {expected}")
