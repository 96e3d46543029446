"""The progress of a run: events, how much time is left, and how both are shown.

A line that changes on a terminal, plain lines elsewhere, warnings and the last line alone, or JSON:
every event has fields for a program and a text for a person, and all of it is in the run's folder
too. Estimates of time read no clock: seconds come in.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn
from rich.table import Column
from rich.text import Text

from .files import plain
from .stop import drop_output, say, visible

# The latest steps that rates, waits and the time left are computed of: a run's pace changes.
_WINDOW_STEPS = 20
_MOST_WAITS, _LEAST_WAIT = 2, 0.05  # how many waits a line shows, and the least share of time
_LONG_S = 2.0  # the least time of a task that a live line shows

ProgressMode = Literal["auto", "plain", "quiet", "json"]  # the key `progress`

# What workers are doing now, and for how many seconds; None if nothing.
Working = Callable[[], tuple[str, float] | None]


@dataclass(frozen=True)
class StagePlan:
    """The steps and evaluations of a stage."""

    name: str
    num_steps: int
    step_s: float | None = None  # seconds that the plan predicts for one; None without a prediction
    evaluated_after: tuple[int, ...] = ()  # numbers of completed steps at which it is evaluated


@dataclass(frozen=True)
class Left:
    """Seconds that are left."""

    stage_s: float | None  # None before the first step, if nothing was predicted
    run_s: float | None  # None if nothing is known
    is_least: bool  # later stages take longer, of some of which nothing is known


@dataclass
class _StageTime:
    plan: StagePlan
    num_done: int = 0
    took_s: float = 0.0
    is_over: bool = False
    evaluations_s: dict[int, float] = field(default_factory=dict[int, float])
    # seconds of the latest steps, and the samples of each
    recent: deque[tuple[float, float]] = field(
        default_factory=lambda: deque[tuple[float, float]](maxlen=_WINDOW_STEPS)
    )

    @property
    def pace_s(self) -> float | None:
        if not self.recent:
            return self.plan.step_s
        return sum(seconds for seconds, _ in self.recent) / len(self.recent)

    @property
    def left_s(self) -> float | None:
        if self.is_over:
            return 0.0
        num_left, known = self.plan.num_steps - self.num_done, self.evaluations_s
        each_s = sum(known.values()) / len(known) if known else 0.0
        due = {step for step in self.plan.evaluated_after if step >= self.num_done}
        to_come_s = each_s * len(due - set(known))
        if not num_left:
            return to_come_s
        return None if self.pace_s is None else num_left * self.pace_s + to_come_s

    @property
    def whole_s(self) -> float | None:
        if self.is_over:
            return self.took_s
        return None if self.pace_s is None else self.plan.num_steps * self.pace_s


class TimeLeft:
    """Estimates the time left of a run's stages."""

    def __init__(self, stages: Sequence[StagePlan]) -> None:
        self._stages = {stage.name: _StageTime(stage) for stage in stages}

    def begin(self, name: str, num_done: int) -> None:
        self._stages[name].num_done = num_done

    def step(self, name: str, num_done: int, took_s: float, amount: float) -> None:
        stage = self._stages[name]
        stage.num_done = num_done
        stage.recent.append((took_s, amount))

    def evaluation(self, name: str, step: int, took_s: float) -> None:
        self._stages[name].evaluations_s[step] = took_s

    def end(self, name: str, took_s: float) -> None:
        self._stages[name].is_over, self._stages[name].took_s = True, took_s

    def rate(self, name: str) -> float | None:
        recent = self._stages[name].recent
        seconds = sum(took_s for took_s, _ in recent)
        return sum(amount for _, amount in recent) / seconds if seconds > 0 else None

    def left(self, name: str) -> Left:
        here = [*self._stages.values()][[*self._stages].index(name) :]
        known = [stage.left_s for stage in here]
        certain = [seconds for seconds in known if seconds is not None]
        return Left(known[0], sum(certain) if certain else None, len(certain) < len(known))

    def share(self, name: str) -> tuple[float, str]:
        """A stage's part of the run's "time" if every stage's is known, else of its "steps"."""
        seconds = {one: stage.whole_s for one, stage in self._stages.items()}
        times = {one: each for one, each in seconds.items() if each is not None}
        if len(times) == len(seconds) and sum(times.values()) > 0:
            return times[name] / sum(times.values()), "time"
        steps = {one: stage.plan.num_steps for one, stage in self._stages.items()}
        return steps[name] / sum(steps.values()), "steps"

    @property
    def took_s(self) -> dict[str, float]:
        return {name: stage.took_s for name, stage in self._stages.items() if stage.took_s}


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


