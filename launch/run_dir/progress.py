"""What a person, or a program, sees while a run goes on.

A live line on a terminal, plain lines elsewhere, warnings and the last line alone, or JSON: what is
told is an `Event`, and every way of telling takes all of them. It only shows: everything in it is
in the run's folder too.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn
from rich.text import Text

from .progress_events import (
    Ended,
    Evaluated,
    Event,
    Note,
    StageBegun,
    StepDone,
    Warned,
    format_duration,
    json_line,
    step_status,
    text_line,
    titled,
)
from .stop import drop_output, say, visible
from .time_left import WINDOW_STEPS, StagePlan, TimeLeft

ProgressMode = Literal["auto", "plain", "quiet", "json"]
"""How it is told; see the key `progress`."""

Working = Callable[[], tuple[str, float] | None]
"""What workers are doing now, in words, and for how many seconds; None if nothing."""

_BAR, _SPACES = 12, 3
"""Characters of a live line's bar, and between its columns."""
_LONG_S = 2.0
"""From which on a live line says what is being done."""


class LastingConsole(Console):
    """A console on standard error that a run outlives; rich's own ends the process."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print texts so that they only show; see `visible`."""
        shown = (visible(one) if isinstance(one, str) else one for one in objects)
        super().print(*shown, **options)

    def on_broken_pipe(self) -> None:
        """Go on with nobody to read it."""
        drop_output(sys.stderr)


