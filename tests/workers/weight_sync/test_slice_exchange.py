"""A worker that cannot use what has come counts as having no weights."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from penstock.dataflow.errors import WorkerError
from penstock.dataflow.graph.role import Worker
from penstock.planner.resharding.sharding import Sharding, unsharded
from penstock.workers.weight_sync.packets import SliceTraffic, WeightsError
from torch import Tensor

SHAPES = {"gate": (2, 3), "up": (4,)}
LAYOUT = unsharded(SHAPES, (0,))


class Sender(Worker):
    def weights_layout(self) -> Sharding:
        return LAYOUT

    def local_tensors(self) -> Mapping[str, Tensor]:
        return {name: torch.ones(shape) for name, shape in SHAPES.items()}


class Taker(Worker):
    fails = False

    def weights_layout(self) -> Sharding:
        return LAYOUT

    def receive(self, tensors: Mapping[str, Tensor], version: int) -> None:
        if self.fails:
            raise ZeroDivisionError("on purpose")
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == SHAPES


def test_weights_that_could_not_be_used_are_held_in_no_version() -> None:
    traffic, taker = SliceTraffic(0, (0,)), Taker()

    def arrive(version: int) -> None:
        made = SliceTraffic(0, (0,)).export(Sender(), {"rollout": LAYOUT}, version)
        traffic.write("actor", taker, LAYOUT, [made["rollout", 0]], version)

    arrive(1)
    traffic.check("actor", 1)
    with pytest.raises(WeightsError, match="is of version 1; version 2 is expected"):
        traffic.check("actor", 2)
    taker.fails = True
    with pytest.raises(ZeroDivisionError):
        arrive(2)
    with pytest.raises(WeightsError, match="was never received; version 2 is expected"):
        traffic.check("actor", 2)
    taker.fails = False
    arrive(2)
    traffic.check("actor", 2)


def test_a_worker_that_only_takes_weights_exports_none() -> None:
    with pytest.raises(WorkerError, match="a Taker cannot export its weights in slices"):
        SliceTraffic(0, (0,)).export(Taker(), {"rollout": LAYOUT}, 1)
