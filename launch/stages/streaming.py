"""Streaming inside a step, as the stages of a run take part in it: who does, and what is said.

`schedule.streaming` is the run's. A stage in which nothing can stream keeps its rows together; a
run in which no stage can stream is refused, as are more parts than there are items to cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph, Streaming, check_segments, streaming
from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.placement import Placement, check_in_flight, flow_of, in_flight, sharing
from ...dataflow.scheduler.schedule import Flow, Schedule
from ..inputs.record import Stage

_KEY = "schedule.streaming"


def stage_schedule(graph: Graph, schedule: Schedule) -> Schedule:
    """The run's schedule as it is for one stage: without what concerns rollouts if it has none."""
    if any(node.kind is NodeKind.ROLLOUT for node in graph.nodes):
        parts = schedule.streaming if streaming(graph).rollouts else 0
        in_flight = schedule.in_flight and bool(parts or schedule.segment_tokens)
        return replace(schedule, streaming=parts, in_flight=in_flight)
    return replace(schedule, streaming=0, segment_tokens=0, in_flight=False)


def stage_flow(graph: Graph, placement: Placement, schedule: Schedule) -> Flow:
    """The flow that the engine will run of a stage."""
    schedule = stage_schedule(graph, schedule)
    if schedule.segment_tokens:
        check_segments(graph)
    if schedule.in_flight:
        check_in_flight(graph, placement)
    return flow_of(graph, placement.streamed(schedule.streaming), schedule)


def check_streams(stages: Sequence[Stage], schedule: Schedule) -> None:
    """Refuse to stream, or to go on in later steps, in a run where nothing can."""
    kinds = {node.kind for stage in stages for node in stage.graph.nodes}
    if schedule.segment_tokens and NodeKind.ROLLOUT not in kinds:
        raise ConfigError(
            f"'schedule.segment_tokens' is {schedule.segment_tokens}, but this run samples nothing "
            "that could go on in a later step\n    leave it out"
        )
    if schedule.streaming == 0 or any(streaming(stage.graph).rollouts for stage in stages):
        return
    lines = [f"    {stage.name}: {reason}" for stage in stages for reason in _why_not(stage.graph)]
    raise ConfigError(
        f"'{_KEY}' is {schedule.streaming}, but nothing that this run samples can stream\n"
        + "\n".join(lines)
        + "\n    leave it out"
    )


def _why_not(graph: Graph) -> list[str]:
    reasons = [
        f"{name} cannot stream: {reason}"
        for name, reason in streaming(graph).why_not.items()
        if graph[name].kind is NodeKind.ROLLOUT
    ]
    return reasons or ["it samples nothing"]


def check_parts(
    graph: Graph, placement: Placement, per_step: Mapping[str, int], schedule: Schedule, at: str
) -> None:
    """Refuse to cut a step's rows into more parts than it takes items."""
    parts = stage_schedule(graph, schedule).streaming
    if not parts:
        return
    needed, multiple = placement.streamed(parts).num_chunks, placement.streamed(1).num_chunks
    rounded = f" (a multiple of {multiple}, for the ranks)" if needed != parts else ""
    for source in _cut(graph):
        items = per_step[source]
        if items >= needed:
            continue
        most = items // multiple * multiple
        lower = f"lower it to at most {most}, or " if most else ""
        raise ConfigError(
            f"'{_KEY}' is {parts}: a step's rows would go on in {needed} parts{rounded}, but "
            f"{graph.name} takes {items} {source} per step\n"
            f"    {lower}raise {at}.per_step.{source} to at least {needed}"
        )


def _cut(graph: Graph) -> list[str]:
    """Sources of which some node takes one part at a time."""
    taken = {ref.node for n in graph.nodes if n.scope != "batch" for _, ref in n.inputs}
    return [name for name in graph.sources if name in taken]


def streaming_lines(
    stage: Stage, placement: Placement, schedule: Schedule, *, in_processes: bool
) -> list[str]:
    """Describe the rollouts of a stage that stream or go on in later steps."""
    graph, schedule = stage.graph, stage_schedule(stage.graph, schedule)
    first = _segment_lines(graph, schedule)
    last, parts = _in_flight_lines(stage, placement, schedule), schedule.streaming
    if not parts:
        return [*first, *last]
    able, needed = streaming(graph), placement.streamed(parts).num_chunks
    asked = "" if needed == parts else f", for {parts} and the ranks of all groups"
    head = f"streaming  {graph.name}: a step's rows go on in {needed} parts{asked}"
    notes = [_idle(graph, placement, able, rollout) for rollout in able.rollouts]
    if not in_processes:
        notes = ["this executor does one thing at a time, so nothing overlaps"]
    elif not able.order_of:
        notes.append("no train node streams: training begins when everything has been sampled")
    about = [f"  {line}" for line in str(able).splitlines()]
    return [*first, head, *about, *(f"  note: {note}" for note in notes if note), *last]


def _in_flight_lines(stage: Stage, placement: Placement, schedule: Schedule) -> list[str]:
    """Which rollouts take newer weights while they are sampled."""
    if not schedule.in_flight:
        return []
    return [
        f"in flight  {name} takes newer weights between two tokens, and parts go on as they come"
        if not reason
        else f"in flight  {name} does not take newer weights: {reason}"
        for name, reason in in_flight(stage.graph, placement).items()
    ]


def _segment_lines(graph: Graph, schedule: Schedule) -> list[str]:
    most = schedule.segment_tokens
    if not most:
        return []
    tokens = "1 token" if most == 1 else f"{most} tokens"
    return [
        f"segments   {graph.name}: a response grows by at most {tokens} in a step, and goes on in "
        "the next"
    ]


def _idle(graph: Graph, placement: Placement, able: Streaming, rollout: str) -> str:
    """Which nodes cannot begin with a part of a rollout's rows, though they could; "" if none."""
    group = placement.nodes[rollout]
    same = {group, *sharing(placement.groups).get(group, ())}
    early, late, blocked = {rollout}, set[str](), list[str]()
    for node in graph.nodes:
        inputs = {ref.node for _, ref in node.inputs}
        if node.kind is NodeKind.SOURCE or not inputs & (early | late):
            continue
        takes = node.scope != "batch" or able.order_of.get(node.name) == rollout
        if not takes or inputs & late:
            late.add(node.name)
        elif placement.nodes[node.name] in same:
            late.add(node.name)
            blocked.append(node.name)
        else:
            early.add(node.name)
    if not blocked:
        return "" if len(early) > 1 else f"nothing that follows {rollout} can begin with a part"
    return (
        f"{' and '.join(blocked)} could begin with a part, but must wait for the devices of "
        f"{rollout} (group '{group}'); use another group"
    )
