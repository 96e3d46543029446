"""The tasks and outputs of one step in flight: what waits for which input, what may be released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ..errors import StateError
from .events import NodeTask, Output, ResumeState, Versions
from .flow import Flow
from .read_rules import ReadRule

__all__ = ["FlowIndex", "StepState", "restored_steps"]


class FlowIndex:
    """A flow's edges by node index, computed once.

    Attributes:
        flow: The flow.
        index: Node name -> index.
        inputs: Per node, the indices of its inputs.
        consumers: Per node, the indices of the nodes that take its output.
        num_tasks: Per node, its tasks per step (a source counts as one).
        chunks: All chunk numbers.
        runnable: Names of the nodes that run on ranks: all but the sources.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.index = {node.name: i for i, node in enumerate(flow.nodes)}
        self.inputs = tuple(tuple(self.index[n] for n in node.inputs) for node in flow.nodes)
        self.consumers = tuple(
            tuple(j for j, inputs in enumerate(self.inputs) if i in inputs)
            for i in range(len(flow.nodes))
        )
        self.chunked = tuple(node.chunked and node.kind != "source" for node in flow.nodes)
        self.num_tasks = tuple(flow.num_chunks if chunked else 1 for chunked in self.chunked)
        self.chunks = tuple(range(flow.num_chunks))
        self.runnable = frozenset(node.name for node in flow.nodes if node.kind != "source")

    def tasks(self, index: int, step: int) -> list[NodeTask]:
        """All tasks of a node in a step."""
        name = self.flow.nodes[index].name
        if not self.chunked[index]:
            return [NodeTask(name, step, None)]
        return [NodeTask(name, step, chunk) for chunk in self.chunks]

    def knows(self, task: NodeTask) -> bool:
        """Whether the flow has such a task, whatever the step."""
        i = self.index.get(task.node)
        if i is None:
            return False
        return task.chunk in self.chunks if self.chunked[i] else task.chunk is None


