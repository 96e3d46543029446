"""What a stage tells of processes that died while it went on, and where it keeps its mirror."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...dataflow.runtime.executor import Restart
from ...dataflow.runtime.recovery.limits import Recovered
from ..run_dir.checkpoint import CheckpointStore
from ..run_dir.progress_events import format_duration

Tell = Callable[[str, int, str, dict[str, Any]], None]
"""Is told of a death: its kind, the step, the words, and further fields of the event."""

_MEMORY = Path("/dev/shm")


@dataclass
class Deaths:
    """The deaths that a stage went on from.

    Attributes:
        recovered: Those after which it went back, in order.
        restarts: Groups that were started again beside it.
        tell: Who is told; nobody before the first step.
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
        """Of the run's summary.json."""
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
        """What came of them, in a line; "" if nobody died."""
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


@contextmanager
def mirror_of(folder: Path, *, mirrored: bool) -> Generator[CheckpointStore | None]:
    """Where a stage's state is kept in this machine's memory after every step, if it is to be.

    Args:
        folder: The stage's; what a process that was killed has left of it is removed.
        mirrored: Whether it is to be.
    """
    if not mirrored:
        yield None
        return
    memory = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    name = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]
    place = memory / f"penstock-mirror-{os.getuid()}-{name}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(mode=0o700)
    try:
        yield CheckpointStore(place / "checkpoints", keep=1)
    finally:
        shutil.rmtree(place, ignore_errors=True)
