"""Checkpoints of a run: taken where it pauses, written while it goes on.

    begin    at the boundary: every rank takes its state; small things are written at once
    look     between tasks: have all ranks written theirs? then seal it, in a thread
    settle   where it must be known: wait for the one that is being written

With `max_lag` above 0, rollouts made with older weights are in flight when a step completes; they
cannot be made again after a resume, so they are part of the checkpoint. Everything is safetensors
and JSON.

A *mirror* is a second place, in memory, for the state after every step: a run that goes back has at
most one step to do again. Nothing is kept there while a checkpoint is still being written.

At most one checkpoint is being written. The next one waits for it, as long as a call may take. If
it takes longer the disk is too slow: checkpoints are left out until it is there.

What a disk refuses costs one warning and the checkpoint, never the run: the older one counts, and
the next interval tries again. Only a run's last checkpoint must be there at its end, because its
result is read from it: it is tried twice, and then the run ends with an error.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from ..errors import ConfigError, WorkerError
from ..files import Background, WrittenFile, disk_refusal, writing
from ..graph.graph import Graph
from ..graph.role import Metric
from ..scheduler.events import NodeTask, Output, ResumeState, SaveCheckpoint
from ..scheduler.schedule import Deadline
from .dispatcher import Dispatcher, Submission
from .executor import Program
from .host import Host
from .ledger import Ledger
from .messages import Done, Handle, RankWork, Report, SaveReport, work
from .placement import flow_of
from .watch import Hold

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
        """Warn the user of something after which the run goes on."""

    def latest(self) -> Path | None:
        """The newest complete checkpoint's folder."""
        ...


@dataclass(frozen=True)
class SavedRun:
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
    """Write where a resumed run goes on: tasks done, rows, and files of live outputs."""
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


# After a node's name: what of its rows goes on in the next step. No node is named so.
_UNFINISHED = "/unfinished"


def is_unfinished(output: Output) -> bool:
    return output.node.endswith(_UNFINISHED)


def unfinished(task: NodeTask, before: int = 0) -> Output:
    return Output(f"{task.node}{_UNFINISHED}", task.step - before, task.chunk or 0)


class StateInWorkers:
    """The state of one program's run, which lies with its workers, as a checkpoint's folder.

    ROLE/                    weights, optimizer state or a state of its own, of every role with one
    live-00000.safetensors   an output that later steps still need
    run.json                 where the run stands
    """

    def __init__(
        self, dispatcher: Dispatcher, name: str, program: Program, deadline: Deadline
    ) -> None:
        self._dispatcher, self._name, self._deadline = dispatcher, name, deadline
        self._placement = program.placement
        # Role whose weights or state change -> the group where they do.
        self.homes: Mapping[str, str] = {
            **flow_of(program.graph, program.placement).homes,
            **program.placement.state_homes(program.graph),
        }

    @property
    def num_ranks(self) -> dict[str, int]:
        """Group of any of the homes -> its number of ranks."""
        return {name: self._placement.group(name).num_ranks for name in self.homes.values()}

    def take(self, saved: SavedRun, outputs: Mapping[Output, Handle], folder: Path) -> str:
        """Have a checkpoint's folder filled; says what the disk refused, "" if nothing."""
        asked: list[tuple[str, Mapping[int, RankWork]]] = []
        for role, group in self.homes.items():
            (folder / role).mkdir()
            save = work(Host.save_state, role, str(folder / role))
            asked.append((group, self._on_all(group, save)))
        for output, file in saved.part_files(folder):
            write = work(Host.save_part, outputs[output], str(file))
            asked.append((self._group_of(output.node), {0: write}))
        for group, works in asked:
            if refused := next(filter(None, self._now(group, works).answers), ""):
                return refused
        write_run_state(folder, saved)
        return ""

    def load(self, point: ResumePoint) -> None:
        """Bring every home to where a checkpoint was taken."""
        for role, home in self.homes.items():
            load = work(Host.load_state, role, str(point.folder / role))
            self._now(home, self._on_all(home, load))

    def load_outputs(self, point: ResumePoint, num_chunks: int) -> dict[Output, Handle]:
        """Give the groups the outputs that were live at a checkpoint, and return handles to them.

        Raises:
            ConfigError: If rows that are still being sampled were saved by another number of ranks.
        """
        chunks = sorted(o.chunk for o, _ in point.parts if is_unfinished(o))
        if chunks and chunks != list(range(num_chunks)):
            raise ConfigError(
                f"{point.folder} holds unfinished rows in {len(chunks)} parts, and this run has "
                f"{num_chunks or 'none'}\n    resume with the same schedule and as many ranks, or "
                "start a new run"
            )
        found: dict[Output, Handle] = {}
        for output, file in point.parts:
            load = {0: work(Host.load_part, str(file))}
            found[output] = self._now(self._group_of(output.node), load).first.parts[0]
        return found

    def _group_of(self, node: str) -> str:
        return self._placement.nodes.get(node, self._placement.groups[0].name)

    def _on_all(self, group: str, one: RankWork) -> dict[int, RankWork]:
        return dict.fromkeys(range(self._placement.group(group).num_ranks), one)

    def _now(self, group: str, works: Mapping[int, RankWork]) -> Submission:
        return self._dispatcher.perform_now(self._name, group, works, self._deadline)


