"""What a run tells of how it goes: what happened, as data, and the words for it.

Each of these becomes a line for a person or an object on a line for a program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .run_folder import plain
from .time_left import Left

_MOST_WAITS = 2
_LEAST_WAIT = 0.05
"""Of what a step waits for, how much is said in a line: the largest, from this share on."""


@dataclass(frozen=True)
class Note:
    """Something about the run as a whole."""

    text: str


@dataclass(frozen=True)
class StageBegun:
    """A stage begins, or goes on after `first_step` steps.

    Attributes:
        stage: Its name.
        number: Which of them it is, from 1.
        num_stages: How many there are.
        first_step: Steps taken before.
        num_steps: Steps in all.
        share: Its part of the run, from 0 to 1.
        share_of: What that is a part of: "time", or "steps" where of some stage no time is known.
    """

    stage: str
    number: int
    num_stages: int
    first_step: int
    num_steps: int
    share: float
    share_of: str


@dataclass(frozen=True)
class StepDone:
    """A step is complete.

    Attributes:
        stage: The stage.
        number: Which of them it is, from 1.
        num_stages: How many there are.
        step: Index of the step, from 0.
        num_steps: Steps of the stage.
        took_s: Seconds it took.
        rate: Samples per second, or what else is counted; None if unknown.
        unit: What is counted.
        values: Short name -> number, in the order shown.
        waits: What the latest steps waited for -> share of their time, the largest first.
        left: What is left.
    """

    stage: str
    number: int
    num_stages: int
    step: int
    num_steps: int
    took_s: float
    rate: float | None
    unit: str
    values: Mapping[str, float]
    waits: Mapping[str, float]
    left: Left


@dataclass(frozen=True)
class Evaluated:
    """The stage was evaluated after so many steps."""

    stage: str
    step: int
    took_s: float
    values: Mapping[str, float]


@dataclass(frozen=True)
class Warned:
    """A sign that the run goes wrong; see `stages/signs.py`."""

    stage: str
    kind: str
    step: int
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Ended:
    """The run is over."""

    text: str
    run: str
    summary: Mapping[str, Any]


Event = Note | StageBegun | StepDone | Evaluated | Warned | Ended

_NAMES: Mapping[type, str] = {
    Note: "note",
    StageBegun: "stage",
    StepDone: "step",
    Evaluated: "evaluation",
    Warned: "warning",
    Ended: "end",
}


def json_line(event: Event) -> str:
    """The event as a JSON object on one line; what is not a finite number is null."""
    values = asdict(event)
    if isinstance(event, StepDone):
        del values["left"]
        values |= {
            "stage_left_s": event.left.stage_s,
            "run_left_s": event.left.run_s,
            "run_left_is_least": event.left.is_least,
        }
    values |= values.pop("fields", None) or {}
    return json.dumps({"event": _NAMES[type(event)], **plain(values)}, allow_nan=False)


def text_line(event: Event) -> str:
    """The event in words, on one line; "" if there is nothing to say. Warnings have several."""
    match event:
        case Note() | Ended() | Warned():
            return event.text
        case StageBegun():
            if event.num_stages == 1:
                return ""
            share = f"{event.share:.0%} of the run's {event.share_of}"
            return (
                f"stage {event.number} of {event.num_stages}: {event.stage}, {event.num_steps} "
                f"steps, {share}"
            )
        case StepDone():
            done = f"{event.step + 1}/{event.num_steps}"
            return f"{titled(event)} {done}  {step_status(event)}".rstrip()
        case Evaluated():
            when = f"after {event.step} steps" if event.step else "before the first step"
            took = format_duration(event.took_s)
            return f"evaluation {when}, {took}: {format_values(event.values)}"


def titled(event: StepDone | StageBegun) -> str:
    """`grpo`, or `grpo (2 of 2)` where there are several stages."""
    several = f" ({event.number} of {event.num_stages})" if event.num_stages > 1 else ""
    return f"{event.stage}{several}"


def step_status(event: StepDone, *, left_first: bool = False) -> str:
    """What is said of a step behind its number.

    Args:
        event: The step.
        left_first: Whether the time left comes first, where the end of a line may not be seen.
    """
    rate = "" if event.rate is None else f"{event.rate:.4g} {event.unit}/s"
    parts = [rate, format_values(event.values), _waits(event.waits)]
    return "  ".join(filter(None, [_left(event), *parts] if left_first else [*parts, _left(event)]))


def _waits(waits: Mapping[str, float]) -> str:
    said = [f"{what} {share:.0%}" for what, share in waits.items() if share >= _LEAST_WAIT]
    return f"waits for {', '.join(said[:_MOST_WAITS])}" if said else ""


def _left(event: StepDone) -> str:
    """`14.0 s left (run: at least 2 min 05 s)`; of the run where more stages follow."""
    left = event.left
    here = f"{format_duration(left.stage_s)} left" if left.stage_s else ""
    if event.number == event.num_stages or not left.run_s:
        return here
    least = "at least " if left.is_least else ""
    return f"{here} (run: {least}{format_duration(left.run_s)})".strip()


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
