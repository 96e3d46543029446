"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere.

The display only shows: everything in it is in `metrics.jsonl` too.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from .stop import drop_standard_error, visible

__all__ = ["LastingConsole", "ProgressDisplay", "format_duration", "format_values"]

_WINDOW_STEPS = 20
"""Rates and the time left come from this many of the latest steps: a run's pace changes."""


class LastingConsole(Console):
    """A console on standard error that a run outlives; rich's own ends the process."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print texts so that they only show; see `visible`."""
        shown = (visible(one) if isinstance(one, str) else one for one in objects)
        super().print(*shown, **options)

    def on_broken_pipe(self) -> None:
        """Go on with nobody to read it."""
        drop_standard_error()


class ProgressDisplay:
    """Shows how far a run is, how fast, and how well.

    Args:
        title: What is running: "grpo".
        num_steps: Steps of the whole run.
        first_step: The step it starts from, when resumed.
        console: Where to show it; standard error by default, so that output can be piped.
        every_s: Seconds between plain lines where there is no terminal.
        clock: Seconds from any origin; for tests.

    Example:
        >>> with ProgressDisplay("grpo", num_steps=200) as display:
        ...     for result in engine.run(sources, num_steps=200):
        ...         display.update(result.step, num_samples=128, values={"reward": 0.5})
        ...     display.summarize({"accuracy": "0.12 -> 0.61"})
    """

    def __init__(
        self,
        title: str,
        *,
        num_steps: int,
        first_step: int = 0,
        console: Console | None = None,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.title = title
        self.num_steps = num_steps
        self.console = console or LastingConsole(stderr=True)
        self.num_done = first_step
        self._every_s = every_s
        self._clock = clock
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW_STEPS)
        self._unit = "samples"
        self._started_s = self._mark_s = clock()
        self._said_s = -math.inf
        self._live: tuple[Progress, TaskID] | None = None

    def __enter__(self) -> ProgressDisplay:
        self._started_s = self._mark_s = self._clock()
        if self.console.is_terminal:
            live = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                console=self.console,
            )
            task = live.add_task(
                self.title, total=self.num_steps, completed=self.num_done, status="starting"
            )
            self._live = (live, task)
            live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live[0].stop()
            self._live = None

    def update(
        self,
        step: int,
        *,
        num_samples: float,
        values: Mapping[str, float],
        unit: str = "samples",
    ) -> None:
        """Show that a step is complete.

        Args:
            step: Its index.
            num_samples: Rows it made, or whatever else is counted.
            values: Short name -> number, in the order shown.
            unit: What is counted.
        """
        now_s = self._clock()
        self._unit = unit
        self._recent.append((now_s - self._mark_s, num_samples))
        self._mark_s = now_s
        self.num_done = step + 1
        status = "  ".join(filter(None, [self.rate, format_values(values), self.time_left]))
        if self._live:
            live, task = self._live
            live.update(task, completed=self.num_done, status=status)
        elif now_s - self._said_s >= self._every_s or self.num_done >= self.num_steps:
            self._said_s = now_s
            self._say(f"{self.title} {self.num_done}/{self.num_steps}  {status}")

    def summarize(self, values: Mapping[str, float | str]) -> None:
        """Say in one line what came out."""
        took = format_duration(self._clock() - self._started_s)
        self._say(
            f"{self.title}: {self.num_done} steps in {took}  {format_values(values)}".rstrip()
        )

    @property
    def rate(self) -> str:
        """Samples, or what is counted, per second over the latest steps; empty before the first."""
        elapsed_s = sum(seconds for seconds, _ in self._recent)
        num_samples = sum(samples for _, samples in self._recent)
        return f"{num_samples / elapsed_s:.4g} {self._unit}/s" if elapsed_s > 0 else ""

    @property
    def time_left(self) -> str:
        """Time left at the pace of the latest steps; empty before the first and after the last."""
        left = self.num_steps - self.num_done
        if not self._recent or left <= 0:
            return ""
        pace_s = sum(seconds for seconds, _ in self._recent) / len(self._recent)
        return f"{format_duration(left * pace_s)} left"

    def _say(self, line: str) -> None:
        # As Text, and unwrapped: one line stays one line in a log, and brackets are not markup.
        self.console.print(Text(line), soft_wrap=True, highlight=False)


def format_values(values: Mapping[str, float | str]) -> str:
    """`reward 0.5  loss 0.02`: names with numbers to four significant digits."""
    return "  ".join(
        f"{name} {value if isinstance(value, str) else format(value, '.4g')}"
        for name, value in values.items()
    )


def format_duration(seconds: float) -> str:
    """`8.1 s`, `2 min 05 s`, `3 h 07 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
