"""What a run says at its end: summary.json, a curve, and a few lines for a person."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..run_dir.atomic import write_text
from ..run_dir.curve import draw_curve
from ..run_dir.progress import format_duration
from ..run_dir.run_folder import CodeVersion, RunFolder
from ..run_dir.trackers.jsonl import read_metrics
from .checks import comparison_text, nodes_summary
from .headline import Headline
from .job import Job
from .train import Outcome

__all__ = ["summary_of", "write_report"]


def summary_of(
    job: Job,
    outcome: Outcome,
    *,
    code: CodeVersion,
    peak_memory_bytes: int,
    wall_time_s: float,
    resumed: bool,
    changes: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The contents of summary.json. Times are of this process only, if the run was resumed.

    Args:
        job: What was run.
        outcome: Of the main stage.
        code: As it was when this process began, since somebody may edit it meanwhile.
        peak_memory_bytes: Of this process and all below it.
        wall_time_s: Of the stages.
        resumed: Whether an earlier process did some of it.
        changes: What was changed of its configuration on the way, as `RunRecord` has it.
    """
    main, prediction = job.main, job.plan.prediction
    return {
        "graph": main.graph.name,
        "task": job.data.task.task_id,
        "seed": job.run.seed,
        "stages": [stage.name for stage in job.stages],
        "num_steps": main.config.num_steps,
        "weights_sha256": outcome.weights_sha256,
        "roles_sha256": outcome.roles_sha256,
        "accuracy_before_rl": outcome.before.accuracy if outcome.before else None,
        "accuracy_after_rl": outcome.after.accuracy if outcome.after else None,
        "num_held_out": job.held_out.num_prompts if job.held_out else 0,
        "episode_return_before": outcome.before.episode_return if outcome.before else {},
        "episode_return_after": outcome.after.episode_return if outcome.after else {},
        "num_episodes": outcome.after.num_episodes if outcome.after else 0,
        "verifier_errors": outcome.after.errors if outcome.after else None,
        "verifier_timeouts": outcome.after.timeouts if outcome.after else None,
        "samples_per_s": outcome.samples_per_s,
        "env_steps_per_s": outcome.env_steps_per_s,
        "env_restarts": outcome.num_env_restarts,
        "step_time_s": outcome.step_time_s,
        "predicted_step_time_s": prediction.step_time_s if prediction else None,
        "calibration": prediction.calibration if prediction else None,
        "nodes": nodes_summary(main.graph, job.plan, outcome.node_times_s),
        "peak_memory_bytes": peak_memory_bytes,
        "wall_time_s": wall_time_s,
        "main_stage_wall_time_s": outcome.wall_time_s,
        "resumed": resumed,
        "first_step": outcome.first_step,
        "changes": list(changes),
        "code": str(code),
        "examples_before": outcome.before.examples if outcome.before else [],
        "examples_after": outcome.after.examples if outcome.after else [],
    }


def write_report(
    job: Job,
    folder: RunFolder,
    outcome: Outcome,
    summary: dict[str, Any],
    console: Console,
    tracked: str | None,
) -> None:
    """Draw the curve and print what came out; the last line sums it up.

    Args:
        job: What was run.
        folder: Its folder.
        outcome: Of the main stage.
        summary: The contents of summary.json.
        console: Where to print.
        tracked: How a person looks at what the tracker has; see `Tracker.start`.
    """
    curve = _draw(job, folder, summary)
    compared = comparison_text(job.plan, summary["nodes"], outcome.step_time_s)
    changed = _changed(summary["changes"])
    for line in (*compared, *_examples(outcome), *_unverified(outcome), *changed):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    shown = {
        "models": folder.path / "models",
        "curve": curve,
        "timeline": folder.trace,
        "tracker": tracked,
    }
    for name, path in shown.items():
        if path is not None:
            console.print(f"{name}: {path}", highlight=False, markup=False, soft_wrap=True)
    line = _summary_line(folder, summary, outcome.env_unit)
    console.print(line, highlight=False, soft_wrap=True)


def _draw(job: Job, folder: RunFolder, summary: dict[str, Any]) -> Path | None:
    rows = read_metrics(folder.metrics)
    metric = Headline(job.main).curve(rows[-1] if rows else {})
    if metric is None:
        return None
    points = [(row["step"], row[metric.name]) for row in rows if row.get(metric.name) is not None]
    title = f"{summary['graph']} on {summary['task']}, seed {summary['seed']}"
    path = folder.path / "curve.svg"
    write_text(path, draw_curve(points, title=title, label=metric.label))
    return path


def _examples(outcome: Outcome) -> list[str]:
    if outcome.before is None or outcome.after is None:
        return []
    lines: list[str] = []
    for before, after in zip(outcome.before.examples, outcome.after.examples, strict=False):
        if "messages" in before:
            lines += _conversation(before, after)
            continue
        lines.append(
            f"{before['prompt']!r}: {before['response']!r} ({before['score']:g}) before, "
            f"{after['response']!r} ({after['score']:g}) after"
        )
    return lines


def _conversation(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What was said, a line a turn, and the two answers."""
    said = [f"{message['role']}: {message['content']!r}" for message in before["messages"]]
    answers = [
        f"    assistant {when} training: {example['response']!r} ({example['score']:g})"
        for when, example in (("before", before), ("after", after))
    ]
    return [*said, *answers]


def _unverified(outcome: Outcome) -> list[str]:
    """Answers whose score says nothing about them, because the verifier gave none."""
    return [
        f"accuracy {when} training: the verifier failed on {measured.errors or 0:.1%} of the "
        f"answers and ran out of time on {measured.timeouts or 0:.1%}; they count as wrong"
        for when, measured in (("before", outcome.before), ("after", outcome.after))
        if measured is not None and (measured.errors or measured.timeouts)
    ]


def _changed(changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What of the run's configuration was not the same from its first step to its last."""
    return [
        f"changed after {change['step']} steps: "
        + ", ".join(f"{key} from {then} to {now}" for key, (then, now) in change["keys"].items())
        for change in changes
    ]


def _summary_line(folder: RunFolder, summary: dict[str, Any], env_unit: str) -> str:
    parts = [f"{folder.id}: {summary['num_steps']} steps"]
    if summary["accuracy_before_rl"] is not None:
        before, after = summary["accuracy_before_rl"], summary["accuracy_after_rl"]
        parts.append(
            f"accuracy {before:.1%} -> {after:.1%} on {summary['num_held_out']} held-out problems"
        )
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
    parts.append(f"{summary['peak_memory_bytes'] / 2**20:.0f} MiB")
    parts.append(format_duration(summary["wall_time_s"]))
    return ", ".join(parts)
