"""How long the search for a plan takes, and how sure it is, from 64 GPUs to 10,240.

PPO with four models of 70B, or with four mixtures of experts, and rows in proportion to the
cluster. Options come from the models of time and memory with the constants fitted to published
times, or from a made-up table (`planner_synthetic.py`) whose every question takes as long as one is
told.

`cpu_s` is what the search computes on its one core; on a machine with other work it takes longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
from bench import parser, report, table
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.dataflow.graph.tracer import build
from penstock.planner.inputs.calls import Lengths, Workload, calls_of
from penstock.planner.inputs.cluster import ClusterSpec
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.search.option_table import ModelTable, call_nodes
from penstock.planner.search.options import CallNode, OptionTable, SearchResult
from penstock.planner.search.search import search
from planner_case import PUBLISHED_H100
from planner_synthetic import SHAPE_70B, SyntheticTable, h100_cluster, ppo_calls

MIXTRAL = ModelShape(
    name="mixtral-8x7b",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_key_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=32000,
    num_experts=8,
    experts_per_token=2,
)
QWEN3_MOE = ModelShape(
    name="qwen3-30b-a3b",
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_key_heads=4,
    head_dim=128,
    intermediate_size=768,
    vocab_size=151936,
    num_experts=128,
    experts_per_token=8,
    qk_norm=True,
)

Problem: TypeAlias = tuple[Sequence[CallNode], OptionTable, ClusterSpec]


def num_rows(num_nodes: int) -> int:
    """Four per GPU, 128 at least."""
    return max(128, 32 * num_nodes)


def modeled(shape: ModelShape, num_nodes: int, ask_s: float) -> Problem:
    """What `penstock plan` asks for the shipped PPO with four models of that shape."""
    workload = Workload(
        num_prompts=num_rows(num_nodes),
        samples_per_prompt=1,
        prompt=Lengths.constant(1024),
        response=Lengths.constant(1024),
    )
    graph = build(ppo_step, cfg=PPO(epochs=1, num_minibatches=4))
    calls = calls_of(graph, workload, dict.fromkeys(graph.roles, shape))
    return call_nodes(calls), ModelTable(calls, PUBLISHED_H100), h100_cluster(num_nodes)


def synthetic(num_nodes: int, ask_s: float) -> Problem:
    """The same four models on the made-up table."""
    table = SyntheticTable(SHAPE_70B, SHAPE_70B, num_rows(num_nodes), ask_s=ask_s)
    return ppo_calls(), table, h100_cluster(num_nodes)


PROBLEMS: dict[str, Callable[[int, float], Problem]] = {
    "model": partial(modeled, SHAPE_70B),
    "mixtral": partial(modeled, MIXTRAL),
    "qwen3-moe": partial(modeled, QWEN3_MOE),
    "synthetic": synthetic,
}
"""Table -> the problem for so many nodes, if a made-up question takes so many seconds."""


def row_of(num_nodes: int, max_lag: int, cpu_s: float, result: SearchResult) -> dict[str, Any]:
    """One search as a program reads it."""
    return {
        "num_devices": 8 * num_nodes,
        "max_lag": max_lag,
        "search_time_s": round(result.search_time_s, 2),
        "cpu_s": round(cpu_s, 2),
        "gap": round(result.gap, 5),
        "step_time_s": result.step_time_s,
        "lower_bound_s": result.lower_bound_s,
        "stopped_at_deadline": result.stopped_at_deadline,
        "table_asked": result.num_asked,
        "plan": str(result.best),
    }


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Seconds over devices, one line per schedule, with the times asked for."""
    mpl.rcParams["svg.hashsalt"] = "planner_scale"
    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for max_lag in dict.fromkeys(row["max_lag"] for row in rows):
        some = [row for row in rows if row["max_lag"] == max_lag]
        worst = max(row["gap"] for row in some)
        axes.plot(
            [row["num_devices"] for row in some],
            [row["cpu_s"] for row in some],
            marker="o",
            label=f"max_lag = {max_lag}, gap at most {worst:.1%}",
        )
    axes.plot([128, 1024, 10240], [10, 60, 60], "k_", markersize=16, label="asked for at most")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds on one core")
    axes.set_xticks([row["num_devices"] for row in rows], [str(r["num_devices"]) for r in rows])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Search at every size under every schedule; print, draw, write."""
    options = parser((__doc__ or "").splitlines()[0])
    options.add_argument("--table", choices=PROBLEMS, default="model")
    options.add_argument("--nodes", type=int, nargs="+", default=[8, 16, 32, 64, 128, 512, 1280])
    options.add_argument("--lags", type=int, nargs="+", default=[0, 1])
    options.add_argument("--ask-ms", type=float, default=3.0, help="of the made-up table")
    options.add_argument("--deadline", type=float, default=300.0, metavar="SECONDS")
    options.add_argument("--svg", type=Path, help="where to draw the curves")
    args = options.parse_args()
    rows: list[dict[str, Any]] = []
    for max_lag in args.lags:
        for num_nodes in args.nodes:
            calls, asked, cluster = PROBLEMS[args.table](num_nodes, args.ask_ms / 1e3)
            began_s = time.process_time()
            result = search(
                calls, asked, cluster,
                max_lag=max_lag, deadline_s=args.deadline,
            )  # fmt: skip
            cpu_s = time.process_time() - began_s
            rows.append(row_of(num_nodes, max_lag, cpu_s, result))
            print(f"{rows[-1]['num_devices']} GPUs, max_lag {max_lag}: {result.best}")
    head = ["num_devices", "max_lag", "search_time_s", "cpu_s", "gap", "table_asked"]
    print(table(head, [[row[key] for key in head] for row in rows]))
    if args.svg:
        draw(rows, args.svg)
        print(f"drawn to {args.svg}")
    report({"table": args.table, "searches": rows}, args.json)


if __name__ == "__main__":
    main()
