"""A plan as text: where everything runs, when, in how much memory, how good that is, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from ...dataflow.graph.graph import Graph
from ...dataflow.runtime.messages import TaskSpan
from ..formatting import (
    aligned,
    bytes_text,
    hours_text,
    part_text,
    percent_text,
    ranges_text,
    seconds_text,
)
from ..plan.plan import GroupMemory, Plan, Prediction
from ..plan.simulate import Simulation, simulate_plan
from .plan_texts import (
    cluster_text,
    cost_text,
    roles_by_group,
    schedule_text,
    segments_text,
    workload_text,
)

_COLUMNS = 72  # characters of a timeline


def explain(graph: Graph, plan: Plan, simulation: Simulation | None = None) -> str:
    if plan.prediction is None:
        plan.placement(graph)
        return "\n".join([_title(graph, plan), "", *_placement(graph, plan)])
    simulation = simulation or simulate_plan(graph, plan)
    sections = [
        [_title(graph, plan), *_summary(plan, plan.prediction, simulation)],
        _placement(graph, plan),
        _nodes(graph, plan, plan.prediction),
        _timeline(graph, plan, simulation),
        *(_memory(plan, name, held) for name, held in plan.prediction.memory.items()),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _title(graph: Graph, plan: Plan) -> str:
    lag = "" if plan.max_lag is None else f", {_schedule(plan)}"
    return f"plan of {graph.name} on {cluster_text(plan.cluster)}{lag}"


def _summary(plan: Plan, prediction: Prediction, simulation: Simulation) -> list[str]:
    step_s = prediction.step_time_s
    rows = [["step", f"{seconds_text(step_s)}; the scheduler, played through with these times, "
                     f"takes {seconds_text(simulation.step_time_s)}"]]  # fmt: skip
    if prediction.workload is not None:
        rows.insert(0, ["workload", workload_text(prediction.workload)])
    rows.append(["cost", f"{hours_text(plan.device_hours)} {cost_text(plan)}"])
    rows.append(["bound", _bound(prediction)])
    stopped = ", stopped at its deadline" if prediction.stopped_at_deadline else ""
    rows.append(["search", seconds_text(prediction.search_time_s) + stopped])
    if prediction.runner_up is not None:
        lost = prediction.runner_up
        rows.append(["runner-up", f"{lost.description}: {_against(lost.step_time_s, step_s)}"])
        rows.append(["", lost.why])
    for number, other in enumerate(prediction.other_schedules):
        wins = "" if number else f"{_schedule(plan)} wins; "
        said = schedule_text(other.max_lag, other.segment_tokens)
        text = f"{wins}{said}: {_against(other.step_time_s, step_s)}"
        rows.append(["" if number else "schedule", text])
    if prediction.streamed is not None:
        streamed = prediction.streamed
        rows.append(["streaming", f"in {streamed.num_parts} parts: "
                                  f"{_against(streamed.step_time_s, step_s)}"])  # fmt: skip
    if prediction.segment_tokens and prediction.workload is not None:
        rows.append(["segments", segments_text(prediction.workload)])
    rows.append(["calibration", prediction.calibration])
    wide = max(len(name) for name, _ in rows)
    return [
        f"  {name if first else '':<{wide}}  {line}"
        for name, text in rows
        for first, line in _wrapped(text)
    ]


def _schedule(plan: Plan) -> str:
    segment = plan.prediction.segment_tokens if plan.prediction is not None else 0
    return schedule_text(plan.max_lag or 0, segment)


def _wrapped(text: str) -> list[tuple[bool, str]]:
    lines = textwrap.wrap(text, 86, break_on_hyphens=False)
    return [(i == 0, line if i == 0 else f"  {line}") for i, line in enumerate(lines)]


def _bound(prediction: Prediction) -> str:
    if prediction.gap < 5e-5:
        return "no plan is faster"
    if not prediction.lower_bound_s:
        return "nothing is proved: the search had too little time (plan.deadline_s)"
    return (
        f"at most {percent_text(prediction.gap)} could be gained: no plan takes less than "
        f"{seconds_text(prediction.lower_bound_s)}"
    )


def _against(other_s: float | None, step_s: float) -> str:
    if other_s is None:
        return "no plan fits"
    factor = other_s / step_s
    if factor >= 1:
        return f"{seconds_text(other_s)}, {factor:.2f} x as long"
    return f"{seconds_text(other_s)}, {1 / factor:.2f} x as fast"


def _placement(graph: Graph, plan: Plan) -> list[str]:
    roles = roles_by_group(graph, plan)
    rows = [["group", "devices", "number", "roles"]]
    for group in plan.groups:
        number = len(group.devices) or group.num_ranks
        devices = ranges_text(group.devices) or f"any {group.device}"
        serves = [one.name for one in plan.groups if group.name in one.served.values()]
        does = [*roles[group.name], *(f"answers {name}" for name in serves)]
        rows.append([group.name, devices, str(number), ", ".join(does) or "none"])
    options = [
        f"{role}.{key}={value}"
        for role, fields in plan.role_options.items()
        for key, value in fields.items()
    ]
    options += [] if plan.group_size is None else [f"task.group_size={plan.group_size}"]
    lines = aligned(rows, right=[2]) + ([f"with {', '.join(options)}"] if options else [])
    return ["placement", *(f"  {line}" for line in lines)]


def _nodes(graph: Graph, plan: Plan, prediction: Prediction) -> list[str]:
    rows = [["node", "group", "model", "layout", "seconds", "of which"]]
    for node in graph.nodes:
        if node.name not in prediction.nodes:
            continue
        found = prediction.nodes[node.name]
        layout = plan.layouts.get(node.name)
        rows.append([
            node.name, plan.group_of(node), prediction.models.get(node.role or "", ""),
            "" if layout is None else str(layout), seconds_text(found.duration_s),
            _parts(found.parts_s),
        ])  # fmt: skip
    if not any(row[2] for row in rows[1:]):
        rows = [row[:2] + row[3:] for row in rows]
    return ["nodes", *(f"  {line}" for line in aligned(rows, right=[len(rows[0]) - 2]))]


def _parts(parts_s: Mapping[str, float]) -> str:
    total = sum(parts_s.values())
    most = sorted(parts_s.items(), key=lambda item: -item[1])[:3]
    return ", ".join(
        f"{part_text(name)} {seconds_text(seconds)}"
        for name, seconds in most
        if seconds >= 0.005 * total > 0
    )


def _timeline(graph: Graph, plan: Plan, simulation: Simulation) -> list[str]:
    spans = simulation.window()
    used = {span.node for span in spans}
    calls = [node.name for node in graph.nodes if node.name in used]
    letters = {name: chr(ord("A") + i % 26) for i, name in enumerate(calls)}
    first = min(span.step for span in spans)
    cycle_s = simulation.end_s - simulation.start_s
    steps = "one step" if simulation.cycle_steps == 1 else f"{simulation.cycle_steps} steps"
    lines = [f"timeline of {steps}, {seconds_text(cycle_s)}"]
    for group in plan.groups:
        bar = _bar([s for s in spans if s.group == group.name], letters, simulation, first)
        idle = percent_text(simulation.idle_share.get(group.name, 1.0))
        lines.append(f"  {group.name:<{max(len(g.name) for g in plan.groups)}} |{bar}| idle {idle}")
    lines += [f"  {line}" for line in _legend(letters)]
    if len({span.step for span in spans}) > 1:
        lines.append("  small letters: calls of the next step")
    return lines + [f"  {line}" for line in _critical(simulation)]


def _bar(
    spans: list[TaskSpan], letters: Mapping[str, str], simulation: Simulation, first: int
) -> str:
    # One line of a timeline: in each column the call that takes most of it, "." where none does.
    # A call that takes less than a column has one all the same, if its neighbor can spare it.
    width_s = (simulation.end_s - simulation.start_s) / _COLUMNS
    owner: list[int | None] = [None] * _COLUMNS
    for column in range(_COLUMNS):
        begin_s = simulation.start_s + column * width_s
        shares = [
            min(s.end_s, begin_s + width_s) - max(s.start_s, begin_s) for s in spans
        ]  # fmt: skip
        if shares and max(shares) > width_s / 2:
            owner[column] = shares.index(max(shares))
    for i, span in enumerate(spans):
        middle = int(((span.start_s + span.end_s) / 2 - simulation.start_s) / width_s)
        taken = owner[min(middle, _COLUMNS - 1)]
        if i not in owner and (taken is None or owner.count(taken) > 1):
            owner[min(middle, _COLUMNS - 1)] = i
    marks = [
        letters[s.node] if (s.step - first) % 2 == 0 else letters[s.node].lower() for s in spans
    ]
    return "".join("." if i is None else marks[i] for i in owner)


def _legend(letters: Mapping[str, str]) -> list[str]:
    lines = [""]
    for name, letter in letters.items():
        entry = f"{letter} {name}"
        if len(lines[-1]) + len(entry) > 88:
            lines.append("")
        lines[-1] += f"{'   ' if lines[-1] else ''}{entry}"
    return lines


def _critical(simulation: Simulation) -> list[str]:
    steps = simulation.critical_steps
    over = "" if steps == 1 else f" through {steps} steps"
    lines = [f"critical path{over}:"]
    for item in simulation.critical_path:
        entry = f"{item.node} {seconds_text(item.seconds)}"
        if len(lines[-1]) + len(entry) > 90:
            lines.append("  ")
        lines[-1] += f" {'' if item is simulation.critical_path[0] else '> '}{entry}"
    return lines


def _memory(plan: Plan, name: str, held: GroupMemory) -> list[str]:
    share = held.peak_bytes / held.capacity_bytes if held.capacity_bytes else 0.0
    limit = held.capacity_bytes
    lines = [
        f"memory of each device of {name}: {bytes_text(held.peak_bytes, like=limit, unit=False)} "
        f"of {bytes_text(limit)} ({percent_text(share)})"
    ]
    moments = [
        *(("always", call_group, parts) for call_group, parts in held.resident_bytes.items()),
        *(("while", call, parts) for call, parts in held.transient_bytes.items()),
    ]
    parts = list(dict.fromkeys(part for *_, row in moments for part, size in row.items() if size))
    if not parts:
        return lines
    rows = [["", "", *map(part_text, parts), "all"]]
    for when, what, row in moments:
        sizes = [row.get(part, 0) for part in parts]
        cells = [bytes_text(s, like=limit, unit=False) if s else "-" for s in (*sizes, sum(sizes))]
        mark = " (peak)" if when == "while" and what == held.peak_call else ""
        rows.append([when, what + mark, *cells])
    return lines + [f"  {line}" for line in aligned(rows, right=range(2, len(parts) + 3))]
