"""How far a run of several stages is, and how long it has left, as far as that can be known.

Nothing here reads a clock: seconds come in, estimates come out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

WINDOW_STEPS = 20
"""Rates, the time left and what is waited for come from this many of the latest steps: a run's pace
changes."""


@dataclass(frozen=True)
class StagePlan:
    """What is to be done in a stage.

    Attributes:
        name: Its name.
        num_steps: Its steps.
        step_s: Seconds that the plan predicts for one; None without a prediction.
        evaluated_after: Numbers of completed steps at which it is evaluated.
    """

    name: str
    num_steps: int
    step_s: float | None = None
    evaluated_after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Left:
    """Seconds that are left.

    Attributes:
        stage_s: Of the stage; None before its first step, if nothing was predicted.
        run_s: Of the run; None if nothing is known.
        is_least: Whether later stages take longer than `run_s` says, because of some of them
            nothing is known.
    """

    stage_s: float | None
    run_s: float | None
    is_least: bool


@dataclass(frozen=True)
class Share:
    """A stage's part of the run: of its time where every stage's is known, else of its steps."""

    part: float
    of_time: bool


@dataclass
class _Stage:
    plan: StagePlan
    num_done: int = 0
    took_s: float = 0.0
    is_over: bool = False
    evaluations_s: dict[int, float] = field(default_factory=dict[int, float])
    recent: deque[tuple[float, float]] = field(
        default_factory=lambda: deque[tuple[float, float]](maxlen=WINDOW_STEPS)
    )

    @property
    def pace_s(self) -> float | None:
        """Seconds of a step: measured, or as predicted before the first."""
        if not self.recent:
            return self.plan.step_s
        return sum(seconds for seconds, _ in self.recent) / len(self.recent)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left of it, with the evaluations to come."""
        if self.is_over:
            return 0.0
        num_left, pace_s = self.plan.num_steps - self.num_done, self.pace_s
        known = self.evaluations_s
        each_s = sum(known.values()) / len(known) if known else 0.0
        due = {step for step in self.plan.evaluated_after if step >= self.num_done}
        to_come_s = each_s * len(due - set(known))
        if not num_left:
            return to_come_s
        return None if pace_s is None else num_left * pace_s + to_come_s


class TimeLeft:
    """Keeps account of a run's stages.

    Args:
        stages: In the order in which they are carried out.
    """

    def __init__(self, stages: Sequence[StagePlan]) -> None:
        self._stages = {stage.name: _Stage(stage) for stage in stages}

    @property
    def num_stages(self) -> int:
        """Stages of the run."""
        return len(self._stages)

    def plan(self, name: str) -> StagePlan:
        """What is to be done in a stage."""
        return self._stages[name].plan

    def number(self, name: str) -> int:
        """Which stage it is, from 1."""
        return list(self._stages).index(name) + 1

    def begin(self, name: str, num_done: int) -> None:
        """A stage begins, or goes on after so many steps."""
        self._stages[name].num_done = num_done

    def step(self, name: str, num_done: int, took_s: float, amount: float) -> None:
        """A step of the stage is complete, with so many samples, or whatever is counted."""
        stage = self._stages[name]
        stage.num_done = num_done
        stage.recent.append((took_s, amount))

    def evaluation(self, name: str, step: int, took_s: float) -> None:
        """The stage was evaluated after so many steps, which took so long."""
        self._stages[name].evaluations_s[step] = took_s

    def end(self, name: str, took_s: float) -> None:
        """The stage is over, after so many seconds of this process."""
        self._stages[name].is_over, self._stages[name].took_s = True, took_s

    def rate(self, name: str) -> float | None:
        """Samples, or what is counted, per second over the latest steps; None before the first."""
        recent = self._stages[name].recent
        seconds = sum(took_s for took_s, _ in recent)
        return sum(amount for _, amount in recent) / seconds if seconds > 0 else None

    def left(self, name: str) -> Left:
        """What is left, of a stage and of the run."""
        stages = list(self._stages.values())
        here = stages[self.number(name) - 1 :]
        known = [stage.left_s for stage in here]
        certain = [seconds for seconds in known if seconds is not None]
        return Left(known[0], sum(certain) if certain else None, len(certain) < len(known))

    def share(self, name: str) -> Share:
        """A stage's part of the whole run: of its time if that is known of all, else of steps."""
        seconds = [self._whole_s(stage) for stage in self._stages.values()]
        index = self.number(name) - 1
        times = [each for each in seconds if each is not None]
        if len(times) == len(seconds) and sum(times) > 0:
            return Share(times[index] / sum(times), True)
        steps = [stage.plan.num_steps for stage in self._stages.values()]
        return Share(steps[index] / sum(steps), False)

    @property
    def took_s(self) -> dict[str, float]:
        """Stage -> the seconds that it took, of those that this process carried out to the end."""
        return {name: stage.took_s for name, stage in self._stages.items() if stage.took_s}

    def _whole_s(self, stage: _Stage) -> float | None:
        if stage.is_over:
            return stage.took_s
        return None if stage.pace_s is None else stage.plan.num_steps * stage.pace_s
