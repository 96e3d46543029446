"""A run as Python sees it: its folder read into tables, curves, its graph and its plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.errors import ConfigError, nearest
from ...dataflow.graph.graph import Graph
from ...planner.plan.plan import Plan
from ..inputs.compose import run_config
from ..inputs.record import recorded
from ..run_dir.resume import stored_config
from ..run_dir.run_folder import RunFolder, RunRecord, record_of
from ..run_dir.run_folder import open_run as open_folder
from ..run_dir.run_state import State, state_of
from ..run_dir.samples import Sample, read_samples
from ..run_dir.trackers.jsonl import read_metrics
from ..runs.series import History, Over
from ..runs.values import value_text
from ..stages.headline import Headline
from .live_curve import Curve

if TYPE_CHECKING:
    from pandas import DataFrame

_FACTS = (
    "num_steps",
    "accuracy_before_rl",
    "accuracy_after_rl",
    "episode_return_before",
    "episode_return_after",
    "samples_per_s",
    "wall_time_s",
    "stopped",
)
"""Of the summary: what is shown of a run at a glance."""


class RunHandle:
    """A run that goes on or is over; its files are read whenever something is asked for.

    Args:
        folder: Of the run, or of one of its stages (`run.stage("sft")`).

    Attributes:
        folder: Where it is.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._files = folder
        self.folder: Path = folder.path

    @property
    def id(self) -> str:
        """The run's name among all runs."""
        return self._files.id

    @property
    def record(self) -> RunRecord:
        """Everything that its files say of it: seed, code, versions, changes, tags."""
        return record_of(self._files)

    @property
    def state(self) -> State:
        """How it stands: "running", "finished", "stopped"..."""
        return state_of(self.record)

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration, every default spelled out.

        Raises:
            ConfigError: If it cannot be read.
        """
        return stored_config(self._files)

    @property
    def summary(self) -> Mapping[str, Any]:
        """What came out, as in summary.json; empty as long as the run is not over."""
        return self.record.summary or {}

    def stage(self, name: str) -> RunHandle:
        """The metrics and samples of a stage before the main one, such as "sft".

        Raises:
            ConfigError: If the run has no such stage.
        """
        stages = self.folder / "stages"
        known = sorted(path.name for path in stages.iterdir()) if stages.is_dir() else []
        if name not in known:
            raise ConfigError(
                f"run '{self.id}' has no stage {name!r}{nearest(str(name), known)}\n"
                f"    before the main one it has: {', '.join(known) or 'none'}"
            )
        return RunHandle(self._files.stage(name))

    @property
    def metrics(self) -> DataFrame:
        """A row for each step, a column for each metric; what a step did not measure is NaN.

        Raises:
            ConfigError: If the file is damaged.
        """
        # Imported here: it takes most of a second.
        from pandas import DataFrame

        lines = read_metrics(self._files.metrics)
        table = DataFrame.from_records(lines, columns=None if lines else ["step"])
        return table.set_index("step").astype("float64")

    def samples(self, step: int | None = None) -> DataFrame:
        """The responses that were kept, a row each, with what they earned.

        Args:
            step: Of which step, counted from 0; None for all that are kept.

        Returns:
            A column for each field of `Sample`; what a node said of the response has the node's
            name. Texts are what a model wrote: show them as text.

        Raises:
            ConfigError: If none are kept of the step, or a file is damaged.
        """
        from pandas import DataFrame

        found = read_samples(self.folder, None if step is None else [step])
        return DataFrame([_row(sample) for sample in found])

    def curve(self, metric: str = "", over: Over = "steps") -> Curve:
        """A metric as a picture.

        Args:
            metric: One of the columns of `metrics`; "" for what the run can be judged by.
            over: What is counted from left to right.

        Raises:
            ConfigError: If there is no such metric.
        """
        return self._curve(History(self.folder), metric, over)

    def _curve(self, history: History, metric: str = "", over: Over = "steps") -> Curve:
        found = Headline(None).curve(history.metrics) if not metric else None
        name = metric or (found.name if found else next(iter(history.metrics), ""))
        series = history.series(name, over)
        points = list(zip(series.xs, series.ys, strict=True))
        return Curve(self.id, found.label if found else name, points, over)

    @cached_property
    def graph(self) -> Graph:
        """The graph of the main stage's step, recorded anew.

        Raises:
            ConfigError: If the step cannot be found any more; `graph.svg` in the folder shows it.
        """
        config = run_config(self.config)
        return recorded(config.algorithm, config.seed)[-1].graph

    @property
    def plan(self) -> Plan:
        """Where the main stage's nodes run.

        Raises:
            PlanError: If it cannot be read.
        """
        return Plan.read(self._files.plan)

    def __repr__(self) -> str:
        return f"<run {self.id}: {self.state}, in {os.path.relpath(self.folder)}>"

    def _repr_html_(self) -> str:
        """A few facts and the curve, for Jupyter."""
        summary, history = self.summary, History(self.folder)
        facts = [(key, summary.get(key)) for key in _FACTS]
        rows = "".join(
            f'<tr><th style="text-align: left">{escape(key)}</th>'
            f'<td style="text-align: left">{escape(value_text(value))}</td></tr>'
            for key, value in facts
            if value is not None
        )
        curve = str(self._curve(history)) if history.metrics else ""
        head = f"<p><b>{escape(self.id)}</b>: {escape(self.state)}</p>"
        return f"<div>{head}<table>{rows}</table>{curve}</div>"


def _row(sample: Sample) -> dict[str, Any]:
    """The fields of a sample, and beside them what nodes said of it."""
    fields = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    parts: Mapping[str, float] = fields.pop("parts")
    return {**fields, **parts}


def open_run(folder: str | os.PathLike[str]) -> RunHandle:
    """A run that exists, in whatever state it is.

    Args:
        folder: Such as "runs/20261121-031454-grpo-seed0".

    Raises:
        ConfigError: If it is not the folder of a run.
    """
    try:
        path = Path(folder)
    except TypeError as error:
        raise ConfigError(f"penstock.open_run: expected a folder, got {folder!r:.80}") from error
    return RunHandle(open_folder(path))
