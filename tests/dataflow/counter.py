"""A small real role whose samples tell which weights made them, and steps that use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from penstock.dataflow.graph.axes import Axis, GroupId, f32, i64
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.role import Loss, Metric, Role, call
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.engine import Engine, StepResult
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, one_group
from penstock.dataflow.runtime.worker_protocol import WorkerContext, WorkerSpec
from penstock.dataflow.scheduler.schedule import Schedule
from torch import Tensor

ROW = Axis("row")
Key = Annotated[Tensor, i64(ROW), GroupId()]
Score = Annotated[Tensor, f32(ROW)]


@dataclass(frozen=True, kw_only=True)
class Keys:
    key: Key


@dataclass(frozen=True, kw_only=True)
class Batch:
    score: Score


@dataclass(frozen=True)
class Metrics:
    metrics: dict[str, Metric]


class AnyLoss(Loss[Batch, Tensor]):
    """Never called: the counter trains by itself."""

    tolerates_lag = True


class Model(Role):
    @call("rollout")
    def sample(self, key: Key) -> Score:
        raise NotImplementedError

    @call("train")
    def train(self, loss: Loss[Batch, Tensor], batch: Batch) -> Metrics:
        raise NotImplementedError


class Counter(Model):
    """Its weight is the number of times it was trained, and its samples are its weight."""

    def __init__(self) -> None:
        self.weight = torch.zeros(())

    def sample(self, key: Key) -> Score:
        return self.weight.expand(len(key)).clone()

    def train(self, loss: Loss[Batch, Tensor], batch: Batch) -> Metrics:
        self.weight = self.weight + 1
        rows = len(batch.score)
        return Metrics({"seen": Metric.mean(float(batch.score.sum()), float(rows))})

    def count(self) -> float:
        """For `Engine.call`."""
        return float(self.weight)

    def export_weights(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight.clone()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self.weight = weights["weight"].clone()

    def save_state(self, folder: Path) -> None:
        (folder / "weight.txt").write_text(str(self.weight.item()))

    def load_state(self, folder: Path) -> None:
        self.weight = torch.tensor(float((folder / "weight.txt").read_text()))


@dataclass(frozen=True)
class CounterSpec:
    """Recipe for a `Counter`."""

    def build(self, context: WorkerContext) -> Counter:
        return Counter()


class Numbers:
    """A source of `num_rows` rows with keys 0, 1, 2..."""

    def __init__(self, num_rows: int = 4) -> None:
        self.num_rows = num_rows

    def batch(self, step: int) -> Any:
        return Keys(key=torch.arange(self.num_rows))


def count_step(keys: Keys, model: Model) -> object:
    return model.train(AnyLoss(), Batch(score=model.sample(keys.key)))


def look_step(keys: Keys, model: Model) -> object:
    return model.sample(keys.key)


COUNT = build(count_step)
LOOK = build(look_step)
SOURCES = {"keys": Numbers()}


def apart(graph: Graph, *, num_chunks: int = 1, **nodes: str) -> Placement:
    """Nodes (a dot written as two underscores) on groups of their own; the rest on "main"."""
    chosen = {name.replace("__", "."): group for name, group in nodes.items()}
    placed = {
        node.name: chosen.get(node.name, "main")
        for node in graph.nodes
        if node.name not in graph.sources
    }
    groups = dict.fromkeys(["main", *chosen.values()])
    return Placement(tuple(map(DeviceGroup, groups)), placed, num_chunks)


def engine(
    placement: Placement | None = None,
    *,
    graph: Graph = COUNT,
    worker: Role | WorkerSpec = CounterSpec(),
    max_lag: int = 0,
    deadline_s: float = 30.0,
    **more: Any,
) -> Engine:
    """An engine with one worker, or recipe of it, for every role."""
    return Engine(
        graph,
        placement or one_group(graph),
        workers=dict.fromkeys(graph.roles, worker),
        schedule=Schedule(max_lag=max_lag, deadline_s=deadline_s),
        **more,
    )


def seen(steps: list[StepResult]) -> list[float]:
    """Which weight made each step's samples, by what the training says it saw."""
    return [step.metrics["model.train/seen"] for step in steps]
