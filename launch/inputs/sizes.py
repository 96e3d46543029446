"""Checks that a step's sizes divide and fit, and what streams inside it, from the graph alone.

Rows are followed through the graph: a table brings `per_step` items, a rollout makes
`sampling.num_samples` rows of each prompt, other nodes keep their rows. Where an op makes rows of
its own, their number is unknown before the run and nothing is said.

`schedule.streaming` is the run's. A stage in which nothing can stream keeps its rows together; a
run in which no stage can stream is refused, as are more parts than there are items to cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...algorithms.roles.language import Sampling
from ...algorithms.roles.language_tables import PreferencePairs
from ...dataflow.errors import ConfigError, nearest
from ...dataflow.graph.check import check_lag
from ...dataflow.graph.graph import Graph, Node, NodeKind, Streaming, check_segments, streaming
from ...dataflow.graph.role import Loss
from ...dataflow.runtime.placement import Placement, check_in_flight, flow_of, in_flight, sharing
from ...dataflow.scheduler.schedule import Flow, Schedule
from ...workers.rollout.generate_calls import check_turns
from .record import Stage


@dataclass(frozen=True)
class _Rows:
    """Rows of a node's output: `items` of the data, each of `each` rows, longer by `new_tokens`."""

    source: str
    items: int
    each: int
    why: str
    new_tokens: int = 0
    most_tokens: int = 0  # of conversations instead: how long they may be, prompt included

    def reach(self, prompt: int) -> int:
        """Tokens of the longest row, after a prompt of so many."""
        return self.most_tokens or prompt + self.new_tokens


def _rows(graph: Graph, per_step: Mapping[str, int]) -> dict[str, _Rows]:
    rows: dict[str, _Rows] = {}
    for node in graph.nodes:
        if node.kind is NodeKind.SOURCE:
            each = 2 if graph.sources[node.name] is PreferencePairs else 1
            rows[node.name] = _Rows(node.name, per_step[node.name], each, "rows of a pair")
        elif node.kind is NodeKind.ROLLOUT:
            read, sampling = _read(node, rows), _sampling(node)
            if read is not None and sampling is not None:
                rows[node.name] = replace(
                    read,
                    each=read.each * sampling.num_samples,
                    why="samples",
                    new_tokens=read.new_tokens + sampling.max_new_tokens,
                    most_tokens=sampling.max_total_tokens if node.method == "converse" else 0,
                )
        else:
            kept = {output.rows for output in node.outputs} - {node.name}
            if len(kept) == 1 and (made := kept.pop()) in rows:
                rows[node.name] = rows[made]
    return rows


def _read(node: Node, rows: Mapping[str, _Rows]) -> _Rows | None:
    return next((rows[ref.node] for _, ref in node.inputs if ref.node in rows), None)


def _sampling(node: Node) -> Sampling | None:
    return next((one for one in node.constants.values() if isinstance(one, Sampling)), None)


def check_stage(stage: Stage, schedule: Schedule) -> None:
    """Refuse a stage that cannot run where it is placed: by its schedule, or by its sizes."""
    graph, placement, per_step = stage.graph, stage.placement, stage.config.per_step
    stage_flow(graph, placement, schedule)
    own = stage_schedule(graph, schedule)
    check_lag(graph, own.max_lag, own.segment_tokens, in_flight=own.in_flight)
    check_sizes(graph, placement, per_step, stage.at)
    check_parts(graph, placement, per_step, schedule, stage.at)


def check_sizes(graph: Graph, placement: Placement, per_step: Mapping[str, int], at: str) -> None:
    """Check what one step takes of each table: its size divides by minibatches and by ranks."""
    for name in per_step:
        if name not in graph.sources:
            typo = nearest(name, graph.sources)
            other = f"; '~{at}.per_step.{name}' takes away what the algorithm's YAML says"
            raise ConfigError(
                f"'{at}.per_step' names a table '{name}', which {graph.name} does not read{typo}\n"
                f"    it reads: {', '.join(graph.sources)}{'' if typo else other}"
            )
    for name, table in graph.sources.items():
        if name not in per_step:
            raise ConfigError(
                f"'{at}.per_step.{name}' is missing: how many items of '{name}' "
                f"({table.__name__}) one step takes"
            )
    rows = _rows(graph, per_step)
    for node in graph.nodes:
        if node.kind is NodeKind.TRAIN and (made := _read(node, rows)) is not None:
            _check_train(node, made, placement, at)


