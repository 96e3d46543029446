"""A row of published seconds per PPO iteration as what the planner is asked.

A row names model sizes, GPUs and lengths. Its cluster is nodes of 8 H100 with NVLink inside and
200 Gb/s per GPU between them, and its calls are the six of PPO. The heuristic plan is known in
full: every call on the whole cluster with tp = 8, pp = nodes and dp = 1, one call after another,
the reference and the reward model in host memory while idle. Micro-batches are as many as the
pipeline has stages in forward and generation calls and twice as many per update in train calls, as
that system's schedules have it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.planner.cost.calibration import Constants
from penstock.planner.cost.time_model import TimeModel, offload_time
from penstock.planner.inputs.calls import Call, Lengths, Workload
from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, Mesh, NodeGroup
from penstock.planner.inputs.layout import Layout
from penstock.planner.inputs.model_shape import ModelShape

ROWS = Path(__file__).resolve().parent / "data" / "real_ppo_seconds_per_iteration.json"
NODE_SIZE = 8
UPDATES = 4

# hidden size, layers, heads, key heads, feed-forward width
SIZES = {
    7: (4096, 32, 32, 32, 11008),
    13: (5120, 40, 40, 40, 13824),
    34: (8192, 48, 64, 8, 22016),
    70: (8192, 80, 64, 8, 28672),
}
"""LLaMA-2 shapes, by billions of parameters."""

# An RLHF system of 2024 in PyTorch without CUDA graphs; made by `planner_fit.py`. The efficiency is
# low because it stands for all that grows with the tokens, and because the peak is that of an
# H100's dense half-precision products.
PUBLISHED_H100 = Constants(
    matmul_efficiency=0.133,
    memory_efficiency=0.8,
    network_efficiency=0.7,
    launch_s=5.33e-4,
    hop_s=2.08e-5,
    stage_s=5.6e-4,
    call_s=0.0,
    source="fitted to 16 published PPO iterations on H100 nodes without CUDA graphs",
)

H100 = DeviceSpec(
    name="h100",
    memory_bytes=80_000_000_000,
    flops_per_s={"float16": 989e12, "bfloat16": 989e12},
    memory_bytes_per_s=3.35e12,
    host_bytes_per_s=40e9,
    reserved_bytes=3_000_000_000,
)


@dataclass(frozen=True)
class Case:
    """One row: the row itself, what is computed, and on what."""

    row: dict[str, Any]
    calls: tuple[Call, ...]
    cluster: ClusterSpec
    workload: Workload


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of published times.

    Raises:
        SystemExit: If it is no such file, naming what is missing.
    """
    try:
        rows = json.loads(file.read_text())["rows"]
    except FileNotFoundError:
        raise SystemExit(f"{file} does not exist") from None
    except (json.JSONDecodeError, KeyError, TypeError):
        raise SystemExit(f"{file} is no JSON object with a list of 'rows'") from None
    wanted = ("actor_b", "critic_b", "gpus", "prompt_len", "gen_len", "batch_seqs", "heuristic_s")
    for number, row in enumerate(rows):
        missing = [key for key in wanted if key not in row]
        if missing:
            raise SystemExit(f"{file}: row {number} has no '{missing[0]}'; a row has {wanted}")
    return rows


def shape(billions: int) -> ModelShape:
    """The LLaMA-2 model of that size."""
    if billions not in SIZES:
        raise SystemExit(f"no model of {billions}B; there are {', '.join(map(str, SIZES))}")
    hidden, layers, heads, key_heads, width = SIZES[billions]
    return ModelShape(
        name=f"llama-{billions}b",
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_key_heads=key_heads,
        head_dim=hidden // heads,
        intermediate_size=width,
        vocab_size=32000,
        dtype="float16",
    )


def case(row: dict[str, Any]) -> Case:
    """What a row asks of the planner."""
    workload = Workload(
        num_prompts=row["batch_seqs"],
        samples_per_prompt=1,
        prompt=Lengths.constant(row["prompt_len"]),
        response=Lengths.constant(row["gen_len"]),
        updates_per_train=UPDATES,
        passes_per_train=1,
    )
    return Case(row, _calls(row, workload), cluster(row["gpus"]), workload)


def cluster(gpus: int) -> ClusterSpec:
    """Nodes of 8, or a part of one.

    Raises:
        SystemExit: If nodes would be left in part.
    """
    if gpus > NODE_SIZE and gpus % NODE_SIZE:
        raise SystemExit(f"{gpus} GPUs are no whole number of nodes of {NODE_SIZE}")
    return ClusterSpec(
        name="h100",
        node_groups=(
            NodeGroup(
                num_nodes=-(-gpus // NODE_SIZE),
                devices_per_node=min(gpus, NODE_SIZE),
                device=H100,
                within=LinkSpec(bytes_per_s=450e9, latency_s=5e-6),
            ),
        ),
        between=LinkSpec(bytes_per_s=25e9, latency_s=1e-5),
    )


def _calls(row: dict[str, Any], workload: Workload) -> tuple[Call, ...]:
    actor, critic = shape(row["actor_b"]), shape(row["critic_b"])
    ref, reward = (
        shape(row.get("ref_b", row["actor_b"])),
        shape(row.get("reward_b", row["critic_b"])),
    )

    def call(name: str, kind: Any, model: ModelShape, *after: str) -> Call:
        role = name.partition(".")[0]
        return Call(
            name=name,
            role=role,
            kind=kind,
            model=model,
            head="vocabulary" if role in ("actor", "ref") else "scalar",
            trained=role in ("actor", "critic"),
            num_sequences=workload.num_prompts,
            prompt=workload.prompt,
            response=workload.response,
            updates=UPDATES if kind == "train" else 1,
            after=after,
        )

    forward = ("reward.score", "ref.logprob", "critic.value")
    return (
        call("actor.generate", "generate", actor),
        call("reward.score", "forward", reward, "actor.generate"),
        call("ref.logprob", "forward", ref, "actor.generate"),
        call("critic.value", "forward", critic, "actor.generate"),
        call("actor.train", "train", actor, *forward),
        call("critic.train", "train", critic, *forward),
    )


def heuristic_layout(call: Call, cluster: ClusterSpec) -> Layout:
    """The heuristic plan's layout of a call."""
    group = cluster.node_groups[0]
    pp = group.num_nodes
    rows = -(-call.num_sequences // call.updates)
    groups = 2 * pp if call.kind == "train" and pp > 1 else pp
    return Layout(
        tp=group.devices_per_node,
        pp=pp,
        zero=1 if call.trained else 0,
        checkpointing=call.kind == "train",
        offload=not call.trained,
        micro_batch=max(rows // groups, 1),
    )


def heuristic_s(case: Case, constants: Constants) -> dict[str, float]:
    """Predicted seconds of each call under the heuristic plan; together they are the iteration."""
    mesh = Mesh(case.cluster, (case.cluster.num_devices,))
    model = TimeModel(constants)
    seconds: dict[str, float] = {}
    for call in case.calls:
        layout = heuristic_layout(call, case.cluster)
        seconds[call.name] = model.call_time(call, layout, mesh).total_s
        if layout.offload:
            held = call.model.num_params(call.head) * call.model.dtype_bytes
            seconds[call.name] += offload_time(held / mesh.num_devices, mesh)
    return seconds
