"""A graph and a workload as what the planner places: calls of models, with their sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ...dataflow.errors import PlanError
from ...dataflow.graph.graph import Graph, Node
from ...dataflow.kinds import NodeKind
from .model_shape import AtLeastOne, Head, ModelShape, PlanData


class Lengths(PlanData):
    """A distribution of lengths in tokens, as a histogram; a constant is one bin."""

    tokens: tuple[AtLeastOne, ...] = Field(min_length=1)
    """Length of each bin, ascending."""
    weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """Frequency of each, in any unit; equal if empty."""

    @model_validator(mode="after")
    def _fits(self) -> Lengths:
        if self.weights and len(self.weights) != len(self.tokens):
            raise PlanError(
                f"a length histogram has {len(self.tokens)} tokens= but {len(self.weights)} "
                "weights=; give one weight per bin"
            )
        if list(self.tokens) != sorted(set(self.tokens)):
            raise PlanError(
                f"a length histogram's tokens= must ascend without repeats, got {self.tokens}"
            )
        return self

    @staticmethod
    def constant(tokens: int) -> Lengths:
        return Lengths(tokens=(tokens,))

    @property
    def shares(self) -> tuple[float, ...]:
        weights = self.weights or (1.0,) * len(self.tokens)
        return tuple(weight / sum(weights) for weight in weights)

    @property
    def mean(self) -> float:
        return sum(t * share for t, share in zip(self.tokens, self.shares, strict=True))

    @property
    def longest(self) -> int:
        return self.tokens[-1]

    @property
    def mean_square(self) -> float:
        return sum(t * t * share for t, share in zip(self.tokens, self.shares, strict=True))


class Workload(PlanData):
    """One step of the algorithm, in rows and tokens."""

    num_prompts: AtLeastOne
    """Prompts per step."""
    samples_per_prompt: AtLeastOne | None = None
    """Responses per prompt; by default what the graph's rollout says (`Sampling.num_samples`)."""
    prompt: Lengths
    """Prompt lengths."""
    response: Lengths
    """Response lengths."""
    segment_tokens: AtLeastOne | None = None
    """Most tokens of a response in one step; what has not ended goes on in the next. None: to its
    end."""
    updates_per_train: AtLeastOne | None = None
    """Optimizer steps of one train call; by default the graph's `epochs * num_minibatches`."""
    passes_per_train: AtLeastOne | None = None
    """Times a train call goes over its rows; by default the graph's `epochs`."""

    @property
    def num_rows(self) -> int:
        return self.num_prompts * (self.samples_per_prompt or 1)


# With segments every step begins equally many rows and goes on with what is unfinished. Once as
# many rows end in a step as begin in one, a step has, of the rows that began a steps ago, those
# that are longer than a segments; all of them start from what they have and grow together, until
# they end or the segment does. Everything here is of that steady state, per row that a step begins.
@dataclass(frozen=True)
class Stretch:
    """Decode steps of a generation in which the same rows run."""

    begin: int  # tokens that each row has grown by before, in this step
    end: int  # the same after
    rows: float  # rows that run, per row that a step begins
    before: float  # mean tokens that they have from earlier steps


@dataclass(frozen=True)
class Begun:
    tokens: int  # tokens of each row
    rows: float  # rows, per row that a step begins


def stretches(response: Lengths, segment_tokens: int | None = None) -> tuple[Stretch, ...]:
    """The decode steps of one generation in order, the first token included."""
    segment = min(segment_tokens or response.longest, response.longest)
    ends = {(tokens - 1) % segment + 1 for tokens in response.tokens} | {segment}
    found: list[Stretch] = []
    begin = 0
    ages = range(0, response.longest, segment)
    for end in sorted(ends):
        running = [(age, _longer(response, age + begin)) for age in ages]
        rows = sum(share for _, share in running)
        before = sum(age * share for age, share in running) / rows
        found.append(Stretch(begin, end, rows, before))
        begin = end
    return tuple(found)


def begun_before(response: Lengths, segment_tokens: int | None = None) -> tuple[Begun, ...]:
    segment = segment_tokens or response.longest
    ages = range(segment, response.longest, segment)
    return tuple(Begun(age, _longer(response, age)) for age in ages)


def _longer(response: Lengths, tokens: int) -> float:
    left = 1.0
    for length, share in zip(response.tokens, response.shares, strict=True):
        if length > tokens:
            return left
        left -= share
    return 0.0


CallKind = Literal["generate", "forward", "train"]

# what a node of a role does with a model
CALL_KINDS: Mapping[NodeKind, CallKind] = {
    NodeKind.ROLLOUT: "generate",
    NodeKind.FORWARD: "forward",
    NodeKind.TRAIN: "train",
}


@dataclass(frozen=True)
class Call:
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
    # whether it holds conversations, whose other side answers in one process of each rank
    converses: bool = False
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
    def follows_training(self) -> bool:
        """Whether it reads weights that another call of the step trains."""
        return self.trained and self.kind != "train"

    @property
    def call_group(self) -> str:
        if self.follows_training:
            return f"{self.role}.generate" if self.kind == "generate" else self.name
        return self.leader or self.role


def needs_of(graph: Graph, names: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Node -> those of `names` whose outputs it needs, directly or through other nodes."""
    found: dict[str, tuple[str, ...]] = {}
    handed_on: dict[str, tuple[str, ...]] = {}
    for node in graph.nodes:
        before = (name for _, ref in node.inputs for name in handed_on.get(ref.node, ()))
        found[node.name] = tuple(dict.fromkeys(before))
        handed_on[node.name] = (node.name,) if node.name in names else found[node.name]
    return found


def calls_of(
    graph: Graph,
    workload: Workload,
    models: Mapping[str, ModelShape | None],
    verifiers: Collection[str] = (),
) -> tuple[Call, ...]:
    """The calls of a step that compute a model, in program order; they may need `verifiers`.

    Ops, other roles and a train call without a loss, which moves weights, cost nothing.
    """
    unknown = sorted(models.keys() - graph.roles.keys())
    missing = [role for role in graph.roles if role not in models]
    if unknown or missing:
        wrong = f"has no role '{unknown[0]}'" if unknown else f"needs a model for '{missing[0]}'"
        raise PlanError(f"graph '{graph.name}' {wrong}; its roles are {', '.join(graph.roles)}")
    samples = workload.samples_per_prompt or _samples(graph)
    leaders = _leaders(graph, models)
    shapes = {
        node.name: shape
        for node in graph.nodes
        if (shape := models.get(node.role or "")) is not None
        and (node.kind is not NodeKind.TRAIN or node.learns)
    }
    needs = needs_of(graph, {*shapes, *verifiers})
    return tuple(
        _call(graph, graph[name], shape, workload, samples, needs[name],
              leaders.get(graph[name].role or "", ""))
        for name, shape in shapes.items()
    )  # fmt: skip


def _call(
    graph: Graph, node: Node, shape: ModelShape, workload: Workload, samples: int,
    after: tuple[str, ...], leader: str,
) -> Call:  # fmt: skip
    role = node.role or ""
    passes = int(node.constants.get("epochs", 1))
    updates = passes * int(node.constants.get("num_minibatches", 1))
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
        converses=node.method == "converse",
        after=after,
    )


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
            return int(getattr(node.constants.get("sampling"), "num_samples", 1))
    return 1
