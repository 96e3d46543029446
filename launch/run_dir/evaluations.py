"""Evaluations of a run: `evaluations/step-00000020.json`, and figures made of it.

One file per evaluation, with the scores of every problem, so that two of them can be compared
problem by problem. It is written in one step when the evaluation is over: a run that is killed in
the middle of one has no file of it, and evaluates again when it is resumed.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError
from ...dataflow.files import read_json
from .files import plain, write_json

WHOLE = ""  # the suite without a name: the first held-out problems of the run's own task
LOSS = "loss"  # on held-out demonstrations or pairs; lower is better
SHARES = "verifier.score/reward"  # begins the names of metrics that are shares of the answers

_95 = 1.959963984540054  # standard errors around a mean that hold 95 % of a normal distribution

_FILE = re.compile(r"step-(\d{1,18})\.json")


def pass_at(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that one of k samples is right: `1 - C(n - c, k) / C(n, k)`.

    The unbiased estimator of Chen et al. 2021, "Evaluating large language models trained on code",
    section 2.1.

    Args:
        num_samples: n, samples of a problem.
        num_correct: c, those that are right.
        k: At least 1, at most n.

    Example:
        >>> pass_at(4, 1, 2)
        0.5
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


@dataclass(frozen=True)
class Measured:
    """The results of one evaluation on one suite."""

    metrics: dict[str, float]  # everything it reported
    # share of the answers to held-out problems that are right, 0 to 1; the mean over its samples
    # counts for a problem, and an answer without a score is not right. None if there are no
    # problems.
    accuracy: float | None = None
    # the first responses: prompt_id, prompt, response, score
    examples: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    # actor -> what it earned in a held-out episode, on average
    episode_return: dict[str, float] = field(default_factory=dict[str, float])
    num_episodes: int = 0  # episodes of each
    # problem's index in its task -> the score of each of its samples; None where there is none
    scores: dict[str, list[float | None]] = field(default_factory=dict[str, list[float | None]])
    # problem's index -> how many of them are right
    correct: dict[str, int] = field(default_factory=dict[str, int])
    # `loss` on held-out demonstrations or pairs; `loss/accuracy`, the share of pairs that are told
    # apart
    losses: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def num_samples(self) -> int:
        return max(map(len, self.scores.values()), default=0)

    @property
    def shares(self) -> dict[str, float]:
        return {one: right / len(self.scores[one]) for one, right in self.correct.items()}

    def reward(self, name: str) -> float | None:
        return self.metrics.get(f"{SHARES}/{name}")

    @property
    def values(self) -> dict[str, float]:
        """Names of a suite's metrics: `accuracy`, `pass@4`, `loss`, and `actor/return` of actors.

        pass@k is among them for k = 2, 4, 8... below the number of samples, and for that number.
        """
        values = {f"{role}/return": value for role, value in self.episode_return.items()}
        if self.accuracy is not None:
            values["accuracy"] = self.accuracy
        for k in _passes(self.num_samples):
            found = [
                pass_at(len(self.scores[problem]), correct, k)
                for problem, correct in self.correct.items()
            ]
            values[f"pass@{k}"] = statistics.fmean(found)
        return values | self.losses


def score_text(example: Mapping[str, Any]) -> str:
    return "no score" if example["score"] is None else f"{example['score']:g}"


def example_text(example: Mapping[str, Any]) -> str:
    """Describe a prompt, or a conversation's turns, with the response and its score."""
    said = f"{example['response']!r} ({score_text(example)})"
    if "messages" not in example:
        return f"{example['prompt']!r}: {said}"
    turns = (f"{message['role']}: {message['content']!r}" for message in example["messages"])
    return "\n".join((*turns, f"    assistant: {said}"))


def _passes(num_samples: int) -> list[int]:
    return sorted({1 << i for i in range(1, num_samples.bit_length())} | {num_samples} - {0, 1})


def names_of(num_samples: int) -> list[str]:
    return ["accuracy", *(f"pass@{k}" for k in _passes(num_samples))]


def accuracy_interval(found: Measured) -> tuple[float, float] | None:
    """The 95 % interval around an accuracy, over problems; None unless there are two or more."""
    shares = [*found.shares.values()]
    if len(shares) < 2:
        return None
    half = _half_width(shares)
    return statistics.fmean(shares) - half, statistics.fmean(shares) + half


def _half_width(values: list[float]) -> float:
    return _95 * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True)
class Change:
    """The change of a suite's accuracy, problem by problem."""

    mean: float  # mean over problems of the change of a problem's share of right answers, -1 to 1
    # half of the 95 % interval around it, by the normal approximation: 1.96 standard errors of that
    # mean. Samples of one problem count together.
    half_width: float
    num_problems: int  # problems that both evaluations asked

    @classmethod
    def between(cls, before: Measured, after: Measured) -> Change | None:
        then, now = before.shares, after.shares
        changes = [now[problem] - then[problem] for problem in then if problem in now]
        if len(changes) < 2:
            return None
        return cls(statistics.fmean(changes), _half_width(changes), len(changes))

    @property
    def interval(self) -> tuple[float, float]:
        return self.mean - self.half_width, self.mean + self.half_width

    def __str__(self) -> str:
        low, high = self.interval
        interval = f"95 % interval {100 * low:+.1f} to {100 * high:+.1f}"
        return f"{100 * self.mean:+.1f} points ({interval})"


class Evaluations:
    """The evaluations of one run, by the number of steps that were complete."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "evaluations"

    def steps(self) -> list[int]:
        names = [file.name for file in self._folder.iterdir()] if self._folder.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := _FILE.fullmatch(name)))

    def write(self, step: int, found: Mapping[str, Measured]) -> None:
        self._folder.mkdir(exist_ok=True)
        suites = {name: plain(asdict(measured)) for name, measured in found.items()}
        write_json(self._file(step), {"step": step, "suites": suites})

    def read(self, step: int) -> dict[str, Measured]:
        file = self._file(step)
        try:
            content: Any = read_json(file)["suites"]
            for found in content.values():
                for kind in ("metrics", "losses", "episode_return"):
                    known = found.get(kind, {}).items()
                    found[kind] = {name: value for name, value in known if value is not None}
            return {name: Measured(**found) for name, found in content.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            known = isinstance(error, OSError | ValueError)
            raise ConfigError(
                f"'{file}' cannot be read: {error if known else 'it is damaged'}\n"
                "    bring it back as it was; what was measured at an earlier step cannot be "
                "measured again"
            ) from error

    def rewind(self, step: int) -> None:
        for later in self.steps():
            if later > step:
                self._file(later).unlink()

    def curve(self, metric: str) -> dict[int, float]:
        points: dict[int, float] = {}
        for step in self.steps():
            for suite, found in self.read(step).items():
                named = {logged_name(suite, name): value for name, value in found.values.items()}
                points |= {step: named[metric]} if metric in named else {}
        return points

    def best(self, metric: str) -> int | None:
        points = {step: value for step, value in self._merits(metric).items() if step}
        return max(points, key=lambda step: (points[step], -step), default=None)

    def without_improvement(self, metric: str) -> int:
        values = list(self._merits(metric).values())
        return len(values) - 1 - values.index(max(values)) if values else 0

    def _merits(self, metric: str) -> dict[int, float]:
        sign = -1.0 if metric == LOSS else 1.0
        return {step: sign * value for step, value in self.curve(metric).items()}

    def _file(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.json"


def logged_name(suite: str, name: str) -> str:
    """A suite's metric as it is named in logs, below `evaluation/`."""
    return f"{suite}/{name}" if suite else name
