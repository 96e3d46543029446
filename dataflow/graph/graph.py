"""The graph of a step: frozen data that prints, compares, serializes and draws.

A `Graph` is what `build` records and all that the scheduler, the planner and the engine ever see of
an algorithm. Nodes are in program order, which is a topological order; edges are references to the
producer's column, never matched names.

A rollout streams if its rows come from a source: a rank samples all that it has of a step together,
and a part of them goes on when its last row has ended. A train call streams if it can take such
parts one by one: each gives its gradient, and the optimizer's step comes with the last. Everything
else follows from the scopes of the ops in between; one that needs the whole batch is a barrier.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..errors import FlowError, Where
from ..kinds import NodeKind, WeightRead
from ..registry import imported
from .axes import Spec
from .role import Loss, Role, Scope

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Ref:
    """An edge: one output column of another node."""

    node: str
    column: str

    def __str__(self) -> str:
        return f"{self.node}.{self.column}"


@dataclass(frozen=True)
class RoleRef:
    """A role passed as an argument: the callee reads that role's weights."""

    role: str

    def __str__(self) -> str:
        return f"<{self.role}>"


@dataclass(frozen=True)
class Constant:
    """A value fixed when the step was recorded."""

    value: Any

    def __str__(self) -> str:
        return _describe(self.value)


@dataclass(frozen=True)
class TableArgument:
    """A table built from columns, as a train call's batch is."""

    table: type
    fields: tuple[tuple[str, Argument], ...]


Argument = Ref | RoleRef | Constant | TableArgument


@dataclass(frozen=True)
class OutputColumn:
    name: str  # Field name in the output table, or "out" for a single column
    spec: Spec
    rows: str  # Which node made the rows this column describes; columns with equal `rows` line up
    group_id: bool = False  # True if it says which group each row belongs to
    behavior: bool = False  # True if it is the log-probability the rows were made with


@dataclass(frozen=True)
class Node:
    """One call of the step."""

    # `actor.generate`, `gae`, `ref.logprob#2`; unique, deterministic, what plans refer to.
    name: str
    kind: NodeKind
    scope: Scope
    ordinal: int  # Calls of the same method or op before it in the step
    where: Where  # The line of the step function that made it
    role: str | None = None
    method: str | None = None
    function: Callable[..., Any] | None = None
    # Parameter name -> argument, in the callee's order.
    arguments: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[OutputColumn, ...] = ()
    # The dataclass of the outputs, or None for a single column or none.
    output_table: type | None = None
    reads: tuple[WeightRead, ...] = ()  # Weights this call reads, own role first

    @cached_property
    def inputs(self) -> tuple[tuple[str, Ref], ...]:
        """Every column read, as (path, producer): `("batch.advantage", Ref(...))`."""
        return tuple(_references(self.arguments))

    @property
    def constants(self) -> dict[str, Any]:
        """Parameter name -> value, of the arguments that are constants."""
        return {name: one.value for name, one in self.arguments if isinstance(one, Constant)}

    @property
    def roles_given(self) -> tuple[str, ...]:
        """Roles that are arguments, as an actor is of a rollout."""
        return tuple(one.role for _, one in self.arguments if isinstance(one, RoleRef))

    @property
    def learns(self) -> bool:
        losses = [value for value in self.constants.values() if isinstance(value, Loss)]
        return self.kind is NodeKind.TRAIN and bool(losses)

    @property
    def leader(self) -> str | None:
        """The role whose weights it moves its own role's towards; None if it does no such thing."""
        given = dict(self.arguments).get("leader")
        return given.role if isinstance(given, RoleRef) else None

    def output(self, column: str) -> OutputColumn:
        for output in self.outputs:
            if output.name == column:
                return output
        raise KeyError(column)


def _references(
    arguments: tuple[tuple[str, Argument], ...], prefix: str = ""
) -> Iterator[tuple[str, Ref]]:
    for name, argument in arguments:
        if isinstance(argument, Ref):
            yield prefix + name, argument
        elif isinstance(argument, TableArgument):
            yield from _references(argument.fields, f"{prefix}{name}.")


def argument_json(argument: Argument) -> Any:
    if isinstance(argument, TableArgument):
        fields = {name: argument_json(value) for name, value in argument.fields}
        return {"table": argument.table.__name__, "fields": fields}
    if isinstance(argument, Ref):
        return {"from": str(argument)}
    if isinstance(argument, RoleRef):
        return {"role": argument.role}
    return {"constant": _describe(argument.value)}


