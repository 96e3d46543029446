"""The tasks and outputs of one step in flight: what waits for which input, what may be released."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..errors import StateError
from .events import NodeTask, Output, ResumeState, Versions
from .schedule import Flow
from .weight_versions import ReadRule

_Key = tuple[int, int]
_FIRST: _Key = (-1, -1)


class Consumption:
    """The order of one step's chunks, as far as it is known."""

    def __init__(self, num_chunks: int, num_ranks: int, *, by_arrival: bool = False) -> None:
        self.by_arrival = by_arrival
        self.order: list[int] = []  # The chunks whose places are known, in order
        self.sizes: dict[int, int] = {}  # Chunk -> its size, of every chunk answered
        self._num_chunks = num_chunks
        self._unplaced: list[_Key] = []
        self.spread(num_ranks)

    def answered(self, chunk: int, size: int) -> None:
        if self.by_arrival:
            self.sizes[chunk] = size
            self.order.append(chunk)
            return
        rank, key = chunk % len(self._last), (size, chunk)
        if key <= self._last[rank]:
            raise StateError(
                f"chunk {chunk} of size {size} was answered after chunk {self._last[rank][1]} of "
                f"size {self._last[rank][0]}; a rank answers by (size, chunk)"
            )
        self.sizes[chunk] = size
        self._last[rank] = key
        self._left[rank] -= 1
        heapq.heappush(self._unplaced, key)
        if self._left[rank]:
            heapq.heappush(self._slowest, (key, rank))
        known = self._known()
        while self._unplaced and (known is None or self._unplaced[0] <= known):
            self.order.append(heapq.heappop(self._unplaced)[1])

    def spread(self, num_ranks: int) -> None:
        """From now on give rank r the remaining ones of chunks r, r + num_ranks, ...

        No rank may be at work on any. Chunks with a place keep it: none that is left comes before.
        """
        left = [chunk for chunk in range(self._num_chunks) if chunk not in self.sizes]
        self._left = [0] * num_ranks
        for chunk in left:
            self._left[chunk % num_ranks] += 1
        self._last = [_FIRST] * num_ranks
        self._slowest = [(_FIRST, rank) for rank, count in enumerate(self._left) if count]

    def _known(self) -> _Key | None:
        while self._slowest:
            last, rank = self._slowest[0]
            if self._left[rank] and last == self._last[rank]:
                return last
            heapq.heappop(self._slowest)  # outdated: the rank has answered since
        return None


class FlowIndex:
    """A flow's edges by node index, computed once."""

    def __init__(self, flow: Flow, *, in_flight: bool = False) -> None:
        self.flow, self.in_flight = flow, in_flight
        self.num_ranks = dict(flow.groups)  # Group -> its ranks now
        self.index = {node.name: i for i, node in enumerate(flow.nodes)}  # Node name -> index
        # Per node, the indices of its inputs.
        self.inputs = tuple(tuple(self.index[n] for n in node.inputs) for node in flow.nodes)
        # Per node, the indices of the nodes that take its output.
        self.consumers = tuple(
            tuple(j for j, inputs in enumerate(self.inputs) if i in inputs)
            for i in range(len(flow.nodes))
        )
        # Per node, whether it runs once per chunk.
        self.chunked = tuple(node.chunked and node.kind != "source" for node in flow.nodes)
        # Per node, the one in whose order it takes chunks one by one; None for others.
        self.order_of = tuple(self.index.get(node.order_of) for node in flow.nodes)
        # Per node, whether its input is complete chunk by chunk.
        self.by_chunk = tuple(
            chunked or order is not None
            for chunked, order in zip(self.chunked, self.order_of, strict=True)
        )
        # Per node of that kind, how many at a time: one for each rank.
        self.per_part = tuple(flow.groups.get(node.group, 1) for node in flow.nodes)
        # Per node, whether it makes an output.
        self.stores = tuple(node.kind != "train" for node in flow.nodes)
        # Per node, its tasks per step (a source counts as one).
        self.num_tasks = tuple(self._num_tasks(i) for i in range(len(flow.nodes)))
        self.chunks = tuple(range(flow.num_chunks))  # All chunk numbers
        # Names of the nodes that run on ranks: all but the sources.
        self.runnable = frozenset(node.name for node in flow.nodes if node.kind != "source")

    def _num_tasks(self, index: int) -> int:
        if self.order_of[index] is not None:
            return self.flow.num_chunks // self.per_part[index]
        return self.flow.num_chunks if self.chunked[index] else 1

    def is_last(self, index: int, task: NodeTask) -> bool:
        return self.order_of[index] is None or task.chunk == self.num_tasks[index] - 1

    def tasks(self, index: int, step: int) -> list[NodeTask]:
        name = self.flow.nodes[index].name
        if not self.by_chunk[index]:
            return [NodeTask(name, step, None)]
        return [NodeTask(name, step, number) for number in range(self.num_tasks[index])]

    def knows(self, task: NodeTask) -> bool:
        i = self.index.get(task.node)
        if i is None:
            return False
        if not self.by_chunk[i]:
            return task.chunk is None
        return task.chunk in range(self.num_tasks[i])


