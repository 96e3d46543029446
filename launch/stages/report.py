"""Reports of a run: notes before its first step, summary.json, a curve, some lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from ...algorithms.roles.language import Policy
from ...configs.schema import ModelConfig, model_spec
from ...dataflow.errors import ConfigError
from ...dataflow.graph.graph import Graph, NodeKind, RoleRef
from ...planner.formatting import aligned, bytes_text, seconds_text
from ...planner.plan.plan import Plan
from ...workers.agents.environment import TASK_AGENTS
from ...workers.data.sources import TaskSource
from ...workers.models.architecture import empty_model
from ..inputs.data import acted_in
from ..inputs.engines import MODEL_TYPE
from ..inputs.record import Stage
from ..inputs.run import Run
from ..placement.machine import num_cores
from ..run_dir.curve import draw_curve
from ..run_dir.evaluations import (
    LOSS,
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
from ..run_dir.run_folder import RunFolder, record_of
from ..run_dir.step_logs import count_kinds, read_metrics
from .stage_result import Headline, StageResult
from .worker_specs import HEADS, optimizer_of

if TYPE_CHECKING:
    from ...workers.envs.task import EnvTaskSpec

_LONG = frozenset({"examples_before", "examples_after", "nodes", "suites"})
"""Fields of a summary that are too long for its last event."""

_Nodes = Mapping[str, Mapping[str, float | None]]
"""Node -> "predicted_s" and "measured_s", None where nothing is known; and on GPUs as bytes what a
device held at most, "predicted_bytes" and "peak_bytes"."""

_ROWS_SHOWN, _IDS_SHOWN = 5, 24  # the most of a step, and of a piece of a row
_NUM_STEPS = 16  # taken to try an environment before its state is saved, and after
_LARGE = 20_000_000
"""Parameters from which on the rates of the algorithms' YAML, made for a million, are too high."""
_RATES = {"lora": 2e-4, "sampling": 1e-5, "reference": 5e-6, "data": 5e-5}
"""Usual learning rates of large pretrained models: of adapters, of all weights where a policy
learns from what it samples, in comparison with a reference, and from data alone."""


def first_notes(run: Run, *, tries: bool = False) -> list[str]:
    """Describe before the first step placement, models, evaluations and rows left out."""
    lines = [run.note, untried(run), run.data.about_tools, about_micro_batches(run)]
    why = not_reproducible(run)
    lines.append(why and f"not reproducible: {why}")
    lines += not_exact(run, tries=tries)
    lines += [line for stage in run.stages for line in high_rates(stage, run.model)]
    lines.append(rounded_adapters(run))
    if run.held_out_rows and run.config.evaluation.num_prompts:
        why = run.data.why_not_scored
        lines.append(why and f"evaluations measure the loss alone, and no accuracy: {why}")
    for report in run.reports:
        lines += [str(report)] if report.num_bad else []
        for note, count in report.notes.items():
            lines.append(f"{note} ({count} rows)" if count else note)
    return [line for line in lines if line]


def untried(run: Run) -> str:
    """Parts of a run on GPUs that have never run on one, and where to read on; "" if all have."""
    if not run.executor.device.startswith("cuda"):
        return ""
    engines = (run.engines.runs(s.graph, node) for s in run.stages for node in s.graph.nodes)
    parts = sorted({engine.name for engine in engines if not engine.tried_on_gpus})
    groups = run.main.placement.groups
    named = {device for group in groups for device in group.devices}
    if len(named) + sum(group.num_processes for group in groups if not group.devices) > 1:
        parts.append("several GPUs (NCCL)")
    what = ", ".join(parts)
    return f"never run on GPUs so far: {what}; docs/gpu.md says what has" if parts else ""


def about_micro_batches(run: Run) -> str:
    """The tokens that each role computes at once on a GPU, where launching decides that."""
    if not run.executor.device.startswith("cuda"):
        return ""
    roles: dict[int, list[str]] = {}
    for role, groups in run.main.planned_options.items():
        own = {**run.engines.options_of(role), **run.main.roles[role].options}
        for options in groups.values():
            tokens = {**options, **own}.get("micro_batch_tokens")
            if tokens is not None and role not in roles.setdefault(tokens, []):
                roles[tokens].append(role)
    said = (f"{tokens:,} tokens of {' and '.join(names)}" for tokens, names in roles.items())
    return f"micro-batches: {'; '.join(said)}" if roles else ""


def statistics(run: Run) -> list[str]:
    """Lengths of the rows of every stage, each line once."""
    tables = (source for of_stage in run.sources.values() for source in of_stage.values())
    lines = [source.statistics for source in tables if isinstance(source, TaskSource)]
    num_held_out, asked = len(run.data.task.held_out), run.held_out
    if asked and asked.num_prompts < num_held_out:
        lines.append(
            f"evaluations ask {asked.num_prompts} of {num_held_out} held-out problems "
            "(evaluation.num_prompts)"
        )
    return list(dict.fromkeys(lines))


