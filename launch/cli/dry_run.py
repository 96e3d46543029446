"""`penstock run --dry-run`: whether a run could start, and where each of its ranks would go.

All that a launch checks is checked, against the cluster that `cluster=` describes or, without it,
the one that a plan's file was made for. Nothing is started, downloaded or written, so a laptop can
say what a cluster would. Only `placement=auto` without a described cluster asks the Ray that
`RAY_ADDRESS` names, if it is set, what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .hydra_app import hydra_app, refuse_resume

if TYPE_CHECKING:
    from ...planner.inputs.cluster import ClusterSpec
    from ..inputs.run import Run
    from ..placement.place import Seat

_COLUMNS = ("group", "process", "rank", "node", "device", "memory", "roles")


def dry_run_command(arguments: list[str]) -> int:
    """Run the command; `arguments` are the words after `penstock run --dry-run`."""
    hydra_app("dry_run", arguments, _dry_run)
    return 0


def _dry_run(composed: dict[str, Any]) -> None:
    # Imported here: torch and all that follows it take seconds, and `--help` needs none of it.
    from dataclasses import replace

    from ..inputs.compose import AUTO, resolve, run_config
    from ..placement.machine import joined
    from ..run_dir.trackers.registry import TRACKERS, Trackers
    from ..stages.prepare import prepare

    refuse_resume(composed, "run --dry-run")
    cluster = _described(composed.pop("cluster", None))
    config = run_config(composed)
    # Refuses what a tracker lacks. One of the user's own may open files as soon as it is made.
    if config.tracker.all.keys() <= TRACKERS.keys():
        Trackers(config.tracker, tables=config.samples.track_every is not None)
    run = resolve(config, None if cluster is None else cluster.device_type)
    if cluster is not None or config.placement != AUTO:
        run = replace(run, cluster=cluster)
    else:
        run = joined(run)
    print(_text(prepare(run, dry=True), cluster))


def _described(section: Any) -> ClusterSpec | None:
    """The cluster of `cluster=`, if it is given."""
    from ...configs.plan_schema import ClusterConfig
    from ...configs.validate import validated
    from ..placement.machine import cluster_spec, named_devices

    if section is None:
        return None
    return cluster_spec(validated(ClusterConfig, named_devices(section), "cluster"))


def _text(run: Run, cluster: ClusterSpec | None) -> str:
    """Describe what would run where."""
    from ...planner.inputs.cluster import ClusterSpec
    from ...planner.report.plan_texts import cluster_text
    from ..placement.place import check_fits, seats
    from ..stages.prepare import first_notes, statistics

    plan, placement = run.placed, run.main.placement
    if cluster is None and isinstance(plan.cluster, ClusterSpec):
        cluster = plan.cluster
    nodes = {} if cluster is None else check_fits(plan, placement, cluster)
    lines = [f"{run.main.graph.name} can start; this was a dry run, and nothing was started"]
    lines += [f"cluster  {cluster_text(cluster)}"] if cluster is not None else []
    lines += [*first_notes(run, tries=True), *statistics(run), *_streaming(run)]
    found = seats(run.main.graph, placement, nodes)
    return "\n".join([*lines, *_table(found, plan.memory_bytes_per_device)])


def _streaming(run: Run) -> list[str]:
    """What streams, in every stage where something does."""
    from ..inputs.run import executor_kind
    from ..stages.streaming import streaming_lines

    kind = executor_kind(run.executor.kind)
    return [
        line
        for stage in run.stages
        for line in streaming_lines(
            stage, stage.placement, run.config.schedule, in_processes=kind.has_processes
        )
    ]


def _table(found: Sequence[Seat], memory: Mapping[int, int]) -> list[str]:
    from ...planner.formatting import bytes_text

    rows: list[tuple[str, ...]] = [_COLUMNS]
    for seat in found:
        device = seat.device
        needed = None if device is None else memory.get(device)
        rows.append(
            (
                seat.group,
                str(seat.process),
                str(seat.rank),
                seat.node.removeprefix("node ") or "any",
                "any" if device is None else str(device),
                "-" if needed is None else bytes_text(needed),
                ", ".join(seat.roles) or "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    return [
        "  ".join(f"{word:<{width}}" for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
