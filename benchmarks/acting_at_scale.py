"""SRL's, IMPALA's and SEED's designs on 15,000 cores and 32 GPUs, planned and played through.

    python benchmarks/acting_at_scale.py --json FILE

Nothing is run: the planner's search looks at every layout of a step of `impala_step`, and the
engine's own scheduler plays those through that may be the best. The designs are pins of that search
(`plan.pins.acting.inference`): SRL has processes that do nothing but answer, IMPALA has a copy of
the policy in each process that acts, and SEED has those that train answer. Within its design each
has its best numbers of processes, groups and overlapped groups.

What is published is how much faster a core of SRL steps environments once it turns to others while
it waits for actions (its authors' repository `reallyscalablerl/experiments`), and so how long an
answer takes beside a step: that of SMAC's map 3m takes 2.7 steps. What is assumed: the seconds of a
step; that on a core the policy takes as long as an answer from elsewhere does; and that 20 GPUs
train, and 8 answer, as fast as all cores can step. So the ratios stand beside the paper's for their
size, and say which design each resource serves best, not what SRL would measure.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from bench import parser, report, table
from penstock.algorithms.impala import Impala, impala_step
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.kinds import NodeKind
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from penstock.planner.inputs.task_profile import (
    ActingPins,
    CallProfile,
    ExecutorProfile,
    LoopProfile,
    TaskProfile,
)
from penstock.planner.plan.acting_plan import plan_acting
from penstock.planner.plan.plan import Plan

NUM_CORES, NUM_GPUS = 15_000, 32
PAPER = 3.7
"""How much faster SRL's design is than the others at most (Mei et al., 2024)."""
ROWS = 240_000
"""Environments of a step: sixteen for each core."""
HORIZON = 16
CALL_S, REQUEST_S, PUBLISH_S = 7e-5, 5e-4, 0.1
"""What a call costs the controller (`controller_scale.py`), a request, and new weights."""
DESIGNS = {"SRL": "served", "IMPALA": "copied", "SEED": "served by the trainer"}


@dataclass(frozen=True)
class Environment:
    """A published environment.

    Attributes:
        gain: How much faster a core steps once its ring is large enough; published.
        step_s: Of one environment; assumed.
    """

    gain: float
    step_s: float

    @property
    def answer_s(self) -> float:
        return (self.gain - 1.0) * self.step_s

    @property
    def most_steps_per_s(self) -> float:
        return NUM_CORES / self.step_s


ENVIRONMENTS = {
    "Atari Pong": Environment(8.3, 8e-4),
    "SMAC 3m": Environment(3.7, 4e-3),
    "SMAC 27m_vs_30m": Environment(1.5, 4e-2),
}
TRAINING_GPUS, ANSWERING_GPUS = 20, 8
"""That are as fast as all cores."""


