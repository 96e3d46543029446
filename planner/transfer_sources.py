"""Who sends each piece to whom.

A device of the receiver's node is preferred, and among equals the one that has sent least.

With `relay`, receivers help where holders would be overloaded: if 8 devices of a far node need the
same weights, each of them fetches an eighth over the network and gives it to the other 7. Nothing
arrives twice either way. The pieces then travel in up to three rounds: holders to the first
receivers; these to other nodes; inside each node from its first receiver to the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .box import volume
from .transfer_overlay import Piece

__all__ = ["Send", "choose_sources"]

MAX_UNITS = 250_000
"""Decisions made one by one, at most: beyond it parameters of a piece are decided on together."""


class Send(NamedTuple):
    """Some parameters' share of a piece, from one device to another.

    Attributes:
        piece: Index among the pieces.
        params: Which of the piece's parameters.
        source: Who sends.
        destination: Who receives.
        round: 0 from a holder; n from a device that received it in round n - 1.
    """

    piece: int
    params: tuple[int, ...]
    source: int
    destination: int
    round: int


class _Unit(NamedTuple):
    """What is decided on at once: one parameter's share of a piece, or a few parameters'."""

    piece: int
    params: tuple[int, ...]
    elements: int


@dataclass
class _Node:
    """One node as a unit sees it."""

    holders: list[int]
    needers: list[int]


def choose_sources(
    pieces: Sequence[Piece], node_of: Mapping[int, int], *, relay: bool
) -> tuple[Send, ...]:
    """Decide who sends what.

    Among devices that hold the same, the bytes sent inside the node differ by one slice at most,
    and so do the bytes sent to other nodes, as long as neither passes on what it received.

    Args:
        pieces: What is needed, and who holds it.
        node_of: Device -> node.
        relay: Whether a device may pass on what it received.
    """
    chooser = _Chooser(pieces, node_of)
    if relay:
        chooser.first_sends()
        chooser.other_sends()
    else:
        chooser.direct()
    sends = (Send(p, tuple(params), *rest) for (p, *rest), params in chooser.made.items())
    return tuple(sends)


class _Chooser:
    """Running totals, in elements, and the sends decided so far."""

    def __init__(self, pieces: Sequence[Piece], node_of: Mapping[int, int]) -> None:
        self._pieces = pieces
        self._node_of = node_of
        self._nodes = [_nodes(piece, node_of) for piece in pieces]
        self._near = dict.fromkeys(node_of, 0)
        self._far = dict.fromkeys(node_of, 0)
        self._hub = dict.fromkeys(node_of, 0)
        self._first_received = dict.fromkeys(node_of, 0)
        # The receiver in each (unit, node) that the others of its node may ask, and its round.
        self._landed: dict[tuple[_Unit, int], tuple[int, int]] = {}
        self.made: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)

    def _units(self) -> Iterator[_Unit]:
        """Largest first: what is left to the end then evens out best."""
        decisions = sum(len(piece.kind.params) * len(piece.needers) for piece in self._pieces)
        step = -(-decisions // MAX_UNITS)
        sizes = [volume(piece.box) for piece in self._pieces]
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            params = self._pieces[i].kind.params
            for begin in range(0, len(params), step or 1):
                part = params[begin : begin + step]
                yield _Unit(i, part, sizes[i] * len(part))

    def _send(self, unit: _Unit, source: int, destination: int, round_: int) -> None:
        near = self._node_of[source] == self._node_of[destination]
        (self._near if near else self._far)[source] += unit.elements
        self.made[unit.piece, source, destination, round_].extend(unit.params)

    def direct(self) -> None:
        """Every receiver asks a holder."""
        for unit in self._units():
            holders = list(self._pieces[unit.piece].holders)
            for node in self._nodes[unit.piece].values():
                near, far = node.holders, holders
                for needer in node.needers:
                    source = _least(near, self._near) if near else _least(far, self._far)
                    self._send(unit, source, needer, 0)

    def first_sends(self) -> None:
        """What holders cannot avoid: one copy into each node of theirs, one to all other nodes."""
        for unit in self._units():
            nodes = self._nodes[unit.piece]
            for key, node in nodes.items():
                if node.holders:
                    self._land(unit, key, node, _least(node.holders, self._near), 0)
            away = [node for node in nodes.values() if not node.holders]
            if away:
                # Whoever is first may have to serve all other nodes: take turns at it.
                hub = _least([needer for node in away for needer in node.needers], self._hub)
                self._hub[hub] += unit.elements * len(away)
                source = _least(list(self._pieces[unit.piece].holders), self._far)
                self._land(unit, self._node_of[hub], _Node([], [hub]), source, 0)

    def _land(self, unit: _Unit, key: int, node: _Node, source: int, round_: int) -> None:
        first = _least(node.needers, self._first_received)
        self._first_received[first] += unit.elements
        self._landed[unit, key] = (first, round_)
        self._send(unit, source, first, round_)

    def other_sends(self) -> None:
        """The rest: a holder while that keeps it below the busiest receiver, else a receiver.

        No plan ends before the busiest receiver has everything, so up to that load it costs
        nothing to ask the holder.
        """
        near_limit, far_limit = self._limits()
        for unit in self._units():
            piece, nodes = self._pieces[unit.piece], self._nodes[unit.piece]
            holders = list(piece.holders)
            hub = next(
                (self._landed[unit, k] for k, n in nodes.items()
                 if not n.holders and (unit, k) in self._landed), None,
            )  # fmt: skip
            for key, node in nodes.items():
                if (unit, key) not in self._landed:
                    assert hub is not None
                    source, round_ = self._source(unit, holders, hub, self._far, far_limit)
                    self._land(unit, key, node, source, round_)
                landed = self._landed[unit, key]
                for needer in node.needers:
                    if needer != landed[0]:
                        source, round_ = self._source(
                            unit, node.holders, landed, self._near, near_limit
                        )
                        self._send(unit, source, needer, round_)

    def _source(
        self, unit: _Unit, holders: list[int], landed: tuple[int, int], sent: Mapping[int, int],
        limit: int,
    ) -> tuple[int, int]:  # fmt: skip
        receiver, round_ = landed
        if holders:
            best = _least(holders, sent)
            if sent[best] + unit.elements <= limit or sent[best] <= sent[receiver]:
                return best, 0
        return receiver, round_ + 1

    def _limits(self) -> tuple[int, int]:
        """What the busiest device receives, and what it receives over the network if shared out."""
        lacking, far = Counter[int](), Counter[int]()
        members = defaultdict[int, set[int]](set)
        for piece, nodes in zip(self._pieces, self._nodes, strict=True):
            elements = volume(piece.box) * len(piece.kind.params)
            for needer in piece.needers:
                lacking[needer] += elements
            for key, node in nodes.items():
                if not node.holders:
                    far[key] += elements
                    members[key].update(node.needers)
        per_device = [far[key] // len(members[key]) for key in far]
        return max(lacking.values(), default=0), max(per_device, default=0)


def _least(devices: Sequence[int], sent: Mapping[int, int]) -> int:
    return devices[0] if len(devices) == 1 else min(devices, key=sent.__getitem__)


def _nodes(piece: Piece, node_of: Mapping[int, int]) -> Mapping[int, _Node]:
    """The nodes with receivers."""
    nodes: dict[int, _Node] = {}
    for needer in sorted(piece.needers):
        nodes.setdefault(node_of[needer], _Node([], [])).needers.append(needer)
    for holder in sorted(piece.holders):
        if node_of[holder] in nodes:
            nodes[node_of[holder]].holders.append(holder)
    return nodes