_ASK_S = 0.2  # Between two questions to the ranks whether they have finished writing

_WAIT_S = 1.0  # An idle rank waits so long for its writing to end before it answers

Take = Callable[[Path], str]
"""Has everything taken that a checkpoint's folder is to hold; says what the disk refused, or ""."""


@dataclass
class _Pending:
    step: int
    store: CheckpointFolder  # Where it is being written
    failed: str = ""  # The disk's error; "" without one
    # The request for the ranks' progress that is under way; None if there is none.
    asked: list[Submission] | None = None
    asked_s: float = 0.0  # When they were asked last
    sealing: Background[str] | None = None  # The last part of it
    is_late: bool = False  # Whether the run has waited for it in vain


class Saving:
    def __init__(
        self,
        store: CheckpointFolder,
        dispatcher: Dispatcher,
        program: str,
        ranks: Mapping[str, int],
        deadline: Deadline,
        mirror: CheckpointFolder | None = None,
    ) -> None:
        self.store, self._mirror = store, mirror
        self._mirrored_bytes = 0
        # The step of the newest checkpoint to resume from; None if there is none.
        self.saved: int | None = None
        self._dispatcher, self._program = dispatcher, program
        self._ranks, self._deadline = ranks, deadline
        self._pending: _Pending | None = None
        self._last: tuple[int, Take] | None = None
        self._failed: tuple[int, str] | None = None
        self._warned: set[bool] = set()  # of the mirror, of the checkpoints

    @property
    def has_mirror(self) -> bool:
        return self._mirror is not None

    def begin(self, step: int, take: Take, *, due: bool = True) -> bool:
        """Take a checkpoint; the run may go on when this returns."""
        store = self.store if due else self._mirror
        pending = self._pending
        if store is None or (not due and pending is not None and pending.store is self.store):
            return False
        if due:
            self._last = (step, take)
        if pending is not None and (pending.is_late or not self.settle(self._deadline.limit_s)):
            pending.is_late = True
            slow = f"that of step {pending.step} is being written for more than"
            why = f"{slow} {self._deadline.limit_s:g} s; the disk is too slow"
            self._note_failure(_Pending(step, store), why)
            return False
        try:
            failed = self._taken(step, take, store)
        except BaseException:
            store.abandon(step)
            raise
        self._pending = _Pending(step, store, failed)
        if failed:
            self.settle(self._deadline.limit_s)
        return not failed

    def _taken(self, step: int, take: Take, store: CheckpointFolder) -> str:
        try:
            folder = store.begin(step)
            with writing(folder):
                return take(folder)
        except OSError as error:
            return _refused(error)

    def newest_point(self, graph: Graph, seed: int) -> ResumePoint | None:
        saved = read_resume_point(self.store, graph, seed)
        self.saved = saved.state.step if saved else None
        kept = read_resume_point(self._mirror, graph, seed) if self._mirror else None
        if kept is None or (saved is not None and saved.state.step > kept.state.step):
            return saved
        return kept

    def has_any(self) -> bool:
        stores = (self.store, self._mirror)
        return any(store is not None and store.latest() is not None for store in stores)

    def source_of(self, step: int) -> Literal["start", "checkpoint", "mirror"]:
        if not self.has_any():
            return "start"
        return "checkpoint" if self.saved == step else "mirror"

    def has(self, step: int) -> bool:
        pending = self._pending
        return self.saved == step or (
            pending is not None
            and pending.store is self.store
            and pending.step == step
            and not pending.failed
        )

    def look(self) -> None:
        """Go on with the one that is being written, as far as that goes without waiting."""
        pending = self._pending
        if pending is None:
            return
        if pending.sealing is not None:
            self._try_end(pending.sealing, 0.0)
        elif pending.asked is not None:
            if all(one.failed or not one.waiting for one in pending.asked):
                asked, pending.asked = pending.asked, None
                self._hear(pending, asked)
        elif time.monotonic() > pending.asked_s + _ASK_S:
            pending.asked_s = time.monotonic()
            pending.asked = [
                self._dispatcher.submit(None, self._program, group, self._works(group, 0.0))
                for group in self._ranks
            ]

    def settle(self, deadline_s: float) -> bool:
        """Wait for the one that is being written; says whether nothing is being written now."""
        until_s, deadline = time.monotonic() + deadline_s, Deadline(deadline_s)
        while (pending := self._pending) is not None:
            left_s = until_s - time.monotonic()
            if left_s < 0:
                return False
            if pending.sealing is not None:
                self._try_end(pending.sealing, min(_WAIT_S, left_s))
                continue
            pending.asked = None  # a rank that is asked twice answers the same twice
            answers = [
                self._dispatcher.perform_now(
                    self._program, group, self._works(group, min(_WAIT_S, left_s)), deadline
                )
                for group in self._ranks
            ]
            self._hear(pending, answers)
        return True

    def finish(self, step: int) -> None:
        """The run ends: its last checkpoint must be there."""
        settled = self.settle(self._deadline.limit_s)
        if settled and self._failed and self._last and self._last[0] == step:
            self.begin(*self._last)
            settled = self.settle(self._deadline.limit_s)
        pending = self._pending
        if not settled and pending is not None:
            raise WorkerError(
                f"the last checkpoint, of step {pending.step}, is not written after "
                f"{self._deadline}; the disk is too slow"
            )
        if self._failed is not None:
            failed_step, why = self._failed
            raise WorkerError(
                f"the last checkpoint, of step {failed_step}, was not written, and {self._counts}: "
                f"{why}"
            )

    def go_back(self) -> None:
        """Processes have died: the one that is being written counts if only its end is missing."""
        pending = self._pending
        if pending is None:
            return
        if pending.sealing is None:
            pending.failed = "processes have died"
            for group in self._ranks:  # those that live are to end before they begin the next
                self._dispatcher.submit(None, self._program, group, self._works(group, 0.0))
            self._abandon(pending)
        elif not self.settle(self._deadline.limit_s):
            raise WorkerError(
                f"the checkpoint of step {pending.step} is not sealed after {self._deadline}"
            )

    def take_mirrored_bytes(self) -> int:
        """Bytes that were written to the mirror since this was asked last."""
        taken, self._mirrored_bytes = self._mirrored_bytes, 0
        return taken

    def give_up(self) -> None:
        """Log that a checkpoint is still being written and no longer waited for."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.store is self.store:
            self.store.missed(pending.step)
            self.store.warn(
                f"the checkpoint of step {pending.step} was not complete when its run was closed, "
                f"and {self._counts}"
            )

    def _works(self, group: str, wait_s: float) -> dict[int, RankWork]:
        unwanted = self._pending is not None and bool(self._pending.failed)
        report = work(Host.save_report, wait_s, unwanted=unwanted)
        return dict.fromkeys(range(self._ranks[group]), report)

    def _hear(self, pending: _Pending, answers: list[Submission]) -> None:
        for one in answers:
            if one.failed is not None:
                self._abandon(pending)
                raise self._dispatcher.failure(one.failed) from one.failed.error
        reports = [report for one in answers for report in one.answers]
        files: dict[str, WrittenFile] = {}
        is_writing = False
        for report in reports:
            assert isinstance(report, SaveReport), "who is asked for a report gives one"
            pending.failed = pending.failed or report.failed
            is_writing |= report.writing
            files |= report.files
        if is_writing:
            return
        if pending.failed:
            self._abandon(pending)
            self._note_failure(pending, pending.failed)
        else:
            if pending.store is not self.store:
                self._mirrored_bytes += sum(file.size_bytes for file in files.values())
            seal = partial(pending.store.seal, pending.step, files)
            pending.sealing = Background(seal, f"seal step {pending.step}")

    def _abandon(self, pending: _Pending) -> None:
        self._pending = None
        pending.store.abandon(pending.step)

    def _try_end(self, sealing: Background[str], wait_s: float) -> None:
        pending = self._pending
        if pending is None or not sealing.wait(wait_s):
            return
        self._pending = None
        try:
            left_over = sealing.result()
        except OSError as error:
            self._note_failure(pending, _refused(error))
            return
        self._warned.discard(pending.store is self.store)
        if pending.store is self.store:
            self.saved = pending.step
            if self._failed is not None and self._failed[0] <= pending.step:
                self._failed = None
        if left_over:
            self.store.warn(f"checkpoints older than is kept cannot be removed: {left_over}")

    def _note_failure(self, pending: _Pending, why: str) -> None:
        what, is_checkpoint = "copy in memory", pending.store is self.store
        if is_checkpoint:
            what, self._failed = "checkpoint", (pending.step, why)
            self.store.missed(pending.step)
        if is_checkpoint not in self._warned:
            self._warned.add(is_checkpoint)
            self.store.warn(
                f"the {what} of step {pending.step} was not written, and {self._counts}. The run "
                f"goes on, tries again at the next one, and says no more of it until it is "
                f"written: {why}"
            )

    @property
    def _counts(self) -> str:
        if self.saved is None:
            return "there is no older one"
        return f"that of step {self.saved} counts"


def _refused(error: OSError) -> str:
    said = disk_refusal(error)
    if said is None:
        raise error
    return said
