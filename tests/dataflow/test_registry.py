"""Every string of every registry names a part, and nothing else is imported to choose one."""

from __future__ import annotations

from importlib import import_module

import pytest
from penstock.dataflow.registry import Registry
from penstock.launch.inputs.data import TASKS
from penstock.launch.inputs.engines import ENV_SPECS, NETWORKS
from penstock.launch.run_dir.trackers import TRACKERS
from penstock.workers.agents.environment import TASK_AGENTS
from penstock.workers.engines.registry import ENGINES
from penstock.workers.executors.registry import EXECUTORS
from penstock.workers.rewards.registry import TASK_REWARDS
from penstock.workers.verifiers.verifiers import BUILT_IN
from penstock.workers.weight_sync.channel import CHANNELS

REGISTRIES: dict[str, Registry[object]] = {
    "task": TASKS,
    "worker that acts": ENV_SPECS,
    "reward": TASK_REWARDS,
    "agent": TASK_AGENTS,
    "verifier": BUILT_IN,
    "tracker": TRACKERS,
    "engine": ENGINES,
    "executor": EXECUTORS,
    "weight channel": CHANNELS,
}
ENTRIES = [(what, name) for what, registry in REGISTRIES.items() for name in registry]


@pytest.mark.parametrize(("what", "name"), ENTRIES, ids=" ".join)
def test_every_string_names_a_part(what: str, name: str) -> None:
    registry = REGISTRIES[what]
    module, _, part = registry.paths[name].partition(":")
    assert module.startswith("penstock.")
    assert part
    found = registry[name]
    assert getattr(found, "name", name) == name  # what an engine or executor calls itself


def test_a_registry_is_a_mapping_that_imports_what_is_looked_up() -> None:
    registry = Registry[object]({"one": "no_such_module:Part", "path": "pathlib:Path"})
    assert list(registry) == ["one", "path"]
    assert "one" in registry
    assert "two" not in registry
    assert registry["path"].__name__ == "Path"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(KeyError):
        registry["two"]
    with pytest.raises(ModuleNotFoundError):
        registry["one"]


def test_networks_are_the_workers_with_weights() -> None:
    assert {name for name, spec in ENV_SPECS.items() if hasattr(spec, "network")} == NETWORKS


@pytest.mark.parametrize("package", ["dataflow", "algorithms.losses", "algorithms.roles"])
def test_every_public_name_of_a_package_is_there(package: str) -> None:
    module = import_module(f"penstock.{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
