"""Every kind of tracker there is, and those of one run together.

`metrics.jsonl` is the run's own record, from which its curve is drawn: it is always written, and a
run that cannot write it ends. What is configured beside it can fail without harm.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from ....configs.references import entry_or_own
from ....configs.schema import TrackerConfig
from ....dataflow.errors import ConfigError, PenstockError, one_process, users_line
from .jsonl import JsonlTracker
from .tensorboard import TensorBoardTracker
from .tracker import RunInfo, Tracker
from .weights_and_biases import WandbTracker

__all__ = ["TRACKERS", "Trackers"]

TRACKERS: Mapping[str, Callable[..., Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
}
"""Kind -> what makes it of `tracker.options`."""

_FAILURES = (Exception, SystemExit, GeneratorExit)
"""What a tracker may raise that counts as its failure, and does not end the run."""


class Trackers:
    """The trackers of one run: its record, and the one that is configured.

    Args:
        config: The section `tracker`.

    Raises:
        ConfigError: If there is no such tracker, or it does not take these options.
    """

    def __init__(self, config: TrackerConfig) -> None:
        self._record = JsonlTracker()
        self._others = {config.kind: _made(config.kind, config.options)} if config.kind else {}
        self.place: str | None = None
        """How a person looks at what is tracked; see `Tracker.start`."""
        self.num_steps = 0
        """Steps that are in the record since this process began."""

    def add(self, name: str, tracker: Tracker) -> None:
        """Tell one more, which is not configured, before the run begins."""
        self._others[name] = tracker

    def start(self, run: RunInfo) -> None:
        """Begin the run; see `Tracker.start`."""
        self._record.start(run)
        places = self._call("start", lambda tracker: tracker.start(run))
        self.place = "; ".join(filter(None, places)) or None

    def rewind(self, step: int, stage: str) -> None:
        """Begin a stage at this step; see `Tracker.rewind`."""
        self._record.rewind(step, stage)
        self._call(f"rewind of stage '{stage}'", lambda tracker: tracker.rewind(step, stage))

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """Log a step, each of them once and in order."""
        self._record.log(step, stage, metrics)
        self.num_steps += 1
        self.note(step, stage, metrics)

    def note(
        self, step: int, stage: str, metrics: Mapping[str, float], *, recorded: bool = False
    ) -> None:
        """Log what was measured after so many steps; the record may leave it to summary.json."""
        if recorded:
            self._record.note(step, metrics)
        where = f"log of step {step} of stage '{stage}'"
        self._call(where, lambda tracker: tracker.log(step, stage, dict(metrics)))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End the run; see `Tracker.finish`. Afterwards nothing may be called but this again."""
        self._record.finish(summary)
        self._call("finish", lambda tracker: tracker.finish(deepcopy(summary)))
        self._others.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish(None)

    def _call(self, where: str, call: Callable[[Tracker], Any]) -> list[Any]:
        """What each tracker answers; one that fails is told to finish, and is not called again."""
        answers: list[Any] = []
        for name, tracker in (*self._others.items(),):
            try:
                with one_process():
                    answers.append(call(tracker))
            except _FAILURES as error:
                del self._others[name]
                warnings.warn(_ended(name, tracker, where, error), stacklevel=3)
        return answers


def _ended(name: str, tracker: Tracker, where: str, error: BaseException) -> str:
    """Tell a tracker that has failed to finish; what to say of it."""
    said = [f"tracker '{name}' failed at {where}:", *_described(error)]
    try:
        with one_process():
            tracker.finish(None)
    except _FAILURES as second:
        said += ["and so did its finish:", *_described(second)]
    said.append("it is not called again; the run goes on, and metrics.jsonl has every step")
    return "\n    ".join(said)


def _made(kind: str, options: Mapping[str, Any]) -> Tracker:
    factory = entry_or_own(kind, TRACKERS, "tracker.kind", "tracker")
    try:
        with one_process():
            made = factory(**options)
    except PenstockError:
        raise
    except _FAILURES as error:
        described = "\n    ".join(_described(error))
        raise ConfigError(
            f"'tracker.kind': tracker '{kind}' cannot be made\n    {described}\n"
            "    tracker.options are the keyword arguments of what makes it"
        ) from error
    if isinstance(made, Tracker):
        return made
    raise ConfigError(
        f"'tracker.kind': '{kind}' made a {type(made).__name__}, which is no tracker\n"
        "    it must have the methods start, rewind, log and finish"
    )


def _described(error: BaseException) -> list[str]:
    where = users_line(error)
    at = [] if where is None else [f"{where.file}:{where.line}: {where.source}"]
    return [*at, f"{type(error).__name__}: {error}"]
