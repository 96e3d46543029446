"""Reading the samples that a run keeps: its responses with what they earned, step by step.

`workers/data/sample_log.py` writes them. A step is a file that is complete or absent, so they can
be read while the run goes on.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from ...dataflow.errors import ConfigError
from ...dataflow.files import MOST_TEXT_BYTES, opened
from ...workers.data.sample_files import step_files
from .stop import visible

# errors that reading a file may raise which no run has written
_DAMAGED = (OSError, EOFError, ValueError, TypeError, KeyError, AttributeError, RecursionError)

SAMPLES = "samples"  # below a stage's folder

Sort = Literal["step", "reward", "advantage", "length"]
SORTS: tuple[Sort, ...] = ("step", "reward", "advantage", "length")

Order = Literal["highest", "lowest"]
ORDERS: tuple[Order, ...] = ("highest", "lowest")


@dataclass(frozen=True)
class SaidTurn:
    """One turn of a policy in a conversation."""

    said: str  # the turn's text, without what ended it
    reward: float  # what that earned
    shown: str  # what it was shown after it; empty where that was the end


@dataclass(frozen=True)
class Sample:
    """One response of a run."""

    step: int  # that it was trained in
    # of the weights that sampled it: how many train calls came before; of its first tokens if it
    # went on in later steps
    version: int
    prompt: str  # as text, without special tokens
    response: str  # as text, without what ended it; special tokens by their names
    length: int  # tokens of the response
    finished: bool | None = None  # whether it ended by itself; None if the step does not say
    reward: float | None = None  # what it earned; None if nothing in the step is a score
    advantage: float | None = None  # mean over its tokens; None if the step has no advantages
    prompt_id: int | None = None  # which problem it answers; None if the step does not say
    last_version: int | None = None  # that sampled its last tokens; None if all had the same
    turns: tuple[SaidTurn, ...] = ()  # of a conversation; empty of a single response
    # number of its conversation in the step, and which of that one's rows it is, where there may be
    # several, as those of a program that begins anew or branches; None elsewhere
    conversation: int | None = None
    piece: int | None = None
    # everything else that the step says of it in one number, by the node's name
    parts: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)


_FIELDS = frozenset(Sample.__dataclass_fields__) - {"parts"}


def sample_steps(folder: Path) -> list[int]:
    return list(step_files(folder / SAMPLES))


def read_samples(folder: Path | str, steps: Iterable[int] | None = None) -> list[Sample]:
    """The samples of a run, or of a stage's folder below it, in the order they were written.

    Args:
        folder: `runs/20261121-031454-grpo-seed0`, or `.../stages/sft`.
        steps: Which steps, counted from 0; None for all that are there.

    Raises:
        ConfigError: If there are none of a step, or a file is damaged.

    Example:
        >>> best = max(read_samples("runs/20261121-031454-grpo-seed0"), key=lambda s: s.reward)
    """
    files = step_files(Path(folder) / SAMPLES)
    found: list[Sample] = []
    for step in files if steps is None else steps:
        if step not in files:
            there = f"of {len(files)}: {min(files)} to {max(files)}" if files else "of none"
            raise ConfigError(f"'{folder}' has no samples of step {step}; it has some {there}")
        found += _read(files[step])
    return found


def _read(path: Path) -> list[Sample]:
    try:
        with opened(path) as packed, gzip.open(packed) as file:
            content = file.read(MOST_TEXT_BYTES + 1)
        if len(content) > MOST_TEXT_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_TEXT_BYTES} bytes")
        samples: list[Sample] = []
        for row in map(json.loads, content.splitlines()):
            own = {name: value for name, value in row.items() if name in _FIELDS}
            own["turns"] = tuple(SaidTurn(**turn) for turn in row.get("turns", ()))
            rest = {name: value for name, value in row.items() if name not in _FIELDS}
            parts = {name: float(value) for name, value in rest.items() if value is not None}
            samples.append(Sample(**own, parts=parts))
        return samples
    except _DAMAGED as error:
        raise ConfigError(
            f"'{path}' cannot be read ({type(error).__name__}: {error})\n"
            "    remove it; the run does not need it"
        ) from error


def sample_rows(samples: Iterable[Sample]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns of a table of samples, and a row of texts, numbers and None for each.

    The parts of a reward have columns of their own; the turns of a conversation are in `response`.
    """
    found = [*samples]
    parts = dict.fromkeys(name for sample in found for name in sample.parts)
    own = [one.name for one in fields(Sample) if one.name not in ("turns", "parts")]
    rows = [
        [getattr(sample, name) for name in own] + [sample.parts.get(name) for name in parts]
        for sample in found
    ]
    return [*own, *parts], rows


def sample_key(sort: Sort, order: Order = "highest") -> Callable[[Sample], float]:
    """Return the key to sort samples by; those without the number come last."""
    sign = -1.0 if order == "highest" else 1.0

    def key(sample: Sample) -> float:
        value: float | None = None if sort == "step" else getattr(sample, sort)
        return math.inf if value is None or math.isnan(value) else sign * value

    return key


def shown(sample: Sample) -> Text:
    """Return a block: a line about the sample, its prompt, and its response or its turns."""
    text = Text(_headline(sample) + "\n", "bold")
    text.append(_indented(sample.prompt), "cyan")
    if not sample.turns:
        text.append("  --\n", "dim")
        text.append(_indented(sample.response))
    for number, turn in enumerate(sample.turns):
        earned = f", reward {turn.reward:.4g}" if turn.reward else ""
        text.append(f"  -- turn {number}{earned}\n", "dim")
        text.append(_indented(turn.said))
        if turn.shown.strip():
            text.append("  -- shown\n", "dim")
            text.append(_indented(turn.shown), "cyan")
    return text


def _indented(said: str) -> str:
    return "".join(f"  {line}\n" for line in visible(said).strip("\n").split("\n"))


def _headline(sample: Sample) -> str:
    said: list[str] = []
    if sample.reward is not None:
        parts = {name: f"{value:.4g}" for name, value in sample.parts.items()}
        known = {f"{value:.4g}" for value in (sample.reward, sample.advantage) if value is not None}
        named = ", ".join(f"{name} {value}" for name, value in parts.items())
        around = f" ({named})" if {*parts.values()} - known else ""
        said.append(f"reward {sample.reward:.4g}{around}")
    elif sample.advantage is not None:
        said.append("no score")
    if sample.advantage is not None:
        said.append(f"advantage {sample.advantage:.4g}")
    said.append(f"{sample.length} tokens{', cut off' if sample.finished is False else ''}")
    which = "" if sample.prompt_id is None else f", prompt {sample.prompt_id}"
    if sample.conversation is not None:
        which += f", conversation {sample.conversation}, row {sample.piece}"
    last = "" if sample.last_version is None else f" to {sample.last_version}"
    return f"step {sample.step}, version {sample.version}{last}{which}: {', '.join(said)}"
