"""The trackers that come with Penstock, and those of one run together.

`metrics.jsonl` is the run's own record, from which its curve is drawn: it is always written, and a
run that cannot write it ends. Those that are configured beside it can fail without harm.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from ....configs.references import entry_or_own
from ....configs.schema import TrackerConfig
from ....dataflow.errors import ConfigError, PenstockError, one_process, users_line
from ....dataflow.registry import Registry
from ..samples import Sample
from ..step_logs import METRICS, MetricsLog
from .tracker import RunInfo, TakesSamples, Tracker

_FOLDER = "penstock.launch.run_dir.trackers"

# Kind -> what makes it of `tracker.options`.
TRACKERS = Registry[Callable[..., Tracker]](
    {
        "tensorboard": f"{_FOLDER}.tensorboard:TensorBoardTracker",
        "wandb": f"{_FOLDER}.weights_and_biases:WandbTracker",
        "mlflow": f"{_FOLDER}.mlflow_store:MlflowTracker",
        "trackio": f"{_FOLDER}.trackio_store:TrackioTracker",
        "prometheus": f"{_FOLDER}.prometheus:PrometheusTracker",
    }
)

_TABLES = TakesSamples.log_samples.__name__

# what a tracker may raise that counts as its failure, and does not end the run
_FAILURES = (Exception, SystemExit, GeneratorExit)


class JsonlTracker:
    """Writes `metrics.jsonl`, the run's own record, which cannot fail without ending the run.

    What an evaluation found after n steps may be part of line n, whose step began with those
    weights; after the last step it has a line of its own.
    """

    def __init__(self) -> None:
        self._noted: dict[int, Mapping[str, float]] = {}
        self._folders: Mapping[str, Path] = {}
        self._log: MetricsLog | None = None

    def start(self, run: RunInfo) -> None:
        self._folders = run.folders

    def rewind(self, step: int, stage: str) -> None:
        self.finish(None)
        self._log = MetricsLog(self._folders[stage] / METRICS, first_step=step)

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        assert self._log is not None, f"stage '{stage}' has not begun"
        self._log.write(step, {**metrics, **self._noted.pop(step, {})})

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        self._noted[step] = metrics

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if self._log is not None:
            for step, metrics in self._noted.items():
                self._log.write(step, metrics)
            self._noted.clear()
            self._log.close()
            self._log = None


class Trackers:
    """The trackers of one run: its record, and those that are configured."""

    def __init__(self, config: TrackerConfig, *, tables: bool = False) -> None:
        self._record = JsonlTracker()
        self._others = {
            kind: _made(kind, options, *_keys(config, kind)) for kind, options in config.all.items()
        }
        if tables and not any(isinstance(one, TakesSamples) for one in self._others.values()):
            having = ", ".join(kind for kind, made in TRACKERS.items() if hasattr(made, _TABLES))
            raise ConfigError(
                "'samples.track_every': none of the trackers "
                f"({', '.join(self._others) or 'none'}) has tables\n    those that have: {having}"
            )
        self.place: str | None = None  # an address or a command, as `Tracker.start` returns it
        self.num_steps = 0  # in the record since this process began

    def add(self, name: str, tracker: Tracker) -> None:
        self._others[name] = tracker

    def start(self, run: RunInfo) -> None:
        self._record.start(run)
        places = self._call("start", lambda tracker: tracker.start(run))
        self.place = "; ".join(filter(None, places)) or None

    def rewind(self, step: int, stage: str) -> None:
        self._record.rewind(step, stage)
        self._call(f"rewind of stage '{stage}'", lambda tracker: tracker.rewind(step, stage))

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        self._record.log(step, stage, metrics)
        self.num_steps += 1
        self.note(step, stage, metrics)

    def note(
        self, step: int, stage: str, metrics: Mapping[str, float], *, recorded: bool = False
    ) -> None:
        if recorded:
            self._record.note(step, metrics)
        where = f"log of step {step} of stage '{stage}'"
        self._call(where, lambda tracker: tracker.log(step, stage, dict(metrics)))

    def log_samples(self, step: int, stage: str, samples: Sequence[Sample]) -> None:
        def give(tracker: Tracker) -> None:
            if isinstance(tracker, TakesSamples):
                tracker.log_samples(step, stage, samples)

        self._call(f"log_samples of step {step} of stage '{stage}'", give)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._record.finish(summary)
        self._call("finish", lambda tracker: tracker.finish(deepcopy(summary)))
        self._others.clear()

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish(None)

    def _call(self, where: str, call: Callable[[Tracker], Any]) -> list[Any]:
        answers: list[Any] = []
        for kind, tracker in (*self._others.items(),):
            try:
                with one_process():
                    answers.append(call(tracker))
            except _FAILURES as error:
                del self._others[kind]
                self._give_up(kind, tracker, where, error)
        return answers

    def _give_up(self, kind: str, tracker: Tracker, where: str, error: BaseException) -> None:
        said = [f"tracker '{kind}' failed at {where}:", *_described(error)]
        try:
            with one_process():
                tracker.finish(None)
        except _FAILURES as second:
            said += ["and so did its finish:", *_described(second)]
        said.append("it is not called again; the run goes on, and metrics.jsonl has every step")
        warnings.warn("\n    ".join(said), stacklevel=2)


def _keys(config: TrackerConfig, kind: str) -> tuple[str, str]:
    if kind == config.kind:
        return "tracker.kind", "tracker.options"
    return "tracker.also", f"tracker.also.{kind}"


def _made(kind: str, options: Mapping[str, Any], at: str, options_at: str) -> Tracker:
    factory = entry_or_own(kind, TRACKERS, at, "tracker")
    try:
        with one_process():
            made = factory(**options)
    except PenstockError:
        raise
    except _FAILURES as error:
        described = "\n    ".join(_described(error))
        raise ConfigError(
            f"'{at}': tracker '{kind}' cannot be made\n    {described}\n"
            f"    {options_at} are the keyword arguments of what makes it"
        ) from error
    if isinstance(made, Tracker):
        return made
    raise ConfigError(
        f"'{at}': '{kind}' made a {type(made).__name__}, which is no tracker\n"
        "    it must have the methods start, rewind, log and finish"
    )


def _described(error: BaseException) -> list[str]:
    where = users_line(error)
    at = [] if where is None else [f"{where.file}:{where.line}: {where.source}"]
    return [*at, f"{type(error).__name__}: {error}"]