def shown_rows(run: Run) -> list[str]:
    """Rows of the main stage's first step: their tokens, and which of them are trained on."""
    lines: list[str] = []
    for name, source in run.sources[run.main.name].items():
        if not isinstance(source, TaskSource):
            raise ConfigError(
                f"{run.main.graph.name} reads no texts, so there are no tokens to show\n"
                "    choose a task with prompts, such as task=file"
            )
        table: Any = source.batch(0)
        given: Any = table.tokens if hasattr(table, "tokens") else table.prompt
        rows: list[list[int]] = given.tolist()
        unmasked = [[False] * len(rows[0])] * len(rows)
        masks = table.mask.tolist() if hasattr(table, "mask") else unmasked
        sides = [", chosen" if one else ", rejected" for one in getattr(table, "chosen", ())]
        for number, (row, mask) in enumerate(zip(rows[:_ROWS_SHOWN], masks, strict=False)):
            ids = [token for token in row if token >= 0]
            lines.append(
                f"{name}, row {number + 1} of {len(rows)}{''.join(sides[number : number + 1])}: "
                f"{len(ids)} tokens, {sum(mask)} trained on"
            )
            for trained, places in groupby(range(len(ids)), key=mask.__getitem__):
                own = [ids[place] for place in places]
                more = f" and {len(own) - _IDS_SHOWN} more" if len(own) > _IDS_SHOWN else ""
                what = "trained on" if trained else "read"
                lines.append(f"    {what}: {run.data.tokenizer.decode(own)!r}")
                lines.append(f"        {' '.join(map(str, own[:_IDS_SHOWN]))}{more}")
    return lines


def about_model(run: Run) -> str:
    """The language model, its precision and place, and the engine that computes it; "" if none."""
    model = run.model
    if model.architecture.get("model_type") == MODEL_TYPE:
        return ""
    config = model_spec(model).config
    computes = run.engines.train.computes(empty_model(config))
    commit = "" if model.revision is None else f" at {model.revision[:12]}"
    name = model.hub or model.package or model.folder or "random weights"
    return (
        f"model: {name}{commit}, {model.dtype} on {run.executor.device}, computed {computes} "
        f"({config.model_type})"
    )


def not_reproducible(run: Run) -> str:
    """Why what comes out does not follow from the seed alone, in words; "" if it does."""
    reasons = [run.config.schedule.why_not_reproducible]
    task = run.data.task
    if task.converses and not task.deterministic:
        why = f", as {task.why_not_deterministic}" if task.why_not_deterministic else ""
        reasons.append(f"the other side of '{task.task_id}' may answer a turn in two ways{why}")
    return "; ".join(filter(None, reasons))


def not_exact(run: Run, *, tries: bool = False) -> list[str]:
    """Return a line for every group that cannot be restarted exactly; none if all can."""
    lines: dict[str, None] = {}
    for stage in run.stages:
        for role, reason in _reasons(stage, run, tries):
            for node in stage.graph.nodes:
                arguments = (one for _, one in node.arguments if isinstance(one, RoleRef))
                named = node.role == role or any(one.role == role for one in arguments)
                if named and node.kind is not NodeKind.TRAIN:
                    group = stage.placement.nodes[node.name]
                    lines[f"group '{group}' cannot be restarted exactly: {reason}"] = None
    return list(lines)


def _reasons(stage: Stage, run: Run, tries: bool) -> Iterator[tuple[str, str]]:
    """Yield the roles that cannot be restarted exactly, each with why and what to change."""
    nodes, task, schedule = stage.graph.nodes, run.data.task, run.config.schedule
    samples = {n.role for n in nodes if n.kind is NodeKind.ROLLOUT and n.role is not None}
    for role in samples:
        if schedule.order == "arrival":
            yield (
                role,
                "which weights its calls read depends on timing (schedule.order=arrival); to "
                "change that: schedule.order=step",
            )
        if schedule.in_flight:
            yield (
                role,
                "when new weights come while it samples depends on timing (schedule.in_flight); "
                "to change that: schedule.in_flight=false",
            )
    for role, section in stage.roles.items():
        worker = stage.worker(role)
        talks = worker in TASK_AGENTS and task.converses
        if talks and not task.deterministic:
            yield (
                role,
                f"what answers in '{task.task_id}' may keep a state outside the run, or answer "
                "otherwise when a conversation is begun anew; to change that: tools and "
                "environments that follow from problem, seed and turns, and say `deterministic`",
            )
        in_mixture = worker == "mixture" and "judge" in _values(section.options)
        if worker == "judge" or in_mixture:
            yield (
                role,
                "a judge behind an address may score the same response otherwise; to change that: "
                "a rule, or a reward model that the run computes itself",
            )
        acted = acted_in(run.spec) if worker == "env" else None
        of_env = acted is not None and acted.acts_in == "environment"
        if of_env and (why := _why_random(cast("EnvTaskSpec", acted), tries)):
            yield (
                role,
                f"{why}, so an episode that is replayed may show something else, which ends the "
                "run; to change that: another version of the environment, whose episodes follow "
                "from seed and actions",
            )


