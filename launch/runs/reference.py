"""A stored reference that later runs are held against: what they may not lose, and by how much.

A figure is worse if the mean over the runs is beyond the reference's by more than is allowed, which
is the larger of a tolerance and of the noise, half of a 95 % interval by Student's t. Runs whose
seeds the reference has are compared seed by seed, and the noise is that of the mean of their
differences: a seed that comes out as before has none. Other runs are taken for further draws, and
the noise is that of the mean of so many of them, as the reference's own runs vary.

Hashes and counts must be the same, seed by seed; hashes where the machine and the packages are
those of the reference, since another processor rounds otherwise. What is not compared is said.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...dataflow.errors import ConfigError
from ..run_dir.atomic import write_json
from ..run_dir.environment import Environment, changed_versions, versions_text
from .figures import Figures
from .values import RunValues, value_text

Direction = Literal["not_lower", "not_higher", "same"]

_FORMAT = 1
_MAY_DIFFER = ("memory_bytes", "system")
"""Of a machine, without any effect on what is computed."""

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's t for 1 to 10 degrees of freedom; above, those of the last are used."""


@dataclass(frozen=True)
class Rule:
    """What a figure may not do.

    Attributes:
        direction: What it must be, beside the reference.
        tolerance: By how much it may be otherwise.
        relative: Whether that is a share of the reference's value.
    """

    direction: Direction
    tolerance: float = 0.0
    relative: bool = False


RULES: Mapping[str, Rule] = {
    "accuracy_after_rl": Rule("not_lower", 0.01),
    "peak_memory_bytes": Rule("not_higher", 0.1, relative=True),
    "weights_sha256": Rule("same"),
    "counts": Rule("same"),
}
"""What is checked by default, of what a run has; `counts` stands for all of its counts."""


@dataclass(frozen=True)
class Finding:
    """What was found of one figure.

    Attributes:
        key: Which.
        reference: Its value in the reference.
        value: Its value in the runs.
        allowed: The difference that is allowed; None of what must be the same.
        worse: Whether it is beyond that.
        note: Why it was not compared; "" if it was.
    """

    key: str
    reference: Any
    value: Any
    allowed: float | None
    worse: bool
    note: str = ""


