"""GPUs are known by the names that their driver gives them, and all of a machine's are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from penstock.configs.references import options_of
from penstock.dataflow.errors import ConfigError
from penstock.launch.cli.hydra_app import compose
from penstock.launch.inputs.run import Run, resolved
from penstock.launch.placement.machine import idle_gpus, preset_of, with_cluster
from penstock.launch.placement.place import choose
from penstock.workers.executors.assignment import Machine
from penstock.workers.executors.on_ray import executor
from penstock.workers.executors.registry import EXECUTORS

H100 = ("NVIDIA H100 80GB HBM3", 85_017_624_576)
FIX = (
    "\n    measure them: penstock profile device=cuda; or take them for others: penstock plan "
    "cluster=h100 output=plan.json, and placement=plan.json; or say yourself what runs where: "
    "executor.groups"
)


LARGE = (
    "model.architecture.hidden_size=2048",
    "model.architecture.intermediate_size=8192",
    "model.architecture.num_hidden_layers=16",
)
"""A model for which eight GPUs are worth their ranks."""


def has(monkeypatch: pytest.MonkeyPatch, gpus: Sequence[tuple[str, int]]) -> None:
    """Have torch report such devices."""
    found = [SimpleNamespace(name=name, total_memory=memory) for name, memory in gpus]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)


def chosen(*words: str) -> Run:
    composed = compose("run", [*LARGE, "executor=ray", "executor.device=cuda", *words])
    composed.pop("resume")
    return choose(with_cluster(resolved(composed)))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        # Others than their names begin with.
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H800", None),
        ("", None),
    ],
)
def test_a_device_is_known_by_its_name(name: str, option: str | None) -> None:
    assert preset_of(name, options_of("cluster")) == option


@pytest.mark.slow
def test_all_gpus_of_a_machine_are_used_without_a_calibration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has(monkeypatch, [H100] * 8)
    choice = chosen("algorithm.per_step.prompts=512")
    devices = {device for group in choice.placed.groups for device in group.devices}
    assert devices == set(range(8))
    first, second = choice.note.splitlines()[:2]
    assert first.startswith("placement: {actor, reward} on 8; ")
    assert first.endswith(" per step predicted (analytic defaults for GPUs)")
    assert second == (
        "placement: this machine has 8 x NVIDIA H100 80GB HBM3 (79.2 GiB), planned as h100"
    )


@pytest.mark.slow
def test_memory_is_what_the_machine_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    less = 60 * 2**30
    has(monkeypatch, [("NVIDIA H200", less), ("NVIDIA H200", less + 1)])
    memory = chosen().placed.prediction
    assert memory is not None
    reserved = 3_000_000_000
    assert {group.capacity_bytes for group in memory.memory.values()} == {less - reserved}


@pytest.mark.slow
def test_gpus_that_nothing_describes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, [("NVIDIA H800", 80 * 2**30)] * 8)
    with pytest.raises(ConfigError) as raised:
        chosen()
    assert str(raised.value) == (
        "'placement' is 'auto', but no option of cluster= describes 8 x NVIDIA H800 (80.0 GiB)"
        + FIX
    )


@pytest.mark.slow
def test_gpus_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, [H100, ("NVIDIA H200", 150_000_000_000)])
    with pytest.raises(ConfigError) as raised:
        chosen()
    assert str(raised.value) == (
        "'placement' is 'auto', but no option of cluster= describes 1 x NVIDIA H100 80GB HBM3 "
        "(79.2 GiB) and 1 x NVIDIA H200 (140 GiB)" + FIX
    )


@pytest.mark.slow
def test_a_single_gpu_needs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, [("NVIDIA H800", 80 * 2**30)])
    choice = chosen()
    assert [group.num_ranks for group in choice.placed.groups] == [1]
    assert choice.note == (
        "placement: everything on one rank; nothing was planned: no option of cluster= describes "
        "1 x NVIDIA H800 (80.0 GiB)"
    )


@pytest.mark.slow
def test_nothing_is_planned_for_gpus_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, [])
    with pytest.raises(ConfigError) as raised:
        chosen()
    assert str(raised.value) == (
        "'executor.device' is 'cuda' and 'placement' is 'auto', but there is no CUDA device here "
        "to plan for\n    say for which: penstock run --dry-run cluster=h100; or give a plan: "
        "placement=plan.json"
    )


def joins(monkeypatch: pytest.MonkeyPatch, *machines: Machine) -> None:
    """Have Ray report such machines, of which this one has no GPU."""
    has(monkeypatch, [])
    far = replace(EXECUTORS["ray"], machines=lambda: machines)
    monkeypatch.setattr(executor, "RAY", far)


@pytest.mark.slow
def test_gpus_of_joined_nodes_are_used_from_a_head_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [Machine(str(i), "", {"GPU": 8.0}, {"GPU": 8.0}, {}, ("H100",)) for i in range(2)]
    joins(monkeypatch, Machine("head", "", {"CPU": 4.0}, {"CPU": 4.0}), *nodes)
    plan = chosen("algorithm.per_step.prompts=512").placed
    assert {device for group in plan.groups for device in group.devices} == set(range(16))


@pytest.mark.slow
def test_joined_gpus_that_nothing_describes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Machine(str(i), "", {"GPU": 8.0}, {"GPU": 8.0}, {}, ("H20",)) for i in range(2)]
    joins(monkeypatch, *nodes)
    with pytest.raises(ConfigError) as raised:
        chosen()
    assert str(raised.value) == (
        "'placement' is 'auto', but no option of cluster= describes 16 x H20" + FIX
    )


def test_one_process_says_which_gpus_it_leaves_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    has(monkeypatch, [H100] * 8)
    composed = compose("run", ["executor.device=cuda"])
    composed.pop("resume")
    section = resolved(composed).executor
    assert idle_gpus(section) == (
        "placement: one of 8 x NVIDIA H100 80GB HBM3 (79.2 GiB) is used, because "
        "executor=in_process is one process; executor=ray uses them all"
    )
    assert idle_gpus(section.model_copy(update={"kind": "ray"})) == ""
    has(monkeypatch, [H100])
    assert idle_gpus(section) == ""
