"""Bytes and planning time of transfer plans: HybridFlow's Table 2, and what it does not cover.

Table 2 (HybridFlow, section 5.4) holds for generation on the training devices in sizes that divide
those of training. The other cases do not divide, or move to other devices; there every plan is held
against the lower bound, the bytes that the receivers need and lack. Planning runs on one core; its
times are processor time, so that a busy machine does not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from bench import parser, report, table
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.resharding.plan import TransferPlan
from penstock.planner.resharding.plan_transfer import plan_transfer
from penstock.planner.resharding.rank_assignment import fewest_bytes, strided_generation
from penstock.planner.resharding.sharding import Sharding, shard

A100 = DeviceSpec(
    name="a100-80g",
    memory_bytes=80 * 10**9,
    flops_per_s={"bfloat16": 312e12},
    memory_bytes_per_s=2.0e12,
    host_bytes_per_s=2.5e10,
)
# NVLink at 300 GB/s in each direction; 200 Gb/s per node, shared by its 8 devices.
WITHIN = LinkSpec(bytes_per_s=300e9, latency_s=1e-5)
BETWEEN = LinkSpec(bytes_per_s=25e9 / 8, latency_s=2e-5)


def llama(
    name: str, hidden: int, layers: int, heads: int, key_heads: int, inner: int
) -> ModelShape:
    """A Llama 2."""
    return ModelShape(
        name=name,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_key_heads=key_heads,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=32000,
    )


L7 = llama("llama2-7b", 4096, 32, 32, 32, 11008)
L13 = llama("llama2-13b", 5120, 40, 40, 40, 13824)
L70 = llama("llama2-70b", 8192, 80, 64, 8, 28672)
MIXTURE = ModelShape(
    name="30b, 128 experts",
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_key_heads=4,
    head_dim=128,
    intermediate_size=768,
    vocab_size=151936,
    num_experts=128,
    experts_per_token=8,
)


class Published(NamedTuple):
    """A worked row of Table 2: GB per device with DeepSpeed-Chat, HybridFlow-V and HybridFlow."""

    model: ModelShape
    size_gb: float
    train: Layout
    generate: Layout
    received_gb: tuple[float, float, float]


TABLE_2 = (
    Published(L70, 140, Layout(tp=8, dp=16), Layout(tp=2, dp=64), (138.9, 122.5, 52.5)),
    Published(L70, 140, Layout(tp=8, pp=2, dp=8), Layout(tp=4, dp=32), (138.9, 131.3, 26.3)),
    Published(L7, 14, Layout(tp=8, dp=2), Layout(tp=2, dp=8), (13.1, 12.3, 5.25)),
)


class Case(NamedTuple):
    """A transfer that Table 2 does not cover; device ranges as (first, end)."""

    name: str
    model: ModelShape
    train: Layout
    train_on: tuple[int, int]
    generate: Layout
    generate_on: tuple[int, int]


CASES = (
    Case("wider tp", L70, Layout(tp=4, pp=4, dp=8), (0, 128), Layout(tp=8, dp=16), (0, 128)),
    Case("FSDP to tp", L70, Layout(dp=128, zero=3), (0, 128), Layout(tp=8, dp=16), (0, 128)),
    Case("pp 5 to pp 4, 8 more devices", L70, Layout(tp=8, pp=5, dp=3), (0, 120),
         Layout(tp=8, pp=4, dp=4), (0, 128)),
    Case("disjoint", L70, Layout(tp=8, pp=2, dp=4), (0, 64), Layout(tp=4, dp=16), (64, 128)),
    Case("half overlapping", L13, Layout(tp=8, pp=5, dp=2), (0, 80), Layout(tp=4, dp=16),
         (40, 104)),
    Case("one node feeds 8", L7, Layout(tp=8), (0, 8), Layout(tp=1, dp=64), (8, 72)),
    Case("FSDP mixture to tp and ep", MIXTURE, Layout(dp=32, zero=3), (0, 32),
         Layout(tp=2, dp=16, ep=8), (0, 32)),
)  # fmt: skip


def a100s(num_devices: int) -> ClusterSpec:
    """Enough nodes of 8."""
    nodes = -(-num_devices // 8)
    group = NodeGroup(num_nodes=nodes, devices_per_node=8, device=A100, within=WITHIN)
    return ClusterSpec(name="a100", node_groups=(group,), between=BETWEEN)


def received(plan: TransferPlan) -> int:
    """Of the busiest device."""
    return max(share.received_bytes for share in plan.devices)


def table_2() -> list[dict[str, Any]]:
    """Published rows beside ours, scaled to the published model size."""
    rows: list[dict[str, Any]] = []
    for row in TABLE_2:
        t, p, d = row.train.tp, row.train.pp, row.train.dp
        whole = t * p
        part = row.generate.tp * row.generate.pp
        devices = range(row.train.num_devices)
        cluster = a100s(len(devices))
        source = shard(row.model, row.train, devices)
        order = strided_generation(row.train, row.generate, devices)
        strided = plan_transfer(source, shard(row.model, row.generate, order), cluster)
        in_order = shard(row.model, row.generate, devices)
        found = plan_transfer(source, fewest_bytes(source, in_order, cluster), cluster)
        naive = plan_transfer(source, in_order, cluster)
        scale = row.size_gb / (row.model.num_params() * row.model.dtype_bytes)
        rows.append(
            {
                "model": row.model.name,
                "model_gb": row.size_gb,
                "train": str(row.train),
                "generate": str(row.generate),
                "published_gb": row.received_gb,
                "formula_gb": (
                    (whole * d - 1) / (whole * d) * row.size_gb,
                    (whole - 1) / whole * row.size_gb,
                    (whole - part) / (part * whole) * row.size_gb,
                ),
                "strided_gb": received(strided) * scale,
                "found_gb": received(found) * scale,
                "ranks_in_order_gb": received(naive) * scale,
                "redundant_gb": sum(share.unused_bytes for share in strided.devices) * scale,
                "shard_gb": max(share.needed_bytes for share in strided.devices) * scale,
                "peak_gb": max(share.peak_bytes for share in strided.devices) * scale,
            }
        )
    return rows


def other_cases() -> list[dict[str, Any]]:
    """Transfers beyond Table 2, with relay and without."""
    rows: list[dict[str, Any]] = []
    for case in CASES:
        source = shard(case.model, case.train, range(*case.train_on))
        cluster = a100s(max(case.train_on[1], case.generate_on[1]))
        in_order = shard(case.model, case.generate, range(*case.generate_on))
        destination = fewest_bytes(source, in_order, cluster)
        for relay in (True, False):
            begin = time.process_time()
            plan = plan_transfer(source, destination, cluster, relay=relay)
            seconds = time.process_time() - begin
            assert plan.time is not None
            rows.append(
                {
                    "case": case.name,
                    "model": case.model.name,
                    "train": f"{case.train} on {case.train_on[0]}-{case.train_on[1] - 1}",
                    "generate": f"{case.generate} on {case.generate_on[0]}-"
                    f"{case.generate_on[1] - 1}",
                    "relay": relay,
                    "sent_gb": plan.sent_bytes / 1e9,
                    "lower_bound_gb": plan.lower_bound_bytes / 1e9,
                    "above_bound_bytes": plan.sent_bytes - plan.lower_bound_bytes,
                    "between_nodes_gb": sum(s.sent_between_bytes for s in plan.devices) / 1e9,
                    "most_received_gb": received(plan) / 1e9,
                    "most_sent_gb": max(share.sent_bytes for share in plan.devices) / 1e9,
                    "predicted_s": plan.time.total_s,
                    "floor_s": plan.time.floor_s,
                    "num_moves": len(plan.moves),
                    "planning_s": seconds,
                }
            )
    return rows


def planning_time(num_devices: int, repeats: int) -> dict[str, Any]:
    """70B from tp 8, pp 2 to tp 4, everything from shapes to the plan."""
    train = Layout(tp=8, pp=2, dp=num_devices // 16)
    generate = Layout(tp=4, dp=num_devices // 4)
    cluster = a100s(num_devices)
    parts: dict[str, list[float]] = {"shard": [], "order": [], "plan": []}

    def timed(name: str, begin: float) -> None:
        parts[name].append(time.process_time() - begin)

    num_moves = 0
    for _ in range(repeats):
        begin = time.process_time()
        source = shard(L70, train, range(num_devices))
        destination: Sharding = shard(L70, generate, range(num_devices))
        timed("shard", begin)
        begin = time.process_time()
        destination = fewest_bytes(source, destination, cluster)
        timed("order", begin)
        begin = time.process_time()
        num_moves = len(plan_transfer(source, destination, cluster).moves)
        timed("plan", begin)
    medians = {f"{name}_s": statistics.median(values) for name, values in parts.items()}
    return {"num_devices": num_devices, "num_moves": num_moves, **medians}


def show(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Print some columns of some results."""

    def text(value: Any) -> str:
        if isinstance(value, tuple):
            return " / ".join(f"{v:.4g}" for v in value)  # pyright: ignore[reportUnknownVariableType]
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    print(table(columns, [[text(row[column]) for column in columns] for row in rows]), "\n")


def main() -> None:
    """Print all three tables."""
    options = parser(__doc__ or "")
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args()
    published, others = table_2(), other_cases()
    timings = [planning_time(number, args.repeats) for number in (16, 128, 1024)]
    print("Table 2, GB received per device: DeepSpeed-Chat / HybridFlow-V / HybridFlow, then ours")
    show(published, ("model", "train", "generate", "published_gb", "formula_gb", "strided_gb",
                     "found_gb", "ranks_in_order_gb", "redundant_gb", "shard_gb",
                     "peak_gb"))  # fmt: skip
    print("Beyond Table 2")
    show(others, ("case", "train", "generate", "relay", "sent_gb", "lower_bound_gb",
                  "between_nodes_gb", "most_received_gb", "most_sent_gb", "predicted_s",
                  "floor_s", "num_moves", "planning_s"))  # fmt: skip
    print("Time to plan 70B, tp8 pp2 -> tp4")
    show(timings, ("num_devices", "shard_s", "order_s", "plan_s", "num_moves"))
    report({"table_2": published, "other_cases": others, "planning_time": timings}, args.json)


if __name__ == "__main__":
    main()
