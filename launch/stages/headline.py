"""Which of a step's numbers a person sees first: those of the progress line, and that of the curve.

A metric is named after the node that reports it, `reward.score/reward/mean`, and several nodes may
report the same one. What the policy's training depends on comes first; among those, and after them,
roles stand in the order of the step function's parameters. Several rewards go by their roles'
names, since one is not the other, and so does one that is not called a reward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import networkx as nx

from ...algorithms.roles.language import Reward
from ...dataflow.kinds import NodeKind
from ..inputs.record import Stage

_SCORE = "reward/mean"
"""The metric that every reward reports."""

_SHOWN = (
    "episode_return",
    "first_wins",
    "second_wins",
    _SCORE,
    "cross_entropy",
    "accuracy",
    "entropy",
    "loss",
    "grad_norm",
)
"""Metrics worth a place on the progress line, best first."""

_TROUBLE = ("env_restarts", "cut_off")
"""Those that come before them where they are not 0."""

_PLACES = 3
"""Numbers on the progress line."""

_CURVES = (
    ("episode_return", "episode return"),
    ("first_wins", "share of games that who begins has won"),
    (_SCORE, "mean reward"),
    ("accuracy", "accuracy"),
    ("cross_entropy", "cross-entropy, nats"),
    ("loss", "loss"),
)
"""Metrics a run can be judged by, best first, and what to write beside the axis."""

CURVE_ENDS = tuple(f"/{wanted}" for wanted, _ in _CURVES)
"""How the names of all metrics end that a curve may be of."""


@dataclass(frozen=True)
class CurveMetric:
    """The metric that a run's curve shows, and what to write beside its axis."""

    name: str
    label: str


class Headline:
    """Chooses among what the steps of one stage report.

    Args:
        stage: The stage; None where only metrics are known, whose order then decides.
    """

    def __init__(self, stage: Stage | None) -> None:
        nodes = stage.graph.nodes if stage else ()
        roles = stage.graph.roles if stage else {}
        ranked = ranked_nodes(stage) if stage else ()
        self._rank = {name: rank for rank, name in enumerate(ranked)}
        self._role = {node.name: node.role or node.name for node in nodes}
        self._rewards = {role for role, kind in roles.items() if issubclass(kind, Reward)}

    def shown(self, values: Mapping[str, float]) -> dict[str, float]:
        """The few of a step's metrics that are worth showing, under short names, best first."""
        shown: dict[str, float] = {}
        for wanted in (*_TROUBLE, *_SHOWN):
            found = self._reported(wanted, values)
            for name in found:
                value = values[name]
                there = not math.isnan(value) and (value != 0 or wanted not in _TROUBLE)
                if there and len(shown) < _PLACES:
                    apart = wanted == _SCORE and self._goes_by_role(name, found)
                    shown.setdefault(
                        self._role_of(name) if apart else wanted.partition("/")[0], value
                    )
        return shown

    def curve(self, names: Iterable[str]) -> CurveMetric | None:
        """The metric to judge the stage by, `node/name`; None if there is none of those known."""
        every = [name for name in names if not name.startswith("evaluation/")]
        for wanted, label in _CURVES:
            found = self._reported(wanted, every)
            if found:
                apart = wanted == _SCORE and self._goes_by_role(found[0], found)
                whose = f" of '{self._role_of(found[0])}'" if apart else ""
                return CurveMetric(found[0], f"{label}{whose}")
        return None

    def _reported(self, wanted: str, names: Iterable[str]) -> list[str]:
        """The metrics of that name, first that of the node that comes first."""
        found = [name for name in names if name.endswith(f"/{wanted}")]
        last = len(self._rank)
        return sorted(found, key=lambda name: self._rank.get(name.partition("/")[0], last))

    def _goes_by_role(self, metric: str, among: list[str]) -> bool:
        role = self._role_of(metric)
        if len({self._role_of(other) for other in among}) > 1:
            return True
        return role in self._rewards and role != "reward"

    def _role_of(self, metric: str) -> str:
        node = metric.partition("/")[0]
        return self._role.get(node, node)


def needed_nodes(stage: Stage) -> frozenset[str]:
    """The nodes on which the training of the policy depends, or of what else the stage is for."""
    graph = stage.graph
    learner = stage.policy or next((r for r in graph.roles if r in graph.trains_per_step), None)
    trained = {n.name for n in graph.nodes if n.role == learner and n.kind is NodeKind.TRAIN}
    return frozenset(trained.union(*(nx.ancestors(graph.dag, name) for name in trained)))


def ranked_nodes(stage: Stage) -> list[str]:
    """The graph's nodes, those first whose metrics tell most about what the stage is for."""
    place = {role: index for index, role in enumerate(stage.graph.roles)}
    needed = needed_nodes(stage)
    ranked = sorted(
        stage.graph.nodes,
        key=lambda node: (node.name not in needed, place.get(node.role or "", len(place))),
    )
    return [node.name for node in ranked]