@dataclass(frozen=True)
class Reference:
    """Figures of some runs, to hold others against.

    Attributes:
        rules: Key -> what it may not do.
        values: Key -> its value in each run; a text of every run in the order of seeds.
        runs: What the runs are called.
        seeds: Of each, in order.
        environment: What they were run with.
    """

    rules: Mapping[str, Rule]
    values: Mapping[str, Sequence[Any]]
    runs: Sequence[str] = ()
    seeds: Sequence[int] = ()
    environment: Environment = field(default_factory=Environment)

    @classmethod
    def of(cls, runs: Sequence[RunValues], rules: Mapping[str, Rule]) -> Reference:
        """Made of runs that are good.

        Raises:
            ConfigError: If one lacks what a rule asks for.
        """
        figures = _ordered(runs)
        records = [one.record for one in figures]
        known = _rules_there(figures[0], rules)
        return cls(
            known,
            {key: _of_all(figures, key, rule) for key, rule in known.items()},
            [record.folder.id for record in records],
            [record.seed for record in records],
            records[0].environment,
        )

    def held_against(self, runs: Sequence[RunValues]) -> list[Finding]:
        """What was found of each figure.

        Args:
            runs: Later runs, at least one.

        Raises:
            ConfigError: If one lacks what the reference has.
        """
        figures = _ordered(runs)
        pairs = self._pairs(figures)
        elsewhere = self._elsewhere(figures[0].record.environment)
        findings: list[Finding] = []
        for key, rule in self.rules.items():
            now = _of_all(figures, key, rule)
            before = [self.values[key][place] for place in pairs] if pairs else self.values[key]
            if rule.direction == "same":
                findings.append(_same(key, before, now, bool(pairs), elsewhere))
            else:
                findings.append(_no_worse(key, rule, before, now, bool(pairs)))
        return findings

    def _pairs(self, figures: Sequence[Figures]) -> list[int]:
        """Of each run the place of its seed in the reference; empty if they cannot be paired."""
        seeds = [one.record.seed for one in figures]
        distinct = len({*seeds}) == len(seeds) and len({*self.seeds}) == len(self.seeds)
        if not distinct or not {*seeds} <= {*self.seeds}:
            return []
        return [[*self.seeds].index(seed) for seed in seeds]

    def _elsewhere(self, now: Environment) -> str:
        """Why hashes are not compared; "" if they are."""
        before = self.environment
        if not before.versions or not now.versions:
            return "not compared: the packages' versions are not recorded"
        hardware = {k: v for k, v in before.hardware.items() if k not in _MAY_DIFFER}
        if any(now.hardware.get(key) != value for key, value in hardware.items()):
            return "not compared: another machine"
        versions = changed_versions(before.versions, now.versions)
        return f"not compared: {versions_text(versions)}" if versions else ""

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        write_json(path, {"format": _FORMAT, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Reference:
        """What `write` has written.

        Raises:
            ConfigError: If it cannot be read, or is something else.
        """
        try:
            found: Any = json.loads(path.read_bytes())
            if found.pop("format") != _FORMAT:
                raise ValueError(f"not of format {_FORMAT}")
            rules = {key: Rule(**rule) for key, rule in found["rules"].items()}
            environment = Environment(**found["environment"])
            values = {key: [*found["values"][key]] for key in rules}
            if not all(values.values()):
                raise ValueError("a figure without a value")
            for key, rule in rules.items():
                if rule.direction != "same":
                    values[key] = [float(value) for value in values[key]]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"'{path}' is no reference ({type(error).__name__}: {error})\n"
                "    make one of good runs: penstock runs regress RUN... write=FILE"
            ) from error
        return cls(rules, values, found["runs"], found["seeds"], environment)


def _no_worse(
    key: str, rule: Rule, before: Sequence[float], now: Sequence[float], paired: bool
) -> Finding:
    """The means, and whether that of now is worse by more than is allowed."""
    mean, mean_now = statistics.fmean(before), statistics.fmean(now)
    if paired:
        noise = _half_width([b - a for a, b in zip(before, now, strict=True)])
    else:
        noise = _half_width(before, len(now))
    allowed = max(rule.tolerance * (abs(mean) if rule.relative else 1.0), noise)
    loss = mean - mean_now if rule.direction == "not_lower" else mean_now - mean
    # Not `loss > allowed`, which is false of NaN.
    return Finding(key, mean, mean_now, allowed, not loss <= allowed)


def _same(
    key: str, before: Sequence[Any], now: Sequence[Any], paired: bool, elsewhere: str
) -> Finding:
    """Whether each seed has what it had, as far as that can be asked."""
    note = "" if paired else "not compared: other seeds"
    if isinstance(before[0], str):
        note = note or elsewhere
    worse = not note and [*before] != [*now]
    return Finding(key, _one(before), _one(now), None, worse, note)


def _rules_there(figures: Figures, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rules without those of `RULES` that the runs have nothing of, and with every count."""
    found: dict[str, Rule] = {}
    for key, rule in rules.items():
        if key == "counts":
            found |= dict.fromkeys(figures.counts, rule)
        elif RULES.get(key) != rule or figures.has(key):
            found[key] = rule
    return found


def _ordered(runs: Sequence[RunValues]) -> list[Figures]:
    return [Figures(run) for run in sorted(runs, key=lambda run: (run[0].seed, run[0].created))]


def _of_all(figures: Sequence[Figures], key: str, rule: Rule) -> list[Any]:
    if rule.direction == "same":
        return [one.of(key) for one in figures]
    return [one.number(key) for one in figures]


def _half_width(values: Sequence[float], num_further: int | None = None) -> float:
    """Half of the 95 % interval of the values' mean, or beside it of so many further values'."""
    if len(values) < 2:
        return 0.0
    t = _T_975[min(len(values) - 1, len(_T_975)) - 1]
    variance = 1 / len(values) + (1 / num_further if num_further else 0.0)
    return t * statistics.stdev(values) * math.sqrt(variance)


def _one(values: Sequence[Any]) -> Any:
    """The value, if all are the same."""
    return values[0] if len({*values}) == 1 else ", ".join(value_text(value) for value in values)