def _check_train(node: Node, made: _Rows, placement: Placement, at: str) -> None:
    num_minibatches = node.constants.get("num_minibatches", 1)
    num_ranks = placement.group(placement.nodes[node.name]).num_ranks
    losses = (one for one in node.constants.values() if isinstance(one, Loss))
    grouped = any(loss.unit == "group" for loss in losses)
    unit, total = ("groups", made.items) if grouped else ("rows", made.items * made.each)
    count = f"{made.items} {made.source}"
    if not grouped and made.each > 1:
        count += f" x {made.each} {made.why} = {total} rows"
    if not isinstance(num_minibatches, int) or num_minibatches < 1:
        raise ConfigError(
            f"'{node.name}' is to take {num_minibatches} minibatches per pass\n"
            f"    num_minibatches must be at least 1 ({at}.cfg)"
        )
    if total % num_minibatches:
        raise ConfigError(
            f"'{node.name}' trains on {count} per step, which {num_minibatches} minibatches do not "
            f"divide\n    choose {at}.per_step.{made.source} or num_minibatches so that the "
            f"{unit} divide evenly"
        )
    if made.items % num_ranks:
        raise ConfigError(
            f"'{node.name}' trains on {count} per step, which the {num_ranks} ranks of group "
            f"'{placement.nodes[node.name]}' do not divide\n"
            f"    choose {at}.per_step.{made.source} as a multiple of {num_ranks}"
        )


def train_items(graph: Graph, per_step: Mapping[str, int]) -> dict[str, int]:
    """Train node -> items of data in a step, which the ranks of its group must divide.

    Nodes whose rows an op makes are left out: their number is unknown before the run. So are all if
    a table has no size.
    """
    if graph.sources.keys() - per_step.keys():
        return {}
    rows = _rows(graph, per_step)
    return {
        node.name: made.items
        for node in graph.nodes
        if node.kind is NodeKind.TRAIN and (made := _read(node, rows)) is not None
    }


def check_lengths(
    graph: Graph,
    per_step: Mapping[str, int],
    longest: Mapping[str, int],
    positions: Mapping[str, int],
    shorten: str,
) -> None:
    """Check that the longest rows of each table fit the models that read them, by role.

    `shorten` says in messages how responses are made shorter.
    """
    rows = _rows(graph, per_step)
    for node in graph.nodes:
        sampling, read = _sampling(node), rows.get(node.name) or _read(node, rows)
        if node.method == "converse" and sampling is not None:
            given, branch = node.constants, bool(node.constants.get("branch", False))
            check_turns(f"'{node.name}'", sampling, given.get("max_turns", 1), branch=branch)
        if node.kind is NodeKind.ROLLOUT and sampling is not None and read is not None:
            prompt = longest.get(read.source, 0)
            if 0 < sampling.max_total_tokens <= prompt:
                of = "task" if node.method == "converse" else "cfg.sampling"
                raise ConfigError(
                    f"'{node.name}' has {read.source} of up to {prompt} tokens, and "
                    f"max_total_tokens is {sampling.max_total_tokens}: none are left for a response"
                    f"\n    raise {of}.max_total_tokens, or leave long prompts out: "
                    "task.max_prompt_tokens"
                )
        limit = positions.get(node.role or "")
        if limit is None or read is None or read.source not in longest:
            continue
        length, new = longest[read.source], read.new_tokens
        if read.reach(length) <= limit:
            continue
        what = f"{read.source} of up to {length} tokens"
        leave_out = "leave long rows out: task.max_prompt_tokens, task.max_response_tokens"
        if new:
            what += f" with responses of up to {new}"
            leave_out = f"{shorten}, or leave long prompts out: task.max_prompt_tokens"
        if read.most_tokens:
            what = f"conversations of up to {read.most_tokens} tokens"
            leave_out = "lower max_total_tokens: task.max_total_tokens"
        raise ConfigError(
            f"'{node.name}' has {what}, but the model of '{node.role}' has {limit} positions\n"
            f"    {leave_out}"
        )


