"""The ledger: what each step read, made and trained on, so that no row is there twice or missing.

    read      a source's rows, and a SHA-256 of their values, whatever pieces they are cut into
    made      a node's rows, as its ranks report them; of what is trained on, a digest of each piece
    trained   the rows of the pieces that the ranks of a train node were given, and their digests

A digest is taken where a piece is: of what was made before it is stored, of what is trained on
after it was fetched. A step closes once it is complete: each piece must have been made once, and
given to each train node once, as it was made. A step that is computed again, because the run has
gone back, must read the same rows. It takes the place of what it was before, and counts once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import StateError
from ..graph.graph import Graph
from ..kinds import NodeKind
from ..scheduler.events import NodeTask
from .columns import Packed, Part
from .messages import Report

_OPEN = "ledger.json"  # In a checkpoint's folder: what is known of the steps that are not complete

_REMEMBERED = 1000  # Steps that a run may go back and still be compared with what they were


class LedgerError(StateError):
    """A row is missing, or there twice, or not as it was; names the step and the node."""


@dataclass(frozen=True)
class Line:
    step: int
    read: Mapping[str, int]  # Source -> its rows
    sha256: Mapping[str, str]  # Source -> of their values
    made: Mapping[str, int]  # Node -> the rows it made
    trained: Mapping[str, int]  # Train node -> the rows its ranks were given
    times: int = 1  # Times the step was computed to its end
    # Nodes of which this is not known: they did their part before a checkpoint that a version
    # without a ledger wrote.
    unseen: tuple[str, ...] = ()


@dataclass
class _Open:
    """A step that is not complete; the first number of each entry says since which return."""

    read: dict[str, tuple[int, int, str]] = field(default_factory=dict[str, "tuple[int, int, str]"])
    made: dict[tuple[str, int], tuple[int, int, int]] = field(
        default_factory=dict["tuple[str, int]", "tuple[int, int, int]"]
    )
    trained: dict[str, tuple[int, list[tuple[str, int, int]]]] = field(
        default_factory=dict[str, "tuple[int, list[tuple[str, int, int]]]"]
    )


class Ledger:
    """The rows that one program's steps read, made and trained on."""

    def __init__(
        self, graph: Graph, write: Callable[[Line], None], known: Iterable[Line] = ()
    ) -> None:
        self._graph, self._write = graph, write
        # Step -> line, for the latest complete steps.
        self.lines = {line.step: line for line in known}
        self._open: dict[int, _Open] = {}
        self._returns = 0
        self._trains = [node for node in graph.nodes if node.kind is NodeKind.TRAIN]

    def went_back(self, folder: Path | None = None) -> None:
        """The run goes on from an earlier step: what comes again replaces what was there."""
        self._returns += 1
        if folder is None:
            self._open.clear()
        elif (file := folder / _OPEN).exists():
            self._open = {one["step"]: self._opened(one) for one in json.loads(file.read_text())}

    def save(self, folder: Path) -> None:
        """Write what is known of the steps that are not complete into a checkpoint's folder."""
        content = [
            {
                "step": step,
                "read": [[name, *entry[1:]] for name, entry in one.read.items()],
                "made": [[*key, *entry[1:]] for key, entry in one.made.items()],
                "trained": [[name, entry[1]] for name, entry in one.trained.items()],
            }
            for step, one in self._open.items()
        ]
        (folder / _OPEN).write_text(json.dumps(content))

    def _opened(self, content: Mapping[str, Any]) -> _Open:
        before = self._returns - 1
        return _Open(
            {name: (before, rows, sha) for name, rows, sha in content["read"]},
            {(node, chunk): (before, *entry) for node, chunk, *entry in content["made"]},
            {
                name: (before, [(node, rows, digest) for node, rows, digest in pieces])
                for name, pieces in content["trained"]
            },
        )

    # --- entries

    def read(self, step: int, source: str, parts: Sequence[Part]) -> None:
        """Enter the rows that a source gave for a step.

        Raises:
            LedgerError: If it was read before, or gave other rows when the step was first computed.
        """
        entries, rows = self._at(step).read, sum(_num_rows(part) for part in parts)
        sha256, before = _sha256(parts), self.lines.get(step)
        if source in entries and entries[source][0] == self._returns:
            raise LedgerError(f"step {step}: '{source}' was read twice")
        known = before.sha256.get(source) if before else None
        if source in entries:
            known = entries[source][2]
        if known not in (None, sha256):
            raise LedgerError(
                f"step {step} is computed again, and '{source}' brings other rows than the first "
                "time\n    a source's batch(step) must give the same rows whenever it is asked"
            )
        entries[source] = (self._returns, rows, sha256)
        for chunk, digest in enumerate(pieces_of(parts) if source in self._fed() else ()):
            self._at(step).made[source, chunk] = (self._returns, _num_rows(parts[chunk]), digest)

    def done(self, task: NodeTask, report: Report) -> None:
        """Enter what a task made and, for a train call, the pieces that it was given.

        Raises:
            LedgerError: If a piece was made before.
        """
        one = self._at(task.step)
        if self._is_train(task.node):
            since, taken = one.trained.get(task.node, (self._returns, []))
            kept = taken if since == self._returns else []
            one.trained[task.node] = (self._returns, [*kept, *report.taken])
        num_rows = report.num_rows if report.chunk is None else report.num_rows[:1]
        for index, rows in enumerate(num_rows):
            key = task.node, (task.chunk or 0) + index
            if key in one.made and one.made[key][0] == self._returns:
                raise LedgerError(f"step {task.step}: piece {key[1]} of '{key[0]}' was made twice")
            digest = report.made[index] if report.made else 0
            one.made[key] = (self._returns, rows, digest)

    def _at(self, step: int) -> _Open:
        return self._open.setdefault(step, _Open())

    def _fed(self) -> frozenset[str]:
        return feeding(self._graph)

    # --- complete steps

    def complete(self, step: int) -> None:
        """Close a step: check that each train call was given every piece once, and write its line.

        Raises:
            LedgerError: If one was not.
        """
        one, before = self._open.pop(step, _Open()), self.lines.get(step)
        made: dict[str, int] = {}
        for (node, _), (_, rows, _) in one.made.items():
            made[node] = made.get(node, 0) + rows
        unseen = self._unseen(step, one)
        trained = {
            node.name: self._trained(step, node.name, {ref.node for _, ref in node.inputs}, one)
            for node in self._trains
            if node.name not in unseen
        }
        line = Line(
            step,
            {name: rows for name, (_, rows, _) in one.read.items()},
            {name: sha256 for name, (_, _, sha256) in one.read.items()},
            {name: rows for name, rows in made.items() if name not in one.read},
            trained,
            1 + (before.times if before else 0),
            unseen,
        )
        self.lines[step] = line
        self.lines.pop(step - _REMEMBERED, None)
        self._write(line)

    def _unseen(self, step: int, one: _Open) -> tuple[str, ...]:
        seen = {*one.read, *one.trained, *(node for node, _ in one.made)}
        missing = tuple(node.name for node in self._graph.nodes if node.name not in seen)
        begun_now = any(since == self._returns for since, _, _ in one.read.values())
        expected = [name for name in missing if self._graph[name].outputs or self._is_train(name)]
        if expected and (begun_now or not self._returns):
            raise LedgerError(f"step {step} is complete, and nothing was made by '{expected[0]}'")
        return missing

    def _is_train(self, node: str) -> bool:
        return self._graph[node].kind is NodeKind.TRAIN

    def _trained(self, step: int, node: str, producers: Collection[str], one: _Open) -> int:
        taken = one.trained[node][1]
        rows: list[int] = []
        for producer in sorted(producers):
            given = Counter((n, digest) for name, n, digest in taken if name == producer)
            there = Counter((n, d) for (name, _), (_, n, d) in one.made.items() if name == producer)
            if there and given != there:
                _refuse(step, node, producer, given, there)
            rows.append(sum(n * times for (n, _), times in given.items()))
        return max(rows, default=0)