def _values(options: Any) -> Iterator[Any]:
    if isinstance(options, Mapping):
        for value in cast("Mapping[str, Any]", options).values():
            yield from _values(value)
    elif isinstance(options, list | tuple):
        for value in cast("Sequence[Any]", options):
            yield from _values(value)
    else:
        yield options


def _why_random(spec: EnvTaskSpec, tries: bool) -> str:
    if spec.backend == "gymnasium":
        import gymnasium

        if gymnasium.spec(spec.id.rpartition(":")[2]).nondeterministic:
            return f"Gymnasium lists '{spec.id}' as nondeterministic"
    if not tries:
        return ""
    from ...workers.envs.spec import why_not_exact

    found = why_not_exact(spec.env, num_before=_NUM_STEPS, num_after=_NUM_STEPS)
    return f"two environments '{spec.id}' that were tried {found}" if found else ""


def high_rates(stage: Stage, model: ModelConfig) -> list[str]:
    """Describe learning rates that a pretrained model of its size does not survive."""
    learning = stage.graph.learning_roles
    started = [role for role in stage.roles if role in learning and stage.worker(role) in HEADS]
    if model.folder is None or not started:
        return []
    parameters = empty_model(model_spec(model).config).parameters()
    millions = sum(parameter.numel() for parameter in parameters) / 1e6
    kinds = {node.kind for node in stage.graph.nodes}
    compares = "reference" if NodeKind.FORWARD in kinds else "data"
    usual = _RATES["lora" if model.lora else "sampling" if NodeKind.ROLLOUT in kinds else compares]
    highest = max(spec.lr for role in started if (spec := optimizer_of(stage, role)))
    if millions * 1e6 < _LARGE or highest <= 4 * usual:
        return []
    return [
        f"warning: stage '{stage.name}' trains a model of {millions:,.0f}M parameters with a "
        f"learning rate of {highest:g}, which suits one of a million; {usual:g} is usual: "
        f"{stage.at}.optimizer.lr={usual:g}"
    ]


def rounded_adapters(run: Run) -> str:
    """Say where adapters are merged into bfloat16 weights; "" if they are nowhere."""
    if not run.model.lora or run.model.precision != "bfloat16":
        return ""
    names, engines = {stage.name for stage in run.stages}, run.engines
    where = [
        f"for '{node.name}' ({engine.name})"
        for stage in run.stages
        for node in stage.graph.nodes
        if (engine := engines.runs(stage.graph, node)).merges_adapters
    ]
    started = {section.start: None for stage in run.stages for section in stage.roles.values()}
    where += [f"for what starts from '{start}'" for start in started if start in names]
    if not where:
        return ""
    return (
        f"note: adapters are merged into bfloat16 weights {' and '.join(dict.fromkeys(where))}, "
        "which rounds small updates away: model.dtype=float32 keeps them"
    )


