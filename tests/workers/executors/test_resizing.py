"""Replicas join and leave during a run, and the weights come out as if none had."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from penstock.dataflow.runtime import recovery
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.executor import Recovered, Recovery, Restart
from penstock.dataflow.runtime.in_process import InProcess
from penstock.dataflow.runtime.placement import one_group
from penstock.dataflow.runtime.recovery import Scale
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.launch.run_dir.checkpoint import CheckpointStore
from penstock.workers.executors.supervisor import Supervisor

from ...algorithms import runs
from .backends import Backend
from .mortal import MortalSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS, NUM_CHUNKS = 5, 4


@dataclass
class Wishes:
    """Wishes for one size after another, each at a random moment, and waits until it can begin."""

    executor: Supervisor
    sizes: list[int]
    rng: random.Random
    told: list[str] = field(default_factory=list[str])
    wished: dict[str, int] = field(default_factory=dict[str, int])

    def wish(self) -> Mapping[str, int]:
        if len(self.told) == len(self.sizes) or self.rng.random() < 0.7:
            return self.wished
        self.wished = {"rollout": self.sizes[len(self.told)]}
        end_s = time.monotonic() + 300
        while not self.executor.prepare("rollout", self.wished["rollout"]):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        return self.wished


def check_sizes(
    backend: Backend,
    sizes: list[int],
    max_lag: int,
    monkeypatch: pytest.MonkeyPatch,
    checkpoints: CheckpointStore | None = None,
    **workers: Any,
) -> list[Recovered]:
    monkeypatch.setattr(recovery, "_LOOK_S", 0.0)
    run = runs.make("grpo")
    here = replace(one_group(run.graph), num_chunks=NUM_CHUNKS)
    apart = run.apart(2, num_chunks=NUM_CHUNKS)
    found: list[str] = []
    died: list[Recovered | Restart] = []
    executor = backend.executor()
    wishes = Wishes(executor, sizes, random.Random(max_lag))
    scale = Scale(wishes.wish, wishes.told.append)
    spans: set[tuple[str, int]] = set()
    for placement, one, asked in ((here, InProcess(), None), (apart, executor, scale)):
        given, every = (workers, 2 if checkpoints else None) if asked else ({}, None)
        with Engine(
            run.graph,
            placement,
            workers={**run.workers, **given},
            executor=one,
            schedule=Schedule(max_lag=max_lag),
            recovery=Recovery(pause_s=0.0),
            recovered=died.append,
        ) as engine:
            for step in engine.run(
                run.sources,
                NUM_STEPS,
                checkpoint_every=every,
                checkpoints=checkpoints if every else None,
                scale=asked,
            ):
                spans |= {(span.group, span.rank) for span in step.spans}
            found.append(engine.call("actor", "weights_sha256"))
    assert found[0] == found[1]
    before = [2, *sizes]
    assert wishes.told == [
        f"group 'rollout' has {now} ranks, and had {was}"
        for was, now in zip(before, sizes, strict=False)
    ]
    assert {rank for group, rank in spans if group == "rollout"} >= set(range(max(sizes)))
    return [one for one in died if isinstance(one, Recovered)]


def test_with_the_same_weights(spawned: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sizes(spawned, [3, 1], 1, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("max_lag", [0, 1, 2])
def test_on_ray_too(max_lag: int, on_ray: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    check_sizes(on_ray, [3, 1, 4], max_lag, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("max_lag", [0, 1])
def test_a_run_that_goes_back_keeps_those_that_joined(
    max_lag: int, tmp_path: Path, spawned: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = runs.make("grpo").workers["actor"]
    mortal = MortalSpec(actor, str(tmp_path), "train", (2, 4))
    store = CheckpointStore(tmp_path / "checkpoints")
    died = check_sizes(spawned, [3, 4], max_lag, monkeypatch, store, actor=mortal)
    assert [told.number for told in died] == [1, 2]