def check(lines: Sequence[Line], num_steps: int) -> None:
    """Require every step from the first to the last, each once and in order."""
    for number in range(max(len(lines), num_steps)):
        found = lines[number].step if number < len(lines) else None
        if found == number < num_steps:
            continue
        missing = found is None or number < found < num_steps
        wrong = number if missing else found
        raise LedgerError(
            f"the ledger of {num_steps} steps does not add up: step {wrong} is "
            f"{'missing' if missing else 'there once more than it should be'}"
        )


def _refuse(step: int, node: str, producer: str, given: Counter[Any], there: Counter[Any]) -> None:
    lacking, extra = there - given, given - there
    if lacking and extra:
        said = "has been changed on the way"
    else:
        said = "is missing" if lacking else "was given twice"
    rows, _ = next(iter(lacking or extra))
    raise LedgerError(
        f"step {step}: '{node}' was not given what '{producer}' made: a piece of {rows} rows {said}"
        f" ({sum(n * t for (n, _), t in there.items())} rows were made, "
        f"{sum(n * t for (n, _), t in given.items())} were given)"
    )


def text_of(lines: Sequence[Line], rollouts: Collection[str]) -> str:
    """Summarize a ledger in one line: steps, rows read, made and trained on, and repetitions."""
    read: Counter[str] = Counter()
    made: Counter[str] = Counter()
    trained: Counter[str] = Counter()
    for line in lines:
        read.update(line.read)
        made.update({name: rows for name, rows in line.made.items() if name in rollouts})
        trained.update(line.trained)
    again = sum(line.times > 1 for line in lines)
    parts = [
        f"{_listed(read)} read",
        *([f"{_listed(made)} made"] if made else []),
        *([f"{_listed(trained)} trained on"] if trained else []),
    ]
    unseen = sum(bool(line.unseen) for line in lines)
    old = [f"of {unseen} steps a part was done before there was a ledger"] if unseen else []
    twice = f"{again} steps computed more than once, none counted twice"
    first = f" from step {lines[0].step} on" if lines and lines[0].step else ""
    return f"{len(lines)} steps{first}, each once; {', '.join(parts)}; {'; '.join([*old, twice])}"