def summary_of(
    run: Run,
    outcome: StageResult,
    folder: RunFolder,
    *,
    code: CodeVersion,
    usage: ProcessUsage,
    wall_time_s: float,
    stage_times_s: Mapping[str, float],
    resumed: bool,
) -> dict[str, Any]:
    """The contents of summary.json. Times are of this process only, if the run was resumed."""
    main, prediction, record = run.main, run.placed.prediction, record_of(folder)
    suites = outcome.before, outcome.after
    examples = [[shown for one in found.values() for shown in one.examples] for found in suites]
    before, after = (found.get(WHOLE, Measured({})) for found in suites)
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
        "reward_before_rl": before.reward("mean"),
        "reward_after_rl": after.reward("mean"),
        "loss_before": before.losses.get(LOSS),
        "loss_after": after.losses.get(LOSS),
        "num_held_out": run.held_out.num_prompts if run.held_out else 0,
        "suites": suites_summary(outcome.before, outcome.after),
        "episode_return_before": before.episode_return,
        "episode_return_after": after.episode_return,
        "num_episodes": after.num_episodes,
        "verifier_errors": after.reward("errors"),
        "verifier_timeouts": after.reward("timeouts"),
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
        "warnings": count_kinds(folder.path),
        **outcome.deaths.summary,
        "ledger": outcome.ledger,
        "checkpoints_missed": outcome.checkpoints_missed,
        "main_stage_wall_time_s": outcome.wall_time_s,
        "resumed": resumed,
        "first_step": outcome.first_step,
        "changes": list(record.changes),
        "code": str(code),
        "examples_before": examples[0],
        "examples_after": examples[1],
    }


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
    lines = comparison_text(run.placed, summary["nodes"], outcome.step_time_s)
    lines += [*memory_text(summary["nodes"]), *_examples(outcome)]
    for when, found in (("before", outcome.before), ("after", outcome.after)):
        lines += [
            f"accuracy {when} training: {unscored:.1%} of the answers have no score (the "
            f"verifier failed on {measured.reward('errors') or 0:.1%} and ran out of time on "
            f"{measured.reward('timeouts') or 0:.1%}); they count as wrong"
            for measured in found.values()
            if (unscored := measured.reward("unscored"))
        ]
    for change in summary["changes"]:
        keys = (f"{key} from {then} to {now}" for key, (then, now) in change["keys"].items())
        lines.append(f"changed after {change['step']} steps: {', '.join(keys)}")
    if summary["not_reproducible"]:
        lines.append(f"not reproducible: {summary['not_reproducible']}")
    lines += _suites(run, outcome)
    lines += [outcome.stopped] if outcome.stopped else []
    if missed := outcome.checkpoints_missed:
        lines.append(f"checkpoints that were due and could not be written: {missed}")
    lines += [outcome.deaths.text] if outcome.deaths.text else []
    metric, kept = run.config.evaluation.keep_best, Evaluations(folder.path)
    if metric is not None and (best := kept.best(metric)) is not None:
        lines.append(
            f"best: evaluation/{metric} {kept.curve(metric)[best]:.4g} after {best} steps; "
            f"penstock export run={folder.path} step=best"
        )
    times_s = summary["stage_times_s"]
    if len(times_s) > 1 and (total_s := sum(times_s.values())):
        said = (f"{name} {format_duration(s)} ({s / total_s:.0%})" for name, s in times_s.items())
        lines.append(f"stages: {', '.join(said)}")
    lines.append(f"ledger: {outcome.ledger}")
    shown = {
        "models": folder.path / "models",
        "curve": curve,
        "timeline": folder.trace,
        "tracker": tracked,
    }
    lines += [f"{name}: {path}" for name, path in shown.items() if path is not None]
    for line in lines:
        progress.note(line)
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
                lines += [f"{one['role']}: {one['content']!r}" for one in before["messages"]]
                lines += [
                    f"    assistant {when} training: {one['response']!r} ({score_text(one)})"
                    for when, one in (("before", before), ("after", after))
                ]
                continue
            lines.append(
                f"{before['prompt']!r}: {before['response']!r} ({score_text(before)}) before, "
                f"{after['response']!r} ({score_text(after)}) after"
            )
    return lines


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


def measured_text(name: str, measured: Measured) -> str:
    interval = accuracy_interval(measured)
    around = f" (95 % interval {interval[0]:.1%} to {interval[1]:.1%})" if interval else ""
    others = [_figure(key, value) for key, value in measured.values.items() if key != "accuracy"]
    accuracy = [
        f"{len(measured.scores)} problems",
        f"accuracy {measured.accuracy or 0:.1%}{around}",
    ]
    if unscored := measured.reward("unscored"):
        others.append(f"no score {unscored:.1%}")
    figures = [*(accuracy if measured.scores else ()), *others]
    return f"{name or 'held out'}: {', '.join(figures)}"


def _figure(key: str, value: float, now: float | None = None) -> str:
    form = ".4g" if key.partition("/")[0] == LOSS else ".1%"
    return f"{key} {value:{form}}" + ("" if now is None else f" -> {now:{form}}")


def _change_text(name: str, before: Measured, after: Measured) -> str:
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


def nodes_summary(
    graph: Graph,
    plan: Plan,
    node_times_s: Mapping[str, Sequence[float]],
    node_peaks: Mapping[str, int],
) -> dict[str, dict[str, float | None]]:
    """Predicted and measured time and memory of each node, in program order."""
    predicted = plan.prediction.durations_s if plan.prediction else {}
    groups = plan.prediction.memory.values() if plan.prediction else ()
    found: dict[str, dict[str, float | None]] = {}
    for node in (node for node in graph.nodes if node.kind is not NodeKind.SOURCE):
        name, times_s = node.name, node_times_s.get(node.name, ())
        found[name] = {
            "predicted_s": predicted.get(name),
            "measured_s": median(times_s) if times_s else None,
        }
        if peak_bytes := node_peaks.get(name, 0):
            needed = (
                group.resident_total_bytes + sum(group.transient_bytes[name].values())
                for group in groups
                if name in group.transient_bytes
            )
            found[name] |= {"predicted_bytes": next(needed, None), "peak_bytes": peak_bytes}
    return found


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
