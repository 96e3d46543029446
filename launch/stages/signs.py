"""Signs that a run goes wrong, seen in the numbers of its steps: metrics in, warnings out.

Nothing here waits, prints or reads a file. A sign must be there for several steps in a row before
it is told of, is told of once for as long as it stays, and again only if it had gone away. What
counts as one is said in `sign_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .sign_rules import RULES, SHORT, Past, Progress, Row, Rule, SignFacts

KINDS: tuple[str, ...] = tuple(dict.fromkeys(rule.kind for rule in RULES))
"""Every kind of sign."""


@dataclass(frozen=True)
class BadSign:
    """One sign, at the step that made it certain.

    Attributes:
        kind: One of `KINDS`.
        node: Whose metric shows it.
        first_step: The first of the steps in a row that show it.
        step: The last one so far.
        seen: What was seen, with numbers.
        means: What it usually means.
        remedy: What to change, with keys.
    """

    kind: str
    node: str
    first_step: int
    step: int
    seen: str
    means: str
    remedy: str

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.step}"
        when = steps if self.first_step < self.step else f"step {self.step}"
        return f"{when}, {self.node}: {self.seen}\n    {self.means}\n    remedy: {self.remedy}"


class Signs:
    """Looks at one stage's steps in order.

    Args:
        facts: What is known of the stage.

    Example:
        >>> signs = Signs(SignFacts())
        >>> for step in range(8):
        ...     for sign in signs.look(step, {"actor.generate/truncated": 1.0, **counts}):
        ...         print(sign)
    """

    def __init__(self, facts: SignFacts) -> None:
        self._past = Past(facts, Progress(facts.order))
        self._seen: dict[tuple[str, str], _Stretch] = {}

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take up what earlier steps showed, and told of; rows of `metrics.jsonl`."""
        for row in rows:
            values = {name: math.nan if v is None else float(v) for name, v in row.items()}
            self.look(int(row["step"]), values)

    def look(self, step: int, values: Row) -> list[BadSign]:
        """What one more step makes certain.

        Args:
            step: Its index.
            values: `node/name` -> number, as logged.
        """
        self._past.progress.add(values)
        found: list[BadSign] = []
        for rule in RULES:
            for name in values:
                node, _, metric = name.partition("/")
                if metric not in rule.metrics:
                    continue
                seen = rule.look(self._past, node, values, metric)
                stretch = self._seen.setdefault((rule.kind, name), _Stretch())
                stretch.add(step, seen is not None, _num_responses(values))
                if stretch.is_due(rule) and not self._is_there(rule.unless, node):
                    stretch.told = True
                    told = rule.means, rule.remedy(self._past.facts)
                    found.append(BadSign(rule.kind, node, stretch.first, step, seen or "", *told))
        return found

    def _is_there(self, kind: str, node: str) -> bool:
        """Whether the newest step shows a kind of sign at a node."""
        return any(
            stretch.num_steps
            for (other, name), stretch in self._seen.items()
            if other == kind and name.partition("/")[0] == node
        )


def _num_responses(values: Row) -> float:
    """Rows that a step made, as far as its own metrics say."""
    return values.get("run/samples_per_s", math.nan) * values.get("run/step_time_s", math.nan)


@dataclass
class _Stretch:
    """How long a sign has been there, or away."""

    first: int = 0
    num_steps: int = 0
    num_away: int = 0
    num_responses: float = 0.0
    told: bool = False

    def add(self, step: int, there: bool, responses: float) -> None:
        """Count a step, which shows the sign or does not."""
        if there:
            self.first = self.first if self.num_steps else step
            self.num_steps, self.num_away = self.num_steps + 1, 0
            self.num_responses += responses
        else:
            self.num_steps, self.num_responses = 0, 0.0
            self.num_away += 1
            self.told = self.told and self.num_away < SHORT

    def is_due(self, rule: Rule) -> bool:
        """Whether the sign has been there long enough, and was not told of."""
        enough = not self.num_responses < rule.num_responses  # nan where it is not known
        return not self.told and self.num_steps >= rule.num_steps and enough
