"""When a step is captured, replayed and captured again; on a pretended device and on a real one."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from penstock.workers.engines.torch_engine import device_decode
from penstock.workers.engines.torch_engine.device_decode import StepGraphs


class Driver:
    """Stands for CUDA: a captured step does nothing now, and its graph does it again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, int]] = []
        self.pools: list[object] = []
        self.rooms: list[tuple[object, ...]] = []
        self._into: Any = None
        driver = self

        class Graph:
            done: int

            def replay(self) -> None:
                driver.log.append(("replayed", self.done))

            def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
                assert capture_error_mode == "thread_local"
                assert not gc.isenabled()
                driver.pools.append(pool)
                driver._into = self

            def capture_end(self) -> None:
                driver._into = None

        def context(given: object) -> object:
            return nullcontext()

        class Stream:
            def __init__(self, device: object = None) -> None: ...

        fakes: dict[str, Callable[..., object]] = {
            "stream": context,
            "device": context,
            "CUDAGraph": Graph,
            "graph_pool_handle": object,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(device_decode, "capture_stream", Stream)
        monkeypatch.setattr(device_decode, "prepare_capture", self.prepare)

    def prepare(self, *given: object) -> None:
        self.rooms.append(given)

    def step(self, span: int) -> None:
        if self._into is None:
            self.log.append(("done", span))
        else:
            self._into.done = span


def test_the_first_step_of_a_span_is_done_and_captured_and_others_replayed(
    monkeypatch: pytest.MonkeyPatch,
):
    driver = Driver(monkeypatch)
    graphs = StepGraphs(torch.device("cuda"), 300)
    for span in (64, 64, 128, 64, 128):
        graphs.run(driver.step, span, 7)
    assert driver.log == [
        ("done", 64),
        ("replayed", 64),
        ("done", 128),
        ("replayed", 64),
        ("replayed", 128),
    ]
    assert graphs.num_captured == 2
    assert len(driver.pools) == 2
    assert len(set(driver.pools)) == 1  # one pool
    assert driver.rooms == 2 * [(torch.device("cuda"), 300)]
    assert gc.isenabled()


@pytest.mark.parametrize("how", ["cleared", "other weights"])
def test_graphs_are_captured_again_in_a_pool_of_their_own(
    how: str, monkeypatch: pytest.MonkeyPatch
):
    driver = Driver(monkeypatch)
    graphs = StepGraphs(torch.device("cuda"))
    graphs.run(driver.step, 64, 7)
    if how == "cleared":
        graphs.clear()
    graphs.run(driver.step, 64, 8 if how == "other weights" else 7)
    graphs.run(driver.step, 64, 8 if how == "other weights" else 7)
    assert driver.log == [("done", 64), ("done", 64), ("replayed", 64)]
    assert graphs.num_captured == 2
    assert len(set(driver.pools)) == 2


@pytest.mark.gpu
def test_a_real_graph_does_the_step_again_on_what_is_there_then():
    device = torch.device("cuda")
    weights, state = torch.full((4, 4), 2.0, device=device), torch.ones(3, 4, device=device)

    def step(span: int) -> None:
        state.copy_((state @ weights)[:, :span].sum(1, keepdim=True).expand(-1, 4) / 32)

    graphs = StepGraphs(device)
    expected = torch.ones(3, 4, device=device)
    for turn in range(12):
        span = (4, 4, 2)[turn % 3]
        if turn == 6:
            weights.fill_(3.0)  # in place: graphs use it
        graphs.run(step, span, weights.data_ptr())
        expected = (expected @ weights)[:, :span].sum(1, keepdim=True).expand(-1, 4) / 32
        assert torch.equal(state, expected)
    assert graphs.num_captured == 2