def longest_sampled(
    graph: Graph, per_step: Mapping[str, int], longest: Mapping[str, int]
) -> int | None:
    """Tokens of the longest prompt with its response that a step samples; None if unknown."""
    rows, found = _rows(graph, per_step), 0
    for node in graph.nodes:
        if node.kind is NodeKind.ROLLOUT:
            made = rows.get(node.name)
            if made is None or made.source not in longest:
                return None
            found = max(found, made.reach(longest[made.source]))
    return found


def stage_schedule(graph: Graph, schedule: Schedule) -> Schedule:
    """The run's schedule as it is for one stage: without what concerns rollouts if it has none."""
    if any(node.kind is NodeKind.ROLLOUT for node in graph.nodes):
        parts = schedule.streaming if streaming(graph).rollouts else 0
        in_flight = schedule.in_flight and bool(parts or schedule.segment_tokens)
        return replace(schedule, streaming=parts, in_flight=in_flight)
    return replace(schedule, streaming=0, segment_tokens=0, in_flight=False)


def stage_flow(graph: Graph, placement: Placement, schedule: Schedule) -> Flow:
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
    lines: list[str] = []
    for stage in stages:
        reasons = [
            f"{name} cannot stream: {reason}"
            for name, reason in streaming(stage.graph).why_not.items()
            if stage.graph[name].kind is NodeKind.ROLLOUT
        ]
        lines += [f"    {stage.name}: {why}" for why in reasons or ["it samples nothing"]]
    raise ConfigError(
        f"'schedule.streaming' is {schedule.streaming}, but nothing that this run samples can "
        "stream\n" + "\n".join(lines) + "\n    leave it out"
    )


def check_parts(
    graph: Graph, placement: Placement, per_step: Mapping[str, int], schedule: Schedule, at: str
) -> None:
    """Refuse to cut a step's rows into more parts than it takes items."""
    parts = stage_schedule(graph, schedule).streaming
    if not parts:
        return
    needed, multiple = placement.streamed(parts).num_chunks, placement.streamed(1).num_chunks
    rounded = f" (a multiple of {multiple}, for the ranks)" if needed != parts else ""
    # Only of these some node takes one part at a time.
    cut = {ref.node for node in graph.nodes if node.scope != "batch" for _, ref in node.inputs}
    for source in (name for name in graph.sources if name in cut):
        items = per_step[source]
        if items >= needed:
            continue
        most = items // multiple * multiple
        lower = f"lower it to at most {most}, or " if most else ""
        raise ConfigError(
            f"'schedule.streaming' is {parts}: a step's rows would go on in {needed} parts"
            f"{rounded}, but {graph.name} takes {items} {source} per step\n"
            f"    {lower}raise {at}.per_step.{source} to at least {needed}"
        )


def streaming_lines(stage: Stage, schedule: Schedule, *, in_processes: bool) -> list[str]:
    """Describe the rollouts of a stage that stream or go on in later steps."""
    graph, placement = stage.graph, stage.placement
    schedule = stage_schedule(graph, schedule)
    lines: list[str] = []
    if most := schedule.segment_tokens:
        tokens = "1 token" if most == 1 else f"{most} tokens"
        lines.append(
            f"segments   {graph.name}: a response grows by at most {tokens} in a step, and goes on "
            "in the next"
        )
    if parts := schedule.streaming:
        able, needed = streaming(graph), placement.streamed(parts).num_chunks
        asked = "" if needed == parts else f", for {parts} and the ranks of all groups"
        notes = [_idle(graph, placement, able, rollout) for rollout in able.rollouts]
        if not in_processes:
            notes = ["this executor does one thing at a time, so nothing overlaps"]
        elif not able.order_of:
            notes.append("no train node streams: training begins when everything has been sampled")
        lines.append(f"streaming  {graph.name}: a step's rows go on in {needed} parts{asked}")
        lines += [f"  {line}" for line in str(able).splitlines()]
        lines += [f"  note: {note}" for note in notes if note]
    for name, reason in in_flight(graph, placement).items() if schedule.in_flight else ():
        takes = "takes newer weights between two tokens, and parts go on as they come"
        lines.append(
            f"in flight  {name} {f'does not take newer weights: {reason}' if reason else takes}"
        )
    return lines


def _idle(graph: Graph, placement: Placement, able: Streaming, rollout: str) -> str:
    """Nodes that cannot begin with a part of a rollout's rows, though they could; "" if none."""
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