class StepState:
    """Progress of one step.

    Attributes:
        step: The step's index.
        has_source: Whether the batch is stored.
        missing: Per node and task slot, the input parts that are not stored yet.
        left: Per node, tasks not done.
        remaining: Tasks not done in the whole step.
        done: The tasks done.
        refs: Per node and chunk, consumer tasks of that output part that are not done.
        stored: Output parts stored and not released.
        reads: Versions each started task reads.
        lag: How many rollout reads were how many versions behind.
        rows: Rows of an output part `(node index, chunk)`, where the shell told.
    """

    def __init__(self, index: FlowIndex, step: int) -> None:
        self._index = index
        self.step = step
        self.has_source = False
        num_chunks = len(index.chunks)
        self.missing = [
            [len(inputs) * (1 if chunked else num_chunks)] * num_tasks
            for inputs, chunked, num_tasks in zip(
                index.inputs, index.chunked, index.num_tasks, strict=True
            )
        ]
        self.left = list(index.num_tasks)
        self.remaining = sum(self.left)
        self.done: set[NodeTask] = set()
        self.refs = [[len(consumers)] * num_chunks for consumers in index.consumers]
        self.stored: dict[Output, None] = {}
        self.reads: dict[NodeTask, Versions] = {}
        self.lag: Counter[int] = Counter()
        self.rows: dict[tuple[int, int], int] = {}

    def source_arrived(self) -> tuple[list[NodeTask], list[Output]]:
        """Finish all source nodes; returns tasks whose inputs are complete, as `finish` does."""
        self.has_source = True
        ready: list[NodeTask] = []
        for i, node in enumerate(self._index.flow.nodes):
            if node.kind == "source":
                ready += self.finish(i, NodeTask(node.name, self.step))[0]
            elif not self._index.inputs[i]:
                ready += self._index.tasks(i, self.step)
        return ready, []

    def finish(self, i: int, task: NodeTask) -> tuple[list[NodeTask], list[Output]]:
        """Mark `task` of node `i` done.

        Returns:
            Tasks that now have all their inputs, and input parts nobody needs any more.
        """
        index, nodes = self._index, self._index.flow.nodes
        self.done.add(task)
        self.left[i] -= 1
        self.remaining -= 1
        chunks = index.chunks if task.chunk is None else (task.chunk,)
        if nodes[i].kind != "train":
            for chunk in chunks:
                self.stored[Output(task.node, self.step, chunk)] = None
        return self._newly_ready(i, chunks), self._newly_free(i, chunks)

    def _newly_ready(self, i: int, chunks: Iterable[int]) -> list[NodeTask]:
        index, ready = self._index, list[NodeTask]()
        for consumer in index.consumers[i]:
            missing = self.missing[consumer]
            chunked = index.chunked[consumer]
            for chunk in chunks:
                slot = chunk if chunked else 0
                missing[slot] -= 1
                if missing[slot] == 0:
                    name = index.flow.nodes[consumer].name
                    ready.append(NodeTask(name, self.step, chunk if chunked else None))
        return ready

    def _newly_free(self, i: int, chunks: Iterable[int]) -> list[Output]:
        freed: list[Output] = []
        for producer in self._index.inputs[i]:
            refs = self.refs[producer]
            for chunk in chunks:
                refs[chunk] -= 1
                if refs[chunk] == 0:
                    freed.append(Output(self._index.flow.nodes[producer].name, self.step, chunk))
        for output in freed:
            del self.stored[output]
        return freed

    def restore(self, done: Iterable[NodeTask]) -> None:
        """Mark tasks done that a checkpoint says are done.

        Raises:
            ValueError: A task is unknown, or is done while one of its inputs is not.
        """
        index = self._index
        for task in done:
            if not index.knows(task):
                raise ValueError(f"'{task}' is not a task of flow '{index.flow.name}'")
        for task in sorted(done, key=lambda task: (index.index[task.node], task.chunk or 0)):
            i = index.index[task.node]
            if self.missing[i][task.chunk or 0]:
                raise ValueError(f"'{task}' is said to be done, but not all of its inputs are")
            self.finish(i, task)
        sources = [n.name for n in index.flow.nodes if n.kind == "source"]
        self.has_source = all(NodeTask(name, self.step) in self.done for name in sources)
        if not self.has_source:
            raise ValueError(f"step {self.step} has tasks done, but its sources are not")

    def startable(self) -> list[NodeTask]:
        """Tasks not done whose inputs are all stored."""
        if not self.has_source:
            return []
        return [
            task
            for i in range(len(self.missing))
            for slot, task in enumerate(self._index.tasks(i, self.step))
            if self.missing[i][slot] == 0 and task not in self.done
        ]

    def note_reads(self, task: NodeTask, rules: Sequence[ReadRule], versions: Versions) -> None:
        """`task` starts and reads `versions`, one for each of its rules."""
        self.reads[task] = versions
        for rule, (_, version) in zip(rules, versions, strict=True):
            if rule.lagged:
                self.lag[rule.current(self.step) - version] += 1

    def note_rows(self, i: int, chunk: int | None, num_rows: Sequence[int]) -> None:
        """Node `i` made so many rows: one number for `chunk`, or one per chunk if it is None."""
        chunks = self._index.chunks if chunk is None else (chunk,)
        if len(num_rows) != len(chunks):
            name = self._index.flow.nodes[i].name
            raise StateError(
                f"'{name}' of step {self.step} made {len(chunks)} chunk(s), but the event "
                f"counts the rows of {len(num_rows)}"
            )
        for made, count in zip(chunks, num_rows, strict=True):
            self.rows[i, made] = count

    def lines(self) -> list[str]:
        """What each started task reads, one sorted line per task: the step's part of the hash."""
        return sorted(
            f"{task} {' '.join(f'{role}@{version}' for role, version in versions)}"
            for task, versions in self.reads.items()
        )


def restored_steps(
    index: FlowIndex,
    rules_of: Sequence[Sequence[ReadRule]],
    resume: ResumeState,
    num_steps: int,
) -> dict[int, StepState]:
    """The steps in flight at a checkpoint.

    Raises:
        ValueError: The tasks said to be done cannot be those of a checkpoint of this flow.
    """
    by_step: dict[int, list[NodeTask]] = {}
    for task in resume.done:
        by_step.setdefault(task.step, []).append(task)
    expected = range(resume.step, resume.step + len(by_step))
    if sorted(by_step) != list(expected) or expected.stop > num_steps:
        raise ValueError(
            f"a run resumed at step {resume.step} of {num_steps} cannot have tasks of "
            f"step(s) {', '.join(map(str, sorted(by_step)))} done"
        )
    states: dict[int, StepState] = {}
    for step in expected:
        state = states[step] = StepState(index, step)
        state.restore(by_step[step])
        for task in state.done:
            if task.node in index.runnable:
                rules = rules_of[index.index[task.node]]
                reads = tuple((rule.role, rule.lowest(step)) for rule in rules)
                state.note_reads(task, rules, reads)
    return states
