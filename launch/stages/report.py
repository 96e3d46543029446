"""What a run says at its end: summary.json, a curve, and a few lines for a person."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...algorithms.roles.language import Policy
from ..inputs.record import Recorded
from ..placement.machine import num_cores
from ..run_dir.atomic import write_text
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
from ..run_dir.process_usage import ProcessUsage
from ..run_dir.progress import RunProgress
from ..run_dir.progress_events import format_duration
from ..run_dir.run_folder import CodeVersion, RunFolder, RunRecord
from ..run_dir.trackers.jsonl import read_metrics
from .checks import comparison_text, memory_text, nodes_summary
from .headline import Headline
from .job import Job
from .train import Outcome

_LONG = frozenset({"examples_before", "examples_after", "nodes", "suites"})
"""Of a summary what is too long for a line that tells what came out."""


def summary_of(
    job: Job,
    outcome: Outcome,
    *,
    code: CodeVersion,
    usage: ProcessUsage,
    wall_time_s: float,
    stage_times_s: Mapping[str, float],
    warned: Mapping[str, int],
    resumed: bool,
    record: RunRecord,
) -> dict[str, Any]:
    """The contents of summary.json. Times are of this process only, if the run was resumed.

    Args:
        job: What was run.
        outcome: Of the main stage.
        code: As it was when this process began, since somebody may edit it meanwhile.
        usage: Of this process and all below it.
        wall_time_s: Of the stages.
        stage_times_s: Of each of those that this process carried out.
        warned: Kind of sign -> how often the run warned of it.
        resumed: Whether an earlier process did some of it.
        record: What the run's folder says of it.
    """
    main, prediction = job.main, job.plan.prediction
    before, after = (found.get(WHOLE, _NOTHING) for found in (outcome.before, outcome.after))
    return {
        "graph": main.graph.name,
        "task": job.data.task.task_id,
        "seed": job.run.seed,
        "stages": [stage.name for stage in job.stages],
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
        "num_held_out": job.held_out.num_prompts if job.held_out else 0,
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
        "nodes": nodes_summary(main.graph, job.plan, outcome.node_times_s, outcome.node_peaks),
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
    job: Job,
    folder: RunFolder,
    outcome: Outcome,
    summary: dict[str, Any],
    progress: RunProgress,
    tracked: str | None,
) -> None:
    """Draw the curve and print what came out; the last line sums it up.

    Args:
        job: What was run.
        folder: Its folder.
        outcome: Of the main stage.
        summary: The contents of summary.json.
        progress: Where it is told.
        tracked: How a person looks at what the tracker has; see `Tracker.start`.
    """
    curve = _draw(job, folder, summary)
    compared = comparison_text(job.plan, summary["nodes"], outcome.step_time_s)
    compared += memory_text(summary["nodes"])
    changed = _changed(summary["changes"])
    suites = _suites(job, outcome)
    stopped = [outcome.stopped] if outcome.stopped else []
    if missed := outcome.checkpoints_missed:
        stopped.append(f"checkpoints that were due and could not be written: {missed}")
    stopped += [outcome.deaths.text] if outcome.deaths.text else []
    stopped += _best(job, folder)
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
    line = _summary_line(folder, summary, outcome.env_unit, whose_accuracy(job.main))
    told = {name: value for name, value in summary.items() if name not in _LONG}
    progress.end(line, str(folder.path), told)


def whose_accuracy(stage: Recorded) -> str:
    """Return whose accuracy is measured ("solver's "), where a step trains several policies."""
    kinds = stage.graph.roles
    policies = [role for role in stage.graph.learning_roles if issubclass(kinds[role], Policy)]
    return f"{stage.trained(Policy)}'s " if len(policies) > 1 else ""


def _draw(job: Job, folder: RunFolder, summary: dict[str, Any]) -> Path | None:
    rows = read_metrics(folder.metrics)
    metric = Headline(job.main).curve([name for row in rows[-2:] for name in row])
    if metric is None:
        return None
    points = [(row["step"], row[metric.name]) for row in rows if row.get(metric.name) is not None]
    title = f"{summary['graph']} on {summary['task']}, seed {summary['seed']}"
    title += ", not reproducible" if summary["not_reproducible"] else ""
    path = folder.path / "curve.svg"
    write_text(path, draw_curve(points, title=title, label=metric.label))
    return path


def _examples(outcome: Outcome) -> list[str]:
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
    """What was said, a line a turn, and the two answers."""
    said = [f"{message['role']}: {message['content']!r}" for message in before["messages"]]
    answers = [
        f"    assistant {when} training: {example['response']!r} ({score_text(example)})"
        for when, example in (("before", before), ("after", after))
    ]
    return [*said, *answers]


def _suites(job: Job, outcome: Outcome) -> list[str]:
    """Suite by suite, what was measured before and after; none where the last line says it all."""
    config = job.run.evaluation
    is_whole = set(outcome.before) == {WHOLE} and not outcome.before[WHOLE].losses
    if is_whole and config.every is None and not config.sampling:
        return []
    return [
        _change_text(name, measured, outcome.after[name])
        for name, measured in outcome.before.items()
        if (measured.scores or measured.losses) and name in outcome.after
    ]


def _best(job: Job, folder: RunFolder) -> list[str]:
    """Which checkpoint was kept as the best one."""
    metric, kept = job.run.evaluation.keep_best, Evaluations(folder.path)
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


def _unverified(outcome: Outcome) -> list[str]:
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
    """What of the run's configuration was not the same from its first step to its last."""
    return [
        f"changed after {change['step']} steps: "
        + ", ".join(f"{key} from {then} to {now}" for key, (then, now) in change["keys"].items())
        for change in changes
    ]


def _stage_times(times_s: Mapping[str, float]) -> list[str]:
    """How long each stage took, where there are several."""
    total_s = sum(times_s.values())
    if len(times_s) < 2 or not total_s:
        return []
    said = (f"{name} {format_duration(s)} ({s / total_s:.0%})" for name, s in times_s.items())
    return [f"stages: {', '.join(said)}"]


def _summary_line(
    folder: RunFolder, summary: dict[str, Any], env_unit: str, whose: str = ""
) -> str:
    """Summarize the run in a line; `whose` says which of several policies its accuracy is of."""
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