class LastingConsole(Console):
    """A console on standard error that a run outlives; rich's own ends the process."""

    def print(self, *objects: Any, **options: Any) -> None:
        shown = (visible(one) if isinstance(one, str) else one for one in objects)
        super().print(*shown, **options)

    def on_broken_pipe(self) -> None:
        drop_output(sys.stderr)


class RunProgress:
    """Shows how a run goes, stage by stage, with a plain line about steps each `every_s` seconds.

    The console is on standard error by default, so that output can be piped; `clock` is for tests.
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
        self.stages = {stage.name: stage for stage in stages}
        self.clock = clock
        self._mode, self._every_s = mode, every_s
        self._said_s = -math.inf
        self._has_reader = True

    @property
    def is_live(self) -> bool:
        return self._mode == "auto" and self.console.is_interactive  # not with TERM=dumb

    def tell(self, event: str, text: str, fields: Mapping[str, Any]) -> None:
        """Show an event: all of its fields to a program, its text to a person, if it has one."""
        if self._mode == "json":
            if not self._has_reader:
                return
            try:  # null stands for NaN and the infinities
                print(json.dumps({"event": event, **plain(fields)}, allow_nan=False), flush=True)
            except (OSError, ValueError):  # ValueError: the user's code has closed it
                self._has_reader = False
                drop_output(sys.stdout)
        elif event == "warning":
            say(f"warning: {text}")
        elif text and (self._mode != "quiet" or event == "end"):
            # As Text, and unwrapped: one line stays one line in a log, and brackets are not markup.
            self.console.print(Text(visible(text)), soft_wrap=True, highlight=False)

    def tells_step(self, is_last: bool) -> bool:
        """Whether it is time for a plain line about a step; none is needed on a terminal."""
        now_s = self.clock()
        if self.is_live or (now_s - self._said_s < self._every_s and not is_last):
            return False
        self._said_s = now_s
        return True

    def note(self, text: str) -> None:
        self.tell("note", text, {"text": text})

    def end(self, text: str, run: str = "", summary: Mapping[str, Any] | None = None) -> None:
        self.tell("end", text, {"text": text, "run": run, "summary": summary or {}})

    def show(self, text: Text) -> None:
        if self._mode in ("auto", "plain"):
            self.console.print(text, soft_wrap=True, highlight=False)

    @contextmanager
    def stage(self, name: str, first_step: int = 0) -> Generator[StageProgress]:
        started_s = self.clock()
        shown = StageProgress(self, name, first_step)
        with shown.live():
            yield shown
        self.time.end(name, self.clock() - started_s)


class StageProgress:
    """Shows how one stage goes."""

    def __init__(self, run: RunProgress, name: str, first_step: int = 0) -> None:
        self.run, self._name, self._first_step = run, name, first_step
        self._number, self._num_stages = [*run.stages].index(name) + 1, len(run.stages)
        self._num_steps = run.stages[name].num_steps
        several = f" ({self._number} of {self._num_stages})" if self._num_stages > 1 else ""
        self._title = f"{name}{several}"
        self._waited: deque[tuple[float, Mapping[str, float]]] = deque(maxlen=_WINDOW_STEPS)
        self._evaluates_s: float | None = None
        self._live: Progress | None = None
        self.working: Working = lambda: None
        run.time.begin(name, first_step)
        share, share_of = run.time.share(name)
        fields = {
            **self._place(),
            "first_step": first_step,  # steps taken before
            "num_steps": self._num_steps,  # steps in all
            "share": share,  # of the run, from 0 to 1
            "share_of": share_of,
        }
        text = (
            f"stage {self._number} of {self._num_stages}: {name}, {self._num_steps} steps, "
            f"{share:.0%} of the run's {share_of}"
        )
        run.tell("stage", text if several else "", fields)

    def _place(self) -> dict[str, Any]:
        return {"stage": self._name, "number": self._number, "num_stages": self._num_stages}

    @contextmanager
    def live(self) -> Generator[None]:
        if not self.run.is_live:
            yield
            return
        live = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            _Status(self._now),
            console=self.run.console,
            expand=True,
        )
        live.add_task(self._title, total=self._num_steps, completed=self._first_step, status="")
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
        """Show a step by its index; `values` are in the order shown."""
        run, name = self.run, self._name
        run.time.step(name, step + 1, took_s, amount)
        rate, left = run.time.rate(name), run.time.left(name)
        self._waited.append((took_s, waits_s or {}))
        waits = self._waits()
        fields = {
            **self._place(),
            "step": step,
            "num_steps": self._num_steps,
            "took_s": took_s,
            "rate": rate,  # samples per second, or what else is counted; None if unknown
            "unit": unit,
            "values": values,
            "waits": waits,
            "stage_left_s": left.stage_s,
            "run_left_s": left.run_s,
            "run_left_is_least": left.is_least,
        }
        said = [f"{what} {share:.0%}" for what, share in waits.items() if share >= _LEAST_WAIT]
        parts = [
            "" if rate is None else f"{rate:.4g} {unit}/s",
            format_values(values),
            f"waits for {', '.join(said[:_MOST_WAITS])}" if said else "",
        ]
        here = f"{format_duration(left.stage_s)} left" if left.stage_s else ""
        if self._number < self._num_stages and left.run_s:
            least = "at least " if left.is_least else ""
            here = f"{here} (run: {least}{format_duration(left.run_s)})".strip()
        if self._live is not None:
            (task,) = self._live.task_ids
            status = "  ".join(filter(None, [here, *parts]))
            self._live.update(task, completed=step + 1, status=status)
        text = "  ".join(filter(None, [*parts, here]))
        text = f"{self._title} {step + 1}/{self._num_steps}  {text}".rstrip()
        run.tell("step", text if run.tells_step(step + 1 >= self._num_steps) else "", fields)

    def _waits(self) -> dict[str, float]:
        """Shares of the latest steps' time that were waited, by cause, the largest first."""
        total_s = sum(took_s for took_s, _ in self._waited)
        sums: dict[str, float] = {}
        for _, waited in self._waited:
            for what, seconds in waited.items():
                sums[what] = sums.get(what, 0.0) + seconds
        ranked = sorted(sums.items(), key=lambda one: -one[1])
        return {what: seconds / total_s for what, seconds in ranked} if total_s > 0 else {}

    @contextmanager
    def evaluation(self) -> Generator[None]:
        self._evaluates_s = self.run.clock()
        try:
            yield
        finally:
            self._evaluates_s = None

    def evaluated(self, step: int, took_s: float, values: Mapping[str, float]) -> None:
        self.run.time.evaluation(self._name, step, took_s)
        when = f"after {step} steps" if step else "before the first step"
        text = f"evaluation {when}, {format_duration(took_s)}: {format_values(values)}"
        fields = {"stage": self._name, "step": step, "took_s": took_s, "values": values}
        self.run.tell("evaluation", text, fields)

    def warn(self, kind: str, step: int, text: str, fields: Mapping[str, Any]) -> None:
        known = {"stage": self._name, "kind": kind, "step": step, "text": text}
        self.run.tell("warning", text, {**known, **fields})

    def _now(self) -> str:
        found = self.working()
        if self._evaluates_s is not None:
            found = "evaluation", self.run.clock() - self._evaluates_s
        if found is None or found[1] < _LONG_S:
            return ""
        return f"{found[0]} for {format_duration(found[1])}"


class _Status(TextColumn):
    """The current task and the latest step, cut off where the line ends."""

    def __init__(self, now: Callable[[], str]) -> None:
        super().__init__("", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        self._now = now

    def render(self, task: Task) -> Text:
        return Text(visible("  ".join(filter(None, [self._now(), str(task.fields["status"])]))))
