"""An engine that sleeps without its weights is given them again before it is asked for anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from penstock.algorithms.roles import Sampling
from penstock.dataflow.graph.graph import Graph
from penstock.dataflow.graph.role import Worker
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.host import Host
from penstock.dataflow.runtime.messages import RankWork, work
from penstock.dataflow.runtime.placement import DeviceGroup
from penstock.dataflow.runtime.worker_protocol import WorkerContext
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.planner.resharding.sharding import Sharding
from penstock.workers.executors.rank_process import RankProcess, SliceHost
from penstock.workers.models.spec import ModelSpec
from penstock.workers.rollout.generator_policy import GeneratorPolicy, SplitPolicySpec
from penstock.workers.weight_sync.channel import ChannelEnd, ObjectStoreChannel
from penstock.workers.weight_sync.packets import SliceTraffic, WeightsError
from torch import Tensor
from torch_models import EOS, architecture, make_prompts

from ...algorithms import runs
from ..slow_engine import SlowEngine, SlowPolicySpec
from .backends import Backend


@dataclass(frozen=True, kw_only=True)
class EmptySpec(SlowPolicySpec):
    """The engine notes in a file what happens to its weights."""

    file: str

    def build(self, context: WorkerContext) -> GeneratorPolicy:
        return GeneratorPolicy(context, EmptyEngine(self, Path(self.file)))


class EmptyEngine(SlowEngine):
    """It has nothing but NaN after it has slept."""

    drops_weights = True

    def __init__(self, spec: SlowPolicySpec, file: Path) -> None:
        super().__init__(spec)
        self._file = file

    def load(self, tensors: Mapping[str, Tensor], version: int) -> None:
        super().load(tensors, version)
        self._note(f"version {version}")

    def sleep_empty(self) -> int:
        with torch.no_grad():
            for parameter in self._module.parameters():
                parameter.fill_(torch.nan)
        self._note("slept")
        return 1

    def sleep(self) -> int:
        self._note("slept with its weights")
        return 0

    def _note(self, what: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{what}\n")


MODEL = ModelSpec(architecture=architecture("llama"))


def first_weights() -> dict[str, Tensor]:
    return {name: one.detach() for name, one in MODEL.causal_lm("cpu").named_parameters()}


def test_no_call_is_served_before_they_have_come(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    policy = EmptySpec(model=MODEL, end_ids=(EOS,), file=str(file)).build(WorkerContext("actor"))
    weights = first_weights()
    policy.receive(weights, 3)
    assert policy.sleep_empty()
    policy.wake()
    prompt, prompt_id = make_prompts(2)
    with pytest.raises(WeightsError, match="'actor' has no weights in"):
        policy.generate(prompt, prompt_id, Sampling(max_new_tokens=2))
    policy.receive(weights, 3)
    assert file.read_text().splitlines() == ["version 3", "slept", "version 3"]


class Home:
    """A store in this process."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.stored: list[Any] = []

    def put(self, value: Any) -> int:
        self.stored.append(value)
        return len(self.stored) - 1

    def get(self, refs: Sequence[int], timeout_s: float) -> list[Any]:
        return [self.stored[ref] for ref in refs]


@dataclass
class Trained(Worker):
    """Exports slices."""

    layout: Sharding

    def weights_layout(self) -> Sharding:
        return self.layout

    def local_tensors(self) -> Mapping[str, Tensor]:
        return first_weights()

    def weights_changed(self) -> None:
        raise AssertionError


def test_a_process_asks_for_them_again_unless_newer_ones_come(tmp_path: Path) -> None:
    home, file = Home(), tmp_path / "weights"
    policy = EmptySpec(model=MODEL, end_ids=(EOS,), file=str(file)).build(WorkerContext("actor"))
    layout = policy.weights_layout()
    channel = ObjectStoreChannel(ChannelEnd("main", 0, 5.0, home.put, home.get))

    def arrival(version: int) -> RankWork:
        receivers = {"rollout": layout}
        packets = SliceTraffic(0, (0,)).export(Trained(layout), receivers, version)
        offer = channel.publish(packets)
        return work(Host.import_slices, "actor", layout, (offer,), version)

    rank = RankProcess(home, DeviceGroup("rollout"), 0, torch.get_num_threads(), 5.0, 5.0)
    # As `build` sets them.
    traffic, ends = rank._traffic, rank._channel  # pyright: ignore[reportPrivateUsage]
    host = SliceHost(
        Graph("none", (), {}, {}),
        {"actor": policy},
        1,
        rank._fetch,  # pyright: ignore[reportPrivateUsage]
        process=0,
        traffic=traffic,
        channel=ends,
        woke_s={},
    )
    rank._roles, rank._hosts = {"actor": policy}, {"main": host}  # pyright: ignore[reportPrivateUsage]

    def nap_then(one: RankWork) -> str:
        rank.sleep()
        rank.wake([])
        answer = rank.perform("main", one, leads=True)
        with file.open("a") as notes:
            notes.write("did it\n")
        return answer.error

    ask, hold = work(Host.call_method, "actor", "weights_layout"), work(Host.layout, "actor")
    assert [nap_then(one) for one in (ask, arrival(1), ask, arrival(2), hold)] == [""] * 5
    assert file.read_text().splitlines() == [
        "slept with its weights", "did it",  # nobody could give them again
        "slept with its weights", "version 1", "did it",
        "slept", "version 1", "did it",
        "slept", "version 2", "did it",
        "slept", "did it",  # how they are held is known without them
    ]  # fmt: skip
    home.stored.clear()
    assert "cannot be had from the object store" in nap_then(ask)


@pytest.mark.nightly
def test_a_run_on_one_device_copies_no_weights_that_come_again(
    spawned: Backend, tmp_path: Path
) -> None:
    run = runs.make("grpo")
    actor: Any = run.workers["actor"]
    file = tmp_path / "weights"
    slow = EmptySpec(model=actor.model, end_ids=actor.end_ids, file=str(file))
    main, rollout = (DeviceGroup(name, devices=(0,)) for name in ("main", "rollout"))
    engine = Engine(
        run.graph,
        run.apart(rollout, main),
        workers={**run.workers, "actor": SplitPolicySpec(train=actor, rollout=slow)},
        executor=spawned.executor(),
        schedule=Schedule(max_lag=0),
    )
    with engine:
        assert len(list(engine.run(run.sources, 3))) == 3
        noted = file.read_text().splitlines()
    assert noted[-4:] == ["version 1", "slept", "version 2", "slept"]
