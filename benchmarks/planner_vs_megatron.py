"""The share of a peak that models of several widths reach, from published Megatron-LM iterations.

Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022 (arXiv
2205.05198), tables 3 and 5: seconds per iteration of GPT models of known size on A100s, in known
layouts without data parallelism, with sequence parallelism and attention's scores computed again.
Compute, collectives, pipeline and optimizer are those of our model of time; what is left open is
`matmul_efficiency`, and the published seconds determine it: one share for every width. Narrow
models reach less, because norms, activations and scores, which grow with the width alone, weigh
more beside products, which grow with its square, and because smaller products use a device less.

`share_of_width` interpolates as `Calibration` does: over the logarithm of the width, and beyond the
widths that were measured it is that of the nearest.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from bench import parser, report, table
from penstock.planner.cost.calibration import GPU_DEFAULTS
from penstock.planner.cost.time_model import TimeModel
from penstock.planner.inputs.calls import Call, Lengths
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, Mesh, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape

__all__ = ["A100", "share_of_width"]

A100 = DeviceSpec(
    name="a100-80g",
    memory_bytes=80_000_000_000,
    flops_per_s={"float16": 312e12},
    memory_bytes_per_s=2.039e12,
    host_bytes_per_s=20e9,
    reserved_bytes=3_000_000_000,
)


class Row(NamedTuple):
    """A row of tables 3 and 5."""

    name: str
    hidden: int
    layers: int
    heads: int
    stages: int
    chunks: int
    """Parts of a stage, between which the pipeline is interleaved."""
    batch: int
    micro_batch: int
    seconds: float


ROWS = (
    Row("22B", 6144, 48, 64, 1, 1, 4, 4, 1.10),
    Row("175B", 12288, 96, 96, 8, 3, 64, 1, 13.75),
    Row("530B", 20480, 105, 128, 35, 3, 280, 1, 37.83),
    Row("1T", 25600, 128, 160, 64, 1, 512, 1, 71.49),
)


def seconds(row: Row, share: float) -> float:
    """An iteration by our model of time, if products reach that share of the peak."""
    shape = ModelShape(
        name=row.name,
        hidden_size=row.hidden,
        num_layers=row.layers,
        num_heads=row.heads,
        num_key_heads=row.heads,
        head_dim=row.hidden // row.heads,
        # As many weights as a feed-forward of two matrices that is four times as wide.
        intermediate_size=8 * row.hidden // 3,
        vocab_size=51200,
        tied_embeddings=True,
        dtype="float16",
    )
    call = Call(
        name="model.train",
        role="model",
        kind="train",
        model=shape,
        head="vocabulary",
        trained=True,
        num_sequences=row.batch,
        prompt=Lengths.constant(1),
        response=Lengths.constant(2047),
        updates=1,
    )
    layout = Layout(tp=8, pp=row.stages, sequence_parallel=True, micro_batch=row.micro_batch)
    mesh = Mesh(_cluster(row.stages), (8 * row.stages,))
    # In a node the links are as NCCL measures them, see `planner_vs_hybridflow.py`.
    constants = GPU_DEFAULTS.replaced(matmul_efficiency=share, network_efficiency=1.0, call_s=0.0)
    time = TimeModel(constants).call_time(call, layout, mesh)
    # Interleaved stages wait for a part of one (Narayanan et al., 2021, section 2.2); attention's
    # scores and sums are computed a fourth time.
    return time.total_s - time.bubble_s * (1 - 1 / row.chunks) + time.attention_s / 3


def _cluster(num_nodes: int) -> ClusterSpec:
    """Nodes of 8 A100s with a port of 200 Gb/s each."""
    nodes = NodeGroup(
        num_nodes=num_nodes,
        devices_per_node=8,
        device=A100,
        within=LinkSpec(bytes_per_s=232e9, latency_s=5e-6),
    )
    between = LinkSpec(bytes_per_s=0.7 * 25e9, latency_s=2e-5)
    return ClusterSpec(name="selene", node_groups=(nodes,), between=between)


@cache
def _share(row: Row) -> float:
    """The share at which our model takes the published seconds."""
    low, high = 0.1, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(row, middle) > row.seconds else (low, middle)
    return low


def share_of_width(width: int) -> float:
    """The share of the peak that a model of that hidden size reaches."""
    known = [(row.hidden, _share(row)) for row in ROWS]
    if width <= known[0][0]:
        return known[0][1]
    for (low, at_low), (high, at_high) in pairwise(known):
        if width <= high:
            return at_low + math.log(width / low) / math.log(high / low) * (at_high - at_low)
    return known[-1][1]


def main() -> None:
    """Print the shares."""
    options = parser((__doc__ or "").splitlines()[0])
    args = options.parse_args()
    default = GPU_DEFAULTS.matmul_efficiency
    rows: list[dict[str, Any]] = [
        {"model": row.name, "width": row.hidden, "published_s": row.seconds,
         "default_s": seconds(row, default), "share": _share(row)}
        for row in ROWS
    ]  # fmt: skip
    lines = [[row["model"], row["width"], f"{row['published_s']:.2f}",
              f"{row['default_s']:.2f}", f"{row['share']:.3f}"] for row in rows]  # fmt: skip
    print(table(["model", "width", "published s", f"s at {default}", "share"], lines))
    report({"rows": rows}, args.json)


if __name__ == "__main__":
    main()
