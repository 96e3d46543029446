"""A run as Python sees it: its folder read into tables, curves, its graph and its plan.

In a notebook a run that goes on shows its curve: one picture, drawn again now and then.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...dataflow.errors import ConfigError, nearest
from ...dataflow.graph.graph import Graph
from ...planner.plan.plan import Plan
from ..inputs.record import recorded
from ..inputs.run import run_config
from ..run_dir.curve import draw_curve
from ..run_dir.progress import format_values
from ..run_dir.resume import stored_config
from ..run_dir.run_folder import RunFolder, RunRecord, State, record_of, state_of
from ..run_dir.run_folder import open_run as open_folder
from ..run_dir.samples import Sample, read_samples
from ..run_dir.step_logs import read_metrics
from ..run_dir.trackers import RunInfo
from ..runs.values import History, Over, value_text
from ..stages.stage_result import CURVE_ENDS, Headline

if TYPE_CHECKING:
    from pandas import DataFrame

_MOST_POINTS = 400  # of a curve: more are not seen, and each change sends a picture again


@dataclass(frozen=True)
class Curve:
    """A metric of a run, as a picture."""

    title: str  # written above it
    label: str  # what its values are
    points: Sequence[tuple[float, float]] = field(repr=False)  # (step, finite value), by step
    over: str = "steps"  # what is counted from left to right

    def __str__(self) -> str:
        """The picture as SVG text, to be written to a file; Jupyter shows it as a picture."""
        stride = math.ceil(len(self.points) / _MOST_POINTS) or 1
        points = self.points[::stride]
        return draw_curve(points, title=self.title, label=self.label, over=self.over)

    _repr_svg_ = __str__


def in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class LiveCurve:
    """A `Tracker` that shows each stage's curve in the output of the cell that runs.

    Which metric is shown is found as for the curve that a run leaves behind.
    """

    def __init__(self, every_s: float = 1.0) -> None:
        self._every_s = every_s
        self._run = self._stage = ""
        self._lines: list[tuple[int, Mapping[str, float]]] = []  # of what a curve may be of
        self._last: Mapping[str, float] = {}
        self._shown_s = -math.inf
        self._display: Any = None

    def start(self, run: RunInfo) -> str | None:
        self._run = run.id
        return None

    def rewind(self, step: int, stage: str) -> None:
        self._show()
        self._stage, self._lines = stage, []
        # Its curve comes below that of the stage before.
        self._shown_s, self._display = -math.inf, None

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        own = {name: value for name, value in metrics.items() if not name.startswith("evaluation/")}
        if not own:
            return  # an evaluation between two steps
        kept = {name: value for name, value in own.items() if name.endswith(CURVE_ENDS)}
        self._lines.append((step, kept))
        self._last = own
        if time.monotonic() - self._shown_s >= self._every_s:
            self._show()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._show()

    def _show(self) -> None:
        if not self._lines:
            return
        # Imported here: only in a notebook is it there for certain.
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        page = HTML(self.html())
        if self._display is None:
            self._display = display(page, display_id=True)
        else:
            self._display.update(page)
        self._shown_s = time.monotonic()

    def html(self) -> str:
        """A line on the last step, and below it the curve if there is a metric to judge by."""
        step, last = self._lines[-1][0], self._last
        headline = Headline(None)
        said = f"{self._stage}: {step + 1} steps  {format_values(headline.shown(last))}"
        metric = headline.curve(last)
        if metric is None:
            return f"<p>{escape(said)}</p>"
        points = [
            (float(number), line[metric.name])
            for number, line in self._lines
            if math.isfinite(line.get(metric.name, math.nan))
        ]
        curve = Curve(f"{self._run}, {self._stage}", metric.label, points)
        return f"<p>{escape(said)}</p>{curve}"


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


class RunHandle:
    """A run that goes on or is over, or one of its stages (`run.stage("sft")`), in its `folder`.

    Its files are read whenever something is asked for. What it does not have, and what cannot be
    read, is a `ConfigError`.
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
        """The run's state: "running", "finished", "stopped"..."""
        return state_of(self.record)

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration, every default spelled out."""
        return stored_config(self._files)

    @property
    def summary(self) -> Mapping[str, Any]:
        """The summary, as in summary.json; empty as long as the run is not over."""
        return self.record.summary or {}

    def stage(self, name: str) -> RunHandle:
        """The metrics and samples of a stage before the main one, such as "sft"."""
        known = self._files.stage_names
        if name not in known:
            raise ConfigError(
                f"run '{self.id}' has no stage {name!r}{nearest(str(name), known)}\n"
                f"    before the main one it has: {', '.join(known) or 'none'}"
            )
        return RunHandle(self._files.stage(name))

    @property
    def metrics(self) -> DataFrame:
        """A row for each step, a column for each metric; what a step did not measure is NaN."""
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
        """
        from pandas import DataFrame

        found = read_samples(self.folder, None if step is None else [step])
        names = [name for name in Sample.__dataclass_fields__ if name != "parts"]
        rows = [{name: getattr(one, name) for name in names} | {**one.parts} for one in found]
        return DataFrame(rows)

    def curve(self, metric: str = "", over: Over = "steps") -> Curve:
        """A metric as a picture.

        Args:
            metric: One of the columns of `metrics`; "" for what the run can be judged by.
            over: What is counted from left to right.
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
        """The graph of the main stage's step, recorded anew; `graph.svg` shows the first."""
        config = run_config(self.config)
        return recorded(config.algorithm, config.seed)[-1].graph

    @property
    def plan(self) -> Plan:
        """The plan of the main stage.

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
