"""A PPO step and plans for it with round numbers, made by hand."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.algorithms.ppo import PPO, ppo_step
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.tracer import build
from penstock.planner.inputs.calls import Lengths, Workload
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.plan.plan import (
    GroupMemory,
    GroupPlan,
    NodePrediction,
    OtherSchedule,
    Plan,
    Prediction,
    RunnerUp,
)

GB = 10**9

CALLS: Mapping[str, float] = {
    "actor.generate": 12.0,
    "reward.score": 2.0,
    "critic.value": 2.0,
    "ref.logprob": 3.0,
    "actor.train": 14.0,
    "critic.train": 13.0,
}
"""Call -> seconds; binary fractions, so that sums are exact."""

SPLIT: Mapping[str, str] = {
    "actor.generate": "a",
    "ref.logprob": "a",
    "actor.train": "a",
    "reward.score": "b",
    "critic.value": "b",
    "critic.train": "b",
}


def ppo() -> Graph:
    """PPO's step with its defaults."""
    return build(ppo_step, cfg=PPO(), name="ppo")


def h100(num_nodes: int = 2, devices_per_node: int = 8) -> ClusterSpec:
    """Nodes of devices with 80 GB, of which 3 are nobody's."""
    device = DeviceSpec(
        name="h100",
        memory_bytes=80 * GB,
        flops_per_s={"bfloat16": 989e12},
        memory_bytes_per_s=3.35e12,
        host_bytes_per_s=40e9,
        reserved_bytes=3 * GB,
    )
    link = LinkSpec(bytes_per_s=450e9, latency_s=5e-6)
    nodes = NodeGroup(
        num_nodes=num_nodes, devices_per_node=devices_per_node, device=device, within=link
    )
    return ClusterSpec(
        name="h100", node_groups=(nodes,), between=LinkSpec(bytes_per_s=50e9, latency_s=1e-5)
    )


def memory_a() -> GroupMemory:
    """Actor and reference: 41 GB at rest, 66 GB while training."""
    return GroupMemory(
        resident_bytes={
            "actor": {"weights": 2 * GB, "gradients": 4 * GB, "optimizer": 21 * GB},
            "ref": {"weights": 14 * GB},
        },
        transient_bytes={
            "actor.generate": {"weights": 7 * GB, "kv_cache": 12 * GB, "logits": GB // 2},
            "ref.logprob": {"activations": 2 * GB, "logits": 4 * GB},
            "actor.train": {"activations": 17 * GB, "logits": 8 * GB},
        },
        capacity_bytes=77 * GB,
    )


def memory_b() -> GroupMemory:
    """Critic and reward: 40 GB at rest, 57 GB while training."""
    return GroupMemory(
        resident_bytes={
            "critic": {"weights": 2 * GB, "gradients": 4 * GB, "optimizer": 20 * GB},
            "reward": {"weights": 14 * GB},
        },
        transient_bytes={
            "reward.score": {"activations": 2 * GB},
            "critic.value": {"activations": 2 * GB},
            "critic.train": {"activations": 17 * GB},
        },
        capacity_bytes=77 * GB,
    )


def prediction() -> Prediction:
    """Of `split_plan`: 30 seconds per step."""
    parts: Mapping[str, Mapping[str, float]] = {
        "actor.generate": {"decode": 9.5, "prefill": 1.5, "reshard": 1.0},
        "actor.train": {"compute": 12.0, "gradient_sync": 2.0},
    }
    return Prediction(
        step_time_s=30.0,
        lower_bound_s=29.4,
        search_time_s=1.25,
        nodes={
            name: NodePrediction(duration_s=seconds, parts_s=parts.get(name, {"compute": seconds}))
            for name, seconds in CALLS.items()
        },
        memory={"a": memory_a(), "b": memory_b()},
        runner_up=RunnerUp(
            description="{actor, critic, ref, reward} on 16",
            step_time_s=34.5,
            why="its group 'all' is busy 34.5 s of 34.5 s",
        ),
        other_schedules=(OtherSchedule(max_lag=1, step_time_s=33.0),),
        models=dict.fromkeys(("actor", "critic", "ref", "reward"), "llama-7b"),
        workload=Workload(
            num_prompts=1024,
            samples_per_prompt=1,
            prompt=Lengths.constant(1024),
            response=Lengths.constant(1024),
        ),
    )


def split_plan() -> Plan:
    """Actor and reference on one node, critic and reward on the other."""
    zero = Layout(dp=8, zero=1)
    return Plan(
        groups=(
            GroupPlan(name="a", device="cuda", devices=tuple(range(8))),
            GroupPlan(name="b", device="cuda", devices=tuple(range(8, 16))),
        ),
        nodes={**SPLIT, "gae": "b"},
        default_group="a",
        layouts={
            "actor.generate": Layout(tp=2, dp=4),
            "ref.logprob": Layout(dp=8, micro_batch=4),
            "actor.train": zero,
            "reward.score": Layout(dp=8),
            "critic.value": zero,
            "critic.train": zero,
        },
        max_lag=0,
        cluster=h100(),
        prediction=prediction(),
    )


def predicting(**changes: object) -> Plan:
    """`split_plan` with another prediction."""
    return split_plan().model_copy(update={"prediction": prediction().model_copy(update=changes)})
