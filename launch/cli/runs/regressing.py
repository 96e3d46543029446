"""`penstock runs regress`: whether runs are worse than a reference, or slower, as an exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ....dataflow.errors import ConfigError
from ...run_dir.stop import visible
from ...runs.reference import RULES, Finding, Reference, Rule
from ...runs.values import RunValues, sets_by, value_text
from ..words import Words, split_words, whole_number
from .racing import STEP_TIME, raced
from .reproducing import repeatable
from .table import print_table

_DIRECTIONS = ("not_lower", "not_higher", "same")
_WAYS = ("reference", "write", "checkout")
_RACE = ("pairs", "slower")
_FEWEST_PAIRS = 2
"""Of a single run every disturbance counts."""

_HEADER = ["figure", "reference", "now", "allowed", ""]


def regress_runs(arguments: Sequence[str]) -> int:
    """Hold runs against a reference or another checkout, or write one; 1 if a run is worse."""
    options = (*_WAYS, *_RACE, "without", *_DIRECTIONS, "runs")
    words = split_words("runs regress", arguments, options, where=True)
    if sum(way in words.options for way in _WAYS) != 1:
        raise ConfigError(
            "penstock runs regress: give reference=FILE to hold runs against, write=FILE to make "
            "one of them, or checkout=FOLDER to run one in turns with another source tree"
        )
    stray = ("without", *_DIRECTIONS) if "checkout" in words.options else _RACE
    for key in stray:
        if key in words.options:
            way = next(way for way in _WAYS if way in words.options)
            raise ConfigError(f"penstock runs regress: '{key}' says nothing with '{way}'")
    if "checkout" in words.options:
        return _race(words)
    sets = sets_by(words.names, words.where, "", words.home)
    runs = [run for found in sets.values() for run in found]
    if "write" in words.options:
        return _write(runs, words)
    findings = Reference.read(Path(words.option("reference"))).held_against(runs)
    print_table([_HEADER, *map(_row, findings)])
    worse = [finding.key for finding in findings if finding.worse]
    print(visible(f"worse: {', '.join(worse)}" if worse else "no worse than the reference"))
    return 1 if worse else 0


def _race(words: Words) -> int:
    """Run one run in turns by another checkout and by this one; 1 if this one is slower."""
    if len(words.names) != 1 or words.where:
        raise ConfigError(
            "penstock runs regress: checkout=FOLDER takes one run, which is run again and again, "
            f"got {len(words.names)} and {len(words.where)} keys"
        )
    num_pairs = whole_number("pairs", words.option("pairs", "5"))
    if num_pairs < _FEWEST_PAIRS:
        raise ConfigError(f"'pairs': expected at least {_FEWEST_PAIRS}, got {num_pairs}")
    rule = Rule("not_higher", *_tolerance("slower", words.option("slower", "10%")))
    run = repeatable(words.names[0], words.home)
    finding, same = raced(run, Path(words.option("checkout")), num_pairs, rule)
    print_table([_HEADER, _row(finding)])
    if not same:
        print("the runs came to different weights: what they did may not be the same work")
    ratio = f"{finding.value / finding.reference:.2f} times the other checkout's {STEP_TIME}"
    print(visible(f"{'slower' if finding.worse else 'not slower'}: {ratio}, {num_pairs} pairs"))
    return 1 if finding.worse else 0


def _write(runs: Sequence[RunValues], words: Words) -> int:
    path = Path(words.option("write"))
    reference = Reference.of(runs, _rules(words))
    reference.write(path)
    num = len(reference.runs)
    print(visible(f"written to {path}: {num} {'run' if num == 1 else 'runs'}"))
    return 0


def _rules(words: Words) -> Mapping[str, Rule]:
    """The default rules, without some, but for keys that are given: `not_lower=KEY:TOLERANCE`."""
    given: dict[str, Rule] = {}
    for direction in _DIRECTIONS:
        for one in filter(None, words.option(direction).split(",")):
            key, _, tolerance = one.partition(":")
            given[key] = Rule(direction, *_tolerance(key, tolerance))
    gone = words.option("without").split(",")
    return {key: rule for key, rule in {**RULES, **given}.items() if key not in gone}


def _tolerance(key: str, text: str) -> tuple[float, bool]:
    """`0.02`, or `5%` of the reference's value."""
    relative = text.endswith("%")
    try:
        tolerance = float(text.removesuffix("%") or 0)
    except ValueError:
        tolerance = -1.0
    if not 0 <= tolerance < float("inf"):
        raise ConfigError(f"'{key}': expected a tolerance such as 0.02 or 5%, got '{text:.40}'")
    return (tolerance / 100, True) if relative else (tolerance, False)


def _row(finding: Finding) -> list[str]:
    allowed = "" if finding.allowed is None else value_text(finding.allowed)
    said = finding.note or ("worse" if finding.worse else "")
    return [finding.key, value_text(finding.reference), value_text(finding.value), allowed, said]
