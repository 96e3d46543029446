"""Two sets of runs in one figure of each run: their means, the difference, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..run_dir.run_folder import differences
from .figures import Figures
from .intervals import FEW, Figure, difference, probability_of_improvement, summarized
from .values import RunValues, value_text


@dataclass(frozen=True)
class Comparison:
    """How two sets of runs compare.

    Attributes:
        key: What is compared.
        values: Label of each set -> run -> its value.
        means: Label -> interquartile mean over its runs.
        difference: How much higher the second's mean is.
        improvement: How likely a run of the second is above one of the first.
    """

    key: str
    values: Mapping[str, Mapping[str, float]]
    means: Mapping[str, Figure]
    difference: Figure
    improvement: Figure

    def rows(self) -> list[list[str]]:
        """A table: a row for each set, one for the difference, one for the probability."""
        second = [*self.values][1]
        rows = [[self.key, "runs", "mean [95 % interval]", "of each run"]]
        for label, found in self.values.items():
            each = " ".join(value_text(value) for value in found.values())
            rows.append([label, str(len(found)), str(self.means[label]), each])
        rows.append([f"{second}: higher by", "", str(self.difference), ""])
        rows.append([f"{second}: probability of a higher run", "", str(self.improvement), ""])
        return rows

    def remarks(self) -> list[str]:
        """What somebody who reads the table must know."""
        fewest = min(map(len, self.values.values()))
        if fewest < 2:
            return [
                "a set has 1 run: nothing tells whether the difference is more than runs with "
                "other seeds vary by; run further seeds"
            ]
        if fewest < FEW:
            return [
                f"a set has {fewest} runs: too few to tell a difference from chance, and intervals "
                f"of fewer than {FEW} runs are narrower than 95 %; run {FEW} seeds of each"
            ]
        low, high = self.difference.low, self.difference.high
        sure = "is beyond" if low > 0 or high < 0 else "is within"
        return [f"the difference {sure} what these runs vary by"]


def compared(key: str, sets: Mapping[str, Sequence[Figures]]) -> Comparison:
    """Compare two sets.

    Args:
        key: What is compared; see `Figures.of`.
        sets: Label -> runs; two sets, each of at least one run.

    Raises:
        ConfigError: If a run has no such number.
    """
    values = {
        label: {run.record.folder.id: run.number(key) for run in runs}
        for label, runs in sets.items()
    }
    one, other = ([*found.values()] for found in values.values())
    means = {label: summarized([*found.values()]) for label, found in values.items()}
    return Comparison(
        key, values, means, difference(one, other), probability_of_improvement(one, other)
    )


def comparison_markdown(
    found: Sequence[Comparison], sets: Mapping[str, Sequence[RunValues]]
) -> str:
    """A report that can be read by itself: the tables, what differs, and which runs they are."""
    first, second = sets
    lines = [f"# {_escaped(second)} against {_escaped(first)}", ""]
    for one in found:
        head, *rows = one.rows()
        lines += [_row(head), _row(["---"] * len(head)), *map(_row, rows), ""]
        lines += [f"{line[0].upper()}{line[1:]}." for line in one.remarks()] + [""]
    lines += ["## What differs in every run", ""]
    lines += [_row(["key", first, second]), _row(["---"] * 3)]
    lines += [_row([key, *map(value_text, two)]) for key, two in _differing(sets).items()]
    lines += ["", "Values are interquartile means over runs, with intervals of 10,000 bootstrap"]
    lines += ["samples of runs (Agarwal et al. 2021).", "", "## Runs", ""]
    lines += [_row(["set", "run", "seed", "code"]), _row(["---"] * 4)]
    for label, runs in sets.items():
        lines += [_row([label, r.folder.id, str(r.seed), str(r.code)]) for r, _ in runs]
    return "\n".join(lines) + "\n"


def _differing(sets: Mapping[str, Sequence[RunValues]]) -> dict[str, tuple[Any, Any]]:
    """The keys that all runs of a set have the same value of, and the other set another one."""
    common: list[dict[str, Any]] = []
    for runs in sets.values():
        configs = [record.config or {} for record, _ in runs]
        varying = {key for other in configs[1:] for key in differences(configs[0], other)}
        common.append({"config": configs[0], "varying": varying})
    one, other = common
    found = differences(one["config"], other["config"])
    return {key: two for key, two in found.items() if key not in one["varying"] | other["varying"]}


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """A text that stands in a table as it is."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