def cluster() -> ClusterSpec:
    """32 nodes that have a GPU each, and the cores between them."""
    gpu = DeviceSpec(
        name="a100",
        memory_bytes=80 << 30,
        flops_per_s={"float32": 1.9e13},
        memory_bytes_per_s=2e12,
        host_bytes_per_s=2e10,
    )
    node = NodeGroup(
        num_nodes=NUM_GPUS,
        devices_per_node=1,
        device=gpu,
        within=LinkSpec(bytes_per_s=1e11, latency_s=1e-5),
        cores_per_node=-(-NUM_CORES // NUM_GPUS),
    )
    return ClusterSpec(
        name="SRL's largest",
        node_groups=(node,),
        between=LinkSpec(bytes_per_s=1e10, latency_s=1e-4),
    )


def profile(one: Environment, *, on_gpu: bool) -> TaskProfile:
    """Costs of a step where the policy answers on GPUs, or on the core of who asks."""
    graph = build(impala_step, cfg=Impala(horizon=HORIZON))
    answered_s = ANSWERING_GPUS / one.most_steps_per_s

    def loop(rows: int) -> LoopProfile:
        return LoopProfile(
            rows=rows,
            turns=HORIZON,
            step_s=rows * one.step_s,
            step_cpu_s=rows * one.step_s,
            # An answer of a GPU takes as long for a few more environments.
            ask_s=one.answer_s - REQUEST_S if on_gpu else rows * one.answer_s,
            ask_cpu_s=rows * answered_s if on_gpu else rows * one.answer_s,
        )

    train_s = ROWS * HORIZON * TRAINING_GPUS / one.most_steps_per_s
    calls = {
        node.name: CallProfile(one_rank_s=0.0)
        for node in graph.nodes
        if node.kind not in (NodeKind.SOURCE, NodeKind.ROLLOUT)
    }
    calls["actor.train"] = CallProfile(one_rank_s=train_s, two_ranks_s=train_s / 2)
    return TaskProfile(
        setting={},
        rows={"env.rollout": ROWS},
        loops={"env.rollout": (loop(1), loop(64))},
        calls=calls,
        executor=ExecutorProfile(
            name="ray", call_s=CALL_S, publish_s=PUBLISH_S, request_s=REQUEST_S,
            request_cpu_s=0.0,
        ),
        cores=NUM_CORES,
        machine="a cluster as SRL's largest",
        date="2026-11-28",
    )  # fmt: skip


def planned(one: Environment, max_lag: int, **pins: Any) -> tuple[Plan, float]:
    """A plan and the seconds of a core that it took to find."""
    began_s = time.process_time()
    plan = plan_acting(
        build(impala_step, cfg=Impala(horizon=HORIZON)),
        profile(one, on_gpu=pins.get("inference") != "copied"),
        cluster(),
        max_lag=(max_lag,),
        num_groups=None,
        pins=ActingPins(**pins),
    )
    return plan, time.process_time() - began_s


def shown(plan: Plan, taken_s: float) -> dict[str, Any]:
    assert plan.prediction is not None
    return {
        "frames_per_s": ROWS * HORIZON / plan.prediction.step_time_s,
        "groups": {group.name: group.num_ranks for group in plan.groups},
        "num_overlapped": plan.role_options["env"]["num_overlapped"],
        "group_size": plan.group_size,
        "step_s": plan.prediction.step_time_s,
        "gap": plan.prediction.gap,
        "cpu_s": taken_s,
    }


def main() -> None:
    given = parser(__doc__ or "").parse_args()
    found: list[dict[str, Any]] = []
    rows: list[list[object]] = []
    for name, one in ENVIRONMENTS.items():
        # SEED's learner answers with the weights that it has; the others act beside training.
        designs = {
            design: shown(*planned(one, int(design != "SEED"), inference=inference))
            for design, inference in DESIGNS.items()
        }
        ring = {"inference": "served", "num_groups": ROWS}  # of environments one by one
        designs["ring"] = shown(*planned(one, 1, **ring))
        designs["no ring"] = shown(*planned(one, 1, num_overlapped=1, **ring))
        free = shown(*planned(one, 1))
        fps = {design: made["frames_per_s"] for design, made in designs.items()}
        ratios = {design: fps["SRL"] / fps[design] for design in ("IMPALA", "SEED")}
        ratios["ring"] = fps["ring"] / fps["no ring"]
        found.append({"environment": name, "designs": designs, "free": free, "ratios": ratios})
        rows.append([
            name, *(f"{fps[design]:,.0f}" for design in DESIGNS),
            *(f"{ratios[design]:.2f}" for design in ("IMPALA", "SEED")), PAPER,
            f"{ratios['ring']:.2f}", one.gain,
            designs["SRL"]["groups"], f"{free['gap']:.0%}", f"{free['cpu_s']:.1f}",
        ])  # fmt: skip
    head = ["environment", *(f"{design} frames/s" for design in DESIGNS), "SRL / IMPALA",
            "SRL / SEED", "paper", "ring's gain", "published", "SRL's processes", "gap",
            "search s"]  # fmt: skip
    print(table(head, rows))
    report({"cores": NUM_CORES, "gpus": NUM_GPUS, "paper": PAPER, "rows": found}, given.json)


if __name__ == "__main__":
    main()
