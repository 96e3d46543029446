"""Random numbers for ops, which have no state: derived from the data.

An op may be computed in any number of pieces, in any process and again after a restart. A number
that depends on a seed and on the tokens of some rows alone comes out the same each time, and
differs from step to step because the rows do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from torch import Tensor


def uniforms(seed: int, *tokens: Tensor) -> Iterator[float]:
    """Endless numbers in [0, 1) for some rows.

    Args:
        seed: Another seed gives other numbers.
        tokens: i64[T] each, a row's tokens; padding of -1 is left out.
    """
    rows = [row[row >= 0].tolist() for row in tokens]
    key = hashlib.blake2b(repr((seed, rows)).encode(), digest_size=16).digest()
    count = 0
    while True:
        digest = hashlib.blake2b(count.to_bytes(8, "little"), key=key, digest_size=8).digest()
        yield (int.from_bytes(digest, "little") >> 11) / 2**53
        count += 1
