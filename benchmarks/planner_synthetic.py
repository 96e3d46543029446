"""A made-up option table with the shape of a real one, to measure the search and nothing else.

Rooflines, all-reduces, pipeline bubbles and latencies, layouts that must divide the model: times
fall with the number of devices, but not monotonically. PPO with four models of one size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from penstock.planner.inputs.cluster import ClusterSpec, DeviceSpec, LinkSpec, Mesh, NodeGroup
from penstock.planner.inputs.layout import Layout, legal_layouts
from penstock.planner.inputs.model_shape import ModelShape
from penstock.planner.search.options import CallNode, Option, dominant

H100 = DeviceSpec(
    name="h100",
    memory_bytes=80_000_000_000,
    flops_per_s={"bfloat16": 989e12},
    memory_bytes_per_s=3.35e12,
    host_bytes_per_s=40e9,
    reserved_bytes=3_000_000_000,
)
SHAPE_70B = ModelShape(
    name="70b", hidden_size=8192, num_layers=80, num_heads=64, num_key_heads=8, head_dim=128,
    intermediate_size=28672, vocab_size=32000,
)  # fmt: skip
SHAPE_7B = ModelShape(
    name="7b", hidden_size=4096, num_layers=32, num_heads=32, num_key_heads=32, head_dim=128,
    intermediate_size=11008, vocab_size=32000,
)  # fmt: skip


def ppo_calls() -> tuple[CallNode, ...]:
    """The six calls of PPO; five call groups."""
    scored = ("actor.generate", "reward.score", "critic.value", "ref.logprob")
    roll = scored[:1]
    return (
        CallNode("actor.generate", "actor.generate", (), "actor", reads_older=True),
        CallNode("reward.score", "reward", roll, "reward"),
        CallNode("critic.value", "critic", roll, "critic"),
        CallNode("ref.logprob", "ref", roll, "ref"),
        CallNode("actor.train", "actor", scored, "actor", trains=True),
        CallNode("critic.train", "critic", scored, "critic", trains=True),
    )


def h100_cluster(num_nodes: int) -> ClusterSpec:
    """Nodes of eight."""
    return ClusterSpec(
        name=f"{num_nodes} nodes of 8 h100",
        node_groups=(
            NodeGroup(
                num_nodes=num_nodes,
                devices_per_node=8,
                device=H100,
                within=LinkSpec(bytes_per_s=450e9, latency_s=3e-6),
            ),
        ),
        between=LinkSpec(bytes_per_s=25e9, latency_s=1e-5),
    )


def _together(one: Option, other: Option) -> Option:
    """Both, which take turns."""
    return Option(
        {**one.durations_s, **other.durations_s},
        one.resident_bytes + other.resident_bytes,
        {**one.transient_bytes, **other.transient_bytes},
        {**one.layouts, **other.layouts},
    )


@dataclass(frozen=True)
class SyntheticTable:
    """Options of PPO's call groups.

    Attributes:
        actor: Shape of the actor and the reference.
        critic: Shape of the critic and the reward model.
        rows: Responses per step.
        prompt_tokens: Of every row.
        response_tokens: Of every row.
        updates: Optimizer steps per train call.
        ask_s: What a question takes; waited for if the answer is there sooner.
    """

    actor: ModelShape
    critic: ModelShape
    rows: int
    prompt_tokens: int = 1024
    response_tokens: int = 1024
    updates: int = 4
    ask_s: float = 0.0

    def options(
        self, call_group: str, mesh: Mesh, *, beside: tuple[str, ...] = (), lagged: bool = False
    ) -> Sequence[Option]:
        """See `OptionTable`."""
        began_s = time.perf_counter()
        found = self._options(call_group, mesh, with_source=False)
        for name in beside:
            others = self._options(name, mesh, with_source=True)
            found = dominant([_together(*pair) for pair in product(found, others)])
        time.sleep(max(0.0, began_s + self.ask_s - time.perf_counter()))
        return found

    def _options(self, call_group: str, mesh: Mesh, with_source: bool) -> Sequence[Option]:
        shape = self.actor if call_group.split(".")[0] in ("actor", "ref") else self.critic
        found: list[Option] = []
        for layout in legal_layouts(shape, mesh.num_devices, node_size=mesh.node_size):
            if layout.dp > self.rows:
                continue
            if call_group == "actor.generate":
                found.append(self._generate(shape, mesh, layout, with_source))
            elif call_group in ("actor", "critic"):
                found += self._trained(call_group, shape, mesh, layout)
            else:
                found += self._frozen(call_group, shape, mesh, layout)
        return dominant([o for o in found if o.resident_bytes < mesh.memory_bytes])

    def _work_s(self, shape: ModelShape, mesh: Mesh, layout: Layout, passes: int) -> float:
        """All rows `passes` times through the model: compute, tensor parallel traffic, bubbles."""
        rows = math.ceil(self.rows / layout.dp)
        tokens = rows * (self.prompt_tokens + self.response_tokens)
        flops = 2.0 * shape.active_params() * tokens / (layout.tp * layout.pp)
        compute_s = flops / (0.5 * mesh.flops("bfloat16"))
        link = mesh.link(layout.tp)
        moved = 2 * 2 * tokens * shape.hidden_size * shape.dtype_bytes * (layout.tp - 1) / layout.tp
        layers = shape.num_layers / layout.pp
        tensor_s = layers * (2 * moved / link.bytes_per_s + 4 * rows * link.latency_s)
        tensor_s = tensor_s if layout.tp > 1 else 0.0
        bubble = 1 + (layout.pp - 1) / max(1, min(rows, 4 * layout.pp))
        return passes * (compute_s + tensor_s) * bubble

    def _trained(
        self, call_group: str, shape: ModelShape, mesh: Mesh, layout: Layout
    ) -> list[Option]:
        shard = layout.tp * layout.pp
        weights = shape.num_params() // shard
        link = mesh.link(shard * layout.dp)
        sync_s = 4 * weights * (layout.dp - 1) / layout.dp / link.bytes_per_s
        train_s = self._work_s(shape, mesh, layout, 3)
        train_s += self.updates * (sync_s + 14 * weights / mesh.memory_bytes_per_s)
        tokens = self.prompt_tokens + self.response_tokens
        held = 34 * tokens * shape.hidden_size * shape.num_layers // shard
        options: list[Option] = []
        for zero, again in ((0, False), (1, False), (1, True), (0, True)):
            share = layout.dp if zero else 1
            durations_s = {f"{call_group}.train": train_s * (4 / 3 if again else 1.0)}
            transient = {f"{call_group}.train": held // (shape.num_layers if again else 1)}
            if call_group == "critic":
                durations_s["critic.value"] = self._work_s(shape, mesh, layout, 1)
                transient["critic.value"] = held // shape.num_layers
            chosen = layout.model_copy(update={"zero": zero, "checkpointing": again})
            options.append(
                Option(
                    durations_s,
                    4 * weights + 12 * weights // share,
                    transient,
                    dict.fromkeys(durations_s, chosen),
                )
            )
        return options

    def _frozen(
        self, call_group: str, shape: ModelShape, mesh: Mesh, layout: Layout
    ) -> list[Option]:
        name = "ref.logprob" if call_group == "ref" else "reward.score"
        weights = 2 * shape.num_params() // (layout.tp * layout.pp)
        seconds = self._work_s(shape, mesh, layout, 1)
        held = 2 * (self.prompt_tokens + self.response_tokens) * shape.hidden_size
        away = layout.model_copy(update={"offload": True})
        return [
            Option({name: seconds}, weights, {name: held}, {name: layout}),
            Option(
                {name: seconds + weights / mesh.host_bytes_per_s},
                0,
                {name: held + weights},
                {name: away},
            ),
        ]

    def _generate(self, shape: ModelShape, mesh: Mesh, layout: Layout, with_source: bool) -> Option:
        shard = layout.tp * layout.pp
        weights = 2 * shape.num_params() // shard
        rows = math.ceil(self.rows / layout.dp)
        link = mesh.link(layout.tp)
        per_row = shape.kv_bytes_per_token * (self.prompt_tokens + self.response_tokens) // shard
        room = max(1, min(rows, (mesh.memory_bytes // 2 - weights) // max(per_row, 1)))
        waves = math.ceil(rows / room)
        read_s = (weights + room * per_row / 2) / (0.7 * mesh.memory_bytes_per_s)
        reduce_s = 2 * shape.num_layers * 2 * link.latency_s if layout.tp > 1 else 0.0
        token_s = max(read_s, 2.0 * shape.active_params() * room / shard / 500e12) + reduce_s
        decode_s = waves * self.response_tokens * token_s * layout.pp
        moved_s = weights / (mesh.within if with_source else mesh.between).bytes_per_s
        prefill_s = self._work_s(shape, mesh, layout, 1) * self.prompt_tokens / 2048
        return Option(
            {"actor.generate": prefill_s + decode_s + moved_s},
            0 if with_source else weights,
            {"actor.generate": room * per_row + (weights if with_source else 0)},
            {"actor.generate": layout},
        )
