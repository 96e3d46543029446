"""What a checkpoint's folder holds, as workers write it and read it again.

ROLE/                    weights, optimizer state or a state of its own, of every role that has one
live-00000.safetensors   an output that later steps still need
run.json                 where the run stands
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...errors import ConfigError
from ...scheduler.events import NodeTask, Output
from ...scheduler.schedule import Deadline
from ..checkpoint import ResumePoint, SavedRun, write_run_state
from ..dispatcher import Dispatcher, Submission
from ..executor import Program
from ..host import Host
from ..messages import Handle, Work, work
from ..placement import flow_of

_UNFINISHED = "/unfinished"
"""After a node's name: what of its rows goes on in the next step. No node is named so."""


def is_unfinished(output: Output) -> bool:
    """Whether it is what a task leaves to the next step."""
    return output.node.endswith(_UNFINISHED)


def unfinished(task: NodeTask, before: int = 0) -> Output:
    """What a task, or the same of `before` steps earlier, leaves to the next step."""
    return Output(f"{task.node}{_UNFINISHED}", task.step - before, task.chunk or 0)


class StateInWorkers:
    """The state of one program's run, which lies with its workers.

    Args:
        dispatcher: What asks them.
        name: The program's name.
        program: The program.
        deadline: How long a worker may take.

    Attributes:
        homes: Role whose weights or state change -> the group where they do.
    """

    def __init__(
        self, dispatcher: Dispatcher, name: str, program: Program, deadline: Deadline
    ) -> None:
        self._dispatcher, self._name, self._deadline = dispatcher, name, deadline
        self._placement = program.placement
        self.homes: Mapping[str, str] = {
            **flow_of(program.graph, program.placement).homes,
            **program.placement.state_homes(program.graph),
        }

    @property
    def num_ranks(self) -> dict[str, int]:
        """Group of any of the homes -> its number of ranks."""
        return {name: self._placement.group(name).num_ranks for name in self.homes.values()}

    def take(self, saved: SavedRun, outputs: Mapping[Output, Handle], folder: Path) -> str:
        """Have a checkpoint's folder filled; says what the disk refused, "" if nothing.

        Args:
            saved: What is being saved.
            outputs: Where its live outputs are stored.
            folder: The folder; it is there, and empty.
        """
        asked: list[tuple[str, Mapping[int, Work]]] = []
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
        """Have the live outputs of a checkpoint stored again.

        Args:
            point: The checkpoint.
            num_chunks: Chunks in which rows may go on; 0 if none do.

        Raises:
            ConfigError: If rows that go on were begun in others: a row stays in its chunk.
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
        """Where a node's parts are saved and restored; a source's at the first group."""
        return self._placement.nodes.get(node, self._placement.groups[0].name)

    def _on_all(self, group: str, one: Work) -> dict[int, Work]:
        return dict.fromkeys(range(self._placement.group(group).num_ranks), one)

    def _now(self, group: str, works: Mapping[int, Work]) -> Submission:
        return self._dispatcher.perform_now(self._name, group, works, self._deadline)
