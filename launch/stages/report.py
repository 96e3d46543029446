"""The report of a run: summary.json, a curve, and a few lines for a person."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...algorithms.roles.language import Policy
from ...dataflow.graph.graph import Graph
from ...dataflow.kinds import NodeKind
from ...planner.formatting import aligned, bytes_text, seconds_text
from ...planner.plan.plan import Plan
from ..inputs.record import Stage
from ..inputs.run import Run
from ..placement.machine import num_cores
from ..run_dir.curve import draw_curve
from ..run_dir.evaluations import (
    LOSS,
    SHARES,
    WHOLE,
    Change,
    Evaluations,
    Measured,
    accuracy_interval,
    score_text,
)
from ..run_dir.files import write_text
from ..run_dir.progress import RunProgress, format_duration
from ..run_dir.provenance import CodeVersion, ProcessUsage
from ..run_dir.run_folder import RunFolder, RunRecord
from ..run_dir.step_logs import read_metrics
from .headline import Headline
from .stage_result import StageResult

_LONG = frozenset({"examples_before", "examples_after", "nodes", "suites"})
"""Fields of a summary that are too long for its last event."""


def summary_of(
    run: Run,
    outcome: StageResult,
    *,
    code: CodeVersion,
    usage: ProcessUsage,
    wall_time_s: float,
    stage_times_s: Mapping[str, float],
    warned: Mapping[str, int],
    resumed: bool,
    record: RunRecord,
) -> dict[str, Any]:
    """The contents of summary.json. Times are of this process only, if the run was resumed."""
    main, prediction = run.main, run.placed.prediction
    before, after = (found.get(WHOLE, _NOTHING) for found in (outcome.before, outcome.after))
    return {
        "graph": main.graph.name,
        "task": run.data.task.task_id,
        "seed": run.config.seed,
        "stages": [stage.name for stage in run.stages],
        "num_steps": outcome.num_steps,
        "stopped": outcome.stopped or None,
        "weights_sha256": outcome.weights_sha256,
        "roles_sha256": outcome.roles_sha256,
        "not_reproducible": record.not_reproducible or None,
        "accuracy_before_rl": before.accuracy,
        "accuracy_after_rl": after.accuracy,
        "reward_before_rl": before.metrics.get(f"{SHARES}/mean"),
        "reward_after_rl": after.metrics.get(f"{SHARES}/mean"),
        "loss_before": before.losses.get(LOSS),
        "loss_after": after.losses.get(LOSS),
        "num_held_out": run.held_out.num_prompts if run.held_out else 0,
        "suites": suites_summary(outcome.before, outcome.after),
        "episode_return_before": before.episode_return,
        "episode_return_after": after.episode_return,
        "num_episodes": after.num_episodes,
        "verifier_errors": after.errors,
        "verifier_timeouts": after.timeouts,
        "samples_per_s": outcome.samples_per_s,
        "env_steps_per_s": outcome.env_steps_per_s,
        "env_restarts": outcome.num_env_restarts,
        "step_time_s": outcome.step_time_s,
        "predicted_step_time_s": prediction.step_time_s if prediction else None,
        "calibration": prediction.calibration if prediction else None,
        "nodes": nodes_summary(main.graph, run.placed, outcome.node_times_s, outcome.node_peaks),
        "peak_memory_bytes": usage.peak_bytes,
        "cpu_utilization": usage.cpu_s / (wall_time_s * num_cores()) if wall_time_s else None,
        "wall_time_s": wall_time_s,
        "stage_times_s": dict(stage_times_s),
        "warnings": dict(warned),
        **outcome.deaths.summary,
        "ledger": outcome.ledger,
        "checkpoints_missed": outcome.checkpoints_missed,
        "main_stage_wall_time_s": outcome.wall_time_s,
        "resumed": resumed,
        "first_step": outcome.first_step,
        "changes": list(record.changes),
        "code": str(code),
        "examples_before": _all_examples(outcome.before),
        "examples_after": _all_examples(outcome.after),
    }


_NOTHING = Measured({})


def _all_examples(found: Mapping[str, Measured]) -> list[dict[str, Any]]:
    return [example for measured in found.values() for example in measured.examples]


def suites_summary(
    before: Mapping[str, Measured], after: Mapping[str, Measured]
) -> dict[str, dict[str, Any]]:
    """Suite -> what was measured of it before and after, and how its accuracy changed."""
    found: dict[str, dict[str, Any]] = {}
    for name, then in before.items():
        now = after.get(name)
        if not then.scores or now is None:
            continue
        change = Change.between(then, now)
        found[name] = {
            "num_problems": len(now.scores),
            "num_samples": now.num_samples,
            "before": then.values,
            "after": now.values,
            "change": change.mean if change else None,
            "interval_95": list(change.interval) if change else None,
        }
    return found


def write_report(
    run: Run,
    folder: RunFolder,
    outcome: StageResult,
    summary: dict[str, Any],
    progress: RunProgress,
    tracked: str | None,
) -> None:
    """Draw the curve and print what came out; the last line sums it up."""
    curve = _draw(run, folder, summary)
    compared = comparison_text(run.placed, summary["nodes"], outcome.step_time_s)
    compared += memory_text(summary["nodes"])
    changed = _changed(summary["changes"])
    suites = _suites(run, outcome)
    stopped = [outcome.stopped] if outcome.stopped else []
    if missed := outcome.checkpoints_missed:
        stopped.append(f"checkpoints that were due and could not be written: {missed}")
    stopped += [outcome.deaths.text] if outcome.deaths.text else []
    stopped += _best(run, folder)
    stopped += _stage_times(summary["stage_times_s"])
    if summary["not_reproducible"]:
        changed.append(f"not reproducible: {summary['not_reproducible']}")
    said = (*compared, *_examples(outcome), *_unverified(outcome), *changed, *suites, *stopped)
    for line in (*said, f"ledger: {outcome.ledger}"):
        progress.note(line)
    shown = {
        "models": folder.path / "models",
        "curve": curve,
        "timeline": folder.trace,
        "tracker": tracked,
    }
    for name, path in shown.items():
        if path is not None:
            progress.note(f"{name}: {path}")
    line = _summary_line(folder, summary, outcome.env_unit, whose_accuracy(run.main))
    told = {name: value for name, value in summary.items() if name not in _LONG}
    progress.end(line, str(folder.path), told)


def whose_accuracy(stage: Stage) -> str:
    """Return whose accuracy is measured ("solver's "), where a step trains several policies."""
    kinds = stage.graph.roles
    policies = [role for role in stage.graph.learning_roles if issubclass(kinds[role], Policy)]
    return f"{stage.trained(Policy)}'s " if len(policies) > 1 else ""


def _draw(run: Run, folder: RunFolder, summary: dict[str, Any]) -> Path | None:
    rows = read_metrics(folder.metrics)
    metric = Headline(run.main).curve([name for row in rows[-2:] for name in row])
    if metric is None:
        return None
    points = [(row["step"], row[metric.name]) for row in rows if row.get(metric.name) is not None]
    title = f"{summary['graph']} on {summary['task']}, seed {summary['seed']}"
    title += ", not reproducible" if summary["not_reproducible"] else ""
    path = folder.path / "curve.svg"
    write_text(path, draw_curve(points, title=title, label=metric.label))
    return path


def _examples(outcome: StageResult) -> list[str]:
    lines: list[str] = []
    for name in (name for name in outcome.before if name in outcome.after):
        both = zip(outcome.before[name].examples, outcome.after[name].examples, strict=False)
        for before, after in both:
            if "messages" in before:
                lines += _conversation(before, after)
                continue
            lines.append(
                f"{before['prompt']!r}: {before['response']!r} ({score_text(before)}) before, "
                f"{after['response']!r} ({score_text(after)}) after"
            )
    return lines


def _conversation(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    said = [f"{message['role']}: {message['content']!r}" for message in before["messages"]]
    answers = [
        f"    assistant {when} training: {example['response']!r} ({score_text(example)})"
        for when, example in (("before", before), ("after", after))
    ]
    return [*said, *answers]


def _suites(run: Run, outcome: StageResult) -> list[str]:
    """Suite by suite, what was measured before and after; none where the last line says it all."""
    config = run.config.evaluation
    is_whole = set(outcome.before) == {WHOLE} and not outcome.before[WHOLE].losses
    if is_whole and config.every is None and not config.sampling:
        return []
    return [
        _change_text(name, measured, outcome.after[name])
        for name, measured in outcome.before.items()
        if (measured.scores or measured.losses) and name in outcome.after
    ]


def _best(run: Run, folder: RunFolder) -> list[str]:
    metric, kept = run.config.evaluation.keep_best, Evaluations(folder.path)
    best = None if metric is None else kept.best(metric)
    if metric is None or best is None:
        return []
    return [
        f"best: evaluation/{metric} {kept.curve(metric)[best]:.4g} after {best} steps; "
        f"penstock export run={folder.path} step=best"
    ]


def measured_text(name: str, measured: Measured) -> str:
    """A line on what was found of one suite."""
    interval = accuracy_interval(measured)
    around = f" (95 % interval {interval[0]:.1%} to {interval[1]:.1%})" if interval else ""
    others = [_figure(key, value) for key, value in measured.values.items() if key != "accuracy"]
    accuracy = [
        f"{len(measured.scores)} problems",
        f"accuracy {measured.accuracy or 0:.1%}{around}",
    ]
    unscored = [f"no score {measured.unscored:.1%}"] if measured.unscored else []
    figures = [*(accuracy if measured.scores else ()), *others, *unscored]
    return f"{name or 'held out'}: {', '.join(figures)}"


def _figure(key: str, value: float, now: float | None = None) -> str:
    """Describe one of `Measured.values`, or two: shares in percent, losses as they are."""
    form = ".4g" if key.partition("/")[0] == LOSS else ".1%"
    return f"{key} {value:{form}}" + ("" if now is None else f" -> {now:{form}}")


def _change_text(name: str, before: Measured, after: Measured) -> str:
    """A line on one suite: every figure before and after, and the paired change of accuracy."""
    now = after.values
    figures = [_figure(key, value, now[key]) for key, value in before.values.items() if key in now]
    change = Change.between(before, after)
    return f"{name or 'held out'}: " + ", ".join(
        [
            *([f"{len(after.scores)} problems"] if after.scores else ()),
            *figures,
            *([f"accuracy {change}"] if change else ()),
        ]
    )


def _unverified(outcome: StageResult) -> list[str]:
    """Say how many answers have no score, and that they count as wrong."""
    return [
        f"accuracy {when} training: {measured.unscored:.1%} of the answers have no score (the "
        f"verifier failed on {measured.errors or 0:.1%} and ran out of time on "
        f"{measured.timeouts or 0:.1%}); they count as wrong"
        for when, found in (("before", outcome.before), ("after", outcome.after))
        for measured in found.values()
        if measured.unscored
    ]


def _changed(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"changed after {change['step']} steps: "
        + ", ".join(f"{key} from {then} to {now}" for key, (then, now) in change["keys"].items())
        for change in changes
    ]


def _stage_times(times_s: Mapping[str, float]) -> list[str]:
    total_s = sum(times_s.values())
    if len(times_s) < 2 or not total_s:
        return []
    said = (f"{name} {format_duration(s)} ({s / total_s:.0%})" for name, s in times_s.items())
    return [f"stages: {', '.join(said)}"]


def _summary_line(
    folder: RunFolder, summary: dict[str, Any], env_unit: str, whose: str = ""
) -> str:
    parts = [f"{folder.id}: {summary['num_steps']} steps"]
    parts += ["not reproducible"] if summary["not_reproducible"] else []
    if summary["accuracy_before_rl"] is not None:
        before, after = summary["accuracy_before_rl"], summary["accuracy_after_rl"]
        parts.append(
            f"{whose}accuracy {before:.1%} -> {after:.1%} on {summary['num_held_out']} held-out "
            "problems"
        )
        rewards = summary["reward_before_rl"], summary["reward_after_rl"]
        if None not in rewards and rewards != (before, after):
            parts.append(f"held-out reward {rewards[0]:.4g} -> {rewards[1]:.4g}")
    if summary["loss_before"] is not None:
        before, after = summary["loss_before"], summary["loss_after"]
        parts.append(f"held-out loss {before:.4g} -> {after:.4g}")
    for role, after in summary["episode_return_after"].items():
        before = summary["episode_return_before"][role]
        parts.append(
            f"{role}'s return {before:.4g} -> {after:.4g} in {summary['num_episodes']} held-out "
            "episodes"
        )
    if summary["env_steps_per_s"] is not None:
        parts.append(f"{summary['env_steps_per_s']:,.0f} {env_unit}/s")
    elif not math.isnan(summary["samples_per_s"]):
        parts.append(f"{summary['samples_per_s']:.4g} samples/s")
    if summary["env_restarts"]:
        parts.append(f"environments restarted: {summary['env_restarts']:g}")
    if summary["warnings"]:
        parts.append(f"warnings: {', '.join(summary['warnings'])}")
    parts.append(f"{summary['peak_memory_bytes'] / 2**20:.0f} MiB")
    parts.append(format_duration(summary["wall_time_s"]))
    return ", ".join(parts)


_Nodes = Mapping[str, Mapping[str, float | None]]
"""Node -> "predicted_s" and "measured_s", None where nothing is known; and on GPUs as bytes what a
device held at most, "predicted_bytes" and "peak_bytes"."""


def nodes_summary(
    graph: Graph,
    plan: Plan,
    node_times_s: Mapping[str, Sequence[float]],
    node_peaks: Mapping[str, int],
) -> dict[str, dict[str, float | None]]:
    """Predicted and measured time and memory of each node, in program order."""
    predicted = plan.prediction.durations_s if plan.prediction else {}
    return {
        node.name: {
            "predicted_s": predicted.get(node.name),
            "measured_s": _median(node_times_s.get(node.name, ())),
            **_memory(plan, node.name, node_peaks.get(node.name, 0)),
        }
        for node in graph.nodes
        if node.kind is not NodeKind.SOURCE
    }


def _memory(plan: Plan, node: str, peak_bytes: int) -> dict[str, float | None]:
    if not peak_bytes:
        return {}
    groups = plan.prediction.memory.values() if plan.prediction else ()
    needed = (
        group.resident_total_bytes + sum(group.transient_bytes[node].values())
        for group in groups
        if node in group.transient_bytes
    )
    return {"predicted_bytes": next(needed, None), "peak_bytes": peak_bytes}


def memory_text(nodes: _Nodes) -> list[str]:
    """Lines of a table: the most that a GPU held during each call; empty without GPUs or a plan."""
    rows: list[list[str]] = []
    for name, node in nodes.items():
        predicted, seen = node.get("predicted_bytes"), node.get("peak_bytes")
        if predicted is not None and seen:
            sizes = [bytes_text(int(predicted)), bytes_text(int(seen))]
            rows.append([name, *sizes, f"{predicted / seen - 1:+.0%}"])
    head = ["memory of a device", "predicted", "measured", "error"]
    return aligned([head, *rows], right=(1, 2, 3)) if rows else []


def _median(seconds: Sequence[float]) -> float | None:
    return statistics.median(seconds) if seconds else None


def comparison_text(plan: Plan, nodes: _Nodes, step_time_s: float) -> list[str]:
    """Lines of a table: every node that takes time by the prediction, then the step.

    Empty without a prediction, or if this process took no step.
    """
    prediction = plan.prediction
    if prediction is None or not step_time_s > 0:
        return []
    rows = [["node", "group", "predicted", "measured", "error"]]
    for name, node in nodes.items():
        predicted, measured = node["predicted_s"], node["measured_s"]
        if predicted is not None and measured is not None:
            rows.append([name, plan.nodes.get(name, ""), *_cells(predicted, measured)])
    rows.append(["a step", "", *_cells(prediction.step_time_s, step_time_s)])
    return [*aligned(rows, right=(2, 3, 4)), f"predicted with: {prediction.calibration}"]


def _cells(predicted: float, measured: float) -> list[str]:
    error = f"{predicted / measured - 1:+.0%}" if measured > 0 else "-"
    return [seconds_text(predicted), seconds_text(measured), error]
