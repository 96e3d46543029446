"""A run: the one object that goes from the composed configuration to its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...configs.references import entry_or_own
from ...configs.schema import ExecutorConfig, ModelConfig, RunConfig
from ...dataflow.runtime.engine import Source
from ...dataflow.runtime.executor import Recovery
from ...planner.inputs.cluster import ClusterSpec
from ...planner.plan.plan import Plan
from ...workers.data.row_report import DataReport
from ...workers.data.task import TaskSpec
from ...workers.executors.registry import EXECUTORS, ExecutorKind
from .data import Data
from .engines import Engines
from .record import Stage
from .suites import HeldOut, HeldOutRows, Suite

_LATER: Any = None
"""A field that `prepare` fills in."""


@dataclass(frozen=True)
class Run:
    """A run, as far as it is known: `resolve` makes it, and `prepare` completes it.

    Attributes:
        config: The configuration, with a local folder, a precision and a vocabulary in its section
            `model`, with a device and threads in `executor`.
        stages: What is trained, in order; the main one last.
        engines: What trains and generates.
        spec: The recipe of the task.
        cluster: Where it runs, if that was described or joined; otherwise this machine.
        snapshots: Role's start as written -> the same with the commit of a hub's model that it is.
        plan: Where the main stage's nodes run; None until that is decided.
        note: What was chosen for it, or why nothing was, in one line; "" if nothing was to choose.
        data: Its task and tokenizer.
        sources: For each stage, a source for every table it reads.
        suites: The problems to measure accuracy on; empty if there are none.
        held_out_rows: Rows that the main stage's loss is measured on; None if there are none.
        reports: What was left out of the data, one for each way it is read.
        longest_sequence: Tokens of the longest prompt with its response that any stage or its
            evaluation samples; None if unknown.
    """

    config: RunConfig
    stages: tuple[Stage, ...]
    engines: Engines
    spec: TaskSpec
    cluster: ClusterSpec | None = None
    snapshots: Mapping[str, str] = field(default_factory=dict[str, str])
    plan: Plan | None = None
    note: str = ""
    data: Data = _LATER
    sources: Mapping[str, Mapping[str, Source]] = _LATER
    suites: tuple[Suite, ...] = ()
    held_out_rows: HeldOutRows | None = None
    reports: tuple[DataReport, ...] = ()
    longest_sequence: int | None = None

    @property
    def main(self) -> Stage:
        """The stage the run is for."""
        return self.stages[-1]

    @property
    def placed(self) -> Plan:
        """The plan of a run that is prepared."""
        assert self.plan is not None, "nothing has been placed yet"
        return self.plan

    @property
    def model(self) -> ModelConfig:
        """The section `model` as it turned out."""
        return self.config.model

    @property
    def executor(self) -> ExecutorConfig:
        """The section `executor` as it turned out."""
        return self.config.executor

    @property
    def folder(self) -> Path:
        """The folder of runs."""
        return Path(self.config.runs)

    @property
    def recovery(self) -> Recovery:
        """How often the run may go back when processes die."""
        given = self.config.recovery
        longest_s = max(Recovery.longest_pause_s, given.pause_s)
        return Recovery(given.max_restarts, given.max_repeats, given.pause_s, longest_s)

    @property
    def mirrored(self) -> bool:
        """True if its state is kept in memory after every step."""
        return self.config.checkpoint.mirror == "neighbor"

    @property
    def held_out(self) -> HeldOut | None:
        """The problems of the suite that has no name; None if there is none."""
        return next((suite.prompts for suite in self.suites if not suite.name), None)

    def having(self, **sections: Any) -> Run:
        """The run with other sections in its configuration."""
        return replace(self, config=self.config.model_copy(update=sections))


def executor_kind(name: str, at: str = "executor.kind") -> ExecutorKind:
    """The executor that a configuration names under a key.

    Raises:
        ConfigError: If it is one of the user's own that cannot be loaded.
    """
    return entry_or_own(name, EXECUTORS, at, "executor", ExecutorKind)
