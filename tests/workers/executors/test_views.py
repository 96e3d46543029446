"""A group that lives within another one: the weights that are trained there, in a second layout."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import pytest
from penstock.algorithms.ops.rollout_correction import RolloutCorrection
from penstock.dataflow.errors import PlanError
from penstock.dataflow.runtime.engine import Engine
from penstock.dataflow.runtime.placement import DeviceGroup, Placement, flow_of
from penstock.dataflow.scheduler.schedule import Schedule
from penstock.workers.engines.fsdp_engine.specs import FsdpPolicySpec
from penstock.workers.engines.megatron_engine.specs import MegatronPolicySpec
from penstock.workers.engines.roles import RecipeByGroup
from penstock.workers.engines.torch_engine.specs import TorchGeneratorSpec
from penstock.workers.models.architecture import empty_model
from penstock.workers.models.lora import LoraSpec
from penstock.workers.models.spec import ModelSpec
from penstock.workers.rollout.generator_policy import SplitPolicySpec

from ...algorithms import runs
from .backends import ON_RAY_AT_NIGHT, Backend
from .mortal import MortalSpec
from .test_going_back import finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VOCAB = 20


def model(dtype: Literal["float32", "bfloat16"] = "float32") -> ModelSpec:
    """One whose words and heads two and four processes can divide."""
    fields = {**runs.model().architecture, "vocab_size": VOCAB, "num_key_value_heads": 4}
    return ModelSpec(architecture=fields, dtype=dtype)


def run_of(engine: str, dtype: Literal["float32", "bfloat16"] = "float32") -> runs.Run:
    run = runs.make("grpo")
    actor: Any = run.workers["actor"]
    tokenizer = runs.TOKENIZER.build()
    own: dict[str, Any] = {"model": model(dtype), "end_ids": actor.end_ids}
    own["num_words"] = tokenizer.vocab_size
    train: Any
    if engine == "torch":
        return replace(run, workers={**run.workers, "actor": replace(actor, model=model())})
    if engine == "megatron":
        train = MegatronPolicySpec(optimizer=actor.optimizer, **own)
    else:
        shards = int(engine.removeprefix("fsdp"))
        train = FsdpPolicySpec(optimizer=actor.optimizer, shards=shards, **own)
    rollout = TorchGeneratorSpec(**own)
    return replace(
        run, workers={**run.workers, "actor": SplitPolicySpec(train=train, rollout=rollout)}
    )


def found(run: runs.Run, placement: Placement, backend: Backend, **schedule: Any) -> str:
    engine = Engine(
        run.graph,
        placement,
        workers=run.workers,
        executor=backend.executor(),
        schedule=Schedule(max_lag=0, **schedule),
    )
    with engine:
        steps = list(engine.run(run.sources, 3))
        assert len(steps) == 3
        prints = [step.metrics.get("reward.score/fingerprint") for step in steps]
        return f"{engine.call('actor', 'weights_sha256')} {prints}"


def groups(train: DeviceGroup, rollout: DeviceGroup, *, within: bool) -> dict[str, DeviceGroup]:
    own = replace(rollout, within=train.name) if within else rollout
    return {"main": train, "rollout": own}


NIGHT = pytest.mark.nightly
EVALUATED = {
    "torch dp2 -> tp2": ("torch", (2, 1, 1), (1, 2, 1), {}),
    "fsdp2 -> tp2": ("fsdp2", (1, 2, 1), (1, 2, 1), {"shards": 1}),
    "fsdp4 -> fsdp2 x tp2": ("fsdp4", (1, 4, 1), (1, 4, 1), {"shards": 2}),
    "fsdp2 x tp2 -> cp2 x dp2": (
        "fsdp2", (1, 4, 1), (2, 2, 1), {"shards": 2, "context_parallel": 2},
    ),
    "megatron tp2 -> dp2": ("megatron", (1, 2, 1), (2, 1, 1), {}),
    "megatron pp2 -> tp2": ("megatron", (1, 1, 2), (1, 2, 1), {}),
    "megatron dp2 -> pp2": ("megatron", (2, 1, 1), (1, 1, 2), {}),
}  # fmt: skip
"""How the actor is trained, and how it is evaluated: (ranks, tensor, stages) each."""


def evaluated(name: str, backend: Backend, *, within: bool, apart: bool = False) -> str:
    """Three steps that ask the trainer for log-probabilities, and what is left of them."""
    engine, *sizes, own = EVALUATED[name]
    run = run_of(engine)
    cfg = replace(run.cfg, correction=RolloutCorrection())
    run = replace(run, cfg=cfg)
    num = prod(sizes[0])
    devices = [tuple(range(num)), tuple(range(num * apart, num * (1 + apart)))]
    main, other = (
        DeviceGroup(
            name, ranks, tensor_parallel=tensor, pipeline_parallel=stages, devices=devices[at]
        )
        for at, (name, (ranks, tensor, stages)) in enumerate(
            zip(("main", "other"), sizes, strict=True)
        )
    )
    nodes = dict.fromkeys((n.name for n in run.graph.nodes if n.name != "prompts"), "main")
    nodes["actor.logprob"] = "other"
    if engine == "torch":
        nodes["actor.generate"] = "other"
    groups = [main, replace(other, within="main" if within else "")]
    if engine != "torch":  # two groups live within one
        nodes["actor.generate"] = "rollout"
        split: Any = run.workers["actor"]
        spec = RecipeByGroup(split.train, {"other": replace(split.train, **own)})
        run = replace(run, workers={**run.workers, "actor": replace(split, train=spec)})
        home = "main" if within else ""
        groups.append(DeviceGroup("rollout", num, devices=devices[0], within=home))
    placement = Placement(tuple(groups), nodes, num_chunks=4)
    return found(run, placement, backend)


def some(names: Iterable[str], *others: str) -> list[Any]:
    """All of them in `make test-all`, the others alone in `make test`."""
    return [pytest.param(name, marks=() if name in others else NIGHT) for name in names]


@pytest.mark.parametrize("name", some(EVALUATED, "torch dp2 -> tp2", "megatron pp2 -> tp2"))
@ON_RAY_AT_NIGHT
def test_it_evaluates_as_groups_that_take_turns(backend: Backend, name: str) -> None:
    within, turns = (evaluated(name, backend, within=own) for own in (True, False))
    assert within == turns


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in EVALUATED if "4" not in name])
def test_a_copy_on_other_devices_evaluates_the_same(spawned: Backend, name: str) -> None:
    within = evaluated(name, spawned, within=True)
    assert evaluated(name, spawned, within=False, apart=True) == within


PAIRS = {
    "fsdp2 -> dp2": ("fsdp2", (1, 2, 1), (2, 1), (0, 1)),
    "tp2 -> dp2": ("fsdp1", (1, 2, 1), (2, 1), (0, 1)),
    "tp2 -> tp2": ("megatron", (1, 2, 1), (1, 2), (0, 1)),
    "pp2 -> dp2": ("megatron", (1, 1, 2), (2, 1), (0, 1)),
    "fsdp4 -> tp2": ("fsdp4", (1, 4, 1), (2, 2), (0, 1, 2, 3)),
    "tp4 -> tp2": ("megatron", (1, 4, 1), (2, 2), (0, 2, 1, 3)),
    "tp2 pp2 -> tp2": ("megatron", (1, 2, 2), (2, 2), (0, 1, 2, 3)),
}


@pytest.mark.parametrize("pair", some(PAIRS, "pp2 -> dp2", "fsdp4 -> tp2"))
@ON_RAY_AT_NIGHT
def test_it_computes_what_groups_that_take_turns_compute(backend: Backend, pair: str) -> None:
    assert_equal(backend, pair, "float32")


@pytest.mark.parametrize("pair", ["fsdp2 -> dp2", "tp2 -> tp2"])
def test_so_it_does_in_16_bits(spawned: Backend, pair: str) -> None:
    assert_equal(spawned, pair, "bfloat16")


def assert_equal(
    backend: Backend, pair: str, dtype: Literal["float32", "bfloat16"] = "float32"
) -> None:
    engine, (ranks, tensor, stages), (replicas, own), order = PAIRS[pair]
    run = run_of(engine, dtype)
    devices = tuple(range(len(order)))
    train = DeviceGroup(
        "main", ranks, tensor_parallel=tensor, pipeline_parallel=stages, devices=devices
    )
    rollout = DeviceGroup("rollout", replicas, tensor_parallel=own, devices=order)
    both = [
        found(run, run.apart(**groups(train, rollout, within=within), num_chunks=2), backend)
        for within in (False, True)
    ]
    assert both[0] == both[1]


def test_what_adapters_stand_on_is_there_only_while_a_view_generates(spawned: Backend) -> None:
    run, lora = run_of("fsdp2"), LoraSpec(rank=2, alpha=4.0)
    split: Any = run.workers["actor"]
    adapted = SplitPolicySpec(
        train=replace(split.train, lora=lora), rollout=replace(split.rollout, lora=lora)
    )
    run = replace(run, workers={**run.workers, "actor": adapted})
    own = found(run, placed(run, within=True), spawned)
    assert own == found(run, placed(run, within=False), spawned)
    with Engine(
        run.graph, placed(run, within=True), workers=run.workers, executor=spawned.executor()
    ) as engine:
        *_, last = engine.run(run.sources, 2)
    held = sum(one.numel() * one.element_size() for one in empty_model(model().config).parameters())
    assert last.metrics["actor.generate/slept_bytes"] > 2 * held  # in both processes


def placed(run: runs.Run, *, within: bool) -> Placement:
    """Two FSDP shards, and two ranks that generate on the same devices."""
    train = DeviceGroup("main", tensor_parallel=2, devices=(0, 1))
    rollout = DeviceGroup("rollout", 2, devices=(0, 1))
    return run.apart(**groups(train, rollout, within=within), num_chunks=2)


@pytest.mark.parametrize("options", [{"streaming": 4}, {"segment_tokens": 3}], ids=str)
def test_responses_are_streamed_and_cut_as_in_turns(
    spawned: Backend, options: dict[str, Any]
) -> None:
    run = run_of("fsdp2")
    both = [found(run, placed(run, within=own), spawned, **options) for own in (True, False)]
    assert both[0] == both[1]


def test_a_death_changes_nothing(tmp_path: Path, spawned: Backend) -> None:
    run = run_of("fsdp2")
    plain = finish(run, placed(run, within=True), spawned.executor())
    split: Any = run.workers["actor"]
    mortal = replace(split, train=MortalSpec(split.train, str(tmp_path), "train", (3,)))
    store = tmp_path / "checkpoints"
    again = finish(run, placed(run, within=True), spawned.executor(), folder=store, actor=mortal)
    assert again.weights == plain.weights
    assert [told.number for told in again.told] == [1]


def test_a_group_that_cannot_live_there_is_refused() -> None:
    run = run_of("fsdp2")
    given = placed(run, within=True)
    main, rollout = given.groups
    wrong = {
        "within group 'mian': that is not declared; did you mean 'main'?": replace(
            rollout, within="mian"
        ),
        "on devices [2, 3] and [0, 1]": replace(rollout, devices=(2, 3)),
    }
    for said, group in wrong.items():
        with pytest.raises(PlanError, match=re.escape(said)):
            flow_of(run.graph, replace(given, groups=(main, group)))
    with pytest.raises(PlanError, match="set schedule.max_lag=0, have the groups take turns"):
        flow_of(run.graph, given, Schedule(max_lag=1))
