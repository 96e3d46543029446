"""Which device sends each piece to which device.

All parameters of a kind move alike, so every layer, and with it every bucket, loads the devices as
the whole transfer does. Holders of the same piece share it: each serves as many receivers, or where
that does not come out even, a part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from .box import Box, volume
from .overlay import Piece

MAX_PARTS = 64
"""A piece is cut into no more than this: beyond it, plans grow and messages shrink for nothing."""


class Send(NamedTuple):
    """A part of a piece, from one device to another.

    Attributes:
        piece: Index among the pieces.
        params: Indices of the piece's parameters.
        box: Which indices of each; the piece's box or a part of it.
        source: The device that sends.
        destination: The device that receives.
    """

    piece: int
    params: tuple[int, ...]
    box: Box
    source: int
    destination: int


def choose_sources(pieces: Sequence[Piece], *, min_part_elements: int) -> tuple[Send, ...]:
    """Decide who sends what.

    Of devices that hold the same none sends more than another by more than the largest part times
    the parameters that move alike.

    Args:
        pieces: What is needed, and who holds it.
        min_part_elements: No parameter is cut into parts smaller than this.
    """
    sent = {device: 0 for piece in pieces for device in piece.holders}
    sends: list[Send] = []
    # The largest first: what is left to the end evens out best.
    sizes = [volume(piece.box) * len(piece.kind.params) for piece in pieces]
    for index in sorted(range(len(pieces)), key=lambda i: -sizes[i]):
        holders, needers = sorted(pieces[index].holders), sorted(pieces[index].needers)
        count = len(holders) // gcd(len(holders), len(needers))
        for params, box in _parts(pieces[index], index, count, min_part_elements):
            for needer in needers:
                source = min(holders, key=sent.__getitem__)
                sent[source] += len(params) * volume(box)
                sends.append(Send(index, params, box, source, needer))
    return tuple(sends)


def _parts(
    piece: Piece, index: int, count: int, min_part_elements: int
) -> Iterator[tuple[tuple[int, ...], Box]]:
    """Cut a piece into at most `count` parts: its longest dimension, or else the parameters.

    Yields:
        The parameters and the box of each.
    """
    params, box = piece.kind.params, piece.box
    dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])
    begin, stop = box[dim]
    room = min(stop - begin, volume(box) // min_part_elements, MAX_PARTS)
    if room > 1:
        count = min(count, room)
        for a, b in pairwise(begin + (stop - begin) * i // count for i in range(count + 1)):
            yield params, (*box[:dim], (a, b), *box[dim + 1 :])
        return
    # Every count-th parameter, and another first one for each piece, so that neither the layers of
    # a bucket nor the pieces of a layer all load the same device.
    count = min(count, len(params))
    for i in range(count):
        yield params[(i + index) % count :: count], box
