"""A run looked at from outside, whether it has ended or goes on: its models at a step that is kept.

Nothing in the run's folder is changed. What is read may be removed meanwhile, by the run itself
when it writes newer checkpoints: that is found out, and said.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...dataflow.errors import ConfigError, PenstockError
from ...dataflow.graph.role import Role
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...planner.plan.plan import Plan
from ..inputs.compose import resolve, run_config
from ..inputs.run import Run
from ..run_dir.checkpoint import checkpoints_in, fault_of
from ..run_dir.evaluations import Evaluations
from ..run_dir.resume import stored_config
from ..run_dir.run_folder import RunFolder, open_run
from .export import RestoredSpec
from .prepare import prepare
from .run_stage import MODELS
from .worker_specs import Results, exporting_specs


@dataclass(frozen=True)
class KeptCheckpoint:
    """A checkpoint of the run's main stage that is whole.

    Attributes:
        step: Steps that were complete.
        folder: Where it is.
    """

    step: int
    folder: Path


@dataclass(frozen=True)
class KeptRun:
    """A run's folder and what it says.

    Attributes:
        folder: The folder.
        run: The run, made ready as if to go on.
        best_by: The metric of which it keeps the best checkpoint; None if it keeps none.
    """

    folder: RunFolder
    run: Run
    best_by: str | None

    def checkpoint(self, step: int | str | None) -> KeptCheckpoint:
        """The checkpoint of a step, the best one, or the newest."""
        if step == "best":
            step = self._best_step()
        there = checkpoints_in(self.folder.checkpoints)
        faults: list[str] = []
        for kept in [step] if isinstance(step, int) else reversed(there):
            folder = there.get(kept)
            if folder is None:
                continue
            fault = fault_of(folder)
            if fault is None:
                return KeptCheckpoint(kept, folder)
            if folder.exists():
                faults.append(f"checkpoint '{folder}' cannot be used: {fault}")
        if faults:
            raise ConfigError("\n    ".join([*faults, self._there()]))
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise ConfigError(f"run '{self.folder.id}' keeps {which}\n    {self._there()}")

    def _best_step(self) -> int:
        metric = self.best_by
        best = None if metric is None else Evaluations(self.folder.path).best(metric)
        if best is None:
            raise ConfigError(
                f"run '{self.folder.id}' has no best step: "
                + ("it was not to keep one" if metric is None else "no step is evaluated yet")
                + f"\n    {self._there()}; evaluation.keep_best keeps the best one of a run"
            )
        return best

    def _there(self) -> str:
        steps = ", ".join(map(str, checkpoints_in(self.folder.checkpoints)))
        return f"checkpoints are there of steps: {steps or 'none'}"

    def policy(
        self, step: int | str | None, role: str | None = None
    ) -> tuple[KeptCheckpoint, WorkerSpec]:
        """Return the main stage's policy, or another role, at a step or as the run exported it."""
        role = role or self.run.main.policy
        if role is None:
            raise ConfigError(
                f"run '{self.folder.id}' trains no policy that answers problems\n"
                "    its returns are in its summary.json"
            )
        spec: Any = self.specs()[role]
        models = self.folder.path / MODELS / role
        if step is None and not checkpoints_in(self.folder.checkpoints) and models.is_dir():
            model = replace(spec.model, folder=str(models), architecture={})
            ended = KeptCheckpoint(self.run.main.config.num_steps, models)
            changes: dict[str, Any] = {"model": model, "optimizer": None}
            if lora := getattr(spec, "lora", None):  # it is merged into the model
                changes["lora"] = replace(lora, folder=None)
            return ended, replace(spec, **changes)
        kept = self.checkpoint(step)
        return kept, RestoredSpec(spec, kept.folder / role)

    @contextmanager
    def reading(self, kept: KeptCheckpoint) -> Generator[None]:
        """While a checkpoint is read: what fails because it is gone is said so."""
        try:
            yield
        except Exception as error:
            if kept.folder.exists():
                raise
            raise ConfigError(
                f"the checkpoint of step {kept.step} was removed while it was read: run "
                f"'{self.folder.id}' goes on, and keeps its newest "
                f"{self.run.config.keep_checkpoints}\n    try again with the newest one: leave "
                "step out"
            ) from error

    def specs(self) -> dict[str, WorkerSpec | Role]:
        """Specs of the main stage's roles that read what any engine has trained."""
        run = self.run
        results: Results = {
            stage.name: (stage, self.folder.stage(stage.name).path / MODELS)
            for stage in run.stages[:-1]
        }
        return exporting_specs(run.main, run, results)


def kept_run(
    path: str, changed: Callable[[dict[str, Any]], dict[str, Any]] = lambda stored: stored
) -> KeptRun:
    """Read a run's folder."""
    folder = open_run(Path(path))
    stored = stored_config(folder)
    best_by = run_config(stored).evaluation.keep_best
    config = run_config(changed(stored))
    plan = Plan.read(folder.plan) if folder.plan.exists() else None
    try:
        return KeptRun(folder, prepare(resolve(config), plan), best_by)
    except PenstockError as error:
        error.add_note(f"this is about the configuration of run '{folder.id}', in {folder.config}")
        raise