def _listed(rows: Counter[str]) -> str:
    return " and ".join(f"{count} rows ({name})" for name, count in rows.items()) or "no rows"


def feeding(graph: Graph) -> frozenset[str]:
    """The nodes whose output is trained on."""
    trains = (node for node in graph.nodes if node.kind is NodeKind.TRAIN)
    return frozenset(ref.node for node in trains for _, ref in node.inputs)


def pieces_of(parts: Iterable[Part]) -> tuple[int, ...]:
    return tuple(digest_of(part) for part in parts)


def digest_of(part: Part) -> int:
    """64 bits that tell a piece from any other: of its values and lengths, in the order of columns.

    They guard against faults and not against forgers.
    """
    found = hashlib.blake2b(digest_size=8)
    for column in part:
        for content in _contents(column):
            found.update(content)
    return int.from_bytes(found.digest())


def _sha256(parts: Sequence[Part]) -> str:
    found = hashlib.sha256()
    for pieces in zip(*parts, strict=True):
        for which in zip(*(_contents(piece) for piece in pieces), strict=True):
            for content in which:
                found.update(content)
    return found.hexdigest()


def _contents(column: Packed) -> list[Any]:
    tensors = [column.values] if column.lengths is None else [column.values, column.lengths]
    return [_bytes_of(one).numpy() for one in tensors]


def _num_rows(part: Part) -> int:
    return part[0].num_rows if part else 0


def as_json(line: Line) -> dict[str, Any]:
    return asdict(line)


def from_json(content: Mapping[str, Any]) -> Line:
    line = Line(**content)
    return replace(line, unseen=tuple(line.unseen))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().reshape(-1)
    if flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
