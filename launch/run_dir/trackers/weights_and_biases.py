"""Metrics in Weights & Biases: written into the run's folder, or sent as the run goes on.

By default nothing is sent and nobody is asked to log in: `wandb/` in the run's folder takes every
metric, and `wandb sync` sends it whenever somebody wants that. A run that is resumed goes on under
the same name, with a file of its own; the steps that come again stand in both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast, get_args

from ....dataflow.errors import ConfigError
from ..files import flat
from ..samples import SAMPLES, Sample, sample_rows
from .tracker import RunInfo, need_package

_PACKAGE = "wandb"
_FOLDER = "wandb"  # what the package itself makes below the folder that it is given

_STEP = "step"
# for the package's own process to start, to answer, and to send what is left at the end
_DEADLINE_S = 60.0

Mode = Literal["offline", "online"]


class WandbTracker:
    """Writes to Weights & Biases; see `Tracker`.

    The main stage's metrics have their names, with `step` as their axis; those of a stage before it
    have `stage/` in front, also of their step.
    """

    def __init__(
        self,
        project: str = "penstock",
        mode: Mode = "offline",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(
                f"'tracker.options.mode': expected one of {', '.join(get_args(Mode))}, got {mode!r}"
            )
        need_package("wandb", _PACKAGE)
        self._mode = mode
        self._where: dict[str, Any] = {
            "project": project,
            "entity": entity,
            "group": group,
            "tags": [*tags],
        }
        self._main = ""
        self._has_axis: set[str] = set()
        self._run: Any = None

    def start(self, run: RunInfo) -> str:
        # Reports of the package's own errors would leave the machine in both modes.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # here: it takes half a second, and most runs do without

        self._main, home = [*run.folders.items()][-1]
        settings = wandb.Settings(
            silent=True,
            console="off",  # what a run prints is its own
            disable_git=True,
            save_code=False,
            init_timeout=_DEADLINE_S,
            finish_timeout=_DEADLINE_S,
            finish_timeout_raises=True,
            x_service_wait=_DEADLINE_S,
        )
        with _process_hooks_kept():
            self._run = wandb.init(
                **self._where,
                id=run.id,
                name=run.id,
                dir=str(home),
                config=dict(run.config),
                notes=f"not reproducible: {run.not_reproducible}" if run.not_reproducible else None,
                mode=cast(Any, self._mode),
                resume="allow" if self._mode == "online" else None,
                settings=settings,
            )
        written = Path(home, _FOLDER)
        return self._run.url if self._mode == "online" else f"wandb sync {written}/offline-run-*"

    def rewind(self, step: int, stage: str) -> None:
        """Nothing is taken back: what comes again stands at the same step of the stage's axis."""

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        self._write(step, stage, metrics)

    def log_samples(self, step: int, stage: str, samples: Sequence[Sample]) -> None:
        import wandb  # as above

        columns, rows = sample_rows(samples)
        self._write(step, stage, {SAMPLES: wandb.Table([*columns], [*rows])})

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        import wandb  # as above

        run, self._run = self._run, None
        if run is None:
            return
        try:
            # Conversations stay in the run's folder.
            came_out = {k: v for k, v in flat(summary or {}).items() if not isinstance(v, list)}
            run.summary.update(came_out)
            run.finish(exit_code=0 if summary is not None else 1)
        finally:
            wandb.teardown()

    def _write(self, step: int, stage: str, values: Mapping[str, Any]) -> None:
        axis = self._name(stage, _STEP)
        row = {self._name(stage, name): value for name, value in values.items()}
        # One by one: of patterns that overlap, as `*` and `sft/*` do, the package may take either.
        for name in [name for name in row if name not in self._has_axis]:
            self._run.define_metric(name, step_metric=axis)
            self._has_axis.add(name)
        self._run.log({**row, axis: step})

    def _name(self, stage: str, name: str) -> str:
        return name if stage == self._main else f"{stage}/{name}"


@contextmanager
def _process_hooks_kept() -> Generator[None]:
    # Undo what the package does to the whole process, and never takes back.
    # It puts itself between a program and `sys.exit`, to learn how the run ends, which `finish`
    # says.
    exit_before, hook_before = sys.exit, sys.excepthook
    try:
        yield
    finally:
        sys.exit, sys.excepthook = exit_before, hook_before
