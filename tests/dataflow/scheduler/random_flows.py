"""Random flows and timings, and which weights must be read in them, by arithmetic."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from penstock.dataflow.kinds import WeightRead
from penstock.dataflow.scheduler.events import NodeTask, Versions
from penstock.dataflow.scheduler.schedule import Flow, FlowKind, FlowNode, Schedule

TIMES = int(os.environ.get("PENSTOCK_HISTORIES", "1"))
"""How many times as many histories are drawn: `make test-all` draws over 45,000."""


def histories(number: int, often: int = 1) -> settings:
    """So many random histories, or `TIMES` as many, and `often` as many again."""
    return settings(max_examples=number * (TIMES * often if TIMES > 1 else 1), deadline=None)


@st.composite
def flows(draw: st.DrawFn, most_chunks: int = 3) -> Flow:
    groups = {f"g{i}": draw(st.integers(1, 3)) for i in range(draw(st.integers(1, 3)))}
    names = sorted(groups)
    homes = {f"r{i}": draw(st.sampled_from(names)) for i in range(draw(st.integers(0, 2)))}
    trains = {role: draw(st.integers(1, 2)) for role in homes}
    sources = tuple(FlowNode(f"source{i}", "source") for i in range(draw(st.integers(1, 2))))
    kinds: list[str] = ["call"] * draw(st.integers(1, 6))
    kinds += [role for role, count in trains.items() for _ in range(count)]
    nodes, trained = list(sources), dict.fromkeys(homes, 0)
    num_chunks = draw(st.integers(1, most_chunks))
    for i, kind in enumerate(draw(st.permutations(kinds))):
        node = draw(_node(i, kind, nodes, homes, names, trained))
        nodes.append(draw(_streaming(node, nodes, groups, num_chunks)))
        if kind in homes:
            trained[kind] += 1
    pairs = [(a, b) for a in names for b in names if a < b and draw(st.booleans())]
    sharing = {a: frozenset(x for p in pairs if a in p for x in p if x != a) for a in names}
    return Flow("random", tuple(nodes), groups, homes, trains, num_chunks, sharing)


@st.composite
def _node(
    draw: st.DrawFn,
    i: int,
    role: str,
    before: list[FlowNode],
    homes: dict[str, str],
    groups: list[str],
    trained: dict[str, int],
) -> FlowNode:
    choices = [node.name for node in before if node.kind != "train"]
    if draw(st.booleans()):
        choices = choices[:1]  # hangs on a source alone: more nodes may run ahead
    inputs = tuple(draw(st.lists(st.sampled_from(choices), max_size=3, unique=True)))
    read = draw(st.lists(st.sampled_from([*sorted(homes), "frozen"]), max_size=2, unique=True))
    if role in homes:
        reads = tuple(WeightRead(r, trained.get(r, 0)) for r in read if r != role)
        return FlowNode(f"n{i}", "train", False, homes[role], inputs, reads, role)
    kind: FlowKind = draw(st.sampled_from(["op", "forward", "rollout"]))
    served = st.sampled_from(["", "", *groups])
    reads = tuple(WeightRead(r, trained.get(r, 0), kind == "rollout", draw(served)) for r in read)
    group, chunked = draw(st.sampled_from(groups)), draw(st.booleans())
    return FlowNode(f"n{i}", kind, chunked, group, inputs, reads if kind != "op" else ())


@st.composite
def _streaming(
    draw: st.DrawFn, node: FlowNode, before: list[FlowNode], groups: dict[str, int], chunks: int
) -> FlowNode:
    """The node, or the same streaming, where it can."""
    if draw(st.booleans()):
        return node
    by_source = all(name.startswith("source") for name in node.inputs)
    if node.kind == "rollout" and node.chunked and by_source:
        return replace(node, streams=True)
    streams = [other.name for other in before if other.streams]
    if node.kind == "train" and streams and chunks % groups[node.group] == 0:
        return replace(node, order_of=draw(st.sampled_from(streams)))
    return node


def size(task: NodeTask) -> int:
    """Of every task of a node that streams; some are equal."""
    return random.Random(f"{task}").randrange(4)


def timing(seed: int) -> Callable[[object], float]:
    rng = random.Random(seed)
    return lambda work: rng.choice([0.01, 0.1, 1.0, 1.1, 5.0, 20.0])


SEEDS = st.integers(0, 10_000)
LAGS = st.integers(0, 3)
STEPS = st.integers(0, 6)


def expected_reads(flow: Flow, schedule: Schedule, num_steps: int) -> dict[NodeTask, Versions]:
    """Which versions every task reads in step order."""
    inputs = {node.name: node.inputs for node in flow.nodes}
    exact = {
        node.name: node.trains is not None
        or any(read.role in flow.homes and not read.lagged for read in node.reads)
        for node in flow.nodes
    }

    def ahead(name: str) -> bool:
        return not exact[name] and all(ahead(other) for other in inputs[name])

    reads: dict[NodeTask, Versions] = {}
    for step in range(num_steps):
        trained = dict.fromkeys(flow.homes, 0)
        for node in flow.nodes:
            versions: dict[str, int] = {}
            for read in node.reads:
                if read.role in flow.homes:
                    late = schedule.max_lag if read.lagged and ahead(node.name) else 0
                    n = flow.trains_per_step[read.role]
                    versions[read.role] = max(0, (step - late) * n + read.offset)
            if node.trains is not None:
                n = flow.trains_per_step[node.trains]
                versions[node.trains] = step * n + trained[node.trains]
                trained[node.trains] += 1
            if node.kind != "source":
                for chunk in task_numbers(flow, node):
                    reads[NodeTask(node.name, step, chunk)] = tuple(sorted(versions.items()))
    return reads


def task_numbers(flow: Flow, node: FlowNode) -> tuple[int | None, ...]:
    """`NodeTask.chunk` of a node's tasks in a step."""
    if node.order_of:
        return tuple(range(flow.num_chunks // flow.groups[node.group]))
    return tuple(range(flow.num_chunks)) if node.chunked else (None,)
