"""Writing a run's policy for others while the run goes on: to a folder, and from there to a hub."""

from __future__ import annotations

import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from typing_extensions import override

from ...dataflow.errors import ConfigError, PenstockError
from ..inputs.record import Stage
from ..inputs.run import Run
from ..run_dir.checkpoint import checkpoints_in
from ..run_dir.evaluations import Evaluations
from ..run_dir.run_folder import RunFolder
from .export import KeptCheckpoint, push_folder, write_model
from .observers import StageObserver
from .stage_result import ObservedStep
from .worker_specs import Results, exporting_specs

_FOLDER = "pushed"  # in the run's, where the configuration names none


class PushObserver(StageObserver):
    """Writes the policy of each checkpoint; of the last ones the best, if the run keeps one.

    The run waits while the folder is written, and not while it is uploaded: what comes meanwhile is
    left out, but for the end's. A push that fails is warned of, and the run goes on.
    """

    def __init__(self, run: Run, stage: Stage, home: RunFolder, results: Results) -> None:
        role = stage.policy or next(iter(stage.graph.trains_per_step))
        self._run, self._home, self._config = run, home, run.config.push
        self._spec = {role: exporting_specs(stage, run, results)[role]}
        self._folder = Path(self._config.folder or home.path / _FOLDER)
        self._last = 0
        self._thread = ThreadPoolExecutor(1, "push")
        self._upload: Future[Any] | None = None

    @override
    def on_stage(self, first_step: int) -> None:
        self._last = first_step

    @override
    def on_step(self, step: ObservedStep) -> None:
        if self._upload is None or self._upload.done():
            self._push(max(checkpoints_in(self._home.checkpoints), default=0))

    @override
    def on_end(self, num_steps: int) -> None:
        self._settle()
        metric = self._run.config.evaluation.keep_best
        best = None if metric is None else Evaluations(self._home.path).best(metric)
        self._last = 0 if best is not None else self._last
        self._push(num_steps if best is None else best)
        self._settle()
        self._thread.shutdown()

    def _push(self, step: int) -> None:
        folder = checkpoints_in(self._home.checkpoints).get(step)
        if folder is None or step <= self._last:
            return
        self._last = step
        self._settle()
        old, hub = self._folder.with_name(f".{self._folder.name}.old"), self._config.hub
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(old, ignore_errors=True)
            new = self._folder.with_name(f".{self._folder.name}.new")
            shutil.rmtree(new, ignore_errors=True)
            write_model(self._run, self._home, self._spec, KeptCheckpoint(step, folder), new)
            if self._folder.exists():
                self._folder.rename(old)
            new.rename(self._folder)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, PenstockError) as error:
            warnings.warn(f"step {step} was not written to '{self._folder}': {error}", stacklevel=2)
            return
        if hub is not None:
            said = f"{self._home.id}, step {step}"
            private = self._config.private
            self._upload = self._thread.submit(
                push_folder, self._folder, hub, said, private=private
            )

    def _settle(self) -> None:
        """Wait for what is being uploaded, and warn if it failed."""
        upload, self._upload = self._upload, None
        error = None if upload is None else upload.exception()
        if error is not None:
            warnings.warn(str(error), stacklevel=2)


def check_push_folder(folder: str | None) -> None:
    """Require that a folder to push to may be replaced: new, empty, or one that a run wrote."""
    there = None if folder is None else Path(folder)
    if there is None or not there.exists():
        return
    if not there.is_dir() or (any(there.iterdir()) and not (there / "config.json").is_file()):
        raise ConfigError(
            f"'push.folder': '{folder}' is no folder of a model, and a push would replace it\n"
            "    give one that is not there yet, or remove it"
        )
