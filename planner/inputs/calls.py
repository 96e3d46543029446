"""A graph and a workload as what the planner places: calls of models, with their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ...dataflow.errors import PlanError
from ...dataflow.graph.graph import Constant, Graph, Node
from ...dataflow.kinds import NodeKind
from .model_shape import Head, ModelShape
from .workload import Begun, Lengths, Stretch, Workload, begun_before, stretches

CallKind = Literal["generate", "forward", "train"]

# what a node of a role does with a model
CALL_KINDS: Mapping[NodeKind, CallKind] = {
    NodeKind.ROLLOUT: "generate",
    NodeKind.FORWARD: "forward",
    NodeKind.TRAIN: "train",
}


@dataclass(frozen=True)
class Call:
    """One model call of a step."""

    name: str  # the node's name: "actor.generate"
    role: str  # the role whose weights it uses
    kind: CallKind  # what it does with them
    model: ModelShape  # their shape
    head: Head  # what the model ends in
    trained: bool  # whether some call of the step trains the role
    num_sequences: int  # rows, all samples of all prompts
    prompt: Lengths  # prompt lengths
    response: Lengths  # response lengths
    samples_per_prompt: int = 1  # rows that share a prompt; a generator computes it once
    passes: int = 1  # times the rows are gone over
    updates: int = 1  # optimizer steps
    leader: str = ""  # the role that this one follows, in whose layout and beside which it is held
    # how far a row grows in one step of a generation; None if to its end
    segment_tokens: int | None = None
    # names of the calls whose outputs it needs, directly or through ops, in this step
    after: tuple[str, ...] = ()

    @cached_property
    def tokens_mean(self) -> float:
        return self.prompt.mean + self.response.mean

    @cached_property
    def tokens_longest(self) -> int:
        return self.prompt.longest + self.response.longest

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        return stretches(self.response, self.segment_tokens)

    @cached_property
    def begun_before(self) -> tuple[Begun, ...]:
        return begun_before(self.response, self.segment_tokens)

    @cached_property
    def rows_at_once(self) -> int:
        return math.ceil(self.num_sequences * self.stretches[0].rows * (1.0 - 1e-12))

    @property
    def call_group(self) -> str:
        # A trained role's generation is a call group of its own.
        if self.kind == "generate" and self.trained:
            return f"{self.role}.generate"
        return self.leader or self.role


def calls_of(
    graph: Graph, workload: Workload, models: Mapping[str, ModelShape | None]
) -> tuple[Call, ...]:
    """The calls of a step in program order.

    Ops, roles without a model and a train call without a loss, which moves weights, cost nothing.
    """
    unknown = sorted(models.keys() - graph.roles.keys())
    missing = [role for role in graph.roles if role not in models]
    if unknown or missing:
        wrong = f"has no role '{unknown[0]}'" if unknown else f"needs a model for '{missing[0]}'"
        raise PlanError(f"graph '{graph.name}' {wrong}; its roles are {', '.join(graph.roles)}")
    needs: dict[str, tuple[str, ...]] = {}
    calls: list[Call] = []
    samples = workload.samples_per_prompt or _samples(graph)
    leaders = _leaders(graph, models)
    for node in graph.nodes:
        before = dict.fromkeys(c for _, ref in node.inputs for c in needs.get(ref.node, ()))
        shape = models.get(node.role or "")
        if node.role is None or shape is None or _follows(node):
            needs[node.name] = tuple(before)
            continue
        leader = leaders.get(node.role, "")
        call = _call(graph, node, shape, workload, samples, tuple(before), leader)
        calls.append(call)
        needs[node.name] = (call.name,)
    return tuple(calls)


def _call(
    graph: Graph, node: Node, shape: ModelShape, workload: Workload, samples: int,
    after: tuple[str, ...], leader: str,
) -> Call:  # fmt: skip
    role = node.role or ""
    passes = int(_constant(node, "epochs", 1))
    updates = passes * int(_constant(node, "num_minibatches", 1))
    return Call(
        name=node.name,
        role=role,
        kind=CALL_KINDS[node.kind],
        model=shape,
        head=graph.roles[role].model_head or "vocabulary",
        trained=role in graph.learning_roles,
        leader=leader,
        num_sequences=workload.num_prompts * samples,
        prompt=workload.prompt,
        response=workload.response,
        samples_per_prompt=samples,
        segment_tokens=workload.segment_tokens if node.kind is NodeKind.ROLLOUT else None,
        passes=workload.passes_per_train or passes,
        updates=workload.updates_per_train or updates,
        after=after,
    )


def _follows(node: Node) -> bool:
    return node.kind is NodeKind.TRAIN and not node.learns


def _leaders(graph: Graph, models: Mapping[str, ModelShape | None]) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.role is None or node.leader is None or models.get(node.leader) is None:
            continue
        if models.get(node.role) not in (None, models[node.leader]):
            raise PlanError(
                f"'{node.name}': '{node.role}' follows '{node.leader}' with another model, whose "
                "weights it cannot take; give both the same one"
            )
        found[node.role] = node.leader
    for role in found:
        for _ in found:  # roles that follow each other have no end
            found[role] = found.get(found[role], found[role])
    return found


def _samples(graph: Graph) -> int:
    for node in graph.nodes:
        if node.kind is NodeKind.ROLLOUT:
            sampling = _constant(node, "sampling", None)
            return int(getattr(sampling, "num_samples", 1))
    return 1


def _constant(node: Node, name: str, default: Any) -> Any:
    value = dict(node.arguments).get(name)
    return value.value if isinstance(value, Constant) else default
