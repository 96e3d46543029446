"""Which device sends each piece to which device.

All parameters of a kind move alike, so every layer, and with it every bucket, loads the devices as
the whole transfer does. Holders in the receiver's node are asked before others. Holders of the same
piece share it: each serves as many receivers, or where that does not come out even, a part of it.

With `relay`, receivers help where holders would be overloaded: of a piece that n devices of a far
node need, each fetches one n-th over the network and gives it to the others. Nothing arrives twice
either way. The parts then travel in up to three rounds: from holders to a first receiver; from
there to other nodes; inside each node from the one that has it to the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from .box import Box, volume
from .overlay import Piece

__all__ = ["Send", "choose_sources"]

MAX_PARTS = 64
"""A piece is cut into no more than this: beyond it, plans grow and messages shrink for nothing."""

SLACK = 1.05
"""How much more than the busiest receiver a holder may send before receivers help: relaying for the
sake of a norm or an uneven stage costs more moves and rounds than it brings."""


class Send(NamedTuple):
    """A part of a piece, from one device to another.

    Attributes:
        piece: Index among the pieces.
        params: Indices of the piece's parameters.
        box: Which indices of each; the piece's box or a part of it.
        source: The device that sends.
        destination: The device that receives.
        round: 0 from a holder; n from a device that received it in round n - 1.
    """

    piece: int
    params: tuple[int, ...]
    box: Box
    source: int
    destination: int
    round: int


class _Part(NamedTuple):
    piece: int
    params: tuple[int, ...]
    box: Box

    @property
    def elements(self) -> int:
        return len(self.params) * volume(self.box)


@dataclass(frozen=True)
class _Scope:
    """The receivers of a piece that are served together.

    Attributes:
        piece: Index among the pieces.
        holders: Who may be asked: those of the node, or if it has none, all.
        nodes: The receivers, by node; one node if it has holders, else all nodes without.
        is_far: Whether holders are in other nodes.
    """

    piece: int
    holders: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    is_far: bool

    @property
    def receivers(self) -> tuple[int, ...]:
        return tuple(device for node in self.nodes for device in node)


def choose_sources(
    pieces: Sequence[Piece], node_of: Mapping[int, int], *, relay: bool, min_part_elements: int
) -> tuple[Send, ...]:
    """Decide who sends what.

    Without relay, of devices that hold the same none sends more to its own node than another one
    there by more than the largest part times the parameters that move alike; nor to other nodes.

    Args:
        pieces: What is needed, and who holds it.
        node_of: Device -> node.
        relay: Whether a device may pass on what it received.
        min_part_elements: No parameter is cut into parts smaller than this.
    """
    chooser = _Chooser(pieces, node_of, min_part_elements)
    scopes = [scope for i in chooser.largest_first() for scope in chooser.scopes(i)]
    chooser.measure(scopes)
    waiting: list[tuple[_Part, _Scope, int]] = []
    for scope in scopes:
        if relay and chooser.needs_help(scope):
            waiting += chooser.first_sends(scope)
        else:
            chooser.direct(scope)
    for part, scope, hub in waiting:
        chooser.spread(part, scope, hub)
    return tuple(chooser.made)


class _Chooser:
    """Running totals in elements, and the sends decided so far."""

    def __init__(
        self, pieces: Sequence[Piece], node_of: Mapping[int, int], min_part_elements: int
    ) -> None:
        self._pieces = pieces
        self._node_of = node_of
        self._min_part = min_part_elements
        # What a device sent: inside its node, and to others.
        self._sent = {far: dict.fromkeys(node_of, 0) for far in (False, True)}
        self._hub = dict.fromkeys(node_of, 0)
        self._landed = dict.fromkeys(node_of, 0)
        self._share = {far: dict.fromkeys(node_of, 0.0) for far in (False, True)}
        self._limit = {False: 0.0, True: 0.0}
        self.made: list[Send] = []

    def largest_first(self) -> list[int]:
        """Pieces in the order of deciding: what is left to the end evens out best."""
        size = [volume(piece.box) * len(piece.kind.params) for piece in self._pieces]
        return sorted(range(len(size)), key=lambda i: -size[i])

    def scopes(self, index: int) -> Iterator[_Scope]:
        """Receivers by where they may ask."""
        piece = self._pieces[index]
        needers, holders = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for device in sorted(piece.needers):
            needers[self._node_of[device]].append(device)
        for device in sorted(piece.holders):
            holders[self._node_of[device]].append(device)
        for node, devices in needers.items():
            if node in holders:
                yield _Scope(index, tuple(holders[node]), (tuple(devices),), is_far=False)
        away = tuple(tuple(devices) for node, devices in needers.items() if node not in holders)
        if away:
            yield _Scope(index, tuple(sorted(piece.holders)), away, is_far=True)

    def measure(self, scopes: Sequence[_Scope]) -> None:
        """Work out what holders would send if nobody helped, and what they may send.

        No plan ends before the busiest receiver has everything: up to that load it costs nothing
        to ask a holder. Over the network, what counts is one copy per node, shared out in it.
        """
        lacking, far = defaultdict[int, int](int), defaultdict[int, int](int)
        members = defaultdict[int, set[int]](set)
        for scope in scopes:
            elements = self._elements(scope.piece)
            for device in scope.receivers:
                lacking[device] += elements
            copies = len(scope.nodes) if scope.is_far else len(scope.receivers)
            for holder in scope.holders:
                self._share[scope.is_far][holder] += elements * copies / len(scope.holders)
            for devices in scope.nodes if scope.is_far else ():
                node = self._node_of[devices[0]]
                far[node] += elements
                members[node].update(devices)
        busiest = max(lacking.values(), default=0)
        shared = max((elements / len(members[node]) for node, elements in far.items()), default=0)
        self._limit = {False: SLACK * busiest, True: SLACK * shared}

    def _elements(self, piece: int) -> int:
        return volume(self._pieces[piece].box) * len(self._pieces[piece].kind.params)

    def _is_overloaded(self, scope: _Scope) -> bool:
        share = max(self._share[scope.is_far][holder] for holder in scope.holders)
        return share > self._limit[scope.is_far]

    def needs_help(self, scope: _Scope) -> bool:
        """Whether receivers pass on: holders are overloaded, or a far node asks twice.

        Not for pieces, such as shards of norms, that all layers together are too small to cut.
        """
        if len(scope.receivers) == 1 or self._elements(scope.piece) < self._min_part:
            return False
        asks_twice = scope.is_far and len(scope.receivers) > len(scope.nodes)
        return asks_twice or self._is_overloaded(scope)

    def direct(self, scope: _Scope) -> None:
        """Every receiver asks holders, in as many parts as make their shares even."""
        receivers, holders = scope.receivers, scope.holders
        for part in self._parts(scope.piece, len(holders) // gcd(len(holders), len(receivers))):
            for receiver in receivers:
                source = _least(holders, self._sent[scope.is_far])
                self._send(part, source, receiver, 0)

    def first_sends(self, scope: _Scope) -> Iterator[tuple[_Part, _Scope, int]]:
        """What holders cannot avoid: each part once, to a receiver that may have to pass it on."""
        receivers = scope.receivers
        count = max(map(len, scope.nodes))
        if self._is_overloaded(scope):
            count = len(receivers)
        for part in self._parts(scope.piece, count):
            hub = _least(receivers, self._hub)
            self._hub[hub] += part.elements
            self._landed[hub] += part.elements
            self._send(part, _least(scope.holders, self._sent[scope.is_far]), hub, 0)
            yield part, scope, hub

    def spread(self, part: _Part, scope: _Scope, hub: int) -> None:
        """The other receivers of a part: one in each node, then the rest of each node."""
        near_holders = () if scope.is_far else scope.holders
        for devices in scope.nodes:
            first, round_ = hub, 0
            if hub not in devices:
                first = _least(devices, self._landed)
                self._landed[first] += part.elements
                source, round_ = self._source(part, scope.holders, (hub, 0), far=True)
                self._send(part, source, first, round_)
            for receiver in devices:
                if receiver != first:
                    sender = self._source(part, near_holders, (first, round_), far=False)
                    self._send(part, sender[0], receiver, sender[1])

    def _source(
        self, part: _Part, holders: Sequence[int], landed: tuple[int, int], *, far: bool
    ) -> tuple[int, int]:
        """A holder while it may, else the device that received the part, and the round."""
        receiver, round_ = landed
        if holders:
            best, sent = _least(holders, self._sent[far]), self._sent[far]
            if sent[best] + part.elements <= self._limit[far] or sent[best] <= sent[receiver]:
                return best, 0
        return receiver, round_ + 1

    def _send(self, part: _Part, source: int, destination: int, round_: int) -> None:
        far = self._node_of[source] != self._node_of[destination]
        self._sent[far][source] += part.elements
        self.made.append(Send(*part, source, destination, round_))

    def _parts(self, index: int, count: int) -> Iterator[_Part]:
        """Cut a piece into at most `count` parts: its longest dimension, or else the parameters."""
        piece = self._pieces[index]
        params, box = piece.kind.params, piece.box
        dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0])
        begin, stop = box[dim]
        room = min(stop - begin, volume(box) // self._min_part, MAX_PARTS)
        if room > 1:
            count = min(count, room)
            for a, b in pairwise(begin + (stop - begin) * i // count for i in range(count + 1)):
                yield _Part(index, params, (*box[:dim], (a, b), *box[dim + 1 :]))
            return
        # Every count-th parameter, and another first one for each piece, so that neither the
        # layers of a bucket nor the pieces of a layer all load the same device.
        count = min(count, len(params))
        for i in range(count):
            yield _Part(index, params[(i + index) % count :: count], box)


def _least(devices: Sequence[int], load: Mapping[int, int]) -> int:
    return devices[0] if len(devices) == 1 else min(devices, key=load.__getitem__)