def _describe(value: Any) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [
            f"{field.name}={_describe(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        ]
        return f"{type(value).__name__}({', '.join(shown)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return repr(value)


@dataclass(frozen=True)
class Graph:
    """A recorded step.

    Attributes:
        name: The step function's name.
        nodes: In program order.
        roles: Role name -> contract, in the step function's parameter order.
        sources: Source name -> table class.
        results: Names of the nodes whose outputs or metrics the step function returned.
        reported: The columns it returned; those with one number per row are logged as their mean.

    Raises:
        FlowError: If two nodes share a name or an edge points to nothing.
    """

    name: str
    nodes: tuple[Node, ...]
    roles: Mapping[str, type[Role]]
    sources: Mapping[str, type]
    results: tuple[str, ...] = ()
    reported: tuple[Ref, ...] = ()

    def __post_init__(self) -> None:
        seen: dict[str, Node] = {}
        for node in self.nodes:
            if node.name in seen:
                raise FlowError(
                    f"two nodes are named '{node.name}'",
                    where=node.where,
                    origin=f"the first was made at {seen[node.name].where.short}",
                    fix="give one of them another name",
                )
            for path, ref in node.inputs:
                if ref.node not in seen:
                    raise FlowError(
                        f"node '{node.name}', input '{path}': '{ref}' is made by no earlier node",
                        where=node.where,
                        fix="an edge must point to a node that stands before it",
                    )
            seen[node.name] = node

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def dag(self) -> nx.DiGraph[str]:
        """The nodes as a frozen networkx DiGraph; each edge lists the columns it carries."""
        import networkx as nx  # a fifth of the time that torch takes, and our own code needs none

        dag: nx.DiGraph[str] = nx.DiGraph(name=self.name)
        for node in self.nodes:
            dag.add_node(node.name, kind=node.kind.value, scope=node.scope, role=node.role)
            for _, ref in node.inputs:
                columns: tuple[str, ...] = dag.get_edge_data(ref.node, node.name, {}).get(
                    "columns", ()
                )
                if ref.column not in columns:
                    dag.add_edge(ref.node, node.name, columns=(*columns, ref.column))
        return nx.freeze(dag)

    @cached_property
    def trains_per_step(self) -> dict[str, int]:
        """Trained role -> number of its train calls in one step."""
        counts: dict[str, int] = {}
        for node in self.nodes:
            if node.kind is NodeKind.TRAIN and node.role:
                counts[node.role] = counts.get(node.role, 0) + 1
        return counts

    @cached_property
    def learning_roles(self) -> frozenset[str]:
        """Trained roles with a loss: they need gradients and an optimizer.

        A role that only follows another is trained too, since its weights have versions.
        """
        return frozenset(node.role for node in self.nodes if node.role and node.learns)

    def consumers(self, name: str) -> tuple[str, ...]:
        return tuple(n.name for n in self.nodes if any(ref.node == name for _, ref in n.inputs))

    def ancestors(self, name: str) -> set[str]:
        """Nodes on whose outputs a node depends, directly or by way of others."""
        found = set[str]()
        todo = [name]
        while todo:
            new = {ref.node for _, ref in self[todo.pop()].inputs} - found
            found |= new
            todo += new
        return found

    def streams(self, node: Node, ref: Ref) -> bool:
        """True if the edge may carry part of a batch before the rest is there."""
        return node.scope != "batch" and self[ref.node].scope != "batch"

    def weights_note(self, node: Node) -> str:
        """The weight versions that a node reads or makes; empty if only frozen roles are concerned.

        `reads actor@0 or older` for a call, `actor@0 -> actor@1` for a train call.
        """
        reads = [
            f"{read.role}@{read.offset}{' or older' if read.lagged else ''}"
            for read in node.reads
            if self.trains_per_step.get(read.role)
        ]
        if node.kind is NodeKind.TRAIN:
            return f"{reads[0]} -> {node.role}@{node.reads[0].offset + 1}"
        return f"reads {', '.join(reads)}" if reads else ""

    def __str__(self) -> str:
        """One node per paragraph in program order; stable, so tests compare it."""
        lines = [f"graph {self.name}"]
        for name, table in self.sources.items():
            lines.append(f"  source {name}: {table.__name__}")
        for name, contract in self.roles.items():
            trained = "trained" if self.trains_per_step.get(name) else "frozen"
            lines.append(f"  role {name}: {contract.__name__}, {trained}")
        for node in self.nodes:
            if node.kind is not NodeKind.SOURCE:
                lines.extend(["", *_node_lines(self, node)])
        lines.extend(["", f"returns {', '.join(self.results) or 'nothing'}"])
        return "\n".join(lines)

    def _repr_svg_(self) -> str:
        return imported("penstock.dataflow.render.svg:to_svg")(self)  # which reads graphs

    def diff(self, other: Graph) -> str:
        """A unified diff of the two graphs' texts; empty if they are the same."""
        lines = difflib.unified_diff(
            str(self).splitlines(), str(other).splitlines(), self.name, other.name, lineterm=""
        )
        return "\n".join(lines)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of nodes and edges, whatever constants they are given: 16 hexadecimal digits."""
        wiring = json.dumps([_wiring(node) for node in self.nodes])
        return hashlib.sha256(wiring.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The graph as JSON text: nodes, edges, roles, sources, results. Stable across runs."""
        return json.dumps(
            {
                "name": self.name,
                "sources": {name: table.__name__ for name, table in self.sources.items()},
                "roles": {
                    name: {
                        "contract": contract.__name__,
                        "trains_per_step": self.trains_per_step.get(name, 0),
                    }
                    for name, contract in self.roles.items()
                },
                "nodes": [_node_json(node) for node in self.nodes],
                "results": list(self.results),
            },
            indent=2,
        )


def _wiring(node: Node) -> list[Any]:
    inputs = [[path, ref.node, ref.column] for path, ref in node.inputs]
    reads = [[read.role, read.offset] for read in node.reads]
    return [node.name, node.kind.value, node.scope, node.role, node.method, inputs, reads]


def _node_json(node: Node) -> dict[str, Any]:
    return {
        "name": node.name,
        "kind": node.kind.value,
        "scope": node.scope,
        "role": node.role,
        "method": node.method,
        "op": f"{node.function.__module__}:{node.function.__qualname__}" if node.function else None,
        "arguments": {name: argument_json(argument) for name, argument in node.arguments},
        "outputs": [{"name": o.name, "spec": str(o.spec), "rows": o.rows} for o in node.outputs],
        "reads": [dataclasses.asdict(read) for read in node.reads],
        "where": node.where.short,
    }


def _node_lines(graph: Graph, node: Node) -> list[str]:
    note = graph.weights_note(node)
    head = f"{node.name}  [{node.kind.value}, {node.scope}]"
    lines = [f"{head}  {note}" if note else head]
    for name, argument in node.arguments:
        lines.extend(_argument_lines(graph, node, name, argument))
    for output in node.outputs:
        lines.append(f"  -> {output.name} {output.spec}")
    return lines


def _argument_lines(graph: Graph, node: Node, name: str, argument: Argument) -> list[str]:
    if isinstance(argument, TableArgument):
        lines = [f"  {name}: {argument.table.__name__}"]
        for field, value in argument.fields:
            lines.extend("  " + line for line in _argument_lines(graph, node, field, value))
        return lines
    if isinstance(argument, Ref):
        arrow = "~>" if graph.streams(node, argument) else "<-"
        return [f"  {name} {arrow} {argument}"]
    if isinstance(argument, RoleRef):
        return [f"  {name} = role {argument.role}"]
    return [f"  {name} = {Constant(argument.value)}"]


_MOST_TOTALS = 64  # At least as many numbers as any loss has totals


@dataclass(frozen=True)
class Streaming:
    """Nodes that stream in a step, in program order."""

    rollouts: tuple[str, ...] = ()  # Nodes that stream
    # Train node that takes parts one by one -> the rollout in whose order.
    order_of: Mapping[str, str] = field(default_factory=dict[str, str])
    # Rollout or train node that does not stream -> why, and what to change.
    why_not: Mapping[str, str] = field(default_factory=dict[str, str])
    nodes: tuple[str, ...] = ()  # All rollouts and train nodes

    def __str__(self) -> str:
        return "\n".join(self._line(name) for name in self.nodes)

    def _line(self, name: str) -> str:
        if name in self.why_not:
            return f"{name} cannot stream: {self.why_not[name]}"
        if name in self.order_of:
            rollout = self.order_of[name]
            return (
                f"{name} streams: it takes the parts of {rollout} one by one, by the length of "
                "their longest rows"
            )
        return f"{name} streams: a part goes on when its last row has ended"


def streaming(graph: Graph) -> Streaming:
    """Find the rollouts and train calls that can stream, and the reason why others cannot."""
    rollouts: list[str] = []
    order_of: dict[str, str] = {}
    why_not: dict[str, str] = {}
    nodes = [node for node in graph.nodes if node.kind in (NodeKind.ROLLOUT, NodeKind.TRAIN)]
    for node in nodes:
        if node.kind is NodeKind.ROLLOUT:
            reason = _rollout_why_not(graph, node)
            if not reason:
                rollouts.append(node.name)
        else:
            sampled = [name for name in _before(graph, node) if name in rollouts]
            reason = _train_why_not(graph, node, sampled)
            if not reason:
                order_of[node.name] = sampled[0]
        if reason:
            why_not[node.name] = reason
    return Streaming(tuple(rollouts), order_of, why_not, tuple(node.name for node in nodes))


def _rollout_why_not(graph: Graph, node: Node) -> str:
    if node.scope == "batch":
        return "it is one call for the whole batch"
    if node.role is not None and graph.roles[node.role].keeps_state:
        return f"'{node.role}' keeps state, so each of its calls comes after the one before"
    asked = [argument.role for _, argument in node.arguments if isinstance(argument, RoleRef)]
    if asked:
        return f"it asks '{asked[0]}' on the way, and such calls are not served together"
    made = [ref.node for _, ref in node.inputs if graph[ref.node].kind is not NodeKind.SOURCE]
    return f"its rows are made in the step, by '{made[0]}', and not by a source" if made else ""


def _train_why_not(graph: Graph, node: Node, sampled: list[str]) -> str:
    if not node.learns:
        return "it has no loss, whose gradients could be added up"
    if len(sampled) != 1:
        which = " and ".join(f"'{name}'" for name in sampled)
        why = f"it trains on rows of {which}, and takes parts in the order of one rollout"
        return why if sampled else "nothing that it trains on streams"
    barriers = [name for name in _before(graph, node) if graph[name].scope == "batch"]
    barriers = [name for name in barriers if graph[name].kind is not NodeKind.SOURCE]
    if barriers:
        return f"'{barriers[0]}' needs the whole batch; use an op of row or group scope there"
    given = {name: a.value for name, a in node.arguments if isinstance(a, Constant)}
    loss = next(value for value in given.values() if isinstance(value, Loss))
    for name in ("epochs", "num_minibatches"):
        if given.get(name, 1) != 1:
            return f"{name} is {given[name]}, and each optimizer step needs its rows first; set 1"
    if loss.divisor(torch.ones(_MOST_TOTALS, dtype=torch.float64)) is None:
        name = type(loss).__name__
        return f"{name} needs sums over all rows before the first; use a loss with a `divisor`"
    return ""


def _before(graph: Graph, node: Node) -> list[str]:
    found = {ref.node for _, ref in node.inputs}
    for other in reversed(graph.nodes):
        if other.name in found:
            found |= {ref.node for _, ref in other.inputs}
    return [other.name for other in graph.nodes if other.name in found]


def check_segments(graph: Graph) -> None:
    """Require that rollouts may go on in later steps."""
    found = streaming(graph)
    for node in graph.nodes:
        if node.kind is NodeKind.ROLLOUT and node.name in found.why_not:
            raise FlowError(
                f"'{node.name}' cannot go on in a later step (Schedule.segment_tokens): "
                f"{found.why_not[node.name]}",
                where=node.where,
                fix="set Schedule(segment_tokens=0), or have it begin with the step's own data",
            )
        if node.kind is NodeKind.TRAIN:
            _check_minibatches(node)
    after: dict[str, str] = {}
    for node in graph.nodes:
        if node.name in found.rollouts:
            after[node.name] = node.name
            continue
        rollouts = {after[ref.node] for _, ref in node.inputs if ref.node in after}
        if not rollouts:
            continue
        after[node.name] = next(iter(sorted(rollouts)))
        others = [str(ref) for _, ref in node.inputs if ref.node not in after]
        if others or len(rollouts) > 1:
            raise _mixed(node, sorted(rollouts), others)


def _check_minibatches(node: Node) -> None:
    given = {name: a.value for name, a in node.arguments if isinstance(a, Constant)}
    if given.get("num_minibatches", 1) != 1:
        raise FlowError(
            f"'{node.name}' cuts its rows into {given['num_minibatches']} minibatches, and with "
            "Schedule.segment_tokens a step may have fewer rows than that",
            where=node.where,
            fix="set num_minibatches=1, or Schedule(segment_tokens=0)",
        )


def _mixed(node: Node, rollouts: list[str], others: list[str]) -> FlowError:
    beside = f"'{others[0]}'" if others else f"those of '{rollouts[1]}'"
    return FlowError(
        f"'{node.name}' takes {beside} beside rows of '{rollouts[0]}', which with "
        "Schedule.segment_tokens are of groups that ended in this step, whichever began them",
        where=node.where,
        fix=f"take all of its columns from '{rollouts[0]}' (ids say which rows they are), or set "
        "Schedule(segment_tokens=0)",
    )
