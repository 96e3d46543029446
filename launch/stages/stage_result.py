"""The numbers of a stage: those a person sees first, times and counts, evaluations, deaths.

A metric is named after the node that reports it, `reward.score/reward/mean`, and several nodes may
report the same one. What the policy's training depends on comes first; among those, and after them,
roles stand in the order of the step function's parameters. Several rewards go by their roles'
names, since one is not the other, and so does one that is not called a reward.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...algorithms.roles.language import Reward
from ...dataflow.graph.graph import NodeKind
from ...dataflow.runtime.engine import StepResult
from ...dataflow.runtime.executor import Recovered, Restart
from ...dataflow.runtime.messages import TaskSpan
from ..inputs.record import Stage
from ..run_dir.evaluations import Measured
from ..run_dir.progress import format_duration

_SCORE = "reward/mean"  # the metric that every reward reports
_PLACES = 3  # numbers on the progress line

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

_TROUBLE = ("env_restarts", "cut_off")  # those that come before them where they are not 0

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
"""Endings of the names of all metrics that a curve may be of."""


class CurveMetric(NamedTuple):
    """The metric that a run's curve shows, and what to write beside its axis."""

    name: str
    label: str


class Headline:
    """Chooses among what the steps of one stage report."""

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
    return frozenset(trained.union(*map(graph.ancestors, trained)))


def ranked_nodes(stage: Stage) -> list[str]:
    """The graph's nodes, those first whose metrics tell most about what the stage is for."""
    place = {role: index for index, role in enumerate(stage.graph.roles)}
    needed = needed_nodes(stage)
    ranked = sorted(
        stage.graph.nodes,
        key=lambda node: (node.name not in needed, place.get(node.role or "", len(place))),
    )
    return [node.name for node in ranked]


@dataclass
class Deaths:
    # those after which it went back, in order
    recovered: list[Recovered] = field(default_factory=list[Recovered])
    # groups that were started again beside it
    restarts: list[Restart] = field(default_factory=list[Restart])
    # is called with each death: its kind, the step, a message, and further fields of the event;
    # None before the first step
    tell: Callable[[str, int, str, dict[str, Any]], None] | None = None
    num_complete: int = 0  # steps that are complete

    def note(self, one: Recovered | Restart) -> None:
        """Note that the run has gone back, or that a group was started again beside it."""
        if isinstance(one, Recovered):
            self.recovered.append(one)
            kind, step, seen = "recovered", one.step, one.said.partition("\n")[0]
            where = "its start" if one.source == "start" else f"step {one.step} of its {one.source}"
            count = one.completed - one.step
            again = f"{count} step is" if count == 1 else f"{count} steps are"
            pause = format_duration(one.took_s)
            means = f"the run goes on from {where}, {again} computed again (pause {pause})"
        else:
            self.restarts.append(one)
            kind, step = "restarted", self.num_complete
            seen = f"a process of group '{one.group}' died"
            means = f"it was started again beside the run, which took {format_duration(one.took_s)}"
        if self.tell is not None:
            remedy = "none is needed as long as the run goes on; `recovery` says how often it may"
            fields = {"node": "", "seen": seen, "means": means, "remedy": remedy}
            self.tell(kind, step, f"{seen}; {means}", fields)

    @property
    def summary(self) -> dict[str, Any]:
        """The fields about deaths of the run's summary.json."""
        paused = [one.took_s for one in self.recovered]
        held_up = [one.held_up_s for one in self.restarts]
        return {
            "num_recoveries": len(self.recovered),
            "num_restarts": len(self.restarts),
            "longest_pause_s": max((*paused, *held_up), default=0.0),
            "steps_recomputed": sum(one.completed - one.step for one in self.recovered),
        }

    @property
    def text(self) -> str:
        """Return one line about workers that died; "" if none did."""
        if not (self.recovered or self.restarts):
            return ""
        said = self.summary
        return (
            f"processes died: the run went back {said['num_recoveries']} times and computed "
            f"{said['steps_recomputed']} steps again, groups were started again beside it "
            f"{said['num_restarts']} times; the longest pause was "
            f"{format_duration(said['longest_pause_s'])}"
        )


