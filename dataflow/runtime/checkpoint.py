"""The part of a checkpoint besides weights: where the run stands, and outputs still needed.

With `max_lag` above 0, rollouts made with older weights are in flight when a step completes; they
cannot be made again after a resume, so they are part of the checkpoint. Everything is safetensors
and JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from ..graph.graph import Graph
from ..graph.role import Metric
from ..scheduler.events import NodeTask, Output, ResumeState, SaveCheckpoint
from ..written_files import WrittenFile
from .kept import Hold
from .messages import Handle, Report
from .recovery.ledger import Ledger
from .step_result import Done

_STATE_FILE = "run.json"


class CheckpointFolder(Protocol):
    """A folder of checkpoints; a write is complete or it never happened. One at a time."""

    def begin(self, step: int) -> Path:
        """A folder to fill, which is to become the checkpoint of `step`."""
        ...

    def seal(self, step: int, written: Mapping[str, WrittenFile]) -> str:
        """Make what was begun the checkpoint; may be called from another thread."""
        ...

    def abandon(self, step: int) -> None:
        """Remove what was begun, as far as that goes."""

    def missed(self, step: int) -> None:
        """Note that there is no checkpoint of a step at which one was due."""

    def warn(self, text: str) -> None:
        """Tell the user of something that keeps nobody from going on."""

    def latest(self) -> Path | None:
        """The newest complete checkpoint's folder."""
        ...


@dataclass(frozen=True)
class SavedRun:
    """The state of a run that is being saved."""

    graph: Graph
    seed: int
    instruction: SaveCheckpoint
    ledger: Ledger | None = None
    done: tuple[Done, ...] = ()

    def part_files(self, folder: Path) -> Iterator[tuple[Output, Path]]:
        """A file for every output that is still needed."""
        for index, output in enumerate(self.instruction.live):
            yield output, folder / f"live-{index:05d}.safetensors"


@dataclass(frozen=True)
class ResumePoint:
    """The point from which a resumed run goes on."""

    folder: Path
    state: ResumeState
    parts: tuple[tuple[Output, Path], ...]
    done: tuple[Done, ...] = ()


@dataclass(frozen=True)
class Suspended:
    """The state that a paused run leaves to the next; weights stay with their workers."""

    state: ResumeState
    outputs: Mapping[Output, Handle]
    holds: tuple[Hold, Hold]


@dataclass(frozen=True)
class Interval:
    """Between two steps: nothing runs, every trainable role has the weights of `step`."""

    step: int  # Steps completed
    saved: bool  # Whether there is a checkpoint of this step
    save: Callable[[], None]  # Writes one, wherever the run writes its checkpoints


@dataclass(frozen=True)
class Pauses:
    """Steps after which a run is interrupted, and the interruption."""

    # Numbers of completed steps, above 0 and below the run's. A run that is resumed at one of them
    # pauses before its first step.
    steps: frozenset[int]
    # Called there. It may run other programs of the engine; if it answers True the run ends there,
    # with no further checkpoint.
    between: Callable[[Interval], bool]


def graph_sha256(graph: Graph) -> str:
    """Identifies what the graph computes; line numbers do not count."""
    return hashlib.sha256(str(graph).encode()).hexdigest()


def write_run_state(folder: Path, saved: SavedRun) -> None:
    """Write the run's place into the checkpoint folder."""
    resume = saved.instruction.resume
    state = {
        "graph": saved.graph.name,
        "graph_sha256": graph_sha256(saved.graph),
        "graph_text": str(saved.graph),
        "seed": saved.seed,
        "step": resume.step,
        "history_sha256": resume.history_sha256,
        "done": [[task.node, task.step, task.chunk] for task in sorted(resume.done, key=str)],
        "sizes": [[task.node, task.step, task.chunk, size] for task, size in resume.sizes],
        "rows": [[output.node, output.step, output.chunk, n] for output, n in resume.rows],
        "live": [
            [output.node, output.step, output.chunk, file.name]
            for output, file in saved.part_files(folder)
        ],
        "reports": [_as_json(one) for one in saved.done if one.task in resume.done],
    }
    (folder / _STATE_FILE).write_text(json.dumps(state, indent=2))
    if saved.ledger is not None:
        saved.ledger.save(folder)


def read_resume_point(store: CheckpointFolder, graph: Graph, seed: int) -> ResumePoint | None:
    """The newest checkpoint's place, or None if there is no checkpoint."""
    folder = store.latest()
    if folder is None:
        return None
    state: dict[str, Any] = json.loads((folder / _STATE_FILE).read_text())
    if state["graph_sha256"] != graph_sha256(graph):
        raise ConfigError(
            f"{folder} was written by graph '{state['graph']}', which differs from this run's "
            f"'{graph.name}'; resume with the configuration that wrote it, or start a new run"
        )
    if state["seed"] != seed:
        raise ConfigError(
            f"{folder} was written with seed {state['seed']}, this run has seed {seed}; use the "
            "same seed to resume"
        )
    done = frozenset(NodeTask(node, step, chunk) for node, step, chunk in state["done"])
    parts = tuple(
        (Output(node, step, chunk), folder / name) for node, step, chunk, name in state["live"]
    )
    sizes = tuple((NodeTask(*task), size) for *task, size in state.get("sizes", ()))
    rows = tuple((Output(*output), n) for *output, n in state.get("rows", ()))
    resume = ResumeState(state["step"], done, state["history_sha256"], sizes, rows)
    return ResumePoint(folder, resume, parts, tuple(map(_from_json, state.get("reports", ()))))


def _as_json(one: Done) -> dict[str, Any]:
    task, report = one.task, one.report
    metrics = {name: [m.total, m.weight, m.kind] for name, m in report.metrics.items()}
    head = {"task": [task.node, task.step, task.chunk], "rank": one.rank, "versions": one.versions}
    times = {"start_s": report.start_s, "end_s": report.end_s, "chunk": report.chunk}
    return {**head, "report": {**times, "metrics": metrics, "num_rows": report.num_rows}}


def _from_json(found: Mapping[str, Any]) -> Done:
    told = dict(found["report"])
    told["metrics"] = {name: Metric(*parts) for name, parts in told["metrics"].items()}
    told["num_rows"] = tuple(told["num_rows"])
    versions = tuple((role, version) for role, version in found["versions"])
    return Done(NodeTask(*found["task"]), found["rank"], Report(**told), versions)
