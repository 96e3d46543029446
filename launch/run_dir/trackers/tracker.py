"""The `Tracker` seam: an observer of a run's metrics.

One tracker serves one run with all of its stages. It is made by a factory from
`tracker.options` before anything is trained, and `start` is called when the run's folder is there.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ....dataflow.errors import ConfigError
from ..samples import Sample


@dataclass(frozen=True)
class RunInfo:
    """The run, as trackers see it.

    Attributes:
        id: The run's name among all runs, which is its folder's; the same when it is resumed.
        folders: Stage -> its folder, in the order in which stages are trained; that of the main
            stage, the last one, is the run's own.
        config: The configuration as plain data, every default spelled out.
        resumed: Whether an earlier process did some of the run.
        not_reproducible: Why what comes out does not follow from the seed, in words; "" if it does.
            A tracker that has tags or notes says it there.
    """

    id: str
    folders: Mapping[str, Path]
    config: Mapping[str, Any]
    resumed: bool
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


def need_package(kind: str, module: str) -> None:
    """Refuse a kind of tracker whose package is not there.

    Raises:
        ConfigError: With the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"'tracker.kind': {kind} needs a package that is not installed\n"
            f"    pip install 'penstock-rl[{kind}]'"
        )
