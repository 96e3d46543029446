"""A machine of round numbers and a model small enough to count by hand."""

from __future__ import annotations

from typing import Any

from penstock.planner.cost.calibration import Constants
from penstock.planner.cost.time_model import TimeModel
from penstock.planner.cost.time_parts import CallTime
from penstock.planner.inputs.calls import Call, CallKind, Lengths
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, Mesh, NodeGroup
from penstock.planner.inputs.layout import Layout

from ..shapes import model_of

IDEAL = Constants(
    matmul_efficiency=1.0,
    memory_efficiency=1.0,
    network_efficiency=1.0,
    launch_s=0.0,
    hop_s=0.0,
    stage_s=0.0,
    call_s=0.0,
    source="nothing is lost",
)

TINY = model_of("tiny", 8, 2, 2, 1, 16, vocab_size=32)
"""Attention 8 x (2 + 2 x 1) x 4 + 2 x 4 x 8 = 192 weights, feed-forward 3 x 8 x 16 = 384, norms 16:
592 in a layer; embedding and head 256 each; 16 bytes of keys and values per token and layer."""

MIXTURE = TINY.model_copy(update={"num_experts": 4, "experts_per_token": 2})
"""A layer has 4 experts of 384 and a router of 32: 192 + 16 + 32 + 4 x 384 = 1776 weights, of which
a token meets 192 + 16 + 32 + 2 x 384 = 1008."""


def mesh(
    devices: int = 1,
    *,
    node_size: int = 4,
    flops: float = 1e9,
    memory: float = 1e12,
    within: float = 1e9,
    between: float = 1e8,
    latency: float = 0.0,
) -> Mesh:
    """Devices of nodes of `node_size`; by default reading weights costs next to nothing."""
    cluster = ClusterSpec(
        name="round",
        node_groups=(
            NodeGroup(
                num_nodes=-(-devices // node_size),
                devices_per_node=node_size,
                device=DeviceSpec(
                    name="round",
                    memory_bytes=10**9,
                    flops_per_s={"bfloat16": flops},
                    memory_bytes_per_s=memory,
                    host_bytes_per_s=1e7,
                ),
                within=LinkSpec(bytes_per_s=within, latency_s=latency),
            ),
        ),
        between=LinkSpec(bytes_per_s=between, latency_s=10 * latency),
    )
    return Mesh(cluster, (devices,))


def call(
    kind: CallKind, *, rows: int = 6, prompt: int = 2, response: int | Lengths = 2, **other: Any
) -> Call:
    """Rows of the tiny model."""
    fields: dict[str, Any] = {
        "model": TINY,
        "head": "vocabulary",
        "trained": True,
        "num_sequences": rows,
        "prompt": Lengths.constant(prompt),
        "response": Lengths.constant(response) if isinstance(response, int) else response,
    }
    return Call(name=f"actor.{kind}", role="actor", kind=kind, **{**fields, **other})


def timed(
    what: Call, on: Mesh | None = None, constants: Constants = IDEAL, *,
    kv_bytes: float | None = None, **layout: Any,
) -> CallTime:  # fmt: skip
    """Its time in a layout, by default without any split and in one micro-batch."""
    sizes = Layout.model_validate({"micro_batch": what.num_sequences, **layout})
    return call_time(what, sizes, on or mesh(sizes.num_devices), constants, kv_bytes=kv_bytes)


def call_time(
    what: Call, layout: Layout, on: Mesh, constants: Constants, *, kv_bytes: float | None = None
) -> CallTime:
    """What a fresh model of time predicts."""
    return TimeModel(constants).call_time(what, layout, on, kv_bytes=kv_bytes)
