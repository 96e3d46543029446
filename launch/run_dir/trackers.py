"""The `Tracker` seam, an observer of a run's metrics, and the trackers of one run together.

One tracker serves one run with all of its stages. It is made by a factory from `tracker.options`
before anything is trained, and `start` is called when the run's folder is there.

`metrics.jsonl` is the run's own record, from which its curve is drawn: it is always written, and a
run that cannot write it ends. Trackers that are configured beside it can fail without harm. Which
metrics there are is the algorithm's; when they are logged is decided in `stages`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ...configs.references import entry_or_own
from ...configs.schema import TrackerConfig
from ...dataflow.errors import ConfigError, PenstockError, one_process, users_line
from ...dataflow.registry import Registry
from .samples import Sample
from .step_logs import METRICS, MetricsLog


@dataclass(frozen=True)
class RunInfo:
    """The run, as trackers see it."""

    id: str  # the run's name among all runs, which is its folder's; the same when it is resumed
    # stage -> its folder, in the order in which stages are trained; that of the main stage, the
    # last one, is the run's own
    folders: Mapping[str, Path]
    config: Mapping[str, Any]  # the configuration as plain data, every default spelled out
    resumed: bool  # whether an earlier process did some of the run
    # why what comes out does not follow from the seed, in words; "" if it does; a tracker that has
    # tags or notes says it there
    not_reproducible: str = ""


@runtime_checkable
class Tracker(Protocol):
    """Is told of metrics, in the order of these methods.

    Calls come one at a time from the thread that drives the run, which waits for them: what takes
    long belongs into a thread of the tracker's own. A tracker that raises, or calls `sys.exit`, is
    not called again, but for one `finish(None)`; the run warns of it and goes on. A copy of the
    process that it forks ends where the call does.
    """

    def start(self, run: RunInfo) -> str | None:
        """Begin.

        Returns:
            How a person looks at what is tracked, an address or a command; None if that is plain.
        """
        ...

    def rewind(self, step: int, stage: str) -> None:
        """A stage begins, or goes on from a checkpoint, at this step.

        Whatever was logged for the stage at or after it is to be forgotten: those steps come again.
        """

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        """The numbers of a step, or those of an evaluation after so many steps.

        Args:
            step: Index of the step, from 0. An evaluation's may come before or after that step's.
            stage: Of the run.
            metrics: Flat name -> number, NaN and the infinities included.
        """

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Write what is left and let go of files, threads and connections.

        Args:
            summary: As in summary.json; None if the run was stopped or failed.
        """


@runtime_checkable
class TakesSamples(Protocol):
    """A tracker that has tables as well."""

    def log_samples(self, step: int, stage: str, samples: Sequence[Sample]) -> None:
        """Responses of a step, which are text and nothing else: they may look like HTML.

        Args:
            step: In which they were trained on; never one that was given before, and in order.
            stage: Of the run.
            samples: At least one; see `samples.sample_rows`.
        """


_SHIPPED = "penstock.launch.run_dir.shipped_trackers"

# Kind -> what makes it of `tracker.options`.
TRACKERS = Registry[Callable[..., Tracker]](
    {
        "tensorboard": f"{_SHIPPED}:TensorBoardTracker",
        "wandb": f"{_SHIPPED}:WandbTracker",
        "mlflow": f"{_SHIPPED}:MlflowTracker",
        "trackio": f"{_SHIPPED}:TrackioTracker",
        "prometheus": f"{_SHIPPED}:PrometheusTracker",
    }
)

# what a tracker may raise that counts as its failure, and does not end the run
_FAILURES = (Exception, SystemExit, GeneratorExit)


class Trackers:
    """The trackers of one run: its record, and those that are configured.

    What an evaluation found after n steps may be part of line n of the record, whose step began
    with those weights; after the last step it has a line of its own.
    """

    def __init__(self, config: TrackerConfig, *, tables: bool = False) -> None:
        self._others = {kind: _made(config, kind) for kind in config.all}
        if tables and not any(isinstance(one, TakesSamples) for one in self._others.values()):
            method = TakesSamples.log_samples.__name__
            having = ", ".join(kind for kind, made in TRACKERS.items() if hasattr(made, method))
            raise ConfigError(
                "'samples.track_every': none of the trackers "
                f"({', '.join(self._others) or 'none'}) has tables\n    those that have: {having}"
            )
        self._noted: dict[int, Mapping[str, float]] = {}
        self._folders: Mapping[str, Path] = {}
        self._record: MetricsLog | None = None
        self.place: str | None = None  # an address or a command, as `Tracker.start` returns it
        self.num_steps = 0  # in the record since this process began

    def add(self, name: str, tracker: Tracker) -> None:
        self._others[name] = tracker

    def start(self, run: RunInfo) -> None:
        self._folders = run.folders
        places = self._call("start", lambda tracker: tracker.start(run))
        self.place = "; ".join(filter(None, places)) or None

    def rewind(self, step: int, stage: str) -> None:
        self._close_record()
        self._record = MetricsLog(self._folders[stage] / METRICS, first_step=step)
        self._call(f"rewind of stage '{stage}'", lambda tracker: tracker.rewind(step, stage))

    def log(self, step: int, stage: str, metrics: Mapping[str, float]) -> None:
        assert self._record is not None, f"stage '{stage}' has not begun"
        self._record.write(step, {**metrics, **self._noted.pop(step, {})})
        self.num_steps += 1
        self.note(step, stage, metrics)

    def note(
        self, step: int, stage: str, metrics: Mapping[str, float], *, recorded: bool = False
    ) -> None:
        if recorded:
            self._noted[step] = metrics
        where = f"log of step {step} of stage '{stage}'"
        self._call(where, lambda tracker: tracker.log(step, stage, dict(metrics)))

    def log_samples(self, step: int, stage: str, samples: Sequence[Sample]) -> None:
        def give(tracker: Tracker) -> None:
            if isinstance(tracker, TakesSamples):
                tracker.log_samples(step, stage, samples)

        self._call(f"log_samples of step {step} of stage '{stage}'", give)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._close_record()
        self._call("finish", lambda tracker: tracker.finish(deepcopy(summary)))
        self._others.clear()

    def _close_record(self) -> None:
        if self._record is not None:
            for step, metrics in self._noted.items():
                self._record.write(step, metrics)
            self._noted.clear()
            self._record.close()
            self._record = None

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
                said = [f"tracker '{kind}' failed at {where}:", *_described(error)]
                try:
                    with one_process():
                        tracker.finish(None)
                except _FAILURES as second:
                    said += ["and so did its finish:", *_described(second)]
                said.append(
                    "it is not called again; the run goes on, and metrics.jsonl has every step"
                )
                warnings.warn("\n    ".join(said), stacklevel=2)
        return answers


def _made(config: TrackerConfig, kind: str) -> Tracker:
    is_first = kind == config.kind
    at = "tracker.kind" if is_first else "tracker.also"
    factory = entry_or_own(kind, TRACKERS, at, "tracker")
    try:
        with one_process():
            made = factory(**config.all[kind])
    except PenstockError:
        raise
    except _FAILURES as error:
        described = "\n    ".join(_described(error))
        options = "tracker.options" if is_first else f"tracker.also.{kind}"
        raise ConfigError(
            f"'{at}': tracker '{kind}' cannot be made\n    {described}\n"
            f"    {options} are the keyword arguments of what makes it"
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
