"""Arrows, labels and weights that every drawing of a graph shows.

One arrow joins two nodes however many columns travel along it. Data arrows come in two kinds: one
that *streams* may carry part of a batch before the rest is there, a *barrier* waits for all of it.
A third kind joins a train call to the calls after it that read the weights it made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..graph.graph import Graph, Node, NodeKind

ArrowKind = Literal["stream", "barrier", "weights"]


@dataclass(frozen=True)
class DrawnArrow:
    """One arrow of a drawing."""

    source: str  # Name of the node it leaves
    target: str  # Name of the node it enters
    kind: ArrowKind  # See the module
    # What it carries, one text a column: `mask`, or `behavior_logprob → logprob` where the input's
    # name differs from the column's.
    labels: tuple[str, ...]


def arrows_of(graph: Graph) -> tuple[DrawnArrow, ...]:
    """Every arrow, in the order of the nodes they enter."""
    arrows: list[DrawnArrow] = []
    for node in graph.nodes:
        labels: dict[str, list[str]] = {}
        kinds: dict[str, ArrowKind] = {}
        for path, ref in node.inputs:
            text = _label(path.rpartition(".")[2], ref.column)
            carried = labels.setdefault(ref.node, [])
            if text not in carried:
                carried.append(text)
            kinds[ref.node] = "stream" if graph.streams(node, ref) else "barrier"
        arrows.extend(
            DrawnArrow(source, node.name, kinds[source], tuple(texts))
            for source, texts in labels.items()
        )
        arrows.extend(_weight_arrows(graph, node))
    return tuple(arrows)


def _label(parameter: str, column: str) -> str:
    return parameter if column in (parameter, "out") else f"{column} → {parameter}"


def _weight_arrows(graph: Graph, node: Node) -> list[DrawnArrow]:
    return [
        DrawnArrow(maker.name, node.name, "weights", (f"{read.role}@{read.offset}",))
        for read in node.reads
        for maker in graph.nodes
        if maker.kind is NodeKind.TRAIN
        and maker.role == read.role
        and maker.reads[0].offset + 1 == read.offset
    ]