class StepState:
    """Progress of one step.

    There may be tens of thousands of tasks, so nothing is kept of each of them but its places in
    lists: objects that live as long as the step are what the garbage collector looks at.
    """

    def __init__(self, index: FlowIndex, step: int) -> None:
        self._index = index
        self.step = step  # The step's index
        self.has_source = False  # Whether the batch is stored
        num_chunks = len(index.chunks)
        # Per node and chunk (or once, of a barrier), input parts that are not stored yet.
        self.missing = [
            [len(inputs)] * num_chunks if index.by_chunk[i] else [len(inputs) * num_chunks]
            for i, inputs in enumerate(index.inputs)
        ]
        nodes = list(enumerate(index.flow.nodes))
        # Streaming rollout -> the order of its chunks, by node index.
        self.consumption = {
            i: Consumption(num_chunks, index.num_ranks[node.group], by_arrival=index.in_flight)
            for i, node in nodes
            if node.streams
        }
        # Node that takes chunks in such an order -> how many of its tasks may run.
        self.parts = dict.fromkeys((i for i, node in nodes if node.order_of), 0)
        self._complete = dict(self.parts)  # the first chunks in order that have all their inputs
        self.left = list(index.num_tasks)  # Per node, tasks not done
        self.remaining = sum(self.left)  # Tasks not done in the whole step
        self._done = [bytearray(count) for count in index.num_tasks]
        self._reads: list[list[Versions | None]] = [[None] * count for count in index.num_tasks]
        self._stored: dict[int, None] = {}  # node index * num_chunks + chunk, in order
        # Per node and chunk, consumer tasks of that output part that are not done.
        self.refs = [[len(consumers)] * num_chunks for consumers in index.consumers]
        self.lag: Counter[int] = Counter()  # Versions behind -> rollout reads
        # Rows of an output part `(node index, chunk)`, where the shell told.
        self.rows: dict[tuple[int, int], int] = {}

    def source_arrived(self) -> tuple[list[NodeTask], list[Output]]:
        """Finish all source nodes; returns tasks whose inputs are complete, as `finish` does."""
        self.has_source = True
        ready: list[NodeTask] = []
        for i, node in enumerate(self._index.flow.nodes):
            if node.kind == "source":
                ready += self.finish(i, NodeTask(node.name, self.step))[0]
            elif not self._index.inputs[i] and i not in self.parts:
                ready += self._index.tasks(i, self.step)
        return ready, []

    def spread(self, group: str) -> None:
        """The group has another number of ranks, none of which is at work."""
        for i, consumption in self.consumption.items():
            if self._index.flow.nodes[i].group == group:
                consumption.spread(self._index.num_ranks[group])

    def is_done(self, task: NodeTask) -> bool:
        return bool(self._done[self._index.index[task.node]][task.chunk or 0])

    def done(self) -> Iterator[NodeTask]:
        for i, slots in enumerate(self._done):
            if any(slots):
                tasks = self._index.tasks(i, self.step)
                yield from (task for task, done in zip(tasks, slots, strict=True) if done)

    def stored(self) -> Iterator[Output]:
        """Output parts stored and not released, in the order in which they were made."""
        nodes, num_chunks = self._index.flow.nodes, len(self._index.chunks)
        for key in self._stored:
            i, chunk = divmod(key, num_chunks)
            yield Output(nodes[i].name, self.step, chunk)

    def chunks_of(self, i: int, task: NodeTask) -> Sequence[int]:
        if task.chunk is None:
            return self._index.chunks
        order_of, count = self._index.order_of[i], self._index.per_part[i]
        if order_of is None:
            return (task.chunk,)
        return self.consumption[order_of].order[task.chunk * count : (task.chunk + 1) * count]

    def waits(self, i: int, task: NodeTask) -> bool:
        if i in self.parts:
            return (task.chunk or 0) >= self.parts[i]
        return not self.has_source or self.missing[i][task.chunk or 0] > 0

    def finish(self, i: int, task: NodeTask, size: int = 0) -> tuple[list[NodeTask], list[Output]]:
        """Mark `task` of node `i` done, whose longest row is `size` long."""
        self._done[i][task.chunk or 0] = 1
        self.left[i] -= 1
        self.remaining -= 1
        chunks = self.chunks_of(i, task)
        if self._index.stores[i]:
            first = i * len(self._index.chunks)
            for chunk in chunks:
                self._stored[first + chunk] = None
        if i in self.consumption:
            self.consumption[i].answered(chunks[0], size)
        ready = self._newly_ready(i, chunks)
        for part in self.parts:
            ready += self._next_parts(part)
        return ready, self._newly_free(i, chunks)

    def _next_parts(self, i: int) -> list[NodeTask]:
        order = self.consumption[self._index.order_of[i] or 0].order
        missing, complete = self.missing[i], self._complete[i]
        while complete < len(order) and not missing[order[complete]]:
            complete += 1
        self._complete[i] = complete
        name, first = self._index.flow.nodes[i].name, self.parts[i]
        self.parts[i] = complete // self._index.per_part[i]
        return [NodeTask(name, self.step, number) for number in range(first, self.parts[i])]

    def _newly_ready(self, i: int, chunks: Iterable[int]) -> list[NodeTask]:
        index, ready = self._index, list[NodeTask]()
        for consumer in index.consumers[i]:
            missing = self.missing[consumer]
            chunked = index.by_chunk[consumer]
            for chunk in chunks:
                slot = chunk if chunked else 0
                missing[slot] -= 1
                if missing[slot] == 0 and consumer not in self.parts:
                    name = index.flow.nodes[consumer].name
                    ready.append(NodeTask(name, self.step, chunk if chunked else None))
        return ready

    def _newly_free(self, i: int, chunks: Iterable[int]) -> list[Output]:
        freed: list[Output] = []
        for producer in self._index.inputs[i]:
            refs, first = self.refs[producer], producer * len(self._index.chunks)
            for chunk in chunks:
                refs[chunk] -= 1
                if refs[chunk] == 0:
                    del self._stored[first + chunk]
                    freed.append(Output(self._index.flow.nodes[producer].name, self.step, chunk))
        return freed

    def restore(self, done: Iterable[NodeTask], sizes: Mapping[NodeTask, int]) -> None:
        index = self._index
        for task in done:
            if not index.knows(task):
                raise ValueError(f"'{task}' is not a task of flow '{index.flow.name}'")

        def place(task: NodeTask) -> tuple[int, int, int]:
            return index.index[task.node], sizes.get(task, 0), task.chunk or 0

        self.has_source = True  # which is checked below
        for consumption in self.consumption.values():
            # Other ranks may have answered before, so nothing follows from what one answered.
            consumption.spread(len(index.chunks))
        for task in sorted(done, key=place):
            i = index.index[task.node]
            if self.waits(i, task):
                raise ValueError(f"'{task}' is said to be done, but not all of its inputs are")
            self.finish(i, task, sizes.get(task, 0))
        sources = [n.name for n in index.flow.nodes if n.kind == "source"]
        self.has_source = all(self.is_done(NodeTask(name, self.step)) for name in sources)
        for group in index.num_ranks:
            self.spread(group)
        if not self.has_source:
            raise ValueError(f"step {self.step} has tasks done, but its sources are not")

    def startable(self) -> list[NodeTask]:
        """Tasks not done whose inputs are all stored."""
        if not self.has_source:
            return []
        return [
            task
            for i in range(len(self.missing))
            for task in self._index.tasks(i, self.step)
            if not self.waits(i, task) and not self.is_done(task)
        ]

    def sizes(self) -> list[tuple[NodeTask, int]]:
        nodes = self._index.flow.nodes
        return [
            (NodeTask(nodes[i].name, self.step, chunk), size)
            for i, consumption in self.consumption.items()
            for chunk, size in sorted(consumption.sizes.items())
        ]

    def num_rows(self) -> list[tuple[Output, int]]:
        nodes = self._index.flow.nodes
        return [(Output(nodes[i].name, self.step, chunk), n) for (i, chunk), n in self.rows.items()]

    def note_reads(
        self, i: int, task: NodeTask, rules: Sequence[ReadRule], versions: Versions
    ) -> None:
        """`task` of node `i` starts and reads `versions`, one for each of its rules."""
        self._reads[i][task.chunk or 0] = versions
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
        found: list[str] = []
        for i, reads in enumerate(self._reads):
            text = {versions: _text(versions) for versions in set(reads) if versions is not None}
            tasks = self._index.tasks(i, self.step)
            found += [
                f"{task} {text[versions]}"
                for task, versions in zip(tasks, reads, strict=True)
                if versions is not None
            ]
        return sorted(found)


def _text(versions: Versions) -> str:
    return " ".join(f"{role}@{version}" for role, version in versions)


def restored_steps(
    index: FlowIndex,
    rules_of: Sequence[Sequence[ReadRule]],
    resume: ResumeState,
    num_steps: int,
) -> dict[int, StepState]:
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
    sizes = dict(resume.sizes)
    for step in expected:
        state = states[step] = StepState(index, step)
        state.restore(by_step[step], sizes)
        for task in state.done():
            if task.node in index.runnable:
                i = index.index[task.node]
                reads = tuple((rule.role, rule.lowest(step)) for rule in rules_of[i])
                state.note_reads(i, task, rules_of[i], reads)
    for output, num_rows in resume.rows:
        if output.step in states and output.node in index.index:
            states[output.step].rows[index.index[output.node], output.chunk] = num_rows
    return states