class RunProgress:
    """Tells how a run goes, stage by stage.

    Args:
        stages: What is to be done, in order.
        mode: How it is told.
        console: For a person; on standard error by default, so that output can be piped.
        every_s: Seconds between plain lines about steps where there is no terminal.
        clock: Seconds from any origin; for tests.

    Example:
        >>> progress = RunProgress([StagePlan("grpo", 200)])
        >>> with progress.stage("grpo") as stage:
        ...     for result in engine.run(sources, num_steps=200):
        ...         stage.step(result.step, took_s=0.5, amount=128, values={"reward": 0.5})
        >>> progress.end("grpo: 200 steps, accuracy 12.0% -> 61.0%")
    """

    def __init__(
        self,
        stages: Sequence[StagePlan],
        mode: ProgressMode = "auto",
        *,
        console: Console | None = None,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or LastingConsole(stderr=True)
        self.time = TimeLeft(stages)
        self.clock = clock
        self._mode, self._every_s = mode, every_s
        self._said_s = -math.inf
        self._reader = True

    @property
    def is_live(self) -> bool:
        """Whether there is a line that changes, as on a terminal."""
        return self._mode == "auto" and self.console.is_terminal

    @property
    def shows_text(self) -> bool:
        """Whether a person reads how it goes on."""
        return self._mode in ("auto", "plain")

    def tell(self, event: Event) -> None:
        """Tell of what happened, as the mode has it."""
        if self._mode == "json":
            self._write(json_line(event))
        elif isinstance(event, Warned):
            say(f"warning: {event.text}")
        elif self.shows_text or isinstance(event, Ended):
            self._print(event)

    def note(self, text: str) -> None:
        """Say something about the run as a whole."""
        self.tell(Note(text))

    def end(self, text: str, run: str = "", summary: Mapping[str, Any] | None = None) -> None:
        """Say in the last line what came out."""
        self.tell(Ended(text, run, summary or {}))

    def show(self, text: Text) -> None:
        """Print something between the lines, where a person reads them."""
        if self.shows_text:
            self.console.print(text, soft_wrap=True, highlight=False)

    @contextmanager
    def stage(self, name: str, first_step: int = 0) -> Generator[StageProgress]:
        """While it is entered, the stage is carried out."""
        shown = StageProgress(self, name, first_step)
        with shown.live():
            yield shown
        shown.end()

    def _print(self, event: Event) -> None:
        if isinstance(event, StepDone) and not self._is_due(event):
            return
        # As Text, and unwrapped: one line stays one line in a log, and brackets are not markup.
        line = visible(text_line(event))
        if line:
            self.console.print(Text(line), soft_wrap=True, highlight=False)

    def _is_due(self, event: StepDone) -> bool:
        """Whether a line about a step is due; a live line says it otherwise."""
        now_s = self.clock()
        if self.is_live:
            return False
        if now_s - self._said_s < self._every_s and event.step + 1 < event.num_steps:
            return False
        self._said_s = now_s
        return True

    def _write(self, line: str) -> None:
        """Write to standard output, as long as somebody reads it; a run outlives who does."""
        if not self._reader:
            return
        try:
            print(line, flush=True)
        except (OSError, ValueError):  # ValueError: the user's code has closed it
            self._reader = False
            drop_output(sys.stdout)


class StageProgress:
    """Tells how one stage goes.

    Args:
        run: The run.
        name: The stage.
        first_step: The step it starts from, when resumed.
    """

    def __init__(self, run: RunProgress, name: str, first_step: int = 0) -> None:
        self._run, self._name = run, name
        self._started_s = run.clock()
        self._waited: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=WINDOW_STEPS)
        self._evaluates_s: float | None = None
        self._live: Progress | None = None
        self.working: Working = lambda: None
        run.time.begin(name, first_step)
        share = run.time.share(name)
        self._begun = StageBegun(
            name,
            run.time.number(name),
            run.time.num_stages,
            first_step,
            run.time.plan(name).num_steps,
            share.part,
            "time" if share.of_time else "steps",
        )
        run.tell(self._begun)

    @contextmanager
    def live(self) -> Generator[None]:
        """Show the line that changes, where there is one."""
        if not self._run.is_live:
            yield
            return
        live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=_BAR),
            MofNCompleteColumn(),
            _Status(self._now, self._run.console),
            console=self._run.console,
        )
        live.add_task(
            titled(self._begun),
            total=self._begun.num_steps,
            completed=self._begun.first_step,
            status="",
        )
        with live:
            self._live = live
            yield
        self._live = None

    def step(
        self,
        step: int,
        *,
        took_s: float,
        amount: float,
        values: Mapping[str, float],
        unit: str = "samples",
        waits_s: Mapping[str, float] | None = None,
    ) -> None:
        """Tell that a step is complete.

        Args:
            step: Its index.
            took_s: Seconds it took.
            amount: Rows it made, or whatever else is counted.
            values: Short name -> number, in the order shown.
            unit: What is counted.
            waits_s: What it waited for -> seconds.
        """
        run, name = self._run, self._name
        run.time.step(name, step + 1, took_s, amount)
        self._waited.append((took_s, waits_s or {}))
        begun = self._begun
        done = StepDone(
            name,
            begun.number,
            begun.num_stages,
            step,
            begun.num_steps,
            took_s,
            run.time.rate(name),
            unit,
            dict(values),
            self._waits(),
            run.time.left(name),
        )
        if self._live is not None:
            (task,) = self._live.task_ids
            self._live.update(task, completed=step + 1, status=step_status(done, left_first=True))
        run.tell(done)

    @contextmanager
    def evaluation(self) -> Generator[None]:
        """While it is entered the stage is evaluated, and that is what everything waits for."""
        self._evaluates_s = self._run.clock()
        try:
            yield
        finally:
            self._evaluates_s = None

    def evaluated(self, step: int, took_s: float, values: Mapping[str, float]) -> None:
        """Tell what an evaluation after so many steps found."""
        self._run.time.evaluation(self._name, step, took_s)
        self._run.tell(Evaluated(self._name, step, took_s, dict(values)))

    def note(self, text: str) -> None:
        """Say something about the run as a whole."""
        self._run.note(text)

    def warn(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        """Tell of a sign that the run goes wrong."""
        self._run.tell(Warned(self._name, kind, step, text, dict(fields)))

    @property
    def is_live(self) -> bool:
        """See `RunProgress.is_live`."""
        return self._run.is_live

    def show(self, text: Text) -> None:
        """Print something between the lines about steps."""
        self._run.show(text)

    def end(self) -> None:
        """The stage is over."""
        self._run.time.end(self._name, self._run.clock() - self._started_s)

    def _waits(self) -> dict[str, float]:
        """What the latest steps waited for -> share of their time, the largest first."""
        total_s = sum(took_s for took_s, _ in self._waited)
        sums: dict[str, float] = {}
        for _, waited in self._waited:
            for what, seconds in waited.items():
                sums[what] = sums.get(what, 0.0) + seconds
        ranked = sorted(sums.items(), key=lambda one: -one[1])
        return {what: seconds / total_s for what, seconds in ranked} if total_s > 0 else {}

    def _now(self) -> str:
        """What is being done, if it takes long: `step 4: actor.generate for 35 s`."""
        working = self.working()
        since_s = self._evaluates_s
        if since_s is not None:
            what: str = "evaluation"
            elapsed_s = self._run.clock() - since_s
        elif working is not None:
            what, elapsed_s = working
        else:
            return ""
        return "" if elapsed_s < _LONG_S else f"{what} for {format_duration(elapsed_s)}"


class _Status(TextColumn):
    """How it stands when the line is drawn, and what is being done; cut off where the line ends."""

    def __init__(self, now: Callable[[], str], console: Console) -> None:
        super().__init__("")
        self._now, self._console = now, console

    def render(self, task: Task) -> Text:
        """The text, as long as there is room for it behind the other columns."""
        said = "  ".join(filter(None, [self._now(), str(task.fields["status"])]))
        text = Text(visible(said))
        others = len(task.description) + _BAR + 2 * len(str(task.total)) + 1 + _SPACES
        text.truncate(max(1, self._console.width - others), overflow="ellipsis")
        return text
