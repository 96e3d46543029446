"""Measure the step's own loss on held-out demonstrations or pairs, without gradients.

The trained role's log-probabilities or scores are computed where it is trained, by any engine, and
the loss is taken of all rows at once in this process: it does not depend on micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import networkx as nx
import torch

from ...algorithms.roles.language import Policy, PolicyOutput, RewardModel, ScoreOutput
from ...dataflow.graph.axes import DType, Spec
from ...dataflow.graph.graph import Constant, Graph, Node, NodeKind, OutputColumn, Ref
from ...dataflow.graph.role import Role
from ...dataflow.runtime.engine import Engine, Source
from ...dataflow.runtime.executor import Program
from ...dataflow.runtime.placement import Placement, one_group
from ...dataflow.runtime.worker_protocol import WorkerSpec
from ...dataflow.scheduler.schedule import Schedule
from ...workers.data.sources import DemonstrationSource, PairSource
from ..run_dir.evaluations import LOSS, WHOLE, Measured
from .measuring import Evaluates

_PROGRAM = "held_out_loss"


def _always(table: Any) -> Any:
    """Return a source that gives this table in every step."""
    return SimpleNamespace(batch=lambda _: table)  # pyright: ignore[reportUnknownLambdaType]


@dataclass(frozen=True)
class HeldOutRows:
    """A step's tables of held-out rows, and how their loss is computed.

    Attributes:
        graph: Computes the loss's inputs: all that the train call reads, and its role's outputs.
        train: The train call.
        tables: Table -> held-out rows.
    """

    graph: Graph
    train: Node
    tables: Mapping[str, Any]

    @classmethod
    def of(cls, graph: Graph, sources: Mapping[str, Source]) -> HeldOutRows | None:
        """Return the rows of a step that learns from rows alone; None for others or without rows.

        A loss that reads more than log-probabilities or scores is left out as well.
        """
        rows = {
            name: source.held_out()
            for name, source in sources.items()
            if isinstance(source, DemonstrationSource | PairSource)
        }
        trains = [node for node in graph.nodes if node.kind is NodeKind.TRAIN]
        if len(rows) < len(sources) or None in rows.values() or len(trains) != 1:
            return None
        (train,) = trains
        loss = getattr(dict(train.arguments).get("loss"), "value", None)
        before = nx.ancestors(graph.dag, train.name)
        nodes = [node for node in graph.nodes if node.name in before]
        forward = None if loss is None or loss.needs_entropy else _forward(graph, train)
        if forward is None or any(node.kind is NodeKind.ROLLOUT for node in nodes):
            return None
        roles = {node.role for node in (*nodes, forward)}
        kept = {role: contract for role, contract in graph.roles.items() if role in roles}
        own = Graph(_PROGRAM, (*nodes, forward), kept, graph.sources, results=(forward.name,))
        return cls(own, train, rows)

    def measure(self, engine: Engine, program: str) -> dict[str, float]:
        """Return the loss with the current weights and, for pairs, the share that is told apart."""
        given = dict(self.train.arguments)
        batch: Any = given["batch"]
        made = self.graph.nodes[-1]
        refs = {name: ref for name, ref in batch.fields if isinstance(ref, Ref)}
        keep = [str(Ref(made.name, "out")), *map(str, refs.values())]
        sources = {name: _always(table) for name, table in self.tables.items()}
        (result,) = engine.run(sources, 1, program=program, keep=keep)
        columns = {name: result.kept[str(ref)] for name, ref in refs.items()}
        constants = {n: value.value for n, value in batch.fields if isinstance(value, Constant)}
        rows, out = batch.table(**columns, **constants), result.kept[keep[0]].double()
        loss: Any = getattr(given["loss"], "value", None)
        of_words = made.method == "logprob"
        output = PolicyOutput(logprob=out) if of_words else ScoreOutput(score=out)
        with torch.no_grad():
            found = loss.checked(output, rows, loss.totals(rows).double())
        shares = {name: s / w for name, (s, w) in found.metrics.items() if name == "accuracy" and w}
        losses = {f"{LOSS}/{name}": float(share) for name, share in shares.items()}
        return {LOSS: float(found.total), **losses}


def _forward(graph: Graph, train: Node) -> Node | None:
    """Return the call that computes what a train call's loss reads; None if there is none."""
    given = dict(train.arguments)
    fields: dict[str, Any] = dict(getattr(given["batch"], "fields", ()))
    contract, tokens = graph.roles[train.role or ""], fields.get("tokens")
    if not isinstance(tokens, Ref) or "mask" not in fields or "words" in fields:
        return None
    made = graph[tokens.node].output(tokens.column)
    arguments: dict[str, Any] = {"tokens": tokens, "mask": fields["mask"]}
    if issubclass(contract, Policy):
        method, axes = "logprob", made.spec.axes
        arguments |= {key: given[key] for key in ("temperature",) if key in given}
    elif issubclass(contract, RewardModel) and "pair_id" in fields:
        method, axes = "score", made.spec.axes[:1]
        arguments["prompt_id"] = fields["pair_id"]
    else:
        return None
    return replace(
        train,
        name=f"{train.role}.{_PROGRAM}",
        kind=NodeKind.FORWARD,
        scope="row",
        method=method,
        arguments=tuple(arguments.items()),
        outputs=(OutputColumn("out", Spec(DType.F32, axes), made.rows),),
    )


class HeldOutLoss:
    """Measures the loss on held-out rows, besides what another evaluator measures.

    Args:
        rows: The rows.
        inner: The other evaluator, if there is one.
        placed: Where the nodes of a graph run.

    Attributes:
        programs: Programs that the engine must run.
        workers: Role -> its worker, for the other evaluator alone.
    """

    def __init__(
        self, rows: HeldOutRows, inner: Evaluates | None, placed: Callable[[Graph], Placement]
    ) -> None:
        self._rows, self._inner = rows, inner
        own = {_PROGRAM: Program(rows.graph, placed(rows.graph))}
        self.programs = {**(inner.programs if inner else {}), **own}
        self.workers: dict[str, WorkerSpec | Role] = inner.workers if inner else {}

    def measure(self, engine: Engine) -> dict[str, Measured]:
        """Measure with the other evaluator, and add the loss to the suite without a name."""
        found = self._inner.measure(engine) if self._inner else {}
        losses = self._rows.measure(engine, _PROGRAM)
        return {**found, WHOLE: replace(found.get(WHOLE, Measured({})), losses=losses)}


def held_out_losses(
    rows: HeldOutRows,
    workers: Mapping[str, WorkerSpec | Role],
    *,
    device: str,
    seed: int,
    deadline_s: float | None,
) -> dict[str, float]:
    """Return the loss of some weights in this process, outside any run; see `evaluate`."""
    with Engine(
        rows.graph,
        one_group(rows.graph, device=device),
        workers={role: workers[role] for role in rows.graph.roles},
        schedule=Schedule(deadline_s=deadline_s),
        seed=seed,
    ) as engine:
        return rows.measure(engine, "main")
