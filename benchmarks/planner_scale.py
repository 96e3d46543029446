"""How long the search for a plan takes, and how sure it is, from 64 GPUs to 10,240.

PPO with four models of 70B and rows in proportion to the cluster. Options come from the models of
time and memory with the constants fitted to published times, or from a made-up table
(`planner_synthetic.py`) whose every question takes as long as one is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import matplotlib as mpl

mpl.use("svg")

import matplotlib.pyplot as plt
from bench import parser, report, table
from penstock.algorithms.ppo import PPO, ppo_step
from penstock.dataflow.graph.tracer import build
from penstock.planner.cost.constants import PUBLISHED_H100
from penstock.planner.inputs.calls import calls_of
from penstock.planner.inputs.cluster import ClusterSpec
from penstock.planner.inputs.workload import Lengths, Workload
from penstock.planner.search.option_table import ModelTable, call_nodes
from penstock.planner.search.options import CallNode, OptionTable
from penstock.planner.search.result import SearchResult
from penstock.planner.search.search import search
from planner_synthetic import SHAPE_70B, SyntheticTable, h100_cluster, ppo_calls

Problem: TypeAlias = tuple[Sequence[CallNode], OptionTable, ClusterSpec]


def num_rows(num_nodes: int) -> int:
    """Four per GPU, 128 at least."""
    return max(128, 32 * num_nodes)


def modeled(num_nodes: int, ask_s: float) -> Problem:
    """What `penstock plan` asks for the shipped PPO."""
    workload = Workload(
        num_prompts=num_rows(num_nodes),
        samples_per_prompt=1,
        prompt=Lengths.constant(1024),
        response=Lengths.constant(1024),
    )
    graph = build(ppo_step, cfg=PPO(epochs=1, num_minibatches=4))
    calls = calls_of(graph, workload, dict.fromkeys(graph.roles, SHAPE_70B))
    return call_nodes(calls), ModelTable(calls, PUBLISHED_H100), h100_cluster(num_nodes)


def synthetic(num_nodes: int, ask_s: float) -> Problem:
    """The same four models on the made-up table."""
    table = SyntheticTable(SHAPE_70B, SHAPE_70B, num_rows(num_nodes), ask_s=ask_s)
    return ppo_calls(), table, h100_cluster(num_nodes)


PROBLEMS: dict[str, Callable[[int, float], Problem]] = {
    "model": modeled,
    "synthetic": synthetic,
}
"""Table -> the problem for so many nodes, if a made-up question takes so many seconds."""


def row_of(num_nodes: int, max_lag: int, result: SearchResult) -> dict[str, Any]:
    """One search as a program reads it."""
    return {
        "num_devices": 8 * num_nodes,
        "max_lag": max_lag,
        "search_time_s": round(result.search_time_s, 2),
        "gap": round(result.gap, 5),
        "step_time_s": result.step_time_s,
        "lower_bound_s": result.lower_bound_s,
        "stopped_at_deadline": result.stopped_at_deadline,
        "table_asked": result.num_asked,
        "boxes": result.num_boxes,
        "schedules_played": result.num_played,
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
            [row["search_time_s"] for row in some],
            marker="o",
            label=f"max_lag = {max_lag}, gap at most {worst:.1%}",
        )
    axes.plot([128, 1024, 10240], [10, 60, 300], "k_", markersize=16, label="asked for at most")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="seconds to find the plan")
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
    options.add_argument("--max-gap", type=float, default=0.0)
    options.add_argument("--deadline", type=float, default=300.0, metavar="SECONDS")
    options.add_argument("--svg", type=Path, help="where to draw the curves")
    args = options.parse_args()
    rows: list[dict[str, Any]] = []
    for max_lag in args.lags:
        for num_nodes in args.nodes:
            calls, asked, cluster = PROBLEMS[args.table](num_nodes, args.ask_ms / 1e3)
            result = search(
                calls, asked, cluster,
                max_lag=max_lag, deadline_s=args.deadline, max_gap=args.max_gap,
            )  # fmt: skip
            rows.append(row_of(num_nodes, max_lag, result))
            print(f"{rows[-1]['num_devices']} GPUs, max_lag {max_lag}: {result.best}")
    head = ["num_devices", "max_lag", "search_time_s", "gap", "table_asked", "boxes",
            "schedules_played"]  # fmt: skip
    print(table(head, [[row[key] for key in head] for row in rows]))
    if args.svg:
        draw(rows, args.svg)
        print(f"drawn to {args.svg}")
    report({"table": args.table, "searches": rows}, args.json)


if __name__ == "__main__":
    main()
