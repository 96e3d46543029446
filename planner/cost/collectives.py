"""How long messages between the ranks of a group take.

A hop costs a latency and bytes over bandwidth (alpha-beta). A group that lies in one node is one
ring; a group over several nodes works in two levels, a ring inside each node and rings between
nodes in which every device carries its share, so that a node's bytes cross the network once and all
of its ports are busy. Hockney, "The communication challenge for MPP", 1994; ring volumes as in
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH",
2005.
"""

from __future__ import annotations

from typing import NamedTuple

from ..inputs.mesh import Mesh
from .constants import Constants


class Links(NamedTuple):
    """What a mesh's links give a program. `stride` below is the distance of neighboring ranks.

    Ranks are devices 0, stride, 2 stride, ... of a block, so a node holds `node_size // stride` of
    them.
    """

    node_size: int  # devices that share a node
    within_bytes_per_s: float  # inside a node, per device and direction, as reached
    between_bytes_per_s: float  # between nodes, per device and direction, as reached
    within_hop_s: float  # latency of a hop inside a node
    between_hop_s: float  # latency of a hop between nodes
    within_stage_s: float  # latency of a hand-over between pipeline stages inside a node
    between_stage_s: float  # latency of a hand-over between pipeline stages on different nodes


def links_of(mesh: Mesh, constants: Constants) -> Links:
    """The links of a mesh, with what a program reaches of them."""
    within, between = mesh.within, mesh.between
    return Links(
        mesh.node_size,
        within.bytes_per_s * constants.network_efficiency,
        between.bytes_per_s * constants.network_efficiency,
        within.latency_s + constants.hop_s,
        between.latency_s + constants.hop_s,
        within.latency_s + constants.stage_s,
        between.latency_s + constants.stage_s,
    )


def all_gather_s(links: Links, num_bytes: float, ranks: int, stride: int = 1) -> float:
    """Every rank has 1/ranks of `num_bytes` and ends with all of them."""
    if ranks == 1:
        return 0.0
    local = min(max(links.node_size // stride, 1), ranks)
    time = (local - 1) * (num_bytes / local / links.within_bytes_per_s + links.within_hop_s)
    if local < ranks:
        nodes = -(-ranks // local)
        share = num_bytes / local / nodes
        time += (nodes - 1) * (share / links.between_bytes_per_s + links.between_hop_s)
    return time


def all_reduce_s(links: Links, num_bytes: float, ranks: int, stride: int = 1) -> float:
    """Every rank has `num_bytes` and ends with their sum: a reduce-scatter and a gather."""
    return 2.0 * all_gather_s(links, num_bytes, ranks, stride)


def all_to_all_s(links: Links, num_bytes: float, ranks: int, stride: int = 1) -> float:
    """Every rank sends `num_bytes` in equal parts, one to each rank, itself included."""
    if ranks == 1:
        return 0.0
    local = min(max(links.node_size // stride, 1), ranks)
    part = num_bytes / ranks
    time = (local - 1) * (part / links.within_bytes_per_s + links.within_hop_s)
    return time + (ranks - local) * (part / links.between_bytes_per_s + links.between_hop_s)


def point_to_point_s(links: Links, num_bytes: float, block: int) -> float:
    """Hand `num_bytes` to the next pipeline stage, all stages together being `block` devices.

    Stages move in step, so one boundary between nodes sets the pace for all.
    """
    if block <= links.node_size:
        return num_bytes / links.within_bytes_per_s + links.within_stage_s
    return num_bytes / links.between_bytes_per_s + links.between_stage_s
