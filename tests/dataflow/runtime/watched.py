"""A role that is given another one, and asks it while it makes rows: who answers can be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.role import Role, call
from penstock.dataflow.graph.tracer import build
from penstock.dataflow.runtime.placement import DeviceGroup, Placement
from penstock.dataflow.runtime.remote_inference import Array
from penstock.dataflow.runtime.worker_protocol import WorkerContext

from .. import counter
from ..counter import AnyLoss, Batch, Counter, Key, Keys, Score


class Told(NamedTuple):
    """f64[rows]."""

    value: Array


class Teller(counter.Model):
    """A model that can be asked."""

    def tell(self, key: Array) -> Told:
        """f64[rows] for i64[rows]."""
        raise NotImplementedError


class CountTeller(Counter, Teller):
    """Tells a hundred times its weight, and which row was asked for."""

    def tell(self, key: Array) -> Told:
        if key.max(initial=0) >= 1000:
            raise ValueError(f"no key {key.max()}")
        return Told(100.0 * float(self.weight) + key)


@dataclass(frozen=True)
class TellerSpec:
    """Recipe for a `CountTeller`."""

    def build(self, context: WorkerContext) -> CountTeller:
        return CountTeller()


class Watcher(Role):
    @call("rollout")
    def watch(self, key: Key, model: Teller) -> Score:
        raise NotImplementedError


class AskingWatcher(Watcher):
    """Makes a row of each answer, and asks for one row at a time."""

    def watch(self, key: Key, model: Teller) -> Score:
        told = [model.tell(np.array([one])).value[0] for one in key.tolist()]
        return key.new_tensor(told).float()


@dataclass(frozen=True)
class WatcherSpec:
    """Recipe for an `AskingWatcher`."""

    def build(self, context: WorkerContext) -> AskingWatcher:
        return AskingWatcher()


def watch_step(keys: Keys, watcher: Watcher, model: Teller) -> object:
    return model.train(AnyLoss(), Batch(score=watcher.watch(keys.key, model)))


def look_step(keys: Keys, watcher: Watcher, model: Teller) -> object:
    return watcher.watch(keys.key, model)


WATCH = build(watch_step)
LOOK = build(look_step)
SOURCES: Mapping[str, Any] = {"keys": counter.Numbers()}
WORKERS: Mapping[str, Any] = {"watcher": WatcherSpec(), "model": TellerSpec()}


def placed(server: str | None, *, num_ranks: int = 1, num_servers: int = 1) -> Placement:
    """Watching on a group of its own, which `server` serves; None for a copy of its own."""
    watch = DeviceGroup("watch", num_ranks, served={"model": server} if server else {})
    groups = [DeviceGroup("main"), watch]
    if server == "server":
        groups.append(DeviceGroup("server", num_servers))
    nodes = {"watcher.watch": "watch", "model.train": "main"}
    return Placement(tuple(groups), nodes, num_chunks=2)


def on(placement: Placement, graph: Graph) -> Placement:
    """The same groups for another graph."""
    names = {node.name for node in graph.nodes}
    return replace(placement, nodes={n: g for n, g in placement.nodes.items() if n in names})
