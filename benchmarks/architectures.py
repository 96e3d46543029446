"""IMPALA, SEED, SRL and Cleanba as plans of one graph: a run of each, and a picture of its trace.

The step function is `impala_step` in every case, the task a CartPole whose steps take half a
millisecond, the processes Ray's. What differs is the plan and how far acting may run ahead of
training. Where that is the same, so are the weights at the end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from bench import parser, report, table
from penstock.algorithms.impala import Impala, impala_step
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.messages import TaskSpan
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.planner.plan.plan import GroupPlan, Plan
from penstock.workers.envs.actors.actor_critic import TorchActorCriticSpec
from penstock.workers.envs.actors.perceptron import PerceptronSpec
from penstock.workers.envs.spec import EnvSpec
from penstock.workers.envs.task import EnvRowSource
from penstock.workers.envs.worker import EnvWorkerSpec
from penstock.workers.executors.on_ray.executor import RayExecutor, shutdown_ray
from penstock.workers.training.optimizer import OptimizerSpec

NUM_ENVS = 32
NUM_STEPS = 14
SHOWN = range(6, 11)
"""Steps in the picture: those before start processes and warm up."""

TRAIN = GroupPlan(name="learner")


@dataclass(frozen=True)
class Architecture:
    """One published design.

    Attributes:
        name: What its authors call it.
        plan: Where nodes run.
        max_lag: How many versions older than the newest the acting weights may be.
        says: In a sentence, for the picture's title.
    """

    name: str
    plan: Plan
    max_lag: int
    says: str


def _acting(served: dict[str, str] | None = None) -> GroupPlan:
    return GroupPlan(name="actors", num_ranks=2, served=served or {})


_APART = {"env": "actors"}
ARCHITECTURES = (
    Architecture(
        "IMPALA",
        Plan(groups=(TRAIN, _acting()), nodes=_APART),
        1,
        "copies of the policy act, and run ahead of the learner",
    ),
    Architecture(
        "SEED",
        Plan(groups=(TRAIN, _acting({"actor": "learner"})), nodes=_APART),
        0,
        "actors have no policy; they ask the learner's",
    ),
    Architecture(
        "SRL",
        Plan(groups=(TRAIN, _acting({"actor": "policy"}), GroupPlan(name="policy")), nodes=_APART),
        1,
        "actors ask policy workers, and run ahead of the learner",
    ),
    Architecture(
        "Cleanba",
        Plan(groups=(TRAIN, GroupPlan(name="actors")), nodes=_APART),
        1,
        "one actor device exactly one version behind",
    ),
)


def traced(one: Architecture) -> tuple[list[TaskSpan], str]:
    """All calls of a run, and what its weights are at the end."""
    graph = build(impala_step, cfg=Impala(horizon=32))
    env = EnvSpec(id="waiting_env:WaitingCartPole-v0")
    network = PerceptronSpec(hidden_sizes=(256, 256))
    workers: Any = {
        "env": EnvWorkerSpec(env=env),
        "actor": TorchActorCriticSpec(network=network, env=env, optimizer=OptimizerSpec(lr=1e-3)),
    }
    sources = {"rows": EnvRowSource(NUM_ENVS, NUM_ENVS // 4)}
    engine = Engine(
        graph,
        one.plan.placement(graph),
        workers=workers,
        executor=RayExecutor(num_threads=1),
        schedule=Schedule(max_lag=one.max_lag),
    )
    with engine:
        spans = [span for step in engine.run(sources, NUM_STEPS) for span in step.spans]
        return spans, engine.call("actor", "weights_sha256")


COLORS = {"env.rollout": "#4c78a8", "actor.train": "#f58518"}
OTHER = "#b8b8b8"


def draw(axes: Any, one: Architecture, spans: Sequence[TaskSpan]) -> None:
    """Lanes of processes; a box per call, with the step it belongs to."""
    shown = [span for span in spans if span.step in SHOWN]
    begin = min(span.start_s for span in shown)
    lanes = sorted({(span.group, span.rank) for span in shown})
    server = one.plan.groups[1].served.get("actor")
    if server and (server, 0) not in lanes:
        lanes.append((server, 0))
    for span in shown:
        at, ms = 1e3 * (span.start_s - begin), 1e3 * (span.end_s - span.start_s)
        row = lanes.index((span.group, span.rank))
        axes.barh(row, ms, left=at, height=0.7, color=COLORS.get(span.node, OTHER), linewidth=0)
        if span.node in COLORS:
            axes.text(at + ms / 2, row, str(span.step), ha="center", va="center", fontsize=7)
        if server and span.node == "env.rollout":
            axes.barh(
                lanes.index((server, 0)), ms, left=at, height=0.85, color="#4c78a8", alpha=0.2
            )
    axes.set_yticks(range(len(lanes)), [f"{group} {rank}" for group, rank in lanes])
    axes.invert_yaxis()
    axes.set_title(f"{one.name}: {one.says}", fontsize=9, loc="left")


def lag(spans: Sequence[TaskSpan]) -> int:
    """How many versions old the weights were that acted, at most."""
    read = [(s.step, dict(s.versions)["actor"]) for s in spans if s.node == "env.rollout"]
    return max(step - version for step, version in read)


def overlap(spans: Sequence[TaskSpan]) -> float:
    """The part of the time of training during which some environment was stepping."""
    shown = [span for span in spans if span.step in SHOWN]
    acting = [(s.start_s, s.end_s) for s in shown if s.node == "env.rollout"]
    train = [(s.start_s, s.end_s) for s in shown if s.group == TRAIN.name]
    points = sorted({point for pair in (*acting, *train) for point in pair})
    both = total = 0.0
    for low, high in zip(points, points[1:], strict=False):
        if any(a <= low and high <= b for a, b in train):
            total += high - low
            both += (high - low) * any(a <= low and high <= b for a, b in acting)
    return both / total


def main() -> None:
    """Run all, draw them under each other, and say how they differ."""
    options = parser(__doc__ or "")
    options.add_argument("--svg", type=Path, help="where to draw the traces")
    args = options.parse_args()
    mpl.rcParams["svg.hashsalt"] = "penstock"
    here = str(Path(__file__).parent)  # Ray's processes make environments by name
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *os.environ.get("PYTHONPATH", "").split()])
    figure, every = plt.subplots(len(ARCHITECTURES), figsize=(9, 8))
    rows: list[dict[str, Any]] = []
    for axes, one in zip(every, ARCHITECTURES, strict=True):
        spans, weights = traced(one)
        draw(axes, one, spans)
        rows.append(
            {
                "architecture": one.name,
                "versions_behind": lag(spans),
                "learner_overlapped": overlap(spans),
                "weights": weights[:12],
            }
        )
    shutdown_ray()
    every[-1].set_xlabel(
        "ms; blue: environments stepped, light: questions answered, orange: training"
    )
    figure.tight_layout()
    if args.svg:
        figure.savefig(args.svg, metadata={"Date": None})
    head = ("architecture", "versions behind", "learner overlapped", "weights")
    cells = [
        (r["architecture"], r["versions_behind"], f"{r['learner_overlapped']:.2f}", r["weights"])
        for r in rows
    ]
    print(table(head, cells))
    report({"architectures": rows}, args.json)


if __name__ == "__main__":
    main()