@dataclass(frozen=True)
class ObservedStep:
    """A step that is complete."""

    result: StepResult  # what the engine returned
    took_s: float  # seconds it took, without evaluations
    # rows that its rollouts made; without rollouts, items its tables brought
    samples: int
    # steps of environments, or moves of games, that its rollouts took; those of resets left out
    env_steps: float
    env_unit: str  # what these are
    env_restarts: float  # environments that went wrong in it and were restarted
    ended_s: float  # when it was complete, in seconds since the epoch
    values: Mapping[str, float]  # `node/name` -> number, its own metrics among them
    headline: Mapping[str, float]  # the few of these that are worth showing, under short names

    @classmethod
    def of(
        cls, stage: Stage, result: StepResult, took_s: float, headline: Headline
    ) -> ObservedStep:
        rollouts = [node.name for node in stage.graph.nodes if node.kind is NodeKind.ROLLOUT]
        samples = sum(result.num_rows.get(name, 0) for name in rollouts)
        if not rollouts:
            samples = sum(stage.config.per_step.values())

        def total(metric: str) -> float:
            return sum(one for name, one in result.metrics.items() if name.endswith(f"/{metric}"))

        env_steps = total("env_steps")
        values = {
            **result.metrics,
            "run/step_time_s": took_s,
            "run/samples_per_s": samples / took_s if took_s else 0.0,
            "run/controller_bytes": float(result.controller_bytes),
            "run/lag_max": float(max((lag for lag, _ in result.lag), default=0)),
        }
        if env_steps:
            values["run/env_steps_per_s"] = env_steps / took_s if took_s else 0.0
        is_game = any(name.endswith("/num_moves") for name in result.metrics)
        return cls(
            result,
            took_s,
            samples,
            env_steps,
            "moves" if is_game else "environment steps",
            total("env_restarts"),
            time.time(),
            values,
            headline.shown(values),
        )


@dataclass
class StageResult:
    weights_sha256: str = ""  # hash of all trained roles' weights
    # role name -> hash of its weights
    roles_sha256: dict[str, str] = field(default_factory=dict[str, str])
    # wall time of every step taken by this process
    step_times_s: list[float] = field(default_factory=list[float])
    # node -> how long its busiest rank worked on it, in each of those steps
    node_times_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    # node -> the most bytes that any rank's CUDA device held during it; 0 without
    node_peaks: dict[str, int] = field(default_factory=dict[str, int])
    first_step: int = 0  # the step it began at: above 0 if it went on from a checkpoint
    num_steps: int = 0  # steps taken by its end, those before `first_step` included
    num_samples: int = 0  # rows made by those steps
    num_env_steps: float = 0.0  # steps of environments, or moves of games, taken in them
    num_env_restarts: float = 0.0  # environments that went wrong in them and were restarted
    env_unit: str = "environment steps"  # what `num_env_steps` counts
    # suite -> what was measured before the first step; empty if nothing is
    before: dict[str, Measured] = field(default_factory=dict[str, Measured])
    after: dict[str, Measured] = field(default_factory=dict[str, Measured])  # and after the last
    checkpoints_missed: int = 0  # checkpoints that were due and could not be written
    stopped: str = ""  # why it ended before its last step, in words; "" if it did not
    deaths: Deaths = field(default_factory=Deaths)  # of processes, that it went on from
    ledger: str = ""  # what its ledger says, once that adds up
    wall_time_s: float = 0.0  # from the first model built to the last file written

    def add(self, step: ObservedStep) -> None:
        self.deaths.num_complete = step.result.step + 1
        self.step_times_s.append(step.took_s)
        self.num_steps = self.first_step + len(self.step_times_s)
        self.num_samples += step.samples
        self.num_env_steps += step.env_steps
        self.num_env_restarts += step.env_restarts
        self.env_unit = step.env_unit
        for node, seconds in node_seconds(step.result.spans).items():
            self.node_times_s.setdefault(node, []).append(seconds)
        for span in step.result.spans:
            most = max(span.peak_bytes, self.node_peaks.get(span.node, 0))
            self.node_peaks[span.node] = most

    @property
    def samples_per_s(self) -> float:
        """Rows made per second of stepping; nan if this process took no step."""
        return self._per_s(self.num_samples)

    @property
    def env_steps_per_s(self) -> float | None:
        """Steps of environments per second of stepping; None if there are none."""
        return self._per_s(self.num_env_steps) if self.num_env_steps else None

    def _per_s(self, count: float) -> float:
        total_s = sum(self.step_times_s)
        return count / total_s if total_s else float("nan")

    @property
    def step_time_s(self) -> float:
        """Median wall time of a step; nan if this process took none."""
        return statistics.median(self.step_times_s) if self.step_times_s else float("nan")


def node_seconds(spans: Iterable[TaskSpan]) -> dict[str, float]:
    """Node -> how long its busiest rank worked on it in one step.

    A node's rows may come in chunks, on several ranks and with other work in between, so the time
    from its first start to its last end says less than what its ranks spent.
    """
    worked: dict[str, dict[int, float]] = {}
    for span in spans:
        ranks = worked.setdefault(span.node, {})
        ranks[span.rank] = ranks.get(span.rank, 0.0) + span.end_s - span.start_s
    return {node: max(ranks.values()) for node, ranks in worked.items()}
