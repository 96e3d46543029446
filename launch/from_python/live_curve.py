"""A run's curve in a notebook while the run goes on: one picture, drawn again now and then."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ..run_dir.curve import draw_curve
from ..run_dir.progress_events import format_values
from ..run_dir.trackers.tracker import RunInfo
from ..stages.headline import CURVE_ENDS, Headline

_MOST_POINTS = 400
"""Of a curve: more are not seen, and a picture is sent again with each change."""

_MEASURED = "evaluation/"
"""Before the names of what evaluations find; a step has others."""

_EVERY_S = 1.0
"""Between two pictures of a run that goes on."""


@dataclass(frozen=True)
class Curve:
    """A metric of a run, as a picture.

    Attributes:
        title: Written above it.
        label: What its values are.
        points: (step, value), by step; values are finite.
        over: What is counted from left to right.
    """

    title: str
    label: str
    points: Sequence[tuple[float, float]] = field(repr=False)
    over: str = "steps"

    def _repr_svg_(self) -> str:
        """The picture, for Jupyter."""
        stride = math.ceil(len(self.points) / _MOST_POINTS) or 1
        points = self.points[::stride]
        return draw_curve(points, title=self.title, label=self.label, over=self.over)

    def __str__(self) -> str:
        """The picture as SVG text, to be written to a file."""
        return self._repr_svg_()


def in_notebook() -> bool:
    """Whether this process is a Jupyter kernel, where pictures can be shown."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class LiveCurve:
    """A `Tracker` that shows each stage's curve in the output of the cell that runs.

    Which metric is shown is found as for the curve that a run leaves behind.

    Args:
        every_s: Seconds between two pictures.
    """

    def __init__(self, every_s: float = _EVERY_S) -> None:
        self._every_s = every_s
        self._run: RunInfo | None = None
        self._stage = ""
        self._lines: list[tuple[int, Mapping[str, float]]] = []  # of what a curve may be of
        self._last: Mapping[str, float] = {}
        self._shown_s = -math.inf
        self._display: Any = None

    def start(self, run: RunInfo) -> str | None:
        """See `Tracker.start`."""
        self._run = run
        return None

    def rewind(self, step: int, stage: str) -> None:
        """A stage begins: its curve comes below that of the stage before."""
        self._show()
        self._stage, self._lines = stage, []
        self._shown_s, self._display = -math.inf, None

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Note a step, and draw the curve again if the last picture is old enough."""
        own = {name: value for name, value in metrics.items() if not name.startswith(_MEASURED)}
        if not own:
            return  # an evaluation between two steps
        kept = {name: value for name, value in own.items() if name.endswith(CURVE_ENDS)}
        self._lines.append((step, kept))
        self._last = own
        if time.monotonic() - self._shown_s >= self._every_s:
            self._show()

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Draw what has come since the last picture."""
        self._show()

    def _show(self) -> None:
        if not self._lines or self._run is None:
            return
        # Imported here: only in a notebook is it there for certain.
        from IPython.display import (  # pyright: ignore[reportMissingImports]
            HTML,
            display,
        )

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
        run = self._run.id if self._run is not None else ""
        said = f"{self._stage}: {step + 1} steps  {format_values(headline.shown(last))}"
        metric = headline.curve(last)
        if metric is None:
            return f"<p>{escape(said)}</p>"
        points = [
            (float(number), line[metric.name])
            for number, line in self._lines
            if math.isfinite(line.get(metric.name, math.nan))
        ]
        curve = Curve(f"{run}, {self._stage}", metric.label, points)
        return f"<p>{escape(said)}</p>{curve}"
