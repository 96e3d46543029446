"""The result of a stage: times and counts, evaluations, and deaths it went on from."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...dataflow.kinds import NodeKind
from ...dataflow.runtime.engine import StepResult
from ...dataflow.runtime.executor import Recovered, Restart
from ...dataflow.runtime.messages import TaskSpan
from ..inputs.record import Stage
from ..run_dir.evaluations import Measured
from ..run_dir.progress import format_duration

Tell = Callable[[str, int, str, dict[str, Any]], None]
"""Called with a death: its kind, the step, a message, and further fields of the event."""


@dataclass
class Deaths:
    """The deaths of processes that a stage went on from.

    Attributes:
        recovered: Those after which it went back, in order.
        restarts: Groups that were started again beside it.
        tell: Is called with each death; does nothing before the first step.
        num_complete: Steps that are complete.
    """

    recovered: list[Recovered] = field(default_factory=list[Recovered])
    restarts: list[Restart] = field(default_factory=list[Restart])
    tell: Tell | None = None
    num_complete: int = 0

    def note(self, one: Recovered | Restart) -> None:
        """Note that the run has gone back, or that a group was started again beside it."""
        if isinstance(one, Recovered):
            self.recovered.append(one)
            seen = one.said.partition("\n")[0]
            self._say("recovered", one.step, seen, _means(one))
            return
        self.restarts.append(one)
        means = f"it was started again beside the run, which took {format_duration(one.took_s)}"
        self._say("restarted", self.num_complete, f"a process of group '{one.group}' died", means)

    def _say(self, kind: str, step: int, seen: str, means: str) -> None:
        if self.tell is not None:
            fields = {"node": "", "seen": seen, "means": means, "remedy": _REMEDY}
            self.tell(kind, step, f"{seen}; {means}", fields)

    @property
    def summary(self) -> dict[str, Any]:
        """The fields about deaths of the run's summary.json."""
        return {
            "num_recoveries": len(self.recovered),
            "num_restarts": len(self.restarts),
            "longest_pause_s": max(
                (
                    *(one.took_s for one in self.recovered),
                    *(one.held_up_s for one in self.restarts),
                ),
                default=0.0,
            ),
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


_REMEDY = "none is needed as long as the run goes on; `recovery` says how often it may"


def _means(one: Recovered) -> str:
    where = "its start" if one.source == "start" else f"step {one.step} of its {one.source}"
    count = one.completed - one.step
    again = f"{count} step is" if count == 1 else f"{count} steps are"
    pause = format_duration(one.took_s)
    return f"the run goes on from {where}, {again} computed again (pause {pause})"


_ENV_STEPS, _ENV_RESTARTS = "env_steps", "env_restarts"
"""Metrics of a rollout that count steps of environments, those of resets left out, and those
that went wrong and were restarted."""

_MOVES = "num_moves"
"""A metric of games alone."""


@dataclass
class StageResult:
    """The result of a stage.

    Attributes:
        weights_sha256: Hash of all trained roles' weights.
        roles_sha256: Role name -> hash of its weights.
        step_times_s: Wall time of every step taken by this process.
        node_times_s: Node -> how long its busiest rank worked on it, in each of those steps.
        node_peaks: Node -> the most bytes that any rank's CUDA device held during it; 0 without.
        first_step: The step it began at: above 0 if it went on from a checkpoint.
        num_steps: Steps taken by its end, those before `first_step` included.
        num_samples: Rows made by those steps.
        num_env_steps: Steps of environments, or moves of games, taken in them.
        num_env_restarts: Environments that went wrong in them and were restarted.
        env_unit: What `num_env_steps` counts.
        before: Suite -> what was measured before the first step; empty if nothing is.
        after: And after the last.
        checkpoints_missed: Checkpoints that were due and could not be written.
        stopped: Why it ended before its last step, in words; "" if it did not.
        deaths: Of processes, that it went on from.
        ledger: What its ledger says, once that adds up.
        wall_time_s: From the first model built to the last file written.
    """

    weights_sha256: str = ""
    roles_sha256: dict[str, str] = field(default_factory=dict[str, str])
    step_times_s: list[float] = field(default_factory=list[float])
    node_times_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    node_peaks: dict[str, int] = field(default_factory=dict[str, int])
    first_step: int = 0
    num_steps: int = 0
    num_samples: int = 0
    num_env_steps: float = 0.0
    num_env_restarts: float = 0.0
    env_unit: str = "environment steps"
    before: dict[str, Measured] = field(default_factory=dict[str, Measured])
    after: dict[str, Measured] = field(default_factory=dict[str, Measured])
    checkpoints_missed: int = 0
    stopped: str = ""
    deaths: Deaths = field(default_factory=Deaths)
    ledger: str = ""
    wall_time_s: float = 0.0

    def add(self, stage: Stage, step: StepResult, took_s: float) -> None:
        """Count a step."""
        self.deaths.num_complete = step.step + 1
        self.step_times_s.append(took_s)
        self.num_steps = self.first_step + len(self.step_times_s)
        self.num_samples += num_samples(stage, step)
        self.num_env_steps += num_env_steps(step)
        self.num_env_restarts += _total(step, _ENV_RESTARTS)
        self.env_unit = env_unit(step.metrics)
        for node, seconds in node_seconds(step.spans).items():
            self.node_times_s.setdefault(node, []).append(seconds)
        for span in step.spans:
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


def num_samples(stage: Stage, result: StepResult) -> int:
    """Rows that a step's rollouts made; without rollouts, items its tables brought."""
    rollouts = [node.name for node in stage.graph.nodes if node.kind is NodeKind.ROLLOUT]
    if rollouts:
        return sum(result.num_rows.get(name, 0) for name in rollouts)
    return sum(stage.config.per_step.values())


def num_env_steps(result: StepResult) -> float:
    """Steps of environments, or moves of games, that a step's rollouts counted."""
    return _total(result, _ENV_STEPS)


def _total(result: StepResult, metric: str) -> float:
    return sum(value for name, value in result.metrics.items() if name.endswith(f"/{metric}"))


def env_unit(metrics: Mapping[str, float]) -> str:
    """Name the unit of `num_env_steps`."""
    is_game = any(name.endswith(f"/{_MOVES}") for name in metrics)
    return "moves" if is_game else "environment steps"


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
